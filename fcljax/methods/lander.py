"""LANDER: text-enhanced data-free federated class-incremental learning (Tran et al., CVPR 2024, arXiv
2403.14101).

    a(x) = A f(x) + b maps features to the space of anchors e_y, one for each class
    bound L_B = max(0, mean |a(x) - e_y|^2 - r): features stay within a radius of their class's anchor
client     first task   L = L_CE + w_B L_B
           later        L = alpha_cur (L_CE over the task's classes + w_B L_B)
                          + alpha_pre (KD towards the task's first model + mean |a(z) - a_old(z)|^2),
                        the last two on synthetic images z, with C seen and C_old earlier classes and
                        alpha_cur = cur (1 + 1 / log2(C/2 + 1)) / sqrt(C_old / C)
                        alpha_pre = pre log2(C/2 + 1) sqrt(C_old / C)
server     averages; after the last round of a task but the last it makes images of all classes so far:
           a generator learns, from anchors that a random layer disturbs, new in every round,
               L = w_1 L_CE(z; y) + w_2 L_dispute + w_B L_B(z; y) + w_BN |statistics of z - running ones|
           and a student learns from the images made so far, as in TARGET
           the images go down in every round of the next task

The paper's anchors are embeddings of the classes' names by a language model. Here they
are drawn at random, with the distances between classes that those embeddings have.
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
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Output, Params, replaced_loss
from fcljax.parts.server import ServerRound
from fcljax.parts.synthesis import (
    BETAS,
    Best,
    ImageModel,
    MadeSoFar,
    Student,
    SynthesisOptions,
    added,
    adversarial_loss,
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
    taught,
)
from fcljax.parts.task_start import send_start_of_task, teacher, unlabelled
from fcljax.pixels import jitter
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Method, Task, Weighted

ANCHORS = 3  # the key of their draw
SPREAD = 0.207  # of an entry of an anchor: two of CLIP's embeddings differ by 0.086 in the mean square
WIDTH = 512  # of an anchor
GROUP = 10  # images of a batch that share a random layer
DECAY = 2e-4  # of the student's gradient descent


@dataclasses.dataclass(frozen=True)
class LanderOptions(SynthesisOptions):
    """Options of LANDER. `paper` and `released` have the release's constants for
    CIFAR-100; `intended` has fewer rounds, images and channels, for machines without an
    accelerator."""

    bound_weight: float = 5.0
    """Weight w_B of the distance to the anchors."""
    bound_radius: float = 0.015
    """Radius r, as a mean square, within which the distance costs nothing."""
    current_weight: float = option(0.2, positive=True)
    """Factor of the losses on the current task, from the second task on."""
    previous_weight: float = 0.4
    """Factor of the losses on earlier tasks."""
    synthesis_rounds: int = 20
    """Number of generator rounds that add synthesis_batch images each."""
    synthesis_batch: int = 32
    """Number of images per generator round."""
    synthesis_warmup: int = option(5, least=0)
    """Number of generator rounds before these; their images are dropped."""
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
# with a quarter to a fifth of the synthesis, which takes most of a run
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
    make = functools.partial(synthesise, options, generator_config(options, run))
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss(),
        client_rules=(near_anchors(options, run),),
        server_rules=(send_start_of_task(), images_rule(options, run, make)),
    )


# ---- anchors -----------------------------------------------------------------------------------------------


def anchors(classes: int) -> Float[Array, "C E"]:
    """e_y of all classes, the same in every run."""
    return SPREAD * jax.random.normal(jax.random.key(ANCHORS), (classes, WIDTH))


def mapped(trainable: Params, output: Output) -> Float[Array, "batch E"]:
    """a(x)."""
    return apply_head(trainable.extra["lander"], output.feature)


def beyond(
    place: Float[Array, "batch E"],
    anchor: Float[Array, "batch E"],
    mask: Bool[Array, " batch"],
    radius: float,
) -> Float[Array, ""]:
    """L_B: the mean square of a(x) - e_y over the examples in the mask, as far as it is
    beyond the radius."""
    square = mean_square(place, anchor, mask)
    return jnp.maximum(square - radius, 0.0)


def mean_square(
    a: Float[Array, "batch E"], b: Float[Array, "batch E"], mask: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """Return the mean of (a - b)^2 over entries and the examples in the mask."""
    return masked_sum(jnp.mean((a - b) ** 2, axis=-1), mask) / jnp.maximum(jnp.sum(mask), 1)


# ---- client ------------------------------------------------------------------------------------------------


def near_anchors(options: LanderOptions, run: Run) -> ClientRule:
    """Compute the whole loss of the clients; the map to the anchors trains and
    travels."""
    classes = run.sizes.classes

    def parameters(key: PRNGKeyArray) -> Head:
        return init_head(key, run.network.width, WIDTH)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        task = step.context.task
        batch = step.batch
        learned = cross_entropy(step.output.logits, batch.label, task.current, batch.mask)
        place = mapped(step.drawn, step.output)
        anchor = anchors(classes)[batch.label]
        learned += options.bound_weight * beyond(place, anchor, batch.mask, options.bound_radius)
        weights = task_weights(options, task)

        def later() -> Float[Array, ""]:
            return weights.current * learned + weights.previous * kept(options, step)

        # in the first task there is no earlier one, and no image
        return jax.lax.cond(task.index > 0, later, lambda: learned)

    return ClientRule("lander", loss, parameters=parameters)


class Weights(NamedTuple):
    """Of a task's loss, from the second on."""

    current: Float[Array, ""]
    previous: Float[Array, ""]


