"""TARGET: federated class-continual learning via exemplar-free distillation (Zhang et al., ICCV 2023).

client     trains on   L_ce + weight * L_distil,   the latter on synthetic images, from the model that the
           task began with
server     averages; after the last round of a task it makes images of all classes seen so far:
           a generator learns, from noise, images that the global model recognises and of which a student
           thinks otherwise; the student learns from the images made so far    (specification C3-C6)
           the images go down in every round of the next task
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.methods.prompted import WHOLE, PromptedOptions, epoch_schedule
from fcljax.models.heads import kl, mask_logits
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule
from fcljax.parts.synthesis import (
    Best,
    MadeSoFar,
    Student,
    added,
    best_images,
    disagreement,
    output_of,
    student_optimiser,
    synthesis_rule,
    taught,
)
from fcljax.parts.task_start import distil_start, send_start_of_task
from fcljax.pixels import jitter
from fcljax.types import Method, Task, Weighted

# Of the student's gradient descent
MOMENTUM = 0.9
DECAY = 1e-4
BETAS = (0.5, 0.999)  # of the generator's and the noise's Adam
REPTILE = 67.0  # times the way that a generator went in a round is its gradient (release)


@dataclasses.dataclass(frozen=True)
class TargetOptions(PromptedOptions):
    """Options of TARGET. `released` has the release's constants for CIFAR-100, with which the warm-up never
    ends; `paper` the same with as many rounds as its 8,000 images need; `intended` those of a port to vision
    transformers, with half of its generator's steps and channels, for machines without an accelerator."""

    distill_weight: float = 25.0
    """Weight of the clients' distillation on synthetic images."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the clients' distillation."""
    synthetic_batch: int = 64
    """Number of synthetic images per client step (release: all of them in an epoch)."""
    local_classes: Literal["current", "seen", "all"] = "current"
    """Classes in the clients' cross-entropy."""
    synthesis_rounds: int = 30
    """Number of generator rounds; each adds synthesis_batch images."""
    synthesis_batch: int = 16
    """Number of images per generator round."""
    synthesis_warmup: int = 20
    """Number of generator rounds before the student learns; the disagreement counts from
    the last of them on."""
    generator_steps: int = 40
    """Number of generator steps per generator round."""
    generator_lr: float = option(2e-3, positive=True)
    """Learning rate of the generator."""
    noise_lr: float = option(0.01, positive=True)
    """Learning rate of the noise, which is new in every generator round."""
    meta_update: Literal["fomaml", "reptile"] = "fomaml"
    """Meta-learning update that carries the generator from one round to the next."""
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
    noise_width: int = 256
    """Width of the generator's noise."""
    generator_channels: int = 32
    """Channels of the generator's last hidden layer."""
    crop_padding: float = option(0.125, most=1.0)
    """Padding of synthetic images before a crop, as a fraction of the side."""


_CIFAR = TargetOptions(
    epoch_schedule="cosine_lag",
    synthesis_batch=256,
    generator_steps=10,
    student_steps=400,
    student_lr=0.2,
    generator_channels=64,
)
PRESETS = {
    "intended": WHOLE["intended"]._replace(options=TargetOptions()),
    "paper": WHOLE["paper"]._replace(options=dataclasses.replace(_CIFAR, synthesis_rounds=32)),
    "released": WHOLE["released"]._replace(options=dataclasses.replace(_CIFAR, synthesis_rounds=10)),
}


def target(options: TargetOptions, run: Run) -> Method:
    """TARGET as a method, on any adapter."""
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(options.local_classes),
        client_rules=(distil_synthetic(options),),
        server_rules=(send_start_of_task(), synthesis(options, run)),
        learning_rate=epoch_schedule(options, run),
    )


# ---- client ------------------------------------------------------------------------------------------------


def distil_synthetic(options: TargetOptions) -> ClientRule:
    """Distillation of old classes from the model that the task began with, on synthetic images."""

    def distilled(step: ClientStep) -> Float[Array, ""]:
        image = step.context.payload.sent["synthesis"]
        pick, move = jax.random.split(jax.random.fold_in(step.key, 1))
        chosen = image[jax.random.randint(pick, (options.synthetic_batch,), 0, len(image))]
        pixels = jitter(move, chosen / 255, options.crop_padding)
        return options.distill_weight * distil_start(step, pixels, options.distill_temperature)

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory  # in the first task there is nothing to distil, and no image
        later = step.context.task.index > 0
        return jax.lax.cond(later, lambda: distilled(step), lambda: jnp.zeros(()))

    return ClientRule("target", loss)


# ---- server: image synthesis -------------------------------------------------------------------------------


class Making(NamedTuple):
    """What goes from one round of the synthesis to the next."""

    generator: PyTree
    optimiser: PyTree
    student: Student
    made: MadeSoFar


def synthesis(options: TargetOptions, run: Run) -> ServerRule:
    """After the last round of every task but the last one, makes images of all classes seen so far."""
    height, width, _ = run.network.image
    shape = ImageGeneratorConfig(height, width, options.noise_width, options.generator_channels)
    images = (options.synthesis_rounds * options.synthesis_batch, height, width, 3)
    first = functools.partial(jnp.zeros, images, jnp.uint8)
    return synthesis_rule("synthesis", run, first, functools.partial(synthesise, options, shape))


