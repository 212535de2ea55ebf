"""Predictions and the images beside them: a prediction depends neither on the other
images of its batch, nor on their order, nor on padding.

Accuracies would otherwise depend on the order of the test images, and a user who
predicts one image would get another class for it than in a batch. A method whose
predictions do depend on the batch names the options by which they do
(`Method.batchwise`); padding has no influence on its predictions either.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fcljax.checks.federation import (
    GARBAGE,
    SIZES,
    TASKS,
    Federation,
    PlayedState,
    Statement,
    of_client,
    relative_difference,
)
from fcljax.options import flag
from fcljax.types import Batch, Method, RoundContext

IMAGES = 32  # of a batch
# rounding differs with the size of a batch, while
# prompts of another choice move logits by percents
TOLERANCE = 1e-3

# logits(images [n, H, W, 3], mask [n]) -> logits [n, C] of one of the method's functions
Logits = Callable[[Array, Array], Float[Array, "n C"]]


def neighbours_do_not_matter(
    federation: Federation,
    history: list[PlayedState],
) -> Statement:
    """Check that an image's logits do not depend on padding or neighbours in the batch."""
    batchwise = federation.method.batchwise
    images = _coloured(federation.data.input[:IMAGES])
    worst = 0.0
    # after both tasks: prompts of the first one compete in the second
    for task_index, state in ((0, history[SIZES.rounds - 1]), (1, history[-1])):
        for logits in _predictions(federation, state, task_index):
            worst = max(worst, _largest_change(images, logits, bool(batchwise)))
    name = "a prediction does not depend on other images of its batch, their order or padding"
    if batchwise:
        name = f"a prediction depends on its batch by {', '.join(map(flag, batchwise))}, not on padding"
    return Statement(name, worst < TOLERANCE, f"largest relative difference {worst:.1e}")


def _coloured(noise: Array | np.ndarray) -> Float[Array, "n H W 3"]:
    """Return images of noise, each with its own colour.

    A small random network finds noise without colour so alike that nearly all images
    choose the same prompts.
    """
    colour = np.random.default_rng(0).normal(size=(len(noise), 1, 1, 3))
    return jnp.asarray(noise + 3 * colour, jnp.float32)


def _largest_change(
    images: Float[Array, "n H W 3"],
    logits: Logits,
    batchwise: bool,
) -> float:
    """Return the largest difference to the logits of images alone; with `batchwise`,
    beside padding only."""
    alone = jnp.concatenate([logits(image[None], jnp.ones(1, bool)) for image in images])
    first = jnp.arange(IMAGES) == 0
    # padding that is not black, in case that black images choose what others choose
    padding = jnp.full_like(images, GARBAGE[0])
    padded = jnp.stack([logits(padding.at[0].set(image), first)[0] for image in images])
    change = relative_difference(padded, alone)
    if batchwise:
        return change
    mask = jnp.ones(IMAGES, bool)
    together = logits(images, mask)
    reverse = logits(images[::-1], mask)[::-1]
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
    """Return the compiled function of images and mask alone."""
    compiled = jax.jit(function)

    def logits(image: Array, mask: Array) -> Float[Array, "n C"]:
        index = jnp.where(mask, jnp.arange(len(image)), -1)
        batch = Batch(image, jnp.zeros(len(image), jnp.int32), mask, index)
        return compiled(*model, batch)[:, seen]

    return logits
