"""The invariants that every method must satisfy, as statements that `fcljax check`
tests on a tiny federation (checks/federation.py).
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fcljax.checks.examples import COUNT, tiny_data
from fcljax.checks.federation import (
    GARBAGE,
    SIZES,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    begin_task,
    difference,
    engine_of,
    equal_bits,
    farthest_leaf,
    fill_padding,
    not_finite,
    of_client,
    padding_features,
    partition_of,
    parts_of,
    present,
    receive,
    states_after_rounds,
    tiny_federation,
)
from fcljax.checks.neighbours import neighbours_do_not_matter
from fcljax.checks.participation import late_clients_keep_the_same, participation_equals_the_reference
from fcljax.checks.slots import slots_stay_apart
from fcljax.checks.statistics import batch_size_does_not_matter
from fcljax.checks.tracing import traces_are_the_same
from fcljax.config import RunConfig
from fcljax.federated.check import leaks_in_one_line
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import Lanes, RoundReport
from fcljax.federated.health import training_warnings
from fcljax.parts.federate import rule_names
from fcljax.runs import checkpoint
from fcljax.runs.build import make_method


@leaks_in_one_line()
def check(settings: RunConfig) -> list[Statement]:
    """Test every statement on a method.

    Args:
      settings: resolved; those of the method, the adapter and the training count, and of
        the data their kind: images, tables, series or texts.

    Raises:
      InputError: for a method that does not follow the protocol.
    """
    data = tiny_data(settings)
    federation = tiny_federation(make_method(settings, SIZES, data.network), data)
    history = states_after_rounds(federation)
    # in this order: tracing comes last and counts the traces of all others
    return [statement(federation, history) for statement in STATEMENTS]


# ---- the statements --------------------------------------------------------------------


def stays_finite(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that states and losses stay finite, no upload is rejected, and a state
    changes: the server's, or the clients' where all that trains is personal."""
    reports: list[RoundReport] = []
    states_after_rounds(federation, on_report=reports.append)
    # the first one found is named. "Nothing changes" comes last: where every upload was
    # rejected it is the symptom and not the cause.
    problem = (
        _not_finite_leaf(federation, history)
        or _rejected_uploads(reports)
        or _training_warning(reports)
        or _unchanged(federation, history)
    )
    name = "states and losses stay finite, and what trains changes"
    return Statement(name, not problem, problem or "they do")


def _unchanged(federation: Federation, history: list[PlayedState]) -> str:
    """Say that nothing changes where no state does; ""."""
    # zero-shot classification by class names has no rounds, so nothing could change
    if not federation.method.rounds:
        return ""
    first = PlayedState(federation.server, federation.states)
    watched = [(first.server, history[-1].server)]
    if federation.method.personal:
        watched.append((first.clients, history[-1].clients))
    changed = any(difference(before, after) for before, after in watched)
    return "" if changed else "nothing changes"


def _not_finite_leaf(federation: Federation, history: list[PlayedState]) -> str:
    """Name the first leaf with NaN or infinity, its round and rule; "" if none has."""
    for r, state in enumerate(history):
        leaves = not_finite(state)
        if leaves:
            return f"{leaves} is NaN or infinite after round {r + 1}{_owner(federation, leaves)}"
    return ""


def _rejected_uploads(reports: Sequence[RoundReport]) -> str:
    """Say how many uploads the server rejected; "" if none."""
    rejected = sum(report.rejected for report in reports)
    if not rejected:
        return ""
    return f"the server rejected {rejected} uploads: they had NaN, an infinity or an impossible claim"


def _training_warning(reports: Sequence[RoundReport]) -> str:
    """Return the first warning that a run would give about these rounds; "" if none."""
    lines = [
        {"participants": report.participants, "rejected": report.rejected, **report.metrics}
        for report in reports
    ]
    warnings = training_warnings(lines)
    return warnings[0].removeprefix("warning: ") if warnings else ""


