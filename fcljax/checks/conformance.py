"""The invariants that every method must satisfy, as statements that `fcljax check` tests on a tiny federation
(checks/federation.py).
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fcljax.checks.federation import (
    GARBAGE,
    KEY,
    SIZES,
    TASKS,
    TINY,
    Federation,
    PlayedState,
    Statement,
    difference,
    engine_of,
    equal_bits,
    farthest_leaf,
    federation,
    network,
    not_finite,
    of_client,
    padding_features,
    partition_of,
    parts_of,
    present,
    receive,
    states_after_rounds,
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
from fcljax.types import (
    RoundContext,
)


@leaks_in_one_line()
def check(settings: RunConfig) -> list[Statement]:
    """Test every statement on a method.

    Args:
      settings: resolved; those of the method, the adapter and the training count.

    Raises:
      InputError: for a method that does not follow the protocol.
    """
    made = federation(make_method(settings, SIZES, network(TINY)))
    history = states_after_rounds(made)
    return [statement(made, history) for statement in STATEMENTS]


# ---- the statements ----------------------------------------------------------------------------------------


def stays_finite(made: Federation, history: list[PlayedState]) -> Statement:
    """States and the clients' losses stay finite, no upload is left out, and the server's state changes."""
    reports: list[RoundReport] = []
    states_after_rounds(made, heard=reports.append)
    lines = [
        {"participants": each.participants, "rejected": each.rejected, **each.metrics} for each in reports
    ]
    bad = next(((r, leaves) for r, state in enumerate(history) if (leaves := not_finite(state))), None)
    rejected = sum(each.rejected for each in reports)
    found = ""
    if bad is not None:
        found = f"{bad[1]} is NaN or infinite after round {bad[0] + 1}{_owner(made, bad[1])}"
    elif rejected:
        found = f"the server rejected {rejected} uploads: they had NaN, an infinity or an impossible claim"
    elif said := training_warnings(lines):
        found = said[0].removeprefix("warning: ")
    elif not difference(made.server, history[-1].server):
        found = "nothing changes"
    name = "states and losses stay finite, and the server's state changes"
    return Statement(name, not found, found or "they do")


def lanes_do_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """One lane in a loop, which computes short batches as such, receives the same as two vmapped lanes, which
    pad them. The tolerance is for rounding, which Adam turns into whole steps where a gradient is nothing
    else: in FedLwF.MC the teachers equal the students at first."""
    single = engine_of(made.method, Lanes(1, "loop"), made.frozen, made.data, made.partitions, short=True)
    worst = (0.0, "")
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, engine, index, history[1], made.partitions[1], [0, 2, 3])[0]
            for engine in (made.engine, single)
        ]
        worst = max(worst, _farthest(pair, 3))
    return _nearly_equal(
        "uploads do not depend on lanes or padding",
        worst,
        2e-3,
        "an unmasked mean or sum over a batch, or numbers drawn while tracing",
    )


def others_do_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """What a client sends and keeps is the same bits, whichever clients take part besides."""
    found = ""
    for index in range(len(made.method.rounds)):

        def received(ids: Sequence[int], index: int = index) -> tuple[Accumulator, PyTree]:
            return receive(made, made.engine, index, history[1], made.partitions[1], ids)

        together, after = received([0, 2, 3])
        for rank, client in enumerate([0, 2, 3]):
            single, own = received([client])
            sent = difference(of_client(single.gather, 0), of_client(together.gather, rank))
            kept = difference(of_client(own, client), of_client(after, client))
            if not found and (sent or kept):
                owner = _owner(made, kept, "clients") if kept else ""
                found = f"client {client} {'sends' if sent else 'keeps'} other numbers: {sent or kept}{owner}"
    return _equal_or_cause(
        "what a client sends and keeps does not depend on the other participants",
        found,
        "something outside of the client's context and state",
    )


def _equal_or_cause(name: str, found: str, cause: str) -> Statement:
    """The statement that two results have the same bits, with the usual cause where they do not."""
    return equal_bits(name, f"{found}; usual cause: {cause}" if found else "")


def _owner(made: Federation, leaves: str, field: str = "") -> str:
    """The rule whose state the first of some leaves is, such as ", of client rule 'ewc'"; else nothing.

    Args:
      made: the federation.
      leaves: paths in a `PlayedState`, or in one of its fields.
      field: the field, if the paths begin within it.
    """
    names = rule_names(made.method)
    side = field or ("clients" if "clients" in leaves[:9] else "server")
    index = re.search(r"\[(\d+)\]|^(\d+)|/(\d+)", leaves)
    known = names.get(side, ())
    number = int(next(filter(None, index.groups()))) if index else len(known)
    part = {"server": "server", "clients": "client"}[side]
    is_state = side == "clients" or "rules" in leaves.partition(",")[0]
    return f", of the {part} rule {known[number]!r}" if is_state and number < len(known) else ""


def padding_is_inert(made: Federation, history: list[PlayedState]) -> Statement:
    """Padding never influences a result, whatever it contains: images and labels of examples whose mask is
    False, and images that no client has."""
    indices = np.concatenate([partition.indices for partition in made.partitions])
    owned = np.isin(np.arange(60), indices)[:, None, None, None]
    image = jnp.where(owned, made.data.image, jnp.nan)
    assert made.data.query is not None
    query = padding_features(*GARBAGE, made.data.query.shape[1])
    poisoned = states_after_rounds(made, made.data._replace(image=image, query=query))
    found = difference(poisoned[-1], history[-1])
    return _equal_or_cause(
        "padding is inert: with other images and labels in it, nothing changes",
        f"{found}{_owner(made, found)}" if found else "",
        "batch.mask is not used",
    )


def order_does_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """Clients with other numbers send the same sum, in their first round: later keys depend on the
    numbers."""
    del history
    label = np.asarray(made.data.label)
    worst = (0.0, "")
    order = [3, 2, 0, 1]
    renamed = partition_of(label, TASKS[0], made.partitions[0].count.tolist(), order)
    begin = jax.jit(made.method.begin_task)
    round_context = RoundContext.on_host(made.frozen, TASKS[0], 0, False)
    state = PlayedState(begin(round_context, made.server, KEY), made.states)
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, made.engine, index, state, partition, present(partition), TASKS[0])[0]
            for partition in (made.partitions[0], renamed)
        ]
        worst = max(worst, _farthest(pair, 2))
    return _nearly_equal(
        "permuting clients does not change sums over clients",
        worst,
        1e-3,
        "draws or choices by the client's number in place of the key that is given",
    )


def _farthest(pair: Sequence[Accumulator], parts: int) -> tuple[float, str]:
    """The largest relative difference of what was received, and the leaf of uploads that has it."""
    names = ("mean", "sum", "gather")[:parts]
    found = []
    for index, name in enumerate(names):
        apart, leaf = farthest_leaf(*(parts_of(one)[index] for one in pair))
        found.append((apart, f"{name}{leaf}"))
    return max(found)


def _nearly_equal(name: str, worst: tuple[float, str], most: float, cause: str) -> Statement:
    """The statement that a difference is at most rounding; where it is not, the leaf and the usual cause."""
    apart, leaf = worst
    holds = apart < most
    found = f"largest relative difference {apart:.1e}"
    return Statement(
        name, holds, found if holds else f"{found} in {leaf} of the uploads; usual cause: {cause}"
    )


def resumes(made: Federation, history: list[PlayedState]) -> Statement:
    """A run that is resumed from a checkpoint on disk gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, checkpoint.open_checkpoints(Path(folder), 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, history[1], {}))
        checkpoint.finish(manager)
        found = checkpoint.latest(manager, history[1])
    again = states_after_rounds(made, start=1, state=found.state if found else None)
    apart = difference(again[-1], history[-1])
    return _equal_or_cause(
        "a resumed run equals the uninterrupted one",
        f"{apart}{_owner(made, apart)}" if apart else "",
        "state in a Python variable, which no checkpoint has",
    )


def traced_once(made: Federation, history: list[PlayedState]) -> Statement:
    """After all other statements, every function of the engine was traced once."""
    del history
    most = max(made.engine.traces.items(), key=lambda item: item[1])
    found = f"{most[0]}: {most[1]} traces"
    if most[1] > 1:
        found += "; usual cause: a shape, a dtype or a Python number that changes with the round or task"
    return Statement("all rounds of all tasks share one trace", most[1] == 1, found)


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
