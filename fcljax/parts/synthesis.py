"""How servers make images of noise in place of old classes' examples: what TARGET, MFCL and LANDER share.

A generator takes steps towards images that the global model recognises, where a student that learned from the
images so far may think otherwise. No client sends anything for it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.models.heads import kl
from fcljax.parts.federate import Run
from fcljax.parts.learner import Output, Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import jitter
from fcljax.types import Task, Weighted

MOMENTUM = 0.9  # of running statistics of batch normalisation (models/convnet.py)


@runtime_checkable
class Synthesise(Protocol):
    """Makes what clients are sent anew: images, or a generator of images."""

    def __call__(self, round: ServerRound, params: Params, state: PyTree, /) -> tuple[PyTree, Weighted]:
        """What replaces the state, and the loss of making it."""
        ...


def synthesis_rule(name: str, run: Run, first: Callable[[], PyTree], synthesise: Synthesise) -> ServerRule:
    """After the last round of every task but the last one, makes what clients are sent for all classes seen
    so far.

    Args:
      name: of the rule.
      first: what they are sent before that.
    """

    def init(params: Params, trainable: Params) -> PyTree:
        del params, trainable
        return first()

    def update(round: ServerRound, params: Params, state: PyTree) -> ServerUpdate:
        def make(state: PyTree) -> tuple[PyTree, Weighted]:
            return synthesise(round, params, state)

        wanted = round.last & (round.task.index < run.sizes.tasks - 1)
        none = Weighted(jnp.zeros(()), jnp.zeros(()))
        state, found = jax.lax.cond(wanted, make, lambda state: (state, none), state)
        return ServerUpdate(params, state, {"loss": found})

    def sends(task: Task, state: PyTree) -> PyTree:
        del task
        return state

    return ServerRule(name, update, init, sends)


class Best(NamedTuple):
    """Steps of a generator at work, and the images of the best of them."""

    fast: PyTree
    """What takes the steps."""
    optimiser: PyTree
    total: PyTree
    """The sum of the gradients."""
    loss: Float[Array, ""]
    """The lowest so far."""
    image: Float[Array, "batch h w 3"]
    """The images of the lowest loss."""


def best_images(
    loss: Callable[[PyTree, Array], tuple[Float[Array, ""], Float[Array, "batch h w 3"]]],
    fast: PyTree,
    optimiser: optax.GradientTransformation,
    steps: int,
    shape: tuple[int, int, int],
) -> Best:
    """Gradient steps, of which those images stay whose loss was the lowest.

    Args:
      loss: loss(fast, step) -> its value and the images.
      fast: the first value of what trains.
      optimiser: its steps.
      steps: how many.
      shape: batch, height and width of the images.
    """

    def step(i: Array, best: Best) -> Best:
        (value, image), gradient = jax.value_and_grad(loss, has_aux=True)(best.fast, i)
        update, state = optimiser.update(gradient, best.optimiser, best.fast)
        moved = jax.tree.map(jnp.add, best.fast, update)
        total = optax.tree.add(best.total, gradient)
        image = jnp.where(value < best.loss, image, best.image)
        return Best(moved, state, total, jnp.minimum(value, best.loss), image)

    nothing = optax.tree.zeros_like(fast)
    start = Best(fast, optimiser.init(fast), nothing, jnp.float32(jnp.inf), jnp.zeros((*shape, 3)))
    return jax.lax.fori_loop(0, steps, step, start)


def disagreement(
    theirs: Float[Array, "batch C"], own: Float[Array, "batch C"], seen: Bool[Array, " C"]
) -> Float[Array, ""]:
    """-mean(1[they agree] KL(teacher || student)): low where both see the same class and the student is not
    sure of it.

    Args:
      theirs, own: logits of teacher and student over the seen classes.
      seen: the classes that compete.
    """
    agree = jnp.argmax(own, -1) == jnp.argmax(theirs, -1)
    return -jnp.mean(jnp.where(agree, kl(theirs, own, seen), 0.0))


def output_of(
    round: ServerRound, cached: Params, trainable: Params, pixels: Float[Array, "batch h w 3"]
) -> Output:
    """What a model computes for pixels in [0, 1], as in evaluation."""
    batch = unlabelled(round.learner, pixels)
    return round.learner.forward(round.frozen, cached, trainable, batch, round.task, False)


class BatchStatistics(NamedTuple):
    """Of a layer of batch normalisation, [channels]."""

    mean: Float[Array, " c"]
    var: Float[Array, " c"]


def batch_statistics(before: PyTree, after: PyTree) -> list[tuple[BatchStatistics, BatchStatistics]]:
    """The running statistics of every layer of batch normalisation, and those of a batch, which follow from
    the running ones after it."""

    def of_layer(layer: dict, moved: dict) -> tuple[BatchStatistics, BatchStatistics]:
        own = ((moved[key] - MOMENTUM * layer[key]) / (1 - MOMENTUM) for key in BatchStatistics._fields)
        return BatchStatistics(layer["mean"], layer["var"]), BatchStatistics(*own)

    def is_layer(tree: PyTree) -> bool:
        return isinstance(tree, dict) and "var" in tree

    layers, moved = (jax.tree.leaves(tree, is_leaf=is_layer) for tree in (before, after))
    return [of_layer(*each) for each in zip(layers, moved, strict=True)]


class Student(NamedTuple):
    """A model that learns from the images so far."""

    trainable: Params
    optimiser: PyTree


class MadeSoFar(NamedTuple):
    """Images of which only the first are filled."""

    images: UInt8[Array, "images h w 3"]
    filled: Int[Array, ""]


def added(made: MadeSoFar, image: Float[Array, "batch h w 3"]) -> MadeSoFar:
    """With the images of a round, of pixels in [0, 1], in the next places."""
    grey = jnp.round(image * 255).astype(jnp.uint8)
    images = jax.lax.dynamic_update_slice(made.images, grey, (made.filled, 0, 0, 0))
    return MadeSoFar(images, made.filled + len(image))


def taught(
    loss: Callable[[Params, Float[Array, "batch h w 3"]], Float[Array, ""]],
    optimiser: optax.GradientTransformation,
    student: Student,
    made: MadeSoFar,
    size: int,
    padding: float,
    steps: Int[Array, ""],
    key: PRNGKeyArray,
) -> Student:
    """The student after so many steps on the images made so far.

    Args:
      loss: loss(trainable, pixels) of a batch.
      optimiser: of the student.
      student: before the steps.
      made: the images.
      size: of a batch.
      padding: as of `pixels.jitter`.
      steps: how many.
      key: of the draws.
    """

    def step(i: Array, now: Student) -> Student:
        pick, move = jax.random.split(jax.random.fold_in(key, i))
        chosen = made.images[jax.random.randint(pick, (size,), 0, made.filled)] / 255
        gradient = jax.grad(loss)(now.trainable, jitter(move, chosen, padding))
        update, state = optimiser.update(gradient, now.optimiser, now.trainable)
        return Student(jax.tree.map(jnp.add, now.trainable, update), state)

    return jax.lax.fori_loop(0, steps, step, student)


def student_optimiser(rate: float, momentum: float, decay: float) -> optax.GradientTransformation:
    """Gradient descent on gradients of at most norm 1."""
    steps = optax.sgd(rate, momentum)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(decay), steps)
