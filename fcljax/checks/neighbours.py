"""Predictions and the examples beside them: a prediction depends neither on the other
examples of its batch, nor on their order, nor on padding.

Accuracies would otherwise depend on the order of the test examples, and a user who
predicts one example would get another class for it than in a batch. A method whose
predictions do depend on the batch names the options by which they do
(`Method.batchwise`); padding has no influence on its predictions either.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fcljax.checks.federation import (
    GARBAGE,
    SIZES,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    fill_padding,
    of_client,
    relative_difference,
)
from fcljax.data.kinds import take
from fcljax.options import flag
from fcljax.types import Batch, Method, RoundContext

BATCH = 32  # examples
# rounding differs with the size of a batch, while
# prompts of another choice move logits by percents
TOLERANCE = 1e-3

# logits(examples [n, ...], mask [n]) -> logits [n, C] of one of the method's functions
Logits = Callable[[PyTree, Array], Float[Array, "n C"]]


def neighbours_do_not_matter(
    federation: Federation,
    history: list[PlayedState],
) -> Statement:
    """Check that an example's logits do not depend on padding or neighbours in the batch."""
    batchwise = federation.method.batchwise
    examples = jax.tree.map(_coloured, take(federation.data.input, slice(BATCH)))
    worst = 0.0
    # after both tasks: prompts of the first one compete in the second
    for task_index, state in ((0, history[SIZES.rounds - 1]), (1, history[-1])):
        for logits in _predictions(federation, state, task_index):
            worst = max(worst, _largest_change(examples, logits, bool(batchwise)))
    name = "a prediction does not depend on other examples of its batch, their order or padding"
    if batchwise:
        name = f"a prediction depends on its batch by {', '.join(map(flag, batchwise))}, not on padding"
    return Statement(name, worst < TOLERANCE, f"largest relative difference {worst:.1e}")


def _coloured(noise: Array) -> Array:
    """Return examples of noise, each with its own colour: a number added to each channel.

    A small random network finds noise without colour so alike that nearly all examples
    choose the same prompts. Tokens stay as they are.
    """
    if not jnp.issubdtype(noise.dtype, jnp.floating):
        return noise
    shape = (len(noise), *[1] * (noise.ndim - 2), noise.shape[-1])
    colour = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(noise + 3 * colour, jnp.float32)


def _largest_change(examples: PyTree, logits: Logits, batchwise: bool) -> float:
    """Return the largest difference to the logits of examples alone; with `batchwise`,
    beside padding only."""
    place = np.arange(BATCH)
    alone = jnp.concatenate([logits(take(examples, slice(i, i + 1)), jnp.ones(1, bool)) for i in place])
    # padding that is not zero, in case that zeros choose what others choose; every example
    # is once the first of a batch that has only padding besides
    first = jnp.asarray(place == 0)
    padded = jnp.stack(
        [logits(fill_padding(first, take(examples, np.roll(place, -i)), GARBAGE[0]), first)[0] for i in place]
    )
    change = relative_difference(padded, alone)
    if batchwise:
        return change
    mask = jnp.ones(BATCH, bool)
    together = logits(examples, mask)
    reverse = logits(take(examples, place[::-1]), mask)[::-1]
    return max(change, relative_difference(together, alone), relative_difference(reverse, alone))


def _predictions(
    federation: Federation,
    state: PlayedState,
    task_index: int,
) -> list[Logits]:
    """Return the method's functions that predict, as logits of the seen classes.

    A method may predict by the server's model, by the merged model before the server
    trained, by a client's personal model and by weights drawn for it.
    """
    task = TASKS[task_index]
    context = RoundContext.on_host(federation.frozen, task, SIZES.rounds - 1, True)
    seen = np.flatnonzero(task.seen)
    client = of_client(state.clients, 0)
    return [
        _logits(function, (context, state.server, client) if personal else (context, state.server), seen)
        for function, personal in _functions(federation.method)
    ]


def _functions(method: Method) -> list[tuple[Callable, bool]]:
    """Return the functions that predict, each with whether it reads a client's state."""
    functions = (
        (method.predict, False),
        (method.predict_provisional, False),
        (method.predict_client, True),
        (method.predict_drawn, True),
    )
    return [(function, personal) for function, personal in functions if function is not None]


def _logits(function: Callable, model: tuple, seen: np.ndarray) -> Logits:
    """Return the compiled function of examples and mask alone."""
    compiled = jax.jit(function)

    def logits(examples: PyTree, mask: Array) -> Float[Array, "n C"]:
        index = jnp.where(mask, jnp.arange(len(mask)), -1)
        batch = Batch(examples, jnp.zeros(len(mask), jnp.int32), mask, index)
        return compiled(*model, batch)[:, seen]

    return logits
