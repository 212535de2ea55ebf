"""TARGET: exemplar-free distillation for federated class-continual learning (Zhang et al., ICCV 2023), as its
release has it (specification C5 and C6) and as it is carried to vision transformers (C8).

When a task is over the server makes images of all classes seen so far out of noise: a generator learns images
that the global model assigns to drawn classes and, after a warm-up, of which a student that has learned from
the images so far thinks otherwise. Clients of the next task get them with the model, and distil from the
model that the task began with on them, besides the cross-entropy of their own rows. The release's third loss
compares statistics of batch normalisation, of which a vision transformer has none.

The student starts as the network's first values with a new classifier; its steps have no schedule. Images are
kept as grey levels, as the release's files have them.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.methods.fedavg import averaging
from fcljax.methods.hepco.hepco import WHOLE, PromptedOptions, scheduled
from fcljax.methods.target.generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.models.heads import kl, mask_logits
from fcljax.options import option
from fcljax.parts.federate import Run, Seen, ServerStep, Term
from fcljax.parts.learner import Learner, Model, Objective
from fcljax.parts.task_start import distil_start, start_of_task, unlabelled
from fcljax.pixels import jitter
from fcljax.types import Aggregate, Frozen, Method, RoundContext, Task, Weighted

MOMENTUM, DECAY = 0.9, 1e-4  # of the student's gradient descent
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
    """Synthetic images per step of a client (release: all of them in an epoch)."""
    local_classes: Literal["current", "seen", "all"] = "current"
    """Classes in the cross-entropy of the clients."""
    synthesis_rounds: int = 30
    """Rounds of the generator, each of which adds synthesis_batch images."""
    synthesis_batch: int = 16
    """Images per round of the generator."""
    synthesis_warmup: int = 20
    """Rounds of the generator before the student learns and the disagreement counts."""
    generator_steps: int = 40
    """Steps of the generator in each of its rounds."""
    generator_lr: float = option(2e-3, positive=True)
    """Learning rate of the generator."""
    noise_lr: float = option(0.01, positive=True)
    """Learning rate of the noise, which is new in every round of the generator."""
    meta: Literal["fomaml", "reptile"] = "fomaml"
    """Meta-learning update by which the generator carries over what it learned in a round."""
    label_weight: float = 0.5
    """Weight of the global model's cross-entropy in the generator's loss."""
    adversarial_weight: float = 1.0
    """Weight of the disagreement of global model and student in the generator's loss."""
    student_steps: int = 50
    """Steps of the student in each round of the generator."""
    student_lr: float = option(2e-3, positive=True)
    """Learning rate of the student."""
    student_temperature: float = option(20.0, positive=True)
    """Temperature of the student's distillation."""
    noise_width: int = 256
    """Width of the generator's noise."""
    generator_channels: int = 32
    """Channels of the generator's last hidden layer."""
    crop_padding: float = option(0.125, most=1.0)
    """Padding of synthetic images before a crop, over the side."""


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
    """TARGET as a method, on any adapter. `options` must be resolved."""
    steps = (start_of_task(), synthesis(options, run))
    objective = Objective(options.local_classes)
    return averaging(scheduled(run, options), objective, terms=(replay(options),), steps=steps)


# ---- client ------------------------------------------------------------------------------------------------


def replay(options: TargetOptions) -> Term:
    """Distillation of old classes from the model that the task began with, on synthetic images."""

    def of(learner: Learner, seen: Seen) -> Float[Array, ""]:
        image = seen.context.payload.sent["synthesis"]
        pick, move = jax.random.split(jax.random.fold_in(seen.key, 1))
        chosen = image[jax.random.randint(pick, (options.synthetic_batch,), 0, len(image))]
        pixels = jitter(move, chosen / 255, options.crop_padding)
        return options.distill_weight * distil_start(learner, seen, pixels, options.distill_temperature)

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del memory  # in the first task there is nothing to distil, and no image
        return jax.lax.cond(seen.context.task.index > 0, lambda: of(learner, seen), lambda: jnp.zeros(()))

    return Term("target", loss, reads=("start", "synthesis"))


# ---- server: image synthesis -------------------------------------------------------------------------------