def lanes_do_not_matter(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that one lane in a loop, with short batches, receives the same as two
    vmapped lanes with padding.

    The tolerance is for rounding, which Adam turns into whole steps where a gradient is
    nothing else: in FedLwF.MC the teachers equal the students at first.
    """
    # the federation's own engine has two lanes with padded batches; this one has a single
    # lane, and compiles short batches in a size of their own
    single = engine_of(
        federation.method,
        Lanes(1, "loop"),
        federation.frozen,
        federation.data,
        federation.partitions,
        short=True,
    )
    worst = (0.0, "")
    for index in range(len(federation.method.rounds)):
        # from history[1], the end of the first task: clients and server have a state
        pair = [
            receive(federation, engine, index, history[1], federation.partitions[1], [0, 2, 3])[0]
            for engine in (federation.engine, single)
        ]
        worst = max(worst, _farthest(pair, 3))
    return _nearly_equal(
        "uploads do not depend on lanes or padding",
        worst,
        2e-3,
        "an unmasked mean or sum over a batch, or numbers drawn while tracing",
    )


def others_do_not_matter(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that a client's upload and state have the same bits whoever else takes part."""
    problems = [
        _influence_of_others(federation, history[1], index) for index in range(len(federation.method.rounds))
    ]
    return _equal_or_cause(
        "what a client sends and keeps does not depend on the other participants",
        next(filter(None, problems), ""),
        "the client reads something outside its context and state",
    )


def _influence_of_others(
    federation: Federation,
    state_before: PlayedState,
    index: int,
) -> str:
    """Name the client whose upload or state depends on the participants; "" if none."""
    clients = [0, 2, 3]
    partition = federation.partitions[1]
    with_others, states = receive(federation, federation.engine, index, state_before, partition, clients)
    for rank, client in enumerate(clients):
        alone, states_alone = receive(federation, federation.engine, index, state_before, partition, [client])
        # bits and no tolerance: it is the same compiled program with the same numbers
        sent = difference(of_client(alone.gather, 0), of_client(with_others.gather, rank))
        if sent:
            return f"client {client} sends other numbers: {sent}"
        state = difference(of_client(states_alone, client), of_client(states, client))
        if state:
            return f"client {client} keeps other numbers: {state}{_owner(federation, state, 'clients')}"
    return ""


def _equal_or_cause(name: str, problem: str, cause: str) -> Statement:
    """Return the statement that results have the same bits, else with the usual cause."""
    return equal_bits(name, f"{problem}; usual cause: {cause}" if problem else "")


def _owner(federation: Federation, leaves: str, field: str = "") -> str:
    """Name the rule that a leaf belongs to, as ", of the client rule 'ewc'"; "" if none.

    Args:
      federation: whose rules are known by name.
      leaves: paths in a `PlayedState`, or in one of its fields.
      field: the field, if the paths begin within it.
    """
    # paths come as text such as ".clients[1]['mean']" or "1/mean": their first number is
    # the rule's place
    names = rule_names(federation.method)
    side = field or ("clients" if "clients" in leaves[:9] else "server")
    index = re.search(r"\[(\d+)\]|^(\d+)|/(\d+)", leaves)
    rule_names_of_side = names.get(side, ())
    number = int(next(filter(None, index.groups()))) if index else len(rule_names_of_side)
    part = {"server": "server", "clients": "client"}[side]
    is_state = side == "clients" or "rules" in leaves.partition(",")[0]
    if not (is_state and number < len(rule_names_of_side)):
        return ""
    return f", of the {part} rule {rule_names_of_side[number]!r}"


def padding_is_inert(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that padding never influences a result, whatever it contains.

    Padding is the examples and labels whose mask is False, and examples that no client has.
    """
    indices = np.concatenate([partition.indices for partition in federation.partitions])
    # an example that no client has can only be read as padding: NaN would spread at once
    examples = fill_padding(np.isin(np.arange(COUNT), indices), federation.data.input, jnp.nan)
    assert federation.data.query is not None
    # the engine writes zeros into padding itself, so other numbers and labels travel in
    # the query features, and `_with_padding` puts them into the batches
    query = padding_features(*GARBAGE, federation.data.query.shape[1])
    poisoned = states_after_rounds(federation, federation.data._replace(input=examples, query=query))
    leaves = difference(poisoned[-1], history[-1])
    return _equal_or_cause(
        "padding is inert: with other examples and labels in it, nothing changes",
        f"{leaves}{_owner(federation, leaves)}" if leaves else "",
        "batch.mask is not used",
    )


def order_does_not_matter(
    federation: Federation,
    _history: list[PlayedState],
) -> Statement:
    """Check that clients with permuted ids send the same sums in their first round.

    Later rounds are left out, since keys depend on the ids.
    """
    label = np.asarray(federation.data.label)
    worst = (0.0, "")
    order = [3, 2, 0, 1]
    renamed = partition_of(label, TASKS[0], federation.partitions[0].count.tolist(), order)
    state = PlayedState(begin_task(federation, federation.server, TASKS[0]), federation.states)
    for index in range(len(federation.method.rounds)):
        pair = [
            receive(federation, federation.engine, index, state, partition, present(partition), TASKS[0])[0]
            for partition in (federation.partitions[0], renamed)
        ]
        # means and sums only: gathered uploads come in the order of the ids
        worst = max(worst, _farthest(pair, 2))
    return _nearly_equal(
        "permuting clients does not change sums over clients",
        worst,
        1e-3,
        "draws or choices by the client's number in place of the key that is given",
    )


def _farthest(pair: Sequence[Accumulator], parts: int) -> tuple[float, str]:
    """Return the largest relative difference between two received uploads, and its leaf.

    Args:
      pair: what the server received in two ways.
      parts: how many of means, sums and gathered arrays are compared.
    """
    names = ("mean", "sum", "gather")[:parts]
    differences = []
    for index, name in enumerate(names):
        difference_, leaf = farthest_leaf(*(parts_of(received)[index] for received in pair))
        differences.append((difference_, f"{name}{leaf}"))
    return max(differences)


def _nearly_equal(name: str, worst: tuple[float, str], most: float, cause: str) -> Statement:
    """Return the statement that a difference is below `most`, else with leaf and cause."""
    largest, leaf = worst
    measurement = f"largest relative difference {largest:.1e}"
    if largest < most:
        return Statement(name, True, measurement)
    return Statement(name, False, f"{measurement} in {leaf} of the uploads; usual cause: {cause}")


def resumes(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that a run resumed from a checkpoint on disk gives the same bits."""
    # through a file and not in memory: types and structure must survive it
    with tempfile.TemporaryDirectory() as folder, checkpoint.open_checkpoints(Path(folder), 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, history[1], {}))
        checkpoint.finish(manager)
        snapshot = checkpoint.latest(manager, history[1])
    state = None if snapshot is None else snapshot.state
    resumed = states_after_rounds(federation, start=1, state=state)
    leaves = difference(resumed[-1], history[-1])
    return _equal_or_cause(
        "a resumed run equals the uninterrupted one",
        f"{leaves}{_owner(federation, leaves)}" if leaves else "",
        "state in a Python variable, which no checkpoint has",
    )


def traced_once(federation: Federation, _history: list[PlayedState]) -> Statement:
    """Check that every function of the engine was traced once by all other statements."""
    # the worst one is named; one more trace means one more compilation in every run
    function, traces = max(federation.engine.traces.items(), key=lambda item: item[1])
    measurement = f"{function}: {traces} traces"
    if traces > 1:
        measurement += "; usual cause: a shape, a dtype or a Python number that changes over rounds or tasks"
    return Statement("all rounds of all tasks share one trace", traces == 1, measurement)


STATEMENTS = (
    stays_finite,
    traces_are_the_same,
    lanes_do_not_matter,
    others_do_not_matter,
    padding_is_inert,
    neighbours_do_not_matter,
    order_does_not_matter,
    participation_equals_the_reference,
    late_clients_keep_the_same,
    resumes,
    slots_stay_apart,
    batch_size_does_not_matter,
    traced_once,
)
