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

The paper's anchors are embeddings of the classes' names by a language model. Here they are drawn at random,
with the distances between classes that those embeddings have.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt8

from fcljax.adapters.full import FullOptions
from fcljax.models.heads import (
    Head,
    apply_head,
    cross_entropy,
    distillation,
    init_head,
    kl,
    mask_logits,
    masked_sum,
)
from fcljax.models.products import exact_einsum
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Output, Params, replaced_loss
from fcljax.parts.server import ServerRound, ServerRule
from fcljax.parts.synthesis import (
    MadeSoFar,
    Student,
    added,
    batch_statistics,
    best_images,
    disagreement,
    student_optimiser,
    synthesis_rule,
    taught,
)
from fcljax.parts.task_start import send_start_of_task, teacher, unlabelled
from fcljax.pixels import jitter
from fcljax.settings import Preset, RunConfig
from fcljax.types import Method, Task, Weighted

ANCHORS = 3  # the key of their draw
SPREAD = 0.207  # of an entry of an anchor: two of CLIP's embeddings differ by 0.086 in the mean square
WIDTH = 512  # of an anchor
GROUP = 10  # images of a batch that share a random layer
# Of the student's gradient descent
MOMENTUM = 0.9
DECAY = 2e-4
BETAS = (0.5, 0.999)  # of the generator's Adam


@dataclasses.dataclass(frozen=True)
class LanderOptions:
    """Options of LANDER. `paper` and `released` have the release's constants for CIFAR-100; `intended` has
    fewer rounds, images and channels, for machines without an accelerator."""

    bound_weight: float = 5.0
    """Weight w_B of the distance to the anchors."""
    bound_radius: float = 0.015
    """Radius r, as a mean square, within which the distance costs nothing."""
    current_weight: float = option(0.2, positive=True)
    """Factor of the losses on the current task, from the second task on."""
    previous_weight: float = 0.4
    """Factor of the losses on earlier tasks."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature of student and teacher in the clients' distillation."""
    synthetic_batch: int = 64
    """Number of synthetic images per client step."""
    synthesis_rounds: int = 20
    """Number of generator rounds that add synthesis_batch images each."""
    synthesis_batch: int = 32
    """Number of images per generator round."""
    synthesis_warmup: int = option(5, least=0)
    """Number of generator rounds before these; their images are dropped."""
    generator_steps: int = 40
    """Number of generator steps per generator round."""
    generator_lr: float = option(2e-3, positive=True)
    """Learning rate of the generator and the random layer."""
    label_weight: float = 0.5
    """Weight w_1 of the global model's cross-entropy in the generator's loss."""
    adversarial_weight: float = 1.0
    """Weight w_2 of the disagreement of global model and student in the generator's loss."""
    statistics_weight: float = 1.0
    """Weight w_BN of the batch-normalisation statistics, for networks with batch
    normalisation."""
    student_steps: int = 50
    """Number of student steps per generator round."""
    student_lr: float = option(2e-3, positive=True)
    """Learning rate of the student."""
    student_temperature: float = option(20.0, positive=True)
    """Temperature of the student's distillation."""
    noise_width: int = 256
    """Width of the random layer's output, which feeds the generator."""
    generator_channels: int = 32
    """Channels of the generator's last hidden layer."""
    crop_padding: float = option(0.125, most=1.0)
    """Padding of synthetic images before a crop, as a fraction of the side."""


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
PRESETS = {
    "intended": Preset(LanderOptions(), _RUN, _WHOLE),
    "paper": Preset(_RELEASED, _RUN, _WHOLE),
    "released": Preset(_RELEASED, _RUN, _WHOLE),
}


