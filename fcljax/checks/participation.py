"""Statements about clients that take part only in some of a task's rounds.

participation   states after rounds of some clients equal those of a loop over them
late clients    copies of the broadcast do not depend on the first round of the client
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fcljax.checks.federation import (
    KEY,
    LANES,
    SIZES,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    begin_task,
    engine_of,
    equal_bits,
    of_client,
    present,
    read_plain,
    receive,
    relative_difference,
)
from fcljax.federated.engine import RoundInputs, run_round
from fcljax.federated.reference import play_round
from fcljax.types import Broadcast, RoundContext

TASK = 1  # the second task, so that clients have something to keep
PARTICIPANTS = ((0, 2), (0, 3))  # of its rounds; client 3 comes late
LATE = 3
OTHERS = (0, 2)
# Rounding alone would be about 1e-6. Where a gradient should be 0, Adam divides its
# rounding error by its own size, and takes a whole step in a random direction.
TOLERANCE = 2e-3


def participation_equals_the_reference(
    federation: Federation,
    history: list[PlayedState],
) -> Statement:
    """Check that two rounds of different clients give the states of the reference round.

    The reference round has neither lanes nor padding: it calls the method's functions
    client by client. It does not play training on a server's replay buffer, so that is
    left out.
    """
    method = federation.method._replace(server_replay=None)
    engine = federation.engine
    if federation.method.server_replay is not None:
        engine = engine_of(method, LANES, federation.frozen, federation.data, federation.partitions)

    server = _begin_task(federation, history)
    # a copy: rounds give the memory of the old states to the new ones
    states = jax.tree.map(jnp.copy, _before(history).clients)
    plain_server = server
    plain_states = [of_client(states, client) for client in range(len(federation.partitions[TASK].count))]
    for inputs in _rounds(federation):
        server, states, _ = run_round(engine, server, states, inputs)
        plain_server, plain_states, _ = play_round(method, read_plain, plain_server, plain_states, inputs)

    worst = relative_difference(server, plain_server)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain_states)
    worst = max(worst, relative_difference(states, stacked))
    return Statement(
        "rounds of some clients equal a plain loop over these clients",
        worst < TOLERANCE,
        f"largest relative difference {worst:.1e}",
    )


def late_clients_keep_the_same(
    federation: Federation,
    history: list[PlayedState],
) -> Statement:
    """Check that a client's copies of the task's first broadcast do not depend on when
    it first takes part.

    A teacher is such a copy. It must be the same for a client that first takes part in
    the second round, after others have trained. What a client computes by training may
    differ.
    """
    problem = ""
    # only rounds from which a client can be absent: those at a task's start or end have
    # all clients
    for index, this_round in enumerate(federation.method.rounds):
        if this_round.when == "round" and this_round.who == "sampled":
            problem = problem or _changed_copies(federation, history, index)
    return equal_bits("a late client keeps the same copies from the start of the task", problem)


def _changed_copies(
    federation: Federation,
    history: list[PlayedState],
    index: int,
) -> str:
    """Name the leaves of a late client that copy a later broadcast; "" if there are none."""
    partition = federation.partitions[TASK]
    start = PlayedState(_begin_task(federation, history), _before(history).clients)
    first_broadcast = _broadcast(federation, start.server, 0)
    # the same client twice: in the first round, and in the second one after the others
    # have changed the server
    _, early = receive(federation, federation.engine, index, start, partition, [LATE])

    states = jax.tree.map(jnp.copy, start.clients)
    inputs = _inputs(federation, 0, OTHERS)._replace(past=_before(history).past)
    server, states, _ = run_round(federation.engine, start.server, states, inputs)
    _, late = receive(
        federation, federation.engine, index, PlayedState(server, states), partition, [LATE], round_=1
    )

    broadcast_leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(first_broadcast)]
    pairs = zip(
        jax.tree.leaves_with_path(of_client(early, LATE)),
        jax.tree.leaves(of_client(late, LATE)),
        strict=True,
    )
    changed = [
        jax.tree_util.keystr(path)
        for (path, early_leaf), late_leaf in pairs
        if _is_copy(early_leaf, broadcast_leaves) and not np.array_equal(early_leaf, late_leaf)
    ]
    if not changed:
        return ""
    return f"{', '.join(changed[:3])}: a copy of the newest broadcast in place of the task's first one"


def _is_copy(leaf: Array, broadcast_leaves: list[np.ndarray]) -> bool:
    """Return whether a leaf of parameters has the bits of a leaf of the broadcast."""
    array = np.asarray(leaf)
    # a leaf of equal values, such as zeros before the first step, equals many leaves
    # that it was not copied from
    constant = array.size < 2 or np.all(array == array.flat[0])
    if constant or not np.issubdtype(array.dtype, np.floating):
        return False
    return any(array.shape == sent.shape and np.array_equal(array, sent) for sent in broadcast_leaves)


def _before(history: list[PlayedState]) -> PlayedState:
    """Return the state after the last round of the task before."""
    return history[SIZES.rounds * TASK - 1]


def _begin_task(federation: Federation, history: list[PlayedState]) -> PyTree:
    """Return the server's state before the first round of the task."""
    server = begin_task(federation, _before(history).server, TASKS[TASK])
    states = jax.tree.map(jnp.copy, _before(history).clients)
    everyone = present(federation.partitions[TASK])
    inputs = _inputs(federation, 0, everyone)._replace(when="task_start")
    return run_round(federation.engine, server, states, inputs)[0]


def _rounds(federation: Federation) -> list[RoundInputs]:
    """Return the inputs of the task's rounds."""
    return [_inputs(federation, number, ids) for number, ids in enumerate(PARTICIPANTS)]


def _inputs(federation: Federation, number: int, ids: Sequence[int]) -> RoundInputs:
    """Return the inputs of one round of the task with the participants `ids`."""
    last = number == len(PARTICIPANTS) - 1
    partition = federation.partitions[TASK]
    return RoundInputs(
        federation.frozen, federation.data, partition, np.array(ids), TASKS[TASK], number, KEY, "round", last
    )


def _broadcast(federation: Federation, server: PyTree, number: int) -> Broadcast:
    """Return the broadcast of a round of the task."""
    round_context = RoundContext.on_host(federation.frozen, TASKS[TASK], number, False)
    return federation.engine.broadcast(round_context, server)
