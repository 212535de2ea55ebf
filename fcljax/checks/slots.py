"""State that outlives a task belongs to parameters that do: a statement of `fcljax check`.

Some adapters train other parameters in each task, a slot for each: CODA-Prompt's components, or a LoRA pair
per task. When a task is over its slot is frozen. What clients keep in the shape of the trainable parameters,
such as an anchor or a control variate, must then not reach the next task's slot.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fcljax.checks.federation import (
    KEY,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    difference,
    equal_bits,
    receive,
)
from fcljax.types import Batch, RoundContext

NAME = "state that clients keep over tasks does not reach parameters of one task alone"


def slots_stay_apart(made: Federation, history: list[PlayedState]) -> Statement:
    """After the first task, what clients keep of its slots is changed: in the next task they send, keep and
    predict the same bits."""
    slots = slot_entries(made)
    clients, names = changed(history[1].clients, slots)
    if not names:
        return Statement(NAME, True, "they keep none")
    begin = jax.jit(made.method.begin_task)
    opened = begin(RoundContext.on_host(made.frozen, TASKS[1], 0, False), history[1].server, KEY)
    found = ""
    for index, each in enumerate(made.method.rounds):
        if each.who == "sampled":  # those that train
            pair = [next_round(made, index, opened, state) for state in (history[1].clients, clients)]
            found = found or difference(*pair)
    return equal_bits(NAME, f"{', '.join(names[:3])} reach it: {found}" if found else "")


def slot_entries(made: Federation) -> dict[str, np.ndarray]:
    """Which trainable parameters are other ones in the second task than in the first: path -> entries.

    A server with random parameters broadcasts equal values in both tasks where they are the same parameters.
    """
    rng = np.random.default_rng(0)

    def drawn(leaf: jax.Array) -> jax.Array:
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) if floats else leaf

    server = jax.tree.map(drawn, made.server)
    first, second = (trainable_leaves(made, server, task) for task in TASKS)
    apart = {path: np.asarray(leaf) != np.asarray(second[path]) for path, leaf in first.items()}
    return {path: entries for path, entries in apart.items() if entries.any()}


def trainable_leaves(made: Federation, server: PyTree, task) -> dict[str, jax.Array]:
    """What a task's clients are sent and train, by path; of a hand-written method all that they are sent."""
    payload = made.engine.broadcast(RoundContext.on_host(made.frozen, task, 0, False), server).payload
    trainable = getattr(payload, "trainable", payload)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(trainable)}


def changed(clients: PyTree, slots: dict[str, np.ndarray]) -> tuple[PyTree, list[str]]:
    """Clients' states with other values of what they keep of slots, and the paths of these leaves."""
    names = []

    def change(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        for end, entries in slots.items():
            if name.endswith(end) and leaf.shape[1:] == entries.shape:
                names.append(name)
                return jnp.where(entries, 2 * leaf + 1, leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(change, clients), names


def next_round(made: Federation, index: int, server: PyTree, clients: PyTree) -> tuple[PyTree, PyTree]:
    """What clients send in the second task, and what their personal models predict afterwards."""
    state = PlayedState(server, clients)
    received, after = receive(made, made.engine, index, state, made.partitions[1], [0, 2, 3])
    predict = made.method.predict_client
    if predict is None:
        return received, ()
    round_context = RoundContext.on_host(made.frozen, TASKS[1], 0, False)
    image = jnp.asarray(made.data.image)
    label = jnp.asarray(made.data.label)
    batch = Batch(image, label, label >= 0, label)
    of_clients = jax.jit(jax.vmap(lambda state: predict(round_context, server, state, batch)))
    return received, of_clients(after)
