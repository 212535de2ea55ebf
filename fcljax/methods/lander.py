"""LANDER: text-enhanced data-free federated class-incremental learning (Tran et al., CVPR
2024, arXiv 2403.14101).

    a(x) = A f(x) + b   maps features to the space of the anchors e_y, one per class
    L_B = max(0, mean |a(x) - e_y|^2 - r)   bounds the distance to the class's anchor

    client    first task   L = L_CE + w_B L_B
              later        L = alpha_cur (L_CE over the task's classes + w_B L_B)
                             + alpha_pre (KD from the task's first model
                                          + mean |a(z) - a_old(z)|^2)
                           the last two on synthetic images z; C seen, C_old earlier classes:
                           alpha_cur = cur (1 + 1 / log2(C/2 + 1)) / sqrt(C_old / C)
                           alpha_pre = pre log2(C/2 + 1) sqrt(C_old / C)
    server    averages; after the last round of each task except the last it generates images
              of all classes seen so far, in rounds of
                generator, whose input is anchors through a new random layer:
                  L = w_1 L_CE(z; y) + w_2 L_adv + w_B L_B(z; y)
                      + w_BN |statistics of z - running statistics|
                student: distils the global model on the images so far, as in TARGET
              and sends the images in every round of the next task

The paper's anchors are CLIP's text features of the class names. --class-prompts gives
these, where the network has a text tower. Otherwise anchors are drawn at random, with the
same mean distance between classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.adapters.full import FullOptions
from fcljax.models.heads import Head, apply_head, cross_entropy, distillation, init_head, masked_sum
from fcljax.models.products import exact_einsum
from fcljax.options import ClassPromptOptions, option
from fcljax.parts.class_names import text_side
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Output, Params, replaced_loss
from fcljax.parts.server import ServerRound
from fcljax.parts.synthesis import (
    BETAS,
    Best,
    ImageBuffer,
    ImageModel,
    Student,
    SynthesisOptions,
    adversarial_loss,
    append_images,
    batch_statistics,
    best_images,
    distillation_at,
    generator_config,
    global_model,
    has_statistics,
    images_rule,
    judge,
    logits_of,
    student_optimiser,
    synthetic_pixels,
    train_student,
)
from fcljax.parts.task_start import send_start_of_task, teacher, unlabelled
from fcljax.pixels import jitter
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Frozen, Method, Task, Weighted

ANCHOR_SEED = 3  # not the run's seed: anchors stand for names, which all runs share
# standard deviation of an anchor's entries: the mean squared difference of two anchors is
# then 2 * 0.207^2 = 0.086, as of CLIP's embeddings
ANCHOR_STD = 0.207
ANCHOR_WIDTH = 512  # of anchors that are drawn
IMAGES_PER_LAYER = 10  # images of a batch that share a random layer
STUDENT_DECAY = 2e-4  # weight decay


@dataclasses.dataclass(frozen=True)
class LanderOptions(SynthesisOptions, ClassPromptOptions):
    """Options of LANDER.

    `paper` and `released` have the release's constants for CIFAR-100; `intended` has
    fewer rounds, images and channels, for machines without an accelerator.
    """

    class_prompts: str = option("none", unset="anchors drawn at random")
    """Prompt of a class for CLIP's text tower, with {} in place of its name, or file:PATH.
    Its feature is the class's anchor."""
    bound_weight: float = 5.0
    """Weight w_B of the bound on the distance to the anchors."""
    bound_radius: float = 0.015
    """Radius r of the bound, as a mean square."""
    current_weight: float = option(0.2, positive=True)
    """Factor of the losses on the current task, from the second task on."""
    previous_weight: float = 0.4
    """Factor of the losses on earlier tasks."""
    synthesis_rounds: int = 20
    """Number of generator rounds that add synthesis_batch images each."""
    synthesis_batch: int = 32
    """Number of images per generator round."""
    synthesis_warmup: int = option(5, least=0)
    """Number of generator rounds before --synthesis-rounds whose images are dropped."""
    generator_lr: float = option(2e-3, positive=True)
    """Learning rate of the generator and the random layer."""
    statistics_weight: float = 1.0
    """Weight w_BN of the batch-normalisation statistics, for networks with batch
    normalisation."""


