"""What a method measures does not depend on the batch size: a statement of `fcljax
check`.

Fisher information, class sums, Gram matrices and means are statistics of a client's
examples. A mean of batch means, a square of a batch's mean gradient or batch norm in
training mode would make the batch size a hyper-parameter that nobody chose.
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
    begin_task,
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


def batch_size_does_not_matter(
    federation: Federation,
    history: list[PlayedState],
) -> Statement:
    """Check that statistics do not depend on the batch size.

    Passes that train are left out: there the batch size is part of the method.
    """
    differences: list[tuple[float, str]] = []
    server = begin_task(federation, history[1].server, TASKS[1])
    state = PlayedState(server, history[1].clients)
    for this_round in federation.method.rounds:
        # the batch size of training is part of the method
        if all(phase.trains for phase in this_round.program.phases):
            continue
        small, large = (statistics_of(federation, state, this_round.program, size) for size in SIZES)
        # path by path, relative to the largest value of that leaf
        differences += [(relative_difference(small[path], large[path]), path) for path in small]
    worst, path = max(differences, default=(0.0, ""))
    measurement = "they measure nothing"
    if path:
        measurement = f"largest relative difference {worst:.1e}"
    if worst < TOLERANCE:
        return Statement(NAME, True, measurement)
    return Statement(NAME, False, f"{measurement}, in {path}")


def statistics_of(
    federation: Federation, state: PlayedState, program: Program, size: int
) -> dict[str, Array]:
    """Return a client's upload and state after all passes that measure: path -> leaf."""
    context = context_of(federation, state)
    client = of_client(state.clients, CLIENT)
    local = jax.jit(program.start)(context, client, KEY)
    for phase in program.phases:
        # passes that train would change the parameters under which others measure
        if not phase.trains:
            step = jax.jit(phase.step)
            for _ in range(phase.view.epochs):
                # the same examples in the same order, in batches of two sizes
                for batch in batches(federation, size):
                    local, _ = step(context, local, batch, KEY)
    upload, new_state = jax.jit(program.finish)(context, local, client)
    results = {"mean": upload.mean, "sum": upload.sum, "gather": upload.gather, "state": new_state}
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(results)}


def context_of(federation: Federation, state: PlayedState) -> ClientContext:
    """Return the client's context in the second task."""
    broadcast = jax.jit(federation.method.broadcast)(_round_context(federation), state.server)
    ids = np.array([CLIENT])
    inputs = RoundInputs(federation.frozen, federation.data, federation.partitions[1], ids, TASKS[1], 0, KEY)
    return client_context(inputs, broadcast, CLIENT)


def batches(federation: Federation, size: int) -> Iterator[Batch]:
    """Yield the client's examples in their order, the last batch with padding."""
    read = functools.partial(read_plain, federation.data)
    indices = federation.partitions[1].of_client(CLIENT)
    for start in range(0, len(indices), size):
        batch = read_batch(read, indices[start : start + size], size, False, (KEY, KEY))
        # the tiny federation has the content of padding in place of query features
        yield batch._replace(query=None)


def _round_context(federation: Federation) -> RoundContext:
    """Return the context of the second task's first round."""
    return RoundContext.on_host(federation.frozen, TASKS[1], 0, False)