class Student(NamedTuple):
    """A model that learns from the images so far, and its optimiser's state."""

    part: Model
    optimiser: PyTree


class Making(NamedTuple):
    """What goes from one round of the synthesis to the next."""

    generator: PyTree
    optimiser: PyTree
    student: Student
    images: UInt8[Array, "images h w 3"]


class Best(NamedTuple):
    """A round at work: its own copy of the generator and its noise, what the generator's gradients add up to,
    and the images of the lowest loss so far."""

    fast: tuple[PyTree, Array]
    optimiser: PyTree
    total: PyTree
    loss: Float[Array, ""]
    image: Float[Array, "batch h w 3"]


def synthesis(options: TargetOptions, run: Run) -> ServerStep:
    """After the last round of every task but the last one, images of all classes seen so far; they go down
    with the model in every round of the next task."""
    (height, width, _), sizes = run.network.image, run.sizes
    shape = ImageGeneratorConfig(height, width, options.noise_width, options.generator_channels)
    count = options.synthesis_rounds * options.synthesis_batch

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        images: Array,
        aggregate: Aggregate,
        key: Array,
    ):
        del aggregate
        wanted = round_context.last & (round_context.task.index < sizes.tasks - 1)
        make = functools.partial(
            synthesise, options, shape, learner, round_context.frozen, params, round_context.task, key
        )
        none = Weighted(jnp.zeros(()), jnp.zeros(()))
        images, found = jax.lax.cond(wanted, make, lambda images: (images, none), images)
        return params, images, {"loss": found}

    init = lambda params, part: jnp.zeros((count, height, width, 3), jnp.uint8)
    return ServerStep("synthesis", step, init, sends=lambda task, images: images)


def synthesise(
    options: TargetOptions,
    shape: ImageGeneratorConfig,
    learner: Learner,
    frozen: Frozen,
    params: Model,
    task: Task,
    key: PRNGKeyArray,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """New images of the classes that `params` has seen, and the mean of the rounds' lowest losses."""
    rounds, size = options.synthesis_rounds, options.synthesis_batch
    first, second, rest = jax.random.split(key, 3)
    cached = learner.init(second, frozen)
    part = learner.part(cached, task)
    adam, sgd = _meta_optimiser(options), _student_optimiser(options)
    generator = init_image_generator(shape, first)
    start = Making(generator, adam.init(generator), Student(part, sgd.init(part)), jnp.zeros_like(images))
    say = functools.partial(_logits, learner, frozen, task=task)
    global_model = functools.partial(say, params, learner.part(params, task))
    student_model = functools.partial(say, cached)

    def round_(r: Array, carry: tuple[Making, Array]) -> tuple[Making, Array]:
        made, total = carry
        draw, learn = jax.random.split(jax.random.fold_in(rest, r))
        late = r >= options.synthesis_warmup
        rival = functools.partial(student_model, made.student.part)
        loss = functools.partial(synthesis_loss, options, global_model, rival, task, late)
        best = _one_round(options, shape, loss, made.generator, task, draw, size)
        gradient = _kept(options, made.generator, best)
        update, optimiser = adam.update(gradient, made.optimiser)
        grey = jnp.round(best.image * 255).astype(jnp.uint8)
        images = jax.lax.dynamic_update_slice(made.images, grey, (r * size, 0, 0, 0))
        teach = functools.partial(_taught, options, global_model, student_model, sgd, task, images, learn)
        student = teach(made.student, (r + 1) * size, jnp.where(late, options.student_steps, 0))
        generator = optax.apply_updates(made.generator, update)
        return Making(generator, optimiser, student, images), total + best.loss

    made, total = jax.lax.fori_loop(0, rounds, round_, (start, jnp.zeros(())))
    return made.images, Weighted(total, jnp.float32(rounds))


def _logits(
    learner: Learner,
    frozen: Frozen,
    cached: Model,
    part: Model,
    pixels: Float[Array, "batch h w 3"],
    task: Task,
) -> Float[Array, "batch C"]:
    """What a model says of pixels in [0, 1], over the seen classes."""
    logits = learner.forward(frozen, cached, part, unlabelled(learner, pixels), task, False).logits
    return mask_logits(logits, task.seen)


def _meta_optimiser(options: TargetOptions) -> optax.GradientTransformation:
    return optax.adam(options.generator_lr * options.generator_steps, *BETAS)


def _student_optimiser(options: TargetOptions) -> optax.GradientTransformation:
    """Gradient descent on gradients of at most norm 1."""
    steps = optax.sgd(options.student_lr, MOMENTUM)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(DECAY), steps)


