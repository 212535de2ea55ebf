"""One round of a run: the clients train, the server aggregates, the model is evaluated, the result
recorded."""

import functools
from collections.abc import Callable
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
from fcljax.federated.keys import RunKey
from fcljax.federated.schedule import participants
from fcljax.mesh import jit, on_host, put_server
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import make_evaluate
from fcljax.runs.records import NOT_EVALUATED, Clock, Records
from fcljax.runs.traffic import Counted
from fcljax.types import PyTree, ReplayBuffer, RoundContext, When

_PURPOSE = {"task_start": RunKey.TASK_START, "round": RunKey.ROUND, "task_end": RunKey.TASK_END}


def first_server(exp: Experiment) -> PyTree:
    """The server's state before the first round."""
    return jit(exp.method.init, None)(jax.random.fold_in(exp.key, RunKey.INIT), exp.frozen)


def first_state(exp: Experiment, server: PyTree | None = None) -> State:
    """The state of server and clients before the first round, where the engine works; with this state of the
    server, if it is given."""
    server = put_server(first_server(exp), exp.engine.mesh) if server is None else server
    key = jax.random.fold_in(exp.key, RunKey.CLIENTS)
    clients = begin_clients(exp.engine, server, exp.sizes.clients, key)
    return State(server, clients, exp.engine.place(jax.random.key_data(exp.key)))


def state_shapes(exp: Experiment) -> State:
    """A run's state as shapes, as checkpoints have it: [K, ...] for K clients, on any number of devices."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    clients = jax.eval_shape(
        lambda server, key: init_clients(exp.method, server, exp.sizes.clients, key), server, exp.key
    )
    return State(server, clients, jax.eval_shape(jax.random.key_data, exp.key))


def saved_state(exp: Experiment, state: State) -> State:
    """A run's state on the host, as checkpoints have it. All processes call this together."""
    clients = jax.tree.map(lambda x: x[: exp.sizes.clients], on_host(state.clients))
    return State(on_host(state.server), clients, on_host(state.key))


class RoundResult(NamedTuple):
    """What a round leaves."""

    state: State
    kept: ReplayBuffer | None
    """Examples that the server keeps of the task that has just ended, if it keeps any."""
    line: dict[str, Any]
    """The round's line of metrics.jsonl."""


# play_round(exp, state, past, step): the arrays of `state` are donated; `past` is what the server keeps of
# the earlier tasks
PlayRound = Callable[[Experiment, State, tuple[ReplayBuffer, ...], int], RoundResult]


def make_play_round(
    exp: Experiment, records: Records, clock: Clock, clients: Clients | None = None
) -> PlayRound:
    """play_round(exp, state, past, step) -> RoundResult, which also adds the round to the records.

    Args:
      exp: the experiment; a call may give it with other query features.
      records: where rounds are recorded.
      clock: measures the time of clients, server and evaluation.
      clients: plays the clients' part, if the engine does not: clients on other machines. A server that does
        not have the personal models that count evaluates nothing then.
    """
    play = make_play(exp, records, clock, clients)
    settings = exp.settings
    evaluates = clients is None or not exp.method.personal
    evaluate = make_evaluate(exp) if evaluates else None
    counted = Counted.of(exp)

    def play_round(exp: Experiment, state: State, past: tuple[ReplayBuffer, ...], step: int) -> RoundResult:
        t, r = divmod(step, settings.rounds)
        last = r == settings.rounds - 1
        evaluated = NOT_EVALUATED
        state, kept, report, besides = play(exp, state, past, t, r)
        uploads = np.sum([each.uploads for each in (*besides, report)], axis=0, dtype=int).tolist()
        if kept is not None:
            records.add(replay_examples=len(kept.label))
        if evaluate and (last or settings.eval_every_round):
            with clock("eval"):
                evaluated = evaluate(exp.test, state, t, records)
            if last:
                records.keep(evaluated)
        sent = counted.total(uploads, int(r == 0 < t))
        seen = int(np.sum(exp.scenario.tasks[t].seen))
        return RoundResult(state, kept, records.record(t, r, report, evaluated, sent, besides, seen))

    return play_round


def make_play(
    exp: Experiment, records: Records, clock: Clock, clients: Clients | None = None
) -> Callable[..., tuple[State, ReplayBuffer | None, RoundReport, list[RoundReport]]]:
    """play(exp, state, past, task, round) -> (state, kept, report, besides): a round, and the reports of what
    comes before the first and after the last one of a task."""
    begin_task = jit(exp.method.begin_task, None, donate_argnums=1)
    settings = exp.settings
    shares = parse_faults(settings.faults)
    partitions = exp.scenario.partitions
    # a static population has the same eligible clients in all rounds of a task
    eligible = functools.lru_cache(maxsize=1)(lambda t, r: np.flatnonzero(partitions[t][r].count))
    static = settings.population == "static"

    def play(exp: Experiment, state: State, past: tuple[ReplayBuffer, ...], t: int, r: int):
        (server, states, key) = state
        task = exp.scenario.tasks[t]
        last = r == settings.rounds - 1
        partition = partitions[t][r]
        whole = exp.scenario.whole
        everyone = eligible(t, 0 if static else r)
        sampled = participants(settings.seed, t, r, everyone, settings.participation)
        sampled = reached(shares, settings.seed, t, r, sampled)

        def stage(when: When) -> RoundReport:
            nonlocal server, states
            ids = sampled
            number = r
            mine = partition
            if when != "round":
                mine = whole[t] if whole else partition
                ids = np.flatnonzero(mine.count)
                number = 0
            key = jax.random.fold_in(exp.key, _PURPOSE[when])
            inputs = RoundInputs(exp.frozen, exp.train, mine, ids, task, number, key, when, last, past)
            guarded = records.counts.get("rejected", 0) > 0
            server, states, report = run_round(
                exp.engine, server, states, inputs, section=clock, clients=clients, guarded=guarded
            )
            return report

        def beside(when: When) -> RoundReport:
            report = stage(when)._replace(training_examples=0)
            records.count(report)
            return report

        round_context = RoundContext.on_host(exp.frozen, task, r, last)
        kept = None
        besides = []
        if r == 0:
            begin_key = jax.random.fold_in(jax.random.fold_in(exp.key, RunKey.BEGIN_TASK), t)
            server = begin_task(round_context, server, begin_key)
            besides.append(beside("task_start"))
        report = stage("round")
        if last:
            besides.append(beside("task_end"))
            kept = keep_task(exp.engine, exp.frozen, server, task, r)
        return State(server, states, key), kept, report, besides

    return play
