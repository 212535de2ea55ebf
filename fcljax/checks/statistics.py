"""What a method measures does not depend on the batch size: a statement of `fcljax check`.

Fisher information, class sums, Gram matrices and means are statistics of a client's examples. A mean of batch
means, a square of a batch's mean gradient or batch norm in training mode would make the batch size a
hyper-parameter that nobody chose.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fcljax.checks.federation import (
    KEY,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    of_client,
    relative_difference,
)
from fcljax.types import Batch, ClientContext, ClientInfo, Program, RoundContext

NAME = "what clients measure does not depend on the batch size"
CLIENT = 3  # has eight examples of the second task
SIZES = (2, 5)  # four whole batches, or one and another with padding
TOLERANCE = 1e-3


def batch_size_does_not_matter(made: Federation, history: list[PlayedState]) -> Statement:
    """A client makes its passes that measure, over the same examples in batches of two sizes. What trains is
    left out: there the batch size is part of the method."""
    differences: list[tuple[float, str]] = []
    begin = jax.jit(made.method.begin_task)
    server = begin(_round_context(made), history[1].server, KEY)
    for each in made.method.rounds:
        measuring = [phase for phase in each.program.phases if not phase.trains]
        if measuring:
            state = PlayedState(server, history[1].clients)
            first, second = (measured(made, state, each.program, size) for size in SIZES)
            differences += [(relative_difference(first[path], second[path]), path) for path in first]
    worst, path = max(differences, default=(0.0, ""))
    found = f"largest relative difference {worst:.1e}" if path else "they measure nothing"
    if worst < TOLERANCE:
        return Statement(NAME, True, found)
    return Statement(NAME, False, f"{found}, in {path}")


def measured(made: Federation, state: PlayedState, program: Program, size: int) -> dict[str, Array]:
    """What a client sends and keeps after all passes that measure, by path."""
    context, client = context_of(made, state), of_client(state.clients, CLIENT)
    local = jax.jit(program.start)(context, client, KEY)
    for phase in program.phases:
        if not phase.trains:
            step = jax.jit(phase.step)
            for _ in range(phase.view.epochs):
                for batch in batches(made, size):
                    local, _ = step(context, local, batch, KEY)
    upload, after = jax.jit(program.finish)(context, local, client)
    results = {"mean": upload.mean, "sum": upload.sum, "gather": upload.gather, "state": after}
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(results)}


def context_of(made: Federation, state: PlayedState) -> ClientContext:
    """What the client reads in the second task."""
    payload, cached = jax.jit(made.method.broadcast)(_round_context(made), state.server)
    partition = made.partitions[1]
    numbers = CLIENT, partition.count[CLIENT], partition.class_examples[CLIENT], 0
    info = ClientInfo(*(jnp.asarray(number, jnp.int32) for number in numbers))
    return ClientContext(made.frozen, payload, cached, jax.tree.map(jnp.asarray, TASKS[1]), info)


def batches(made: Federation, size: int) -> Iterator[Batch]:
    """The client's examples in their order, the last batch with padding."""
    indices = made.partitions[1].of_client(CLIENT)
    for start in range(0, len(indices), size):
        index = np.full(size, -1)
        index[: len(indices[start : start + size])] = indices[start : start + size]
        mask = index >= 0
        image = jnp.where(mask[:, None, None, None], made.data.image[index], 0)
        label = jnp.where(mask, made.data.label[index], 0)
        keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.asarray(index))
        yield Batch(image, label, jnp.asarray(mask), jnp.asarray(index, jnp.int32), keys=keys)


def _round_context(made: Federation) -> RoundContext:
    return RoundContext.on_host(made.frozen, TASKS[1], 0, False)
