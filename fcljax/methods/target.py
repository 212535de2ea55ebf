"""TARGET: federated class-continual learning via exemplar-free distillation (Zhang et
al., ICCV 2023).

    client    trains on  L_ce + weight * L_distil,  which distils the task's first model on
              synthetic images
    server    averages; after the last round of a task it synthesises images of all classes
              seen so far: a generator learns to make, from noise, images that the global
              model recognises and on which a student disagrees; the student learns from
              the images synthesised so far
              sends the images in every round of the next task
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.methods.prompted import WHOLE
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.server import ServerRound
from fcljax.parts.synthesis import (
    BETAS,
    Best,
    ImageBuffer,
    ImageModel,
    Logits,
    Student,
    SynthesisOptions,
    adversarial_loss,
    append_images,
    best_images,
    distillation_at,
    generator_config,
    global_model,
    images_rule,
    judge,
    logits_of,
    student_optimiser,
    synthetic_pixels,
    train_student,
)
from fcljax.parts.task_start import distil_start, send_start_of_task
from fcljax.pixels import jitter
from fcljax.types import Method, Task, Weighted

STUDENT_DECAY = 1e-4  # weight decay
# Reptile takes a generator's change in a round, times this factor, as gradient (release)
REPTILE = 67.0


@dataclasses.dataclass(frozen=True)
class TargetOptions(SynthesisOptions):
    """Options of TARGET.

    `released` has the release's constants for CIFAR-100, with which the warm-up never
    ends; `paper` the same with as many rounds as its 8,000 images need; `intended` those
    of a port to vision transformers, with half of its generator's steps and channels, for
    machines without an accelerator.
    """

    distill_weight: float = 25.0
    """Weight of the clients' distillation on synthetic images."""
    synthetic_batch: int = 64
    """Number of synthetic images per client step (release: all of them in an epoch)."""
    local_classes: Literal["current", "seen", "all"] = "current"
    """Classes in the clients' cross-entropy."""
    synthesis_warmup: int = 20
    """Number of generator rounds before the student learns; the disagreement counts from
    the last of them on."""
    noise_lr: float = option(0.01, positive=True)
    """Learning rate of the noise, which is new in every generator round."""
    meta_update: Literal["fomaml", "reptile"] = "fomaml"
    """Meta-learning update by which the generator carries over what it learned in a round."""


_CIFAR = TargetOptions(
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
    """Compose TARGET, on any adapter."""
    generate = functools.partial(synthesise, options, generator_config(options, run))
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(options.local_classes),
        client_rules=(distil_synthetic(options),),
        server_rules=(send_start_of_task(), images_rule(options, run, generate)),
    )


# ---- client ----------------------------------------------------------------------------


def distil_synthetic(options: TargetOptions) -> ClientRule:
    """Distil old classes from the model that the task began with, on synthetic images."""

    def distilled(step: ClientStep) -> Float[Array, ""]:
        pixels = synthetic_pixels(options, step.context.payload.sent["synthesis"], step)
        return options.distill_weight * distil_start(step, pixels, options.distill_temperature)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        # `cond` and not `where`: the first task has no images, and pays for none
        has_images = step.context.task.index > 0
        return jax.lax.cond(has_images, lambda: distilled(step), lambda: jnp.zeros(()))

    return ClientRule("target", loss)


# ---- server: image synthesis -----------------------------------------------------------


class TargetState(NamedTuple):
    """The state of the synthesis between its rounds."""

    generator: PyTree
    optimiser: PyTree
    student: Student
    images: ImageBuffer