_RELEASED = LanderOptions(
    synthetic_batch=128,
    synthesis_rounds=40,
    synthesis_batch=256,
    synthesis_warmup=10,
    student_lr=0.1,
    generator_channels=64,
)
_RUN = RunConfig(lr=5e-5)
_WHOLE = (FullOptions(full_lr=5e-5),)
# mini: a fraction of the synthesis, which takes most of a run
PRESETS = with_mini(
    {
        "intended": Preset(LanderOptions(), _RUN, _WHOLE),
        "paper": Preset(_RELEASED, _RUN, _WHOLE),
        "released": Preset(_RELEASED, _RUN, _WHOLE),
    },
    lr=5e-3,
    full_lr=5e-4,
    synthesis_rounds=10,
    synthesis_warmup=2,
    generator_steps=20,
    student_steps=20,
)


def lander(options: LanderOptions, run: Run) -> Method:
    """Compose LANDER, on any adapter."""
    generate = functools.partial(synthesise, options, generator_config(options, run))
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss(),
        client_rules=(lander_loss(options, run),),
        server_rules=(send_start_of_task(), images_rule(options, run, generate)),
    )


# ---- anchors ---------------------------------------------------------------------------


def anchors(classes: int) -> Float[Array, "C E"]:
    """Draw the anchors e_y of all classes, the same in every run."""
    return ANCHOR_STD * jax.random.normal(jax.random.key(ANCHOR_SEED), (classes, ANCHOR_WIDTH))


def class_anchors(options: LanderOptions, frozen: Frozen, classes: int) -> Float[Array, "C E"]:
    """Return the anchors: the text features of the classes' prompts, or drawn ones."""
    if options.class_prompts == "none":
        return anchors(classes)
    return frozen.text.features


def anchor_width(options: LanderOptions, run: Run) -> int:
    """Return E.

    Raises:
      InputError: for prompts where the network has no text tower.
    """
    if options.class_prompts == "none":
        return ANCHOR_WIDTH
    return text_side(run, "lander").joint


def to_anchor_space(trainable: Params, output: Output) -> Float[Array, "batch E"]:
    """Return a(x)."""
    return apply_head(trainable.extra["lander"], output.feature)


def bound_loss(
    mapped: Float[Array, "batch E"],
    anchor: Float[Array, "batch E"],
    mask: Bool[Array, " batch"],
    radius: float,
) -> Float[Array, ""]:
    """Return L_B = max(0, mean |a(x) - e_y|^2 - r) over the examples in the mask."""
    return jnp.maximum(mean_square(mapped, anchor, mask) - radius, 0.0)


