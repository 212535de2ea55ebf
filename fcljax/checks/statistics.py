"""What a method measures does not depend on the batch size: a statement of `fcljax check`.

Fisher information, class sums, Gram matrices and means are statistics of a client's examples. A mean of batch
means, a square of a batch's mean gradient or batch norm in training mode would make the batch size a
hyper-parameter that nobody chose.
"""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array

from fcljax.checks.federation import (
    KEY,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    of_client,
    read_plain,
    relative_difference,
)
from fcljax.federated.engine import RoundInputs
from fcljax.federated.reference import client_context, read_batch
from fcljax.types import Batch, ClientContext, Program, RoundContext

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
    context = context_of(made, state)
    client = of_client(state.clients, CLIENT)
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
    broadcast = jax.jit(made.method.broadcast)(_round_context(made), state.server)
    ids = np.array([CLIENT])
    inputs = RoundInputs(made.frozen, made.data, made.partitions[1], ids, TASKS[1], 0, KEY)
    return client_context(inputs, broadcast, CLIENT)


def batches(made: Federation, size: int) -> Iterator[Batch]:
    """The client's examples in their order, the last batch with padding."""
    read = functools.partial(read_plain, made.data)
    indices = made.partitions[1].of_client(CLIENT)
    for start in range(0, len(indices), size):
        batch = read_batch(read, indices[start : start + size], size, False, (KEY, KEY))
        yield batch._replace(query=None)  # the tiny federation has the content of padding there


def _round_context(made: Federation) -> RoundContext:
    return RoundContext.on_host(made.frozen, TASKS[1], 0, False)
