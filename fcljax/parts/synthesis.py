"""How servers make images of noise in place of old classes' examples: what TARGET, MFCL
and LANDER share.

A generator takes steps towards images that the global model recognises, where a student
that learned from the images so far may think otherwise. No client sends anything for
it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.models.heads import kl, mask_logits
from fcljax.options import option
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run
from fcljax.parts.image_generator import ImageGeneratorConfig
from fcljax.parts.learner import Output, Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import jitter
from fcljax.types import Task, Weighted

MOMENTUM = 0.9  # of running statistics of batch normalisation (models/convnet.py)
STUDENT_MOMENTUM = 0.9  # of the student's gradient descent
BETAS = (0.5, 0.999)  # of the generator's Adam


# ---- options -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GeneratorOptions:
    """Options of TARGET, MFCL and LANDER."""

    synthetic_batch: int = 64
    """Number of synthetic images per client step."""
    noise_width: int = 256
    """Width of the noise that the generator reads."""
    generator_channels: int = 32
    """Channels of the generator's last hidden layer."""


@dataclasses.dataclass(frozen=True)
class SynthesisOptions(GeneratorOptions):
    """Options of TARGET and LANDER, whose servers make images."""

    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the clients' distillation."""
    synthesis_rounds: int = 30
    """Number of generator rounds; each adds synthesis_batch images."""
    synthesis_batch: int = 16
    """Number of images per generator round."""
    synthesis_warmup: int = option(20, least=0)
    """Number of generator rounds before the student learns."""
    generator_steps: int = 40
    """Number of generator steps per generator round."""
    generator_lr: float = option(2e-3, positive=True)
    """Learning rate of the generator."""
    label_weight: float = 0.5
    """Weight of the global model's cross-entropy in the generator's loss."""
    adversarial_weight: float = 1.0
    """Weight of the disagreement of global model and student in the generator's loss."""
    student_steps: int = 50
    """Number of student steps per generator round."""
    student_lr: float = option(2e-3, positive=True)
    """Learning rate of the student."""
    student_temperature: float = option(20.0, positive=True)
    """Temperature of the student's distillation."""
    crop_padding: float = option(0.125, most=1.0)
    """Padding of synthetic images before a crop, as a fraction of the side."""


def generator_config(options: GeneratorOptions, run: Run) -> ImageGeneratorConfig:
    """Return the static shape of the generator."""
    height, width, _ = run.network.image
    return ImageGeneratorConfig(height, width, options.noise_width, options.generator_channels)


# ---- client ------------------------------------------------------------------------------------------------


def synthetic_pixels(
    options: SynthesisOptions, images: UInt8[Array, "images h w 3"], step: ClientStep
) -> Float[Array, "batch h w 3"]:
    """Draw a batch of the images that the server made, as jittered pixels in [0, 1]."""
    pick_key, jitter_key = jax.random.split(jax.random.fold_in(step.key, 1))
    index = jax.random.randint(pick_key, (options.synthetic_batch,), 0, len(images))
    return jitter(jitter_key, images[index] / 255, options.crop_padding)


# ---- server: when images are made --------------------------------------------------------------------------


@runtime_checkable
class Synthesise(Protocol):
    """Makes what clients are sent anew: images, or a generator of images."""

    def __call__(self, round: ServerRound, params: Params, state: PyTree, /) -> tuple[PyTree, Weighted]:
        """What replaces the state, and the loss of making it."""
        ...


def synthesis_rule(
    name: str,
    run: Run,
    first: Callable[[], PyTree],
    synthesise: Synthesise,
) -> ServerRule:
    """Make what clients are sent for all classes seen so far, after the last round of
    every task but the last one.

    Args:
      name: of the rule.
      run: as of `federate`.
      first: what they are sent before that.
      synthesise: makes it.
    """

    def init(_params: Params, _trainable: Params) -> PyTree:
        return first()

    def update(round: ServerRound, params: Params, state: PyTree) -> ServerUpdate:
        def make(state: PyTree) -> tuple[PyTree, Weighted]:
            return synthesise(round, params, state)

        # after the last task no client would read them,
        # and making them is the costly part
        is_due = round.last & (round.task.index < run.sizes.tasks - 1)
        no_loss = Weighted(jnp.zeros(()), jnp.zeros(()))
        # `cond`, not a Python `if`: one trace plays all
        # rounds, and only few of them pay
        state, loss = jax.lax.cond(is_due, make, lambda state: (state, no_loss), state)
        return ServerUpdate(params, state, {"loss": loss})

    def sends(_task: Task, state: PyTree) -> PyTree:
        return state

    return ServerRule(name, update, init, sends)