def mean_square(
    a: Float[Array, "batch E"], b: Float[Array, "batch E"], mask: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """Return the mean of (a - b)^2 over entries and the examples in the mask."""
    return masked_sum(jnp.mean((a - b) ** 2, axis=-1), mask) / jnp.maximum(jnp.sum(mask), 1)


# ---- client ----------------------------------------------------------------------------


def lander_loss(options: LanderOptions, run: Run) -> ClientRule:
    """Add the clients' whole loss. The map a is a parameter of this rule."""
    classes = run.sizes.classes
    width = anchor_width(options, run)

    def parameters(key: PRNGKeyArray) -> Head:
        return init_head(key, run.network.width, width)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        task = step.context.task
        batch = step.batch
        mapped = to_anchor_space(step.drawn, step.output)
        anchor = class_anchors(options, step.context.frozen, classes)[batch.label]
        bound = bound_loss(mapped, anchor, batch.mask, options.bound_radius)
        task_loss = cross_entropy(step.output.logits, batch.label, task.current, batch.mask)
        task_loss += options.bound_weight * bound
        weights = task_weights(options, task)

        def with_earlier_tasks() -> Float[Array, ""]:
            return weights.current * task_loss + weights.previous * earlier_tasks_loss(options, step)

        # the first task has no earlier one and no images, so they are not computed
        return jax.lax.cond(task.index > 0, with_earlier_tasks, lambda: task_loss)

    return ClientRule("lander", loss, parameters=parameters)


class TaskWeights(NamedTuple):
    """Weights of the loss from the second task on."""

    current: Float[Array, ""]
    previous: Float[Array, ""]


def task_weights(options: LanderOptions, task: Task) -> TaskWeights:
    """Return alpha_cur and alpha_pre, which move weight to earlier tasks as classes grow."""
    seen = jnp.sum(task.seen)
    # at least 1, since the first task's share would be a divisor of 0
    old = jnp.maximum(jnp.sum(task.old), 1)
    growth = jnp.log2(seen / 2 + 1)
    share = jnp.sqrt(old / seen)
    current = options.current_weight * (1 + 1 / growth) / share
    previous = options.previous_weight * growth * share
    return TaskWeights(current, previous)


def earlier_tasks_loss(options: LanderOptions, step: ClientStep) -> Float[Array, ""]:
    """Distil the task's first model on synthetic images: logits of old classes, and a(z)."""
    images = step.context.payload.sent["synthesis"]
    batch = unlabelled(step.learner, synthetic_pixels(options, images, step))
    on_images = step._replace(batch=batch)
    old_params = teacher(step.context)
    new = on_images.forward(step.trainable)
    old = jax.lax.stop_gradient(on_images.forward(old_params, False))
    old_classes = step.context.task.old
    distilled = distillation(new.logits, old.logits, old_classes, batch.mask, options.distill_temperature)
    new_mapped = to_anchor_space(step.trainable, new)
    return distilled + mean_square(new_mapped, to_anchor_space(old_params, old), batch.mask)


# ---- server: image synthesis -----------------------------------------------------------


class AnchoredGenerator(NamedTuple):
    """The parameters that train in a generator round."""

    generator: PyTree
    layers: Float[Array, "groups E noise"]
    """The random layers, one per group of images of a batch."""


class LanderState(NamedTuple):
    """The state of the synthesis between its rounds."""

    generator: PyTree
    student: Student
    images: ImageBuffer


def synthesise(
    options: LanderOptions,
    config: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """Return images of the classes seen so far, and the mean of the rounds' lowest losses."""
    generator_key, student_key, map_key, rounds_key = jax.random.split(round.key, 4)
    teacher = global_model(round, params)
    # a new student and a new map a: with the teacher's parameters it would never disagree
    fresh = round.learner.init(student_key, round.frozen)
    trainable = round.learner.trainable(fresh, round.task)
    fresh_map = init_head(map_key, *params.extra["lander"].kernel.shape)
    trainable = trainable._replace(extra=params.extra | {"lander": fresh_map})
    student = ImageModel(fresh, trainable)
    sgd = student_optimiser(options, STUDENT_DECAY)
    distil = functools.partial(student_loss, options, round, teacher, student.cached)

    def one_round(r: Array, carry: tuple[LanderState, Array]) -> tuple[LanderState, Array]:
        state, loss_sum = carry
        image_key, student_key = jax.random.split(jax.random.fold_in(rounds_key, r))
        current_student = student._replace(trainable=state.student.trainable)
        # a student that has not trained disagrees on every image
        disputed = r > options.synthesis_warmup + 1
        loss = functools.partial(generator_loss, options, round, teacher, current_student, disputed)
        best = best_of_round(options, config, loss, state.generator, round, image_key)
        # images of the warm-up are dropped, and the student does not learn from them
        counts = r >= options.synthesis_warmup
        buffer = jax.lax.cond(counts, lambda: append_images(state.images, best.image), lambda: state.images)
        steps = jnp.where(counts, options.student_steps, 0)
        trained = train_student(options, distil, sgd, state.student, buffer, steps, student_key)
        loss_sum += jnp.where(counts, best.loss, 0.0)
        return LanderState(best.params.generator, trained, buffer), loss_sum

    start = LanderState(
        init_image_generator(config, generator_key),
        Student(student.trainable, sgd.init(student.trainable)),
        ImageBuffer(jnp.zeros_like(images), jnp.int32(0)),
    )
    rounds = options.synthesis_warmup + options.synthesis_rounds
    state, loss_sum = jax.lax.fori_loop(0, rounds, one_round, (start, jnp.zeros(())))
    return state.images.images, Weighted(loss_sum, jnp.float32(options.synthesis_rounds))


def best_of_round(
    options: LanderOptions,
    config: ImageGeneratorConfig,
    loss: Callable[[Array, Array], Float[Array, ""]],
    generator: PyTree,
    round: ServerRound,
    key: PRNGKeyArray,
) -> Best:
    """Train the generator with new random layers, and return the images of the lowest loss.

    Each seen class has the same number of images, up to one.
    """
    size = options.synthesis_batch
    layer_key, label_key, view_key = jax.random.split(key, 3)
    label = balanced_labels(round.task.seen, size, label_key)
    anchor = class_anchors(options, round.frozen, len(round.task.seen))
    groups = -(-size // IMAGES_PER_LAYER)
    layers = jax.random.normal(layer_key, (groups, anchor.shape[1], config.noise))

    def loss_of(params: AnchoredGenerator, i: Array) -> tuple[Array, Array]:
        noise = generator_input(params.layers, anchor[label])
        image = generate_images(config, params.generator, noise)
        view = jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)
        return loss(label, view), image

    # a new Adam in every round, since the random layers are new
    adam = optax.adam(options.generator_lr, *BETAS)
    shape = (size, config.height, config.width)
    start = AnchoredGenerator(generator, layers)
    return best_images(loss_of, start, adam, options.generator_steps, shape)


def balanced_labels(
    seen: Bool[Array, " C"],
    size: int,
    key: PRNGKeyArray,
) -> Int[Array, " size"]:
    """Return the same number of labels of each seen class, up to one more for random classes."""
    # the seen classes first: False sorts before True
    classes = jnp.argsort(~seen, stable=True)
    count = jnp.maximum(jnp.sum(seen), 1)
    # a random start, so that the classes with one label more differ between rounds
    offset = jax.random.randint(key, (), 0, count)
    return classes[(offset + jnp.arange(size)) % count]


def generator_input(
    layers: Float[Array, "groups E noise"], anchor: Float[Array, "batch E"]
) -> Float[Array, "batch noise"]:
    """Return the images' anchors, normalised over the batch, through their group's layer."""
    # batch normalisation without parameters
    normal = (anchor - jnp.mean(anchor, axis=0)) / jnp.sqrt(jnp.var(anchor, axis=0) + 1e-5)
    layer = layers[jnp.arange(len(anchor)) // IMAGES_PER_LAYER]
    return exact_einsum("be,ben->bn", normal, layer)


def generator_loss(
    options: LanderOptions,
    round: ServerRound,
    teacher: ImageModel,
    student: ImageModel,
    disputed: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return w_1 L_CE + w_2 L_adv + w_B L_B + w_BN (distance of statistics)."""
    # only a forward pass in training mode returns statistics of the batch
    normalises = has_statistics(teacher)
    output = judge(round, teacher, pixels, train=normalises)
    label_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(output.logits, label))
    anchor = class_anchors(options, round.frozen, len(round.task.seen))[label]
    all_images = jnp.ones(len(label), bool)
    mapped = to_anchor_space(teacher.trainable, output)
    bound = bound_loss(mapped, anchor, all_images, options.bound_radius)
    adversarial = adversarial_loss(
        options, output.logits, logits_of(round, student), round.task.seen, disputed, pixels
    )
    loss = options.label_weight * label_loss + options.bound_weight * bound + adversarial
    if normalises:
        loss += options.statistics_weight * statistics_distance(teacher.trainable.stats, output.stats)
    return loss


def statistics_distance(running: PyTree, after_batch: PyTree) -> Float[Array, ""]:
    """Return sum over layers of |mean - running mean| + |variance - running variance|."""
    total = jnp.zeros(())
    for layer, batch in batch_statistics(running, after_batch):
        difference_of_means = jnp.linalg.norm(layer.mean - batch.mean)
        total = total + (difference_of_means + jnp.linalg.norm(layer.var - batch.var))
    return total


def student_loss(
    options: LanderOptions,
    round: ServerRound,
    teacher: ImageModel,
    cached: Params,
    trainable: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the student's distillation from the global model: of logits, and of a(z)."""
    target = judge(round, teacher, pixels)
    student = judge(round, ImageModel(cached, trainable), pixels)
    all_images = jnp.ones(len(pixels), bool)
    temperature = options.student_temperature
    logits = distillation_at(temperature, target.logits, student.logits, round.task.seen)
    target_mapped = to_anchor_space(teacher.trainable, target)
    mapped = mean_square(target_mapped, to_anchor_space(trainable, student), all_images)
    return logits + options.bound_weight * mapped