class Models(NamedTuple):
    """The models that judge images: logits of pixels [batch, h, w, 3] in [0, 1] over the seen classes."""

    teacher: Callable[[Array], Float[Array, "batch C"]]
    """The global model."""
    student: Callable[[Params, Array], Float[Array, "batch C"]]
    """A model with these trainable parameters."""


def synthesise(
    options: TargetOptions,
    shape: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """New images of the classes that `params` has seen, and the mean of the rounds' lowest losses."""
    learner = round.learner
    frozen = round.frozen
    task = round.task
    first, second, rest = jax.random.split(round.key, 3)
    cached = learner.init(second, frozen)
    adam = _meta_optimiser(options)
    sgd = student_optimiser(options.student_lr, MOMENTUM, DECAY)
    generator = init_image_generator(shape, first)
    own = learner.trainable(cached, task)
    made = MadeSoFar(jnp.zeros_like(images), jnp.int32(0))
    start = Making(generator, adam.init(generator), Student(own, sgd.init(own)), made)
    logits = functools.partial(_logits, round)
    models = Models(
        functools.partial(logits, params, learner.trainable(params, task)), functools.partial(logits, cached)
    )
    distil = functools.partial(student_loss, options, models, task)

    def one_round(r: Array, carry: tuple[Making, Array]) -> tuple[Making, Array]:
        made, total = carry
        draw, learn = jax.random.split(jax.random.fold_in(rest, r))
        disputed = r + 1 >= options.synthesis_warmup
        learns = r >= options.synthesis_warmup
        rival = functools.partial(models.student, made.student.trainable)
        loss = functools.partial(synthesis_loss, options, models.teacher, rival, task, disputed)
        best = _best_of_round(options, shape, loss, made.generator, task, draw)
        gradient = _meta_gradient(options, made.generator, best)
        update, optimiser = adam.update(gradient, made.optimiser)
        images = added(made.made, best.image)
        steps = jnp.where(learns, options.student_steps, 0)
        batch = options.synthetic_batch
        padding = options.crop_padding
        student = taught(distil, sgd, made.student, images, batch, padding, steps, learn)
        generator = optax.apply_updates(made.generator, update)
        return Making(generator, optimiser, student, images), total + best.loss

    rounds = options.synthesis_rounds
    made, total = jax.lax.fori_loop(0, rounds, one_round, (start, jnp.zeros(())))
    return made.made.images, Weighted(total, jnp.float32(rounds))


def _logits(
    round: ServerRound, cached: Params, trainable: Params, pixels: Float[Array, "batch h w 3"]
) -> Float[Array, "batch C"]:
    """What a model says of pixels in [0, 1], over the seen classes."""
    return mask_logits(output_of(round, cached, trainable, pixels).logits, round.task.seen)


def _meta_optimiser(options: TargetOptions) -> optax.GradientTransformation:
    return optax.adam(options.generator_lr * options.generator_steps, *BETAS)


def synthesis_loss(
    options: TargetOptions,
    teacher: Callable,
    student: Callable,
    task: Task,
    disputed: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """oh * CE(teacher, label) + adv * L_adv, where L_adv = -mean(1[they agree] KL(teacher || student)) counts
    once images are `disputed`."""
    theirs = teacher(pixels)
    right = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(theirs, label))

    def against() -> Float[Array, ""]:
        return options.adversarial_weight * disagreement(theirs, student(pixels), task.seen)

    return options.label_weight * right + jax.lax.cond(disputed, against, lambda: jnp.zeros(()))


def _best_of_round(
    options: TargetOptions,
    shape: ImageGeneratorConfig,
    loss: Callable,
    generator: PyTree,
    task: Task,
    key: PRNGKeyArray,
) -> Best:
    """Steps of a copy of the generator and of new noise, for labels drawn uniformly from the seen classes."""
    size = options.synthesis_batch
    noise_key, label_key, view_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, (size, shape.noise))
    label = jax.random.categorical(label_key, jnp.where(task.seen, 0.0, -jnp.inf), shape=(size,))
    adams: dict[Hashable, optax.GradientTransformation] = {
        "generator": optax.adam(options.generator_lr, *BETAS),
        "noise": optax.adam(options.noise_lr, *BETAS),
    }
    adam = optax.partition(adams, ("generator", "noise"))

    def loss_of(fast: tuple[PyTree, Array], i: Array) -> tuple[Array, Array]:
        image = generate_images(shape, *fast)
        return loss(label, jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)), image

    where = (size, shape.height, shape.width)
    return best_images(loss_of, (generator, noise), adam, options.generator_steps, where)


def _meta_gradient(options: TargetOptions, generator: PyTree, best: Best) -> PyTree:
    """The generator's gradient of a round: the sum of its steps' (first-order MAML), or the way that its copy
    has gone (Reptile)."""
    if options.meta_update == "fomaml":
        return best.total[0]
    return jax.tree.map(lambda slow, fast: REPTILE * (slow - fast), generator, best.fast[0])


def student_loss(
    options: TargetOptions, models: Models, task: Task, trainable: Params, pixels: Float[Array, "batch h w 3"]
) -> Float[Array, ""]:
    """The student's distillation from the global model."""
    heat = options.student_temperature
    theirs = models.teacher(pixels) / heat
    own = models.student(trainable, pixels) / heat
    return heat**2 * jnp.mean(kl(theirs, own, task.seen))
