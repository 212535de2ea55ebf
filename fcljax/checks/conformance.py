"""The invariants that every method must satisfy, as statements that `fcljax check` tests on a tiny federation
(checks/federation.py).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import chex
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
    federation,
    network,
    of_client,
    padding_features,
    partition_of,
    parts_of,
    present,
    receive,
    relative_difference,
    states_after_rounds,
)
from fcljax.checks.neighbours import neighbours_do_not_matter
from fcljax.config import RunConfig
from fcljax.federated.client_loop import Accumulator
from fcljax.federated.engine import (
    Lanes,
)
from fcljax.runs import checkpoint
from fcljax.runs.build import make_method
from fcljax.types import (
    RoundContext,
)


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
    """Everything stays finite and the server's state changes."""
    found = "it does"
    try:
        chex.assert_tree_all_finite(history[-1])
    except AssertionError:
        found = "NaN or infinite numbers"
    else:
        found = found if difference(made.server, history[-1].server) else "nothing changes"
    return Statement("everything stays finite, and the server's state changes", found == "it does", found)


def lanes_do_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """One lane in a loop, which computes short batches as such, receives the same as two vmapped lanes, which
    pad them. The tolerance is for rounding, which Adam turns into whole steps where a gradient is nothing
    else: in FedLwF.MC the teachers equal the students at first."""
    single = engine_of(made.method, Lanes(1, "loop"), made.frozen, made.data, made.partitions, short=True)
    worst = 0.0
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, engine, index, history[1], made.partitions[1], [0, 2, 3])[0]
            for engine in (made.engine, single)
        ]
        worst = max(
            worst, *(relative_difference(*(parts_of(one)[part] for one in pair)) for part in range(3))
        )
    return Statement(
        "uploads do not depend on lanes or padding", worst < 2e-3, f"largest relative difference {worst:.1e}"
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
            found = found or difference(of_client(single.gather, 0), of_client(together.gather, rank))
            found = found or difference(of_client(own, client), of_client(after, client))
    return equal_bits("what a client sends and keeps does not depend on the other participants", found)


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
    return equal_bits("padding is inert: with other images and labels in it, nothing changes", found)


def order_does_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """Clients with other numbers send the same sum, in their first round: later keys depend on the
    numbers."""
    del history
    label, worst, order = np.asarray(made.data.label), 0.0, [3, 2, 0, 1]
    renamed = partition_of(label, TASKS[0], made.partitions[0].count.tolist(), order)
    begin = jax.jit(made.method.begin_task)
    round_context = RoundContext.on_host(made.frozen, TASKS[0], 0, False)
    state = PlayedState(begin(round_context, made.server, KEY), made.states)
    for index in range(len(made.method.rounds)):
        pair = [
            receive(made, made.engine, index, state, partition, present(partition), TASKS[0])[0]
            for partition in (made.partitions[0], renamed)
        ]
        worst = max(
            worst, *(relative_difference(*(parts_of(one)[part] for one in pair)) for part in range(2))
        )
    return Statement(
        "permuting clients does not change sums over clients",
        worst < 1e-3,
        f"largest relative difference {worst:.1e}",
    )


def resumes(made: Federation, history: list[PlayedState]) -> Statement:
    """A run that is resumed from a checkpoint on disk gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, checkpoint.open_checkpoints(Path(folder), 1) as manager:
        checkpoint.save(manager, checkpoint.Snapshot(1, history[1], {}))
        checkpoint.finish(manager)
        found = checkpoint.latest(manager, history[1])
    again = states_after_rounds(made, start=1, state=found.state if found else None)
    return equal_bits("a resumed run equals the uninterrupted one", difference(again[-1], history[-1]))


def traced_once(made: Federation, history: list[PlayedState]) -> Statement:
    """After all other statements, every function of the engine was traced once."""
    del history
    most = max(made.engine.traces.items(), key=lambda item: item[1])
    return Statement("all rounds of all tasks share one trace", most[1] == 1, f"{most[0]}: {most[1]} traces")


STATEMENTS = (
    stays_finite,
    lanes_do_not_matter,
    others_do_not_matter,
    padding_is_inert,
    neighbours_do_not_matter,
    order_does_not_matter,
    resumes,
    traced_once,
)