def synthesis_loss(
    options: TargetOptions,
    teacher: Callable,
    student: Callable,
    task: Task,
    late: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """oh * CE(teacher, label) + adv * L_adv, where L_adv = -mean(1[they agree] KL(teacher || student))."""
    theirs = teacher(pixels)
    right = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(theirs, label))
    loss = options.label_weight * right

    def against() -> Float[Array, ""]:
        own = student(pixels)
        agree = jnp.argmax(own, -1) == jnp.argmax(theirs, -1)
        return -options.adversarial_weight * jnp.mean(jnp.where(agree, kl(theirs, own, task.seen), 0.0))

    return loss + jax.lax.cond(late, against, lambda: jnp.zeros(()))


def _one_round(
    options: TargetOptions,
    shape: ImageGeneratorConfig,
    loss: Callable,
    generator: PyTree,
    task: Task,
    key: PRNGKeyArray,
    size: int,
) -> Best:
    """Steps of a copy of the generator and of new noise, for labels drawn uniformly from the seen classes."""
    noise_key, label_key, view_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, (size, shape.noise))
    label = jax.random.categorical(label_key, jnp.where(task.seen, 0.0, -jnp.inf), shape=(size,))
    rates = {"generator": options.generator_lr, "noise": options.noise_lr}
    adams: dict[Hashable, optax.GradientTransformation] = {
        name: optax.adam(rate, *BETAS) for name, rate in rates.items()
    }
    adam = optax.partition(adams, ("generator", "noise"))

    def step(i: Array, best: Best) -> Best:
        def of(fast: tuple[PyTree, Array]):
            image = generate_images(shape, *fast)
            return loss(label, jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)), image

        (value, image), gradient = jax.value_and_grad(of, has_aux=True)(best.fast)
        update, optimiser = adam.update(gradient, best.optimiser)
        fast, total = jax.tree.map(jnp.add, best.fast, update), optax.tree.add(best.total, gradient[0])
        image = jnp.where(value < best.loss, image, best.image)
        return Best(fast, optimiser, total, jnp.minimum(value, best.loss), image)

    fast = (generator, noise)
    nothing = jnp.zeros((size, shape.height, shape.width, 3))
    start = Best(fast, adam.init(fast), optax.tree.zeros_like(generator), jnp.float32(jnp.inf), nothing)
    return jax.lax.fori_loop(0, options.generator_steps, step, start)


def _kept(options: TargetOptions, generator: PyTree, best: Best) -> PyTree:
    """The generator's gradient of a round: the sum of its steps' (first-order MAML), or the way that its copy
    has gone (Reptile)."""
    if options.meta == "fomaml":
        return best.total
    return jax.tree.map(lambda slow, fast: REPTILE * (slow - fast), generator, best.fast[0])


def _taught(
    options: TargetOptions,
    teacher: Callable,
    student: Callable,
    sgd: optax.GradientTransformation,
    task: Task,
    images: UInt8[Array, "images h w 3"],
    key: PRNGKeyArray,
    learner: Student,
    filled: Int[Array, ""],
    steps: Int[Array, ""],
) -> Student:
    """The student after so many steps of distillation on the images made so far."""
    heat, size = options.student_temperature, options.synthesis_batch

    def step(i: Array, now: Student) -> Student:
        pick, move = jax.random.split(jax.random.fold_in(key, i))
        chosen = images[jax.random.randint(pick, (size,), 0, filled)] / 255
        pixels = jitter(move, chosen, options.crop_padding)
        theirs = teacher(pixels) / heat

        def loss(part: Model) -> Float[Array, ""]:
            return heat**2 * jnp.mean(kl(theirs, student(part, pixels) / heat, task.seen))

        update, optimiser = sgd.update(jax.grad(loss)(now.part), now.optimiser, now.part)
        return Student(jax.tree.map(jnp.add, now.part, update), optimiser)

    return jax.lax.fori_loop(0, steps, step, learner)
