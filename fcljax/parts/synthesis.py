"""Image synthesis without data, at the server: what TARGET, MFCL and LANDER share.

A generator learns to make images that the global model recognises. In TARGET and LANDER
it also looks for images that a student, which learns from the images so far, still
judges in another way. It needs nothing of the clients besides their models.
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


# ---- options ---------------------------------------------------------------------------


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


# ---- client ----------------------------------------------------------------------------


def synthetic_pixels(
    options: SynthesisOptions, images: UInt8[Array, "images h w 3"], step: ClientStep
) -> Float[Array, "batch h w 3"]:
    """Draw a batch of the images that the server made, as jittered pixels in [0, 1]."""
    # all rules of a step get the same key, so each derives one of its own
    pick_key, jitter_key = jax.random.split(jax.random.fold_in(step.key, 1))
    index = jax.random.randint(pick_key, (options.synthetic_batch,), 0, len(images))
    return jitter(jitter_key, images[index] / 255, options.crop_padding)


# ---- server: when images are made ------------------------------------------------------


@runtime_checkable
class Synthesise(Protocol):
    """Makes the next value that the server sends: images, or a generator of images."""

    def __call__(self, round: ServerRound, params: Params, state: PyTree, /) -> tuple[PyTree, Weighted]:
        """Return the new state, and the loss of the synthesis."""
        ...


def synthesis_rule(
    name: str,
    run: Run,
    no_synthesis: Callable[[], PyTree],
    synthesise: Synthesise,
) -> ServerRule:
    """Synthesise after the last round of each task except the last, and send the result.

    Args:
      name: of the rule, and of what it sends.
      run: as of `federate`.
      no_synthesis: returns what the server sends in the first task.
      synthesise: makes what it sends in the next one.
    """

    def init(_params: Params, _trainable: Params) -> PyTree:
        return no_synthesis()

    def update(round: ServerRound, params: Params, state: PyTree) -> ServerUpdate:
        def synthesise_now(state: PyTree) -> tuple[PyTree, Weighted]:
            return synthesise(round, params, state)

        # after the last task no client would read the result, and synthesis is costly
        is_due = round.last & (round.task.index < run.sizes.tasks - 1)
        no_loss = Weighted(jnp.zeros(()), jnp.zeros(()))
        # `cond` and not `where`: one program plays all rounds, and only the last one of a
        # task pays for the synthesis
        state, loss = jax.lax.cond(is_due, synthesise_now, lambda state: (state, no_loss), state)
        return ServerUpdate(params, state, {"loss": loss})

    def sends(_task: Task, state: PyTree) -> PyTree:
        return state

    return ServerRule(name, update, init, sends)


def images_rule(options: SynthesisOptions, run: Run, synthesise: Synthesise) -> ServerRule:
    """Return the rule that sends `sent["synthesis"]`: images [images, h, w, 3], uint8."""
    height, width, _ = run.network.image
    shape = (options.synthesis_rounds * options.synthesis_batch, height, width, 3)
    no_images = functools.partial(jnp.zeros, shape, jnp.uint8)
    return synthesis_rule("synthesis", run, no_images, synthesise)


# ---- server: models that judge images --------------------------------------------------


# logits(pixels in [0, 1])
Logits = Callable[[Float[Array, "batch h w 3"]], Float[Array, "batch C"]]


class ImageModel(NamedTuple):
    """A model's parameters of all tasks, and its trainable ones."""

    cached: Params
    trainable: Params


def global_model(round: ServerRound, params: Params) -> ImageModel:
    """Return the global model."""
    trainable = round.learner.trainable(params, round.task)
    return ImageModel(params, trainable._replace(extra=params.extra))


def judge(
    round: ServerRound, model: ImageModel, pixels: Float[Array, "batch h w 3"], train: bool = False
) -> Output:
    """Return a model's output for pixels in [0, 1], with logits over the seen classes."""
    batch = unlabelled(round.learner, pixels)
    output = round.learner.forward(round.frozen, model.cached, model.trainable, batch, round.task, train)
    return output._replace(logits=mask_logits(output.logits, round.task.seen))


def has_statistics(model: ImageModel) -> bool:
    """Return whether the model has batch normalisation."""
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
    """Return adversarial_weight * L_adv (`disagreement`) where images are `disputed`, else 0."""

    def loss() -> Float[Array, ""]:
        return options.adversarial_weight * disagreement(teacher, student(pixels), seen)

    # `cond` skips the student's forward pass in the warm-up, when it has learned nothing
    return jax.lax.cond(disputed, loss, lambda: jnp.zeros(()))