def lander(options: LanderOptions, run: Run) -> Method:
    """LANDER as a method, on any adapter."""
    return federate(
        run,
        linear_learner(run),
        loss=replaced_loss(),
        client_rules=(near_anchors(options, run),),
        server_rules=(send_start_of_task(), synthesis(options, run)),
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
    """L_B: the mean square of a(x) - e_y over the examples in the mask, as far as it is beyond the radius."""
    square = mean_square(place, anchor, mask)
    return jnp.maximum(square - radius, 0.0)


def mean_square(
    a: Float[Array, "batch E"], b: Float[Array, "batch E"], mask: Bool[Array, " batch"]
) -> Float[Array, ""]:
    """The mean of (a - b)^2 over entries and the examples in the mask."""
    return masked_sum(jnp.mean((a - b) ** 2, axis=-1), mask) / jnp.maximum(jnp.sum(mask), 1)


# ---- client ------------------------------------------------------------------------------------------------


def near_anchors(options: LanderOptions, run: Run) -> ClientRule:
    """The whole loss of the clients, and the map to the anchors, which trains and travels."""
    classes = run.sizes.classes

    def parameters(key: PRNGKeyArray) -> Head:
        return init_head(key, run.network.width, WIDTH)

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory  # in the first task there is no earlier one, and no image
        task = step.context.task
        batch = step.batch
        learned = cross_entropy(step.output.logits, batch.label, task.current, batch.mask)
        place = mapped(step.drawn, step.output)
        anchor = anchors(classes)[batch.label]
        learned += options.bound_weight * beyond(place, anchor, batch.mask, options.bound_radius)
        weights = task_weights(options, task)

        def later() -> Float[Array, ""]:
            return weights.current * learned + weights.previous * kept(options, step)

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
    pick, move = jax.random.split(jax.random.fold_in(step.key, 1))
    chosen = images[jax.random.randint(pick, (options.synthetic_batch,), 0, len(images))]
    batch = unlabelled(step.learner, jitter(move, chosen / 255, options.crop_padding))
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


class ImageJudge(NamedTuple):
    """A model that judges images: its parameters of all tasks and its trainable ones."""

    cached: Params
    trainable: Params


def synthesis(options: LanderOptions, run: Run) -> ServerRule:
    """After the last round of every task but the last one, makes images of all classes seen so far."""
    height, width, _ = run.network.image
    shape = ImageGeneratorConfig(height, width, options.noise_width, options.generator_channels)
    images = (options.synthesis_rounds * options.synthesis_batch, height, width, 3)
    first = functools.partial(jnp.zeros, images, jnp.uint8)
    return synthesis_rule("synthesis", run, first, functools.partial(synthesise, options, shape))


def synthesise(
    options: LanderOptions,
    shape: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    images: UInt8[Array, "images h w 3"],
) -> tuple[UInt8[Array, "images h w 3"], Weighted]:
    """New images of the classes that `params` has seen, and the mean of the lowest losses of the rounds that
    made them."""
    first, second, third, rest = jax.random.split(round.key, 4)
    learner = round.learner
    task = round.task
    warm = options.synthesis_warmup
    truth = ImageJudge(params, learner.trainable(params, task)._replace(extra=params.extra))
    new = learner.init(second, round.frozen)
    rival = ImageJudge(new, learner.trainable(new, task)._replace(extra=fresh_map(params, third)))
    sgd = student_optimiser(options.student_lr, MOMENTUM, DECAY)
    made = MadeSoFar(jnp.zeros_like(images), jnp.int32(0))
    start = AnchoredRound(
        init_image_generator(shape, first), Student(rival.trainable, sgd.init(rival.trainable)), made
    )
    distil = functools.partial(student_loss, options, round, truth, rival.cached)

    def one_round(r: Array, carry: tuple[AnchoredRound, Array]) -> tuple[AnchoredRound, Array]:
        making, total = carry
        draw, learn = jax.random.split(jax.random.fold_in(rest, r))
        rated = functools.partial(
            maker_loss,
            options,
            round,
            truth,
            rival._replace(trainable=making.student.trainable),
            r > warm + 1,
        )
        image, generator, loss = images_of_round(options, shape, rated, making.generator, task, draw)
        counts = r >= warm
        filled = jax.lax.cond(counts, lambda: added(making.made, image), lambda: making.made)
        steps = jnp.where(counts, options.student_steps, 0)
        batch = options.synthetic_batch
        padding = options.crop_padding
        student = taught(distil, sgd, making.student, filled, batch, padding, steps, learn)
        return AnchoredRound(generator, student, filled), total + jnp.where(counts, loss, 0.0)

    rounds = options.synthesis_rounds
    making, total = jax.lax.fori_loop(0, warm + rounds, one_round, (start, jnp.zeros(())))
    return making.made.images, Weighted(total, jnp.float32(rounds))


def fresh_map(params: Params, key: PRNGKeyArray) -> dict[str, PyTree]:
    """The student's own map to the anchors, and the other rules' parameters as they are."""
    return params.extra | {"lander": init_head(key, *params.extra["lander"].kernel.shape)}


def images_of_round(
    options: LanderOptions,
    shape: ImageGeneratorConfig,
    loss: functools.partial,
    generator: PyTree,
    task: Task,
    key: PRNGKeyArray,
) -> tuple[Float[Array, "batch h w 3"], PyTree, Float[Array, ""]]:
    """Steps of the generator and of new random layers, for as many images of each seen class.

    Returns:
      The images of the lowest loss, the generator afterwards, and that loss.
    """
    size = options.synthesis_batch
    layer_key, label_key, view_key = jax.random.split(key, 3)
    label = balanced_labels(task.seen, size, label_key)
    layer = jax.random.normal(layer_key, (-(-size // GROUP), WIDTH, shape.noise))

    def loss_of(maker: Maker, i: Array) -> tuple[Array, Array]:
        image = generate_images(shape, maker.generator, disturbed(maker.layer, label, len(task.seen)))
        view = jitter(jax.random.fold_in(view_key, i), image, options.crop_padding)
        return loss(label, view), image

    adam = optax.adam(options.generator_lr, *BETAS)
    best = best_images(
        loss_of, Maker(generator, layer), adam, options.generator_steps, (size, shape.height, shape.width)
    )
    return best.image, best.fast.generator, best.loss


def balanced_labels(seen: Bool[Array, " C"], size: int, key: PRNGKeyArray) -> Int[Array, " size"]:
    """As many of each seen class, up to one; which classes have one more is random."""
    ids = jnp.argsort(~seen, stable=True)  # those that were seen come first
    count = jnp.maximum(jnp.sum(seen), 1)
    return ids[(jax.random.randint(key, (), 0, count) + jnp.arange(size)) % count]


def disturbed(
    layer: Float[Array, "groups E noise"], label: Int[Array, " batch"], classes: int
) -> Float[Array, "batch noise"]:
    """What the generator reads: the normalised anchors of the labels through their group's random layer."""
    anchor = anchors(classes)[label]
    normal = (anchor - jnp.mean(anchor, axis=0)) / jnp.sqrt(jnp.var(anchor, axis=0) + 1e-5)
    own = layer[jnp.arange(len(label)) // GROUP]
    return exact_einsum("be,ben->bn", normal, own)


def judged(
    round: ServerRound, model: ImageJudge, pixels: Float[Array, "batch h w 3"], train: bool = False
) -> Output:
    """What a model computes for pixels in [0, 1], with logits over the seen classes."""
    batch = unlabelled(round.learner, pixels)
    output = round.learner.forward(round.frozen, model.cached, model.trainable, batch, round.task, train)
    return output._replace(logits=mask_logits(output.logits, round.task.seen))


def maker_loss(
    options: LanderOptions,
    round: ServerRound,
    truth: ImageJudge,
    rival: ImageJudge,
    disputed: Bool[Array, ""],
    label: Int[Array, " batch"],
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """The loss of the generator and the random layers."""
    running = truth.trainable.stats
    has_statistics = bool(jax.tree.leaves(running))
    # in training mode the running statistics afterwards tell those of the batch
    theirs = judged(round, truth, pixels, has_statistics)
    right = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(theirs.logits, label))
    anchor = anchors(len(round.task.seen))[label]
    everyone = jnp.ones(len(label), bool)
    place = mapped(truth.trainable, theirs)
    bound = options.bound_weight * beyond(place, anchor, everyone, options.bound_radius)

    def against() -> Float[Array, ""]:
        own = judged(round, rival, pixels).logits
        return options.adversarial_weight * disagreement(theirs.logits, own, round.task.seen)

    loss = options.label_weight * right + bound + jax.lax.cond(disputed, against, lambda: jnp.zeros(()))
    return (
        loss + options.statistics_weight * statistics_distance(running, theirs.stats)
        if has_statistics
        else loss
    )


def statistics_distance(running: PyTree, after: PyTree) -> Float[Array, ""]:
    """The lengths of the differences of means and of variances, added up over layers."""
    layers = batch_statistics(running, after)
    return sum(
        (jnp.linalg.norm(kept.mean - own.mean) + jnp.linalg.norm(kept.var - own.var) for kept, own in layers),
        jnp.zeros(()),
    )


def student_loss(
    options: LanderOptions,
    round: ServerRound,
    truth: ImageJudge,
    cached: Params,
    trainable: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """The student's distillation from the global model, of classes and of places between anchors."""
    theirs = judged(round, truth, pixels)
    own = judged(round, ImageJudge(cached, trainable), pixels)
    heat = options.student_temperature
    everyone = jnp.ones(len(pixels), bool)
    classes = heat**2 * jnp.mean(kl(theirs.logits / heat, own.logits / heat, round.task.seen))
    places = mean_square(mapped(truth.trainable, theirs), mapped(trainable, own), everyone)
    return classes + options.bound_weight * places
