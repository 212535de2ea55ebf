"""One round of a run: the clients train, the server aggregates, the model is evaluated,
the result recorded."""

import functools
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from fcljax.federated.engine import (
    Clients,
    RoundInputs,
    RoundReport,
    begin_clients,
    init_clients,
    keep_task,
    run_round,
)
from fcljax.federated.faults import parse_faults, reached
from fcljax.federated.keys import STAGE_KEYS, RunKey, fold
from fcljax.federated.schedule import participants
from fcljax.mesh import jit, on_host, put_server
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.early_stop import ends_task
from fcljax.runs.evaluate import make_evaluate
from fcljax.runs.records import NOT_EVALUATED, Clock, Records
from fcljax.runs.traffic import Counted
from fcljax.types import PyTree, ReplayBuffer, RoundContext, When


def first_server(exp: Experiment) -> PyTree:
    """Return the server's state before the first round."""
    # jit: without it each operation of `init` would compile by itself
    init = jit(exp.method.init, None)
    return init(fold(exp.key, RunKey.INIT), exp.frozen)


def first_state(exp: Experiment, server: PyTree | None = None) -> State:
    """Return the state of server and clients before the first round, where the engine
    works. `server` is the server's state, if it is made already."""
    if server is None:
        server = put_server(first_server(exp), exp.engine.mesh)
    key = fold(exp.key, RunKey.CLIENTS)
    clients = begin_clients(exp.engine, server, exp.sizes.clients, key)
    return State(server, clients, exp.engine.place(jax.random.key_data(exp.key)))


def state_shapes(exp: Experiment) -> State:
    """Return a run's state as shapes, as checkpoints have it: [K, ...] for K clients,
    on any number of devices."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    clients = jax.eval_shape(
        lambda server, key: init_clients(exp.method, server, exp.sizes.clients, key), server, exp.key
    )
    return State(server, clients, jax.eval_shape(jax.random.key_data, exp.key))


def saved_state(exp: Experiment, state: State) -> State:
    """Return a run's state on the host, as checkpoints have it.

    All processes call this together."""
    clients = jax.tree.map(lambda x: x[: exp.sizes.clients], on_host(state.clients))
    return State(on_host(state.server), clients, on_host(state.key))


class RoundResult(NamedTuple):
    """The result of a round of a run."""

    state: State
    buffer: ReplayBuffer | None
    """Examples that the server keeps of the task that has just ended, if it keeps any."""
    line: dict[str, Any]
    """The round's line of metrics.jsonl."""
    client_ids: Set[int]
    """Ids of the clients whose state may have changed."""


# play_round(exp, state, past, step) -> RoundResult. The arrays of `state` are donated;
# `past` has the server's examples of the earlier tasks.
PlayRound = Callable[[Experiment, State, tuple[ReplayBuffer, ...], int], RoundResult]


def make_play_round(
    exp: Experiment, records: Records, clock: Clock, clients: Clients | None = None
) -> PlayRound:
    """Return play_round(exp, state, past, step), which plays and evaluates a round and
    records it.

    Args:
      exp: the experiment; a call may give it with other query features.
      records: where rounds are recorded.
      clock: measures the time of clients, server and evaluation.
      clients: plays the clients' part, if the engine does not: clients on other machines.
        A server that does not have the personal models that count evaluates nothing then.
    """
    play = make_play(exp, records, clock, clients)
    settings = exp.settings
    evaluate = None
    if clients is None or not exp.method.personal:
        evaluate = make_evaluate(exp)
    evaluate_held_out = None
    if exp.held_out is not None:
        evaluate_held_out = make_evaluate(_on_held_out(exp))
    counted = Counted.of(exp)

    def play_round(exp: Experiment, state: State, past: tuple[ReplayBuffer, ...], step: int) -> RoundResult:
        t, r = divmod(step, settings.rounds)
        last = ends_task(settings, records.rounds, t, r)
        state, buffer, report, other_reports = play(exp, state, past, t, r, last)
        if buffer is not None:
            records.add(replay_examples=len(buffer.label))
        evaluated = NOT_EVALUATED
        if evaluate is not None and (last or settings.eval_every_round):
            with clock("eval"):
                evaluated = evaluate(exp.test, state, t, records)
            if last:
                records.keep(evaluated)
        held_out_accuracy = None
        if evaluate_held_out is not None and exp.held_out is not None:
            with clock("eval"):
                # records of its own: summary.json is about test images
                on_held_out = evaluate_held_out(exp.held_out.split, state, t, Records())
            if on_held_out.accuracy is not None:
                held_out_accuracy = on_held_out.accuracy[t]
        uploads = np.sum([part.uploads for part in (*other_reports, report)], axis=0, dtype=int).tolist()
        # clients download what a finished task hands over when the next one begins
        handovers = 0
        if r == 0 and t > 0:
            handovers = 1
        traffic = counted.total(uploads, handovers)
        classes_seen = int(np.sum(exp.scenario.tasks[t].seen))
        line = records.record(
            t, r, report, evaluated, traffic, other_reports, classes_seen, held_out_accuracy
        )
        client_ids = report.client_ids.union(*(part.client_ids for part in other_reports))
        return RoundResult(state, buffer, line, client_ids)

    return play_round