def distillation_at(
    temperature: float,
    teacher: Float[Array, "batch C"],
    student: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return T^2 mean KL(softmax(teacher / T) || softmax(student / T)) over seen classes."""
    # T^2 keeps the gradient's size independent of the temperature (Hinton et al. 2015)
    return temperature**2 * jnp.mean(kl(teacher / temperature, student / temperature, seen))


# ---- server: rounds of a generator -----------------------------------------------------


class Best(NamedTuple):
    """The state of generator steps, with the images of the best step."""

    params: PyTree
    optimiser: PyTree
    gradient_sum: PyTree
    loss: Float[Array, ""]
    """The lowest loss of a step."""
    image: Float[Array, "batch h w 3"]
    """The images of that step."""


def best_images(
    loss: Callable[[PyTree, Array], tuple[Float[Array, ""], Float[Array, "batch h w 3"]]],
    params: PyTree,
    optimiser: optax.GradientTransformation,
    steps: int,
    shape: tuple[int, int, int],
) -> Best:
    """Train `params`, and return the images of the step with the lowest loss.

    Args:
      loss: loss(params, step) -> value, images.
      params: initial values of what trains.
      optimiser: of `params`.
      steps: number of steps.
      shape: batch, height and width of the images.
    """

    def step(i: Array, best: Best) -> Best:
        (value, image), gradient = jax.value_and_grad(loss, has_aux=True)(best.params, i)
        update, state = optimiser.update(gradient, best.optimiser, best.params)
        new_params = jax.tree.map(jnp.add, best.params, update)
        gradient_sum = optax.tree.add(best.gradient_sum, gradient)
        # as in TARGET's release: the last step need not be the best
        image = jnp.where(value < best.loss, image, best.image)
        return Best(new_params, state, gradient_sum, jnp.minimum(value, best.loss), image)

    no_gradient = optax.tree.zeros_like(params)
    no_images = jnp.zeros((*shape, 3))
    # an infinite loss, so that the first step's images always replace the zeros
    start = Best(params, optimiser.init(params), no_gradient, jnp.float32(jnp.inf), no_images)
    return jax.lax.fori_loop(0, steps, step, start)


def disagreement(
    teacher: Float[Array, "batch C"],
    student: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return L_adv = -mean(1[teacher and student agree] KL(teacher || student)).

    It is low where both predict the same class and the student is less certain of it.

    Args:
      teacher, student: logits.
      seen: the classes that compete.
    """
    # an image on which they already disagree is what the generator looks for: it counts 0
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
    """Return per layer of batch normalisation the running statistics, and those of a batch.

    Args:
      running: statistics before the batch.
      after_batch: statistics that a forward pass in training mode returns.
    """

    def of_layer(layer: dict, updated: dict) -> tuple[BatchStatistics, BatchStatistics]:
        # a layer returns updated = MOMENTUM * layer + (1 - MOMENTUM) * batch and not the
        # batch's own statistics, so the equation is solved for them
        def of_batch(key: str) -> Array:
            return (updated[key] - MOMENTUM * layer[key]) / (1 - MOMENTUM)

        running = BatchStatistics(layer["mean"], layer["var"])
        return running, BatchStatistics(of_batch("mean"), of_batch("var"))

    def is_layer(tree: PyTree) -> bool:
        return isinstance(tree, dict) and "var" in tree

    layers = jax.tree.leaves(running, is_leaf=is_layer)
    updated = jax.tree.leaves(after_batch, is_leaf=is_layer)
    return [of_layer(*pair) for pair in zip(layers, updated, strict=True)]


class Student(NamedTuple):
    """A model that learns from the images so far."""

    trainable: Params
    optimiser: PyTree


class ImageBuffer(NamedTuple):
    """A buffer of which the first `filled` images exist."""

    images: UInt8[Array, "images h w 3"]
    filled: Int[Array, ""]


def append_images(buffer: ImageBuffer, image: Float[Array, "batch h w 3"]) -> ImageBuffer:
    """Append images with pixels in [0, 1]."""
    # 8 bits, as in the data sets: a fourth of the memory and of the download
    grey = jnp.round(image * 255).astype(jnp.uint8)
    images = jax.lax.dynamic_update_slice(buffer.images, grey, (buffer.filled, 0, 0, 0))
    return ImageBuffer(images, buffer.filled + len(image))


def train_student(
    options: SynthesisOptions,
    loss: Callable[[Params, Float[Array, "batch h w 3"]], Float[Array, ""]],
    optimiser: optax.GradientTransformation,
    student: Student,
    buffer: ImageBuffer,
    steps: Int[Array, ""],
    key: PRNGKeyArray,
) -> Student:
    """Return the student after `steps` steps of loss(trainable, pixels) on the buffer."""

    def step(i: Array, student: Student) -> Student:
        pick_key, jitter_key = jax.random.split(jax.random.fold_in(key, i))
        # the rest of the buffer is still zeros
        index = jax.random.randint(pick_key, (options.synthetic_batch,), 0, buffer.filled)
        pixels = jitter(jitter_key, buffer.images[index] / 255, options.crop_padding)
        gradient = jax.grad(loss)(student.trainable, pixels)
        update, state = optimiser.update(gradient, student.optimiser, student.trainable)
        return Student(jax.tree.map(jnp.add, student.trainable, update), state)

    return jax.lax.fori_loop(0, steps, step, student)


def student_optimiser(
    options: SynthesisOptions,
    decay: float,
) -> optax.GradientTransformation:
    """Return SGD with gradients of norm at most 1."""
    sgd = optax.sgd(options.student_lr, STUDENT_MOMENTUM)
    # clipped first, so that weight decay is not part of the norm that is bounded
    return optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(decay), sgd)