def images_rule(options: SynthesisOptions, run: Run, synthesise: Synthesise) -> ServerRule:
    """Return the `synthesis_rule` of a server that makes images: `sent["synthesis"]`,
    [images, h, w, 3]."""
    height, width, _ = run.network.image
    shape = (options.synthesis_rounds * options.synthesis_batch, height, width, 3)
    return synthesis_rule("synthesis", run, functools.partial(jnp.zeros, shape, jnp.uint8), synthesise)


# ---- server: models that judge images ----------------------------------------------------------------------


Logits = Callable[[Float[Array, "batch h w 3"]], Float[Array, "batch C"]]  # of pixels in [0, 1]


class ImageModel(NamedTuple):
    """A model that judges images: its parameters of all tasks and its trainable ones."""

    cached: Params
    trainable: Params


def global_model(round: ServerRound, params: Params) -> ImageModel:
    """Return the global model."""
    trainable = round.learner.trainable(params, round.task)
    return ImageModel(params, trainable._replace(extra=params.extra))


def judge(
    round: ServerRound, model: ImageModel, pixels: Float[Array, "batch h w 3"], train: bool = False
) -> Output:
    """Return what a model computes for pixels in [0, 1], with logits over the seen
    classes."""
    batch = unlabelled(round.learner, pixels)
    output = round.learner.forward(round.frozen, model.cached, model.trainable, batch, round.task, train)
    return output._replace(logits=mask_logits(output.logits, round.task.seen))


def has_statistics(model: ImageModel) -> bool:
    """Return whether the model has batch normalisation. In training mode, the running
    statistics of an output then tell those of its batch (`batch_statistics`)."""
    return bool(jax.tree.leaves(model.trainable.stats))


def logits_of(round: ServerRound, model: ImageModel) -> Logits:
    """Return a model's logits over the seen classes as a function of pixels in [0, 1]."""
    # evaluation mode: synthetic images must not move the teacher's running statistics
    return lambda pixels: judge(round, model, pixels).logits


