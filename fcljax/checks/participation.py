"""Statements about clients that take part in some of a task's rounds only.

participation   the states after rounds of some of the clients are those of a plain loop over these clients
late clients    what a client keeps of the broadcast does not depend on the round in which it first takes part
"""

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
    engine_of,
    of_client,
    read_plain,
    receive,
    relative_difference,
)
from fcljax.federated.engine import RoundInputs, run_round
from fcljax.federated.reference import play_round
from fcljax.types import Broadcast, RoundContext

TASK = 1  # the second task, so that clients have something to keep
PARTICIPANTS = ((0, 2), (0, 3))  # of its rounds; client 3 comes late
LATE, OTHERS = 3, (0, 2)
TOLERANCE = 2e-3  # for rounding, which Adam turns into whole steps where a gradient is nothing else


def participation_equals_the_reference(made: Federation, history: list[PlayedState]) -> Statement:
    """Two rounds of different clients, by the engine and by the reference round, which has neither lanes nor
    padding and calls the method's functions client by client. Training on a server's replay buffer is left
    out, since the reference round does not play it."""
    method = made.method._replace(server_replay=None)
    engine = made.engine
    if made.method.server_replay is not None:
        engine = engine_of(method, LANES, made.frozen, made.data, made.partitions)

    server = _begin_task(made, history)
    states = jax.tree.map(jnp.copy, _before(history).clients)
    plain_server = server
    plain_states = [of_client(states, client) for client in range(len(made.partitions[TASK].count))]
    for inputs in _rounds(made):
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


def late_clients_keep_the_same(made: Federation, history: list[PlayedState]) -> Statement:
    """What a client keeps as a copy of the task's first broadcast, such as a teacher, is the same if it first
    takes part in the second round, after others have trained. What it makes by training may differ."""
    found = ""
    for index, this_round in enumerate(made.method.rounds):
        if this_round.when == "round" and this_round.who == "sampled":
            found = found or _changed_copies(made, history, index)
    return Statement(
        "a client that comes late keeps the same of the task's start", not found, found or "the same bits"
    )


def _changed_copies(made: Federation, history: list[PlayedState], index: int) -> str:
    """The leaves of a late client's state that are copies of another broadcast than an early client's."""
    partition = made.partitions[TASK]
    start = PlayedState(_begin_task(made, history), _before(history).clients)
    first_broadcast = _broadcast(made, start.server, 0)
    _, early = receive(made, made.engine, index, start, partition, [LATE])

    states = jax.tree.map(jnp.copy, start.clients)
    inputs = _inputs(made, 0, OTHERS)._replace(past=_before(history).past)
    server, states, _ = run_round(made.engine, start.server, states, inputs)
    _, late = receive(made, made.engine, index, PlayedState(server, states), partition, [LATE], round_=1)

    sent = [np.asarray(leaf) for leaf in jax.tree.leaves(first_broadcast)]
    pairs = zip(
        jax.tree.leaves_with_path(of_client(early, LATE)),
        jax.tree.leaves(of_client(late, LATE)),
        strict=True,
    )
    changed = [
        jax.tree_util.keystr(path)
        for (path, early_leaf), late_leaf in pairs
        if _is_copy(early_leaf, sent) and not np.array_equal(early_leaf, late_leaf)
    ]
    if not changed:
        return ""
    return f"{', '.join(changed[:3])}: a copy of the newest broadcast in place of the task's first one"


def _is_copy(leaf: Array, sent: list[np.ndarray]) -> bool:
    """Whether a leaf of parameters has the bits of one that was sent. A constant one says nothing."""
    array = np.asarray(leaf)
    if not np.issubdtype(array.dtype, np.floating) or array.size < 2 or np.all(array == array.flat[0]):
        return False
    return any(array.shape == other.shape and np.array_equal(array, other) for other in sent)


def _before(history: list[PlayedState]) -> PlayedState:
    """The state before the task, which is that after the last round of the one before."""
    return history[SIZES.rounds * TASK - 1]


def _begin_task(made: Federation, history: list[PlayedState]) -> PyTree:
    """The server before the first round of the task."""
    round_context = RoundContext.on_host(made.frozen, TASKS[TASK], 0, False)
    server = jax.jit(made.method.begin_task)(round_context, _before(history).server, KEY)
    states = jax.tree.map(jnp.copy, _before(history).clients)
    everyone = np.flatnonzero(made.partitions[TASK].count)
    inputs = _inputs(made, 0, everyone)._replace(when="task_start")
    return run_round(made.engine, server, states, inputs)[0]


def _rounds(made: Federation) -> list[RoundInputs]:
    return [_inputs(made, number, ids) for number, ids in enumerate(PARTICIPANTS)]


def _inputs(made: Federation, number: int, ids) -> RoundInputs:
    last = number == len(PARTICIPANTS) - 1
    partition = made.partitions[TASK]
    return RoundInputs(
        made.frozen, made.data, partition, np.array(ids), TASKS[TASK], number, KEY, "round", last
    )


def _broadcast(made: Federation, server: PyTree, number: int) -> Broadcast:
    round_context = RoundContext.on_host(made.frozen, TASKS[TASK], number, False)
    return made.engine.broadcast(round_context, server)
