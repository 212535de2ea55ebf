"""State that outlives a task belongs to parameters that do: a statement of `fcljax
check`.

Some adapters train other parameters in each task, a slot for each: CODA-Prompt's
components, or a LoRA pair per task. When a task is over its slot is frozen. What
clients keep in the shape of the trainable parameters, such as an anchor or a control
variate, must then not reach the next task's slot.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fcljax.checks.federation import (
    TASKS,
    Federation,
    PlayedState,
    Statement,
    begin_task,
    difference,
    equal_bits,
    receive,
)
from fcljax.types import Batch, RoundContext

NAME = "state that clients keep over tasks does not affect parameters of a single task"


def slots_stay_apart(federation: Federation, history: list[PlayedState]) -> Statement:
    """Check that state of the first task's slots has no influence on the second task.

    The entries of client states that belong to these slots get other values. In the
    second task clients must then send, store and predict the same bits.
    """
    slots = slot_entries(federation)
    clients, names = with_other_slots(history[1].clients, slots)
    if not names:
        return Statement(NAME, True, "they keep none")
    server = begin_task(federation, history[1].server, TASKS[1])
    changed = ""
    for index, this_round in enumerate(federation.method.rounds):
        # the rounds in which clients train
        if this_round.who == "sampled":
            usual = next_round(federation, index, server, history[1].clients)
            poisoned = next_round(federation, index, server, clients)
            changed = changed or difference(usual, poisoned)
    return equal_bits(NAME, f"{', '.join(names[:3])} reach it: {changed}" if changed else "")


def slot_entries(federation: Federation) -> dict[str, np.ndarray]:
    """Return the trainable entries that belong to one task: path -> mask.

    A server with random parameters broadcasts equal values in both tasks where both
    train the same parameters, and almost surely other values where they do not.
    """
    rng = np.random.default_rng(0)

    def random_like(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    # initial values would do for most leaves, but zeros of two slots would look the same
    server = jax.tree.map(random_like, federation.server)
    first, second = (trainable_leaves(federation, server, task) for task in TASKS)
    masks = {path: np.asarray(leaf) != np.asarray(second[path]) for path, leaf in first.items()}
    return {path: mask for path, mask in masks.items() if mask.any()}


def trainable_leaves(
    federation: Federation,
    server: PyTree,
    task,
) -> dict[str, jax.Array]:
    """Return the values that clients of a task receive and train: path -> leaf.

    A method written by hand may have no field `trainable`: then it is all that clients
    receive.
    """
    payload = federation.engine.broadcast(
        RoundContext.on_host(federation.frozen, task, 0, False), server
    ).payload
    trainable = getattr(payload, "trainable", payload)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(trainable)}


def with_other_slots(
    clients: PyTree,
    slots: dict[str, np.ndarray],
) -> tuple[PyTree, list[str]]:
    """Return client states with other values in the entries of slots, and the paths of
    the changed leaves.

    Args:
      clients: states, stacked over clients.
      slots: path of a trainable leaf -> mask; a leaf of a state belongs to it by the end
        of its path and its shape.
    """
    names = []

    def change(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        for end, mask in slots.items():
            if name.endswith(end) and leaf.shape[1:] == mask.shape:
                names.append(name)
                # never the old value, unless that is -1
                return jnp.where(mask, 2 * leaf + 1, leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(change, clients), names


def next_round(
    federation: Federation,
    index: int,
    server: PyTree,
    clients: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return what clients send in the second task, and the logits of their personal
    models afterwards."""
    state = PlayedState(server, clients)
    received, after = receive(
        federation, federation.engine, index, state, federation.partitions[1], [0, 2, 3]
    )
    # a global model is in the server's state, which the uploads cover
    predict = federation.method.predict_client
    if predict is None:
        return received, ()
    round_context = RoundContext.on_host(federation.frozen, TASKS[1], 0, False)
    examples = jax.tree.map(jnp.asarray, federation.data.input)
    label = jnp.asarray(federation.data.label)
    # all examples at once, none of them padding; labels in place of indices, which no
    # prediction reads
    batch = Batch(examples, label, label >= 0, label)
    # the context is an argument: methods see arrays that JAX traces, as in the engine
    predict_all = jax.jit(jax.vmap(predict, in_axes=(None, None, 0, None)))
    return received, predict_all(round_context, server, after, batch)