def synthesise(
    options: TargetOptions,
    config: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """Return images of the classes seen so far, and the mean of the rounds' lowest losses."""
    generator_key, student_key, rounds_key = jax.random.split(round.key, 3)
    # a new student: with the teacher's parameters it would never disagree
    fresh = round.learner.init(student_key, round.frozen)
    student = ImageModel(fresh, round.learner.trainable(fresh, round.task))
    teacher = global_model(round, params)
    generator = init_image_generator(config, generator_key)
    adam = _meta_optimiser(options)
    sgd = student_optimiser(options, STUDENT_DECAY)
    distil = functools.partial(student_loss, options, round, teacher, student.cached)

    def one_round(r: Array, carry: tuple[TargetState, Array]) -> tuple[TargetState, Array]:
        state, loss_sum = carry
        image_key, student_key = jax.random.split(jax.random.fold_in(rounds_key, r))
        current_student = student._replace(trainable=state.student.trainable)
        # a student that has not trained disagrees on every image
        disputed = r + 1 >= options.synthesis_warmup
        loss = functools.partial(
            synthesis_loss,
            options,
            logits_of(round, teacher),
            logits_of(round, current_student),
            round.task,
            disputed,
        )
        seen = round.task.seen
        best = best_of_round(options, config, loss, state.generator, seen, image_key)
        gradient = _meta_gradient(options, state.generator, best)
        update, optimiser = adam.update(gradient, state.optimiser)
        buffer = append_images(state.images, best.image)
        steps = jnp.where(r >= options.synthesis_warmup, options.student_steps, 0)
        trained = train_student(options, distil, sgd, state.student, buffer, steps, student_key)
        generator = optax.apply_updates(state.generator, update)
        return TargetState(generator, optimiser, trained, buffer), loss_sum + best.loss

    start = TargetState(
        generator,
        adam.init(generator),
        Student(student.trainable, sgd.init(student.trainable)),
        ImageBuffer(jnp.zeros_like(images), jnp.int32(0)),
    )
    rounds = options.synthesis_rounds
    state, loss_sum = jax.lax.fori_loop(0, rounds, one_round, (start, jnp.zeros(())))
    return state.images.images, Weighted(loss_sum, jnp.float32(rounds))


def synthesis_loss(
    options: TargetOptions,
    teacher: Logits,
    student: Logits,
    task: Task,
    disputed: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return label_weight * CE(teacher, label) + adversarial_weight * L_adv.

    L_adv = -mean(1[teacher and student agree] KL(teacher || student)) counts once images
    are `disputed`.
    """
    teacher_logits = teacher(pixels)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(teacher_logits, label)
    adversarial = adversarial_loss(options, teacher_logits, student, task.seen, disputed, pixels)
    return options.label_weight * jnp.mean(cross_entropy) + adversarial


def best_of_round(
    options: TargetOptions,
    config: ImageGeneratorConfig,
    loss: Callable[[Array, Array], Float[Array, ""]],
    generator: PyTree,
    seen: Bool[Array, " C"],
    key: PRNGKeyArray,
) -> Best:
    """Train a copy of the generator and new noise, and return the images of the lowest loss.

    Labels are drawn uniformly from the seen classes.
    """
    size = options.synthesis_batch
    noise_key, label_key, view_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, (size, config.noise))
    label = jax.random.categorical(label_key, jnp.where(seen, 0.0, -jnp.inf), shape=(size,))
    # the noise trains with the generator, at a learning rate of its own
    adams: dict[Hashable, optax.GradientTransformation] = {
        "generator": optax.adam(options.generator_lr, *BETAS),
        "noise": optax.adam(options.noise_lr, *BETAS),
    }

    def loss_of(fast: tuple[PyTree, Array], i: Array) -> tuple[Array, Array]:
        image = generate_images(config, *fast)
        view = jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)
        return loss(label, view), image

    adam = optax.partition(adams, ("generator", "noise"))
    shape = (size, config.height, config.width)
    return best_images(loss_of, (generator, noise), adam, options.generator_steps, shape)


def _meta_optimiser(options: TargetOptions) -> optax.GradientTransformation:
    # one step of it stands for all steps of a round (release)
    return optax.adam(options.generator_lr * options.generator_steps, *BETAS)


def _meta_gradient(options: TargetOptions, generator: PyTree, best: Best) -> PyTree:
    """Return the generator's gradient of a round.

    It is the sum of its steps' gradients (first-order MAML), or the change of its copy (Reptile).
    """
    if options.meta_update == "fomaml":
        return best.gradient_sum[0]
    return jax.tree.map(lambda slow, fast: REPTILE * (slow - fast), generator, best.params[0])


def student_loss(
    options: TargetOptions,
    round: ServerRound,
    teacher: ImageModel,
    cached: Params,
    trainable: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the student's distillation from the global model."""
    teacher_logits = judge(round, teacher, pixels).logits
    student_logits = judge(round, ImageModel(cached, trainable), pixels).logits
    temperature = options.student_temperature
    return distillation_at(temperature, teacher_logits, student_logits, round.task.seen)