def task_weights(options: LanderOptions, task: Task) -> Weights:
    """alpha_cur and alpha_pre."""
    seen = jnp.sum(task.seen)
    old = jnp.maximum(jnp.sum(task.old), 1)
    growth = jnp.log2(seen / 2 + 1)
    share = jnp.sqrt(old / seen)
    current = options.current_weight * (1 + 1 / growth) / share
    return Weights(current, options.previous_weight * growth * share)


def kept(options: LanderOptions, step: ClientStep) -> Float[Array, ""]:
    """Distillation of old classes and of places between anchors, on synthetic images."""
    images = step.context.payload.sent["synthesis"]
    task = step.context.task
    batch = unlabelled(step.learner, synthetic_pixels(options, images, step))
    on_made = step._replace(batch=batch)
    before = teacher(step.context)
    own = on_made.forward(step.trainable)
    old = jax.lax.stop_gradient(on_made.forward(before, False))
    distilled = distillation(own.logits, old.logits, task.old, batch.mask, options.distill_temperature)
    return distilled + mean_square(mapped(step.trainable, own), mapped(before, old), batch.mask)


# ---- server: image synthesis -------------------------------------------------------------------------------


class Maker(NamedTuple):
    """What makes images of anchors, and trains."""

    generator: PyTree
    layer: Float[Array, "groups E noise"]
    """The random layers, one for each group of images of a batch."""


class AnchoredRound(NamedTuple):
    """What goes from one round of the synthesis to the next."""

    generator: PyTree
    student: Student
    made: MadeSoFar