def adversarial_loss(
    options: SynthesisOptions,
    teacher: Float[Array, "batch C"],
    student: Logits,
    seen: Bool[Array, " C"],
    disputed: Bool[Array, ""],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the weighted disagreement of the global model, whose logits are `theirs`,
    and the student; it counts once images are `disputed`."""

    def loss() -> Float[Array, ""]:
        return options.adversarial_weight * disagreement(teacher, student(pixels), seen)

    # the student's forward pass is skipped while images are not disputed (warm-up)
    return jax.lax.cond(disputed, loss, lambda: jnp.zeros(()))


def distillation_at(
    temperature: float,
    teacher: Float[Array, "batch C"],
    student: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return T^2 mean KL(softmax(theirs / T) || softmax(student / T)) over the seen
    classes."""
    # T^2 keeps the gradient's size independent of the temperature (Hinton et al. 2015)
    return temperature**2 * jnp.mean(kl(teacher / temperature, student / temperature, seen))


# ---- server: rounds of a generator -------------------------------------------------------------------------


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
    """Take gradient steps, and keep the images whose loss was the lowest.

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
        params = jax.tree.map(jnp.add, best.fast, update)
        total = optax.tree.add(best.total, gradient)
        # the last step is not always the best one: adversarial training oscillates
        image = jnp.where(value < best.loss, image, best.image)
        return Best(params, state, total, jnp.minimum(value, best.loss), image)

    zeros = optax.tree.zeros_like(fast)
    # infinity, so that the first step's images always replace the zeros
    start = Best(fast, optimiser.init(fast), zeros, jnp.float32(jnp.inf), jnp.zeros((*shape, 3)))
    return jax.lax.fori_loop(0, steps, step, start)


def disagreement(
    teacher: Float[Array, "batch C"],
    student: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return -mean(1[they agree] KL(teacher || student)): low where both see the same
    class and the student is not sure of it.

    Args:
      theirs, own: logits of teacher and student over the seen classes.
      seen: the classes that compete.
    """
    # where they already disagree an image is no longer at
    # the student's boundary, so it counts 0
    agree = jnp.argmax(student, -1) == jnp.argmax(teacher, -1)
    return -jnp.mean(jnp.where(agree, kl(teacher, student, seen), 0.0))


class BatchStatistics(NamedTuple):
    """Statistics of a layer of batch normalisation, [channels]."""

    mean: Float[Array, " c"]
    var: Float[Array, " c"]


def batch_statistics(
    running: PyTree,
    after_batch: PyTree,
) -> list[tuple[BatchStatistics, BatchStatistics]]:
    """Return the running statistics of every layer of batch normalisation, and those of
    a batch, which follow from the running ones after it."""

    def of_layer(layer: dict, updated: dict) -> tuple[BatchStatistics, BatchStatistics]:
        # running = MOMENTUM * previous + (1 - MOMENTUM) * batch, solved for the batch:
        # layers return their running statistics alone
        batch_values = (
            (updated[key] - MOMENTUM * layer[key]) / (1 - MOMENTUM) for key in BatchStatistics._fields
        )
        return BatchStatistics(layer["mean"], layer["var"]), BatchStatistics(*batch_values)

    def is_layer(tree: PyTree) -> bool:
        return isinstance(tree, dict) and "var" in tree

    layers, updated = (jax.tree.leaves(tree, is_leaf=is_layer) for tree in (running, after_batch))
    # `dict` leaves of one network in the same order, so that layers match by position
    return [of_layer(*pair) for pair in zip(layers, updated, strict=True)]


class Student(NamedTuple):
    """A model that learns from the images so far."""

    trainable: Params
    optimiser: PyTree


class MadeSoFar(NamedTuple):
    """Images of which only the first are filled."""

    images: UInt8[Array, "images h w 3"]
    filled: Int[Array, ""]


def added(so_far: MadeSoFar, image: Float[Array, "batch h w 3"]) -> MadeSoFar:
    """Add the images of a round, of pixels in [0, 1], in the next places."""
    # 8 bits, as the data sets have: four times as many images in the same memory
    grey = jnp.round(image * 255).astype(jnp.uint8)
    images = jax.lax.dynamic_update_slice(so_far.images, grey, (so_far.filled, 0, 0, 0))
    return MadeSoFar(images, so_far.filled + len(image))


def taught(
    options: SynthesisOptions,
    loss: Callable[[Params, Float[Array, "batch h w 3"]], Float[Array, ""]],
    optimiser: optax.GradientTransformation,
    student: Student,
    so_far: MadeSoFar,
    steps: Int[Array, ""],
    key: PRNGKeyArray,
) -> Student:
    """Return the student after so many steps on the images made so far;
    `loss(trainable, pixels)` is that of a batch."""

    def step(i: Array, now: Student) -> Student:
        pick, move = jax.random.split(jax.random.fold_in(key, i))
        index = jax.random.randint(pick, (options.synthetic_batch,), 0, so_far.filled)
        pixels = jitter(move, so_far.images[index] / 255, options.crop_padding)
        gradient = jax.grad(loss)(now.trainable, pixels)
        update, state = optimiser.update(gradient, now.optimiser, now.trainable)
        return Student(jax.tree.map(jnp.add, now.trainable, update), state)

    return jax.lax.fori_loop(0, steps, step, student)


def student_optimiser(
    options: SynthesisOptions,
    decay: float,
) -> optax.GradientTransformation:
    """Return gradient descent on gradients of at most norm 1."""
    steps = optax.sgd(options.student_lr, STUDENT_MOMENTUM)
    # clipped first, so that weight decay is not part of the norm that is bounded
    return optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(decay), steps)