def _on_held_out(exp: Experiment) -> Experiment:
    """Return the experiment with the held-out training examples in place of test examples."""
    assert exp.held_out is not None
    # the user's metrics and accuracies on new classes are for test examples alone
    method = exp.method._replace(names_classes=False)
    return exp._replace(scenario=exp.held_out.scenario, test=exp.held_out.split, metrics={}, method=method)


def make_sample(exp: Experiment) -> Callable[[int, int], np.ndarray]:
    """Return sample(task, round), the ids of the clients that take part in a round."""
    settings = exp.settings
    fault_shares = parse_faults(settings.faults)

    @functools.lru_cache(maxsize=1)
    def eligible(t: int, r: int) -> np.ndarray:
        return np.flatnonzero(exp.scenario.partitions[t][r].count)

    def sample(t: int, r: int) -> np.ndarray:
        round_of_count = r
        if settings.population == "static":
            # all rounds of a task have the same eligible clients
            round_of_count = 0
        ids = participants(settings.seed, t, r, eligible(t, round_of_count), settings.participation)
        return reached(fault_shares, settings.seed, t, r, ids)

    return sample


def make_play(
    exp: Experiment, records: Records, clock: Clock, clients: Clients | None = None
) -> Callable[..., tuple[State, ReplayBuffer | None, RoundReport, list[RoundReport]]]:
    """Return play(exp, state, past, task, round, last) -> (state, buffer, report,
    other_reports), which plays a round. Without `last`, the last of the settings' rounds
    ends a task.

    `other_reports` are of what comes before the first and after the last round of a
    task; `buffer` is as in `RoundResult`.
    """
    begin_task = jit(exp.method.begin_task, None, donate_argnums=1)
    settings = exp.settings
    partitions = exp.scenario.partitions
    sample = make_sample(exp)

    def play(
        exp: Experiment,
        state: State,
        past: tuple[ReplayBuffer, ...],
        t: int,
        r: int,
        last: bool | None = None,
    ):
        server, states, key = state
        task = exp.scenario.tasks[t]
        if last is None:
            last = r == settings.rounds - 1

        def play_stage(when: When) -> RoundReport:
            nonlocal server, states
            partition = partitions[t][r]
            ids = sampled
            number = r
            if when != "round":
                # before and after a task: all clients with examples of any of its rounds
                if exp.scenario.whole:
                    partition = exp.scenario.whole[t]
                ids = np.flatnonzero(partition.count)
                number = 0
            inputs = RoundInputs(
                exp.frozen,
                exp.train,
                partition,
                ids,
                task,
                number,
                fold(exp.key, STAGE_KEYS[when]),
                when,
                last,
                past,
            )
            # Guarded, every upload is checked as it arrives. Otherwise a chunk with a
            # bad one is played again, which costs more once a run has had bad uploads.
            guarded = records.counts.get("rejected", 0) > 0
            server, states, report = run_round(
                exp.engine, server, states, inputs, section=clock, clients=clients, guarded=guarded
            )
            return report

        def play_beside_rounds(when: When) -> RoundReport:
            # so that training speed is over the rounds, not over exchanges that measure
            report = play_stage(when)._replace(training_examples=0)
            records.count(report)
            return report

        sampled = sample(t, r)
        buffer = None
        other_reports = []
        if r == 0:
            round_context = RoundContext.on_host(exp.frozen, task, r, last)
            server = begin_task(round_context, server, fold(exp.key, RunKey.BEGIN_TASK, t))
            other_reports.append(play_beside_rounds("task_start"))
        report = play_stage("round")
        if last:
            other_reports.append(play_beside_rounds("task_end"))
            buffer = keep_task(exp.engine, exp.frozen, server, task, r)
        return State(server, states, key), buffer, report, other_reports

    return play