def synthesise(
    options: LanderOptions,
    config: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """Make images of the classes that `params` has seen; return them, and the mean of
    the lowest losses of the rounds that made them."""
    generator_key, student_key, map_key, rounds_key = jax.random.split(round.key, 4)
    truth = global_model(round, params)
    fresh = round.learner.init(student_key, round.frozen)
    trainable = round.learner.trainable(fresh, round.task)
    student = ImageModel(fresh, trainable._replace(extra=fresh_map(params, map_key)))
    sgd = student_optimiser(options, DECAY)
    distil = functools.partial(student_loss, options, round, truth, student.cached)

    def one_round(
        r: Array,
        carry: tuple[AnchoredRound, Array],
    ) -> tuple[AnchoredRound, Array]:
        making, total = carry
        draw_key, learn_key = jax.random.split(jax.random.fold_in(rounds_key, r))
        rival = student._replace(trainable=making.student.trainable)
        disputed = r > options.synthesis_warmup + 1
        loss = functools.partial(maker_loss, options, round, truth, rival, disputed)
        best = images_of_round(options, config, loss, making.generator, round.task, draw_key)
        # the first rounds' images are dropped, and the student waits for the others
        counts = r >= options.synthesis_warmup
        made = jax.lax.cond(counts, lambda: added(making.made, best.image), lambda: making.made)
        steps = jnp.where(counts, options.student_steps, 0)
        learned = taught(options, distil, sgd, making.student, made, steps, learn_key)
        making = AnchoredRound(best.fast.generator, learned, made)
        return making, total + jnp.where(counts, best.loss, 0.0)

    start = AnchoredRound(
        init_image_generator(config, generator_key),
        Student(student.trainable, sgd.init(student.trainable)),
        MadeSoFar(jnp.zeros_like(images), jnp.int32(0)),
    )
    rounds = options.synthesis_warmup + options.synthesis_rounds
    making, total = jax.lax.fori_loop(0, rounds, one_round, (start, jnp.zeros(())))
    return making.made.images, Weighted(total, jnp.float32(options.synthesis_rounds))


def fresh_map(params: Params, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Return the student's own map to the anchors, and the other rules' parameters as
    they are."""
    return params.extra | {"lander": init_head(key, *params.extra["lander"].kernel.shape)}


def images_of_round(
    options: LanderOptions,
    config: ImageGeneratorConfig,
    loss: Callable[[Array, Array], Float[Array, ""]],
    generator: PyTree,
    task: Task,
    key: PRNGKeyArray,
) -> Best:
    """Take steps of the generator and of new random layers, for as many images of each
    seen class."""
    size = options.synthesis_batch
    layer_key, label_key, view_key = jax.random.split(key, 3)
    label = balanced_labels(task.seen, size, label_key)
    layer = jax.random.normal(layer_key, (-(-size // GROUP), WIDTH, config.noise))

    def loss_of(maker: Maker, i: Array) -> tuple[Array, Array]:
        image = generate_images(config, maker.generator, disturbed(maker.layer, label, len(task.seen)))
        view = jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)
        return loss(label, view), image

    adam = optax.adam(options.generator_lr, *BETAS)
    shape = (size, config.height, config.width)
    return best_images(loss_of, Maker(generator, layer), adam, options.generator_steps, shape)


def balanced_labels(
    seen: Bool[Array, " C"],
    size: int,
    key: PRNGKeyArray,
) -> Int[Array, " size"]:
    """Draw as many labels of each seen class, up to one; which classes have one more is
    random."""
    ids = jnp.argsort(~seen, stable=True)  # those that were seen come first
    count = jnp.maximum(jnp.sum(seen), 1)
    return ids[(jax.random.randint(key, (), 0, count) + jnp.arange(size)) % count]


def disturbed(
    layer: Float[Array, "groups E noise"], label: Int[Array, " batch"], classes: int
) -> Float[Array, "batch noise"]:
    """Return what the generator reads: the normalised anchors of the labels through
    their group's random layer."""
    anchor = anchors(classes)[label]
    normal = (anchor - jnp.mean(anchor, axis=0)) / jnp.sqrt(jnp.var(anchor, axis=0) + 1e-5)
    own = layer[jnp.arange(len(label)) // GROUP]
    return exact_einsum("be,ben->bn", normal, own)


def maker_loss(
    options: LanderOptions,
    round: ServerRound,
    truth: ImageModel,
    student: ImageModel,
    disputed: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the loss of the generator and the random layers."""
    normalises = has_statistics(truth)
    theirs = judge(round, truth, pixels, train=normalises)
    right = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(theirs.logits, label))
    anchor = anchors(len(round.task.seen))[label]
    everyone = jnp.ones(len(label), bool)
    place = mapped(truth.trainable, theirs)
    bound = options.bound_weight * beyond(place, anchor, everyone, options.bound_radius)
    against = adversarial_loss(
        options, theirs.logits, logits_of(round, student), round.task.seen, disputed, pixels
    )
    loss = options.label_weight * right + bound + against
    if normalises:
        loss += options.statistics_weight * statistics_distance(truth.trainable.stats, theirs.stats)
    return loss


def statistics_distance(running: PyTree, after: PyTree) -> Float[Array, ""]:
    """Return the lengths of the differences of means and of variances, added up over
    layers."""
    layers = batch_statistics(running, after)
    return sum(
        (jnp.linalg.norm(kept.mean - own.mean) + jnp.linalg.norm(kept.var - own.var) for kept, own in layers),
        jnp.zeros(()),
    )


def student_loss(
    options: LanderOptions,
    round: ServerRound,
    truth: ImageModel,
    cached: Params,
    trainable: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the student's distillation from the global model, of classes and of places
    between anchors."""
    theirs = judge(round, truth, pixels)
    student = judge(round, ImageModel(cached, trainable), pixels)
    everyone = jnp.ones(len(pixels), bool)
    temperature = options.student_temperature
    classes = distillation_at(temperature, theirs.logits, student.logits, round.task.seen)
    places = mean_square(mapped(truth.trainable, theirs), mapped(trainable, student), everyone)
    return classes + options.bound_weight * places
