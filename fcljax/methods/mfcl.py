"""MFCL: a data-free approach to mitigate catastrophic forgetting in federated
class-incremental learning for vision tasks (Babakniya et al., NeurIPS 2023).

client     trains on its examples x and on images z that the generator makes of new noise in every step
               L = L_CE(x; classes of the task)
                 + w_FT L_CE(x and z; all seen classes), for the classifier alone: features are constants
                 + w_KD mean |V f(.) - V f_old(.)|^2 over x and z
           f_old and V: features and classifier of old classes of the model that the task began with, which
           also labels z
server     averages; after the last round of a task but the last one the generator takes steps on
               L = L_CE(p, argmax p) + w_IE (1 + sum mean(p) log mean(p) / log C)
                 + w_BN KL of the statistics of batches + w_IP |z - smooth(z)|^2
           with p the global model's softmax over the C seen classes
           the generator goes down in every round: it makes every client's images, and none are stored
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from fcljax.adapters.full import FullOptions
from fcljax.models.heads import cross_entropy, mask_logits
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.image_generator import ImageGeneratorConfig, generate_images, init_image_generator
from fcljax.parts.learner import Output, Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule
from fcljax.parts.synthesis import (
    BatchStatistics,
    GeneratorOptions,
    batch_statistics,
    generator_config,
    global_model,
    has_statistics,
    judge,
    synthesis_rule,
)
from fcljax.parts.task_start import send_start_of_task, teacher, unlabelled
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Method, Weighted

SMOOTH = (-2.0, -1.0, 0.0, 1.0, 2.0)  # pixels that the smoothing reaches


@dataclasses.dataclass(frozen=True)
class MFCLOptions(GeneratorOptions):
    """Options of MFCL. `released` has the release's constants for CIFAR-100; `intended`
    has fewer channels, for machines without an accelerator."""

    finetune_weight: float = 1.0
    """Weight w_FT of the cross-entropy over all seen classes, which trains the classifier
    only."""
    distill_weight: float = 0.1
    """Weight w_KD of the distance between the old classifier's inputs under old and new
    model."""
    generator_steps: int = 100
    """Number of generator steps after a task."""
    generator_batch: int = 64
    """Number of images per generator step."""
    generator_lr: float = option(1e-3, positive=True)
    """Learning rate of the generator."""
    label_temperature: float = option(1.0, positive=True)
    """Temperature of the global model's softmax in the generator's cross-entropy."""
    entropy_weight: float = 1.0
    """Weight w_IE of the balance of classes."""
    statistics_weight: float = 50.0
    """Weight w_BN of the batch-normalisation statistics, for networks with batch
    normalisation."""
    smooth_weight: float = 1e-3
    """Weight w_IP of the distance to smoothed images."""


_RELEASED = MFCLOptions(
    synthetic_batch=128,
    generator_batch=128,
    label_temperature=1e3,
    noise_width=1000,
    generator_channels=64,
)
_RUN = RunConfig(lr=5e-5)
_WHOLE = (FullOptions(full_lr=5e-5),)
PRESETS = with_mini(
    {
        "intended": Preset(MFCLOptions(), _RUN, _WHOLE),
        "paper": Preset(dataclasses.replace(_RELEASED, label_temperature=1.0), _RUN, _WHOLE),
        "released": Preset(_RELEASED, _RUN, _WHOLE),
    },
    lr=5e-3,
    full_lr=1.5e-4,
)


def mfcl(options: MFCLOptions, run: Run) -> Method:
    """MFCL as a method, on any adapter."""
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss("current"),
        client_rules=(replay_generated(options, run),),
        server_rules=(send_start_of_task(), train_generator(options, run)),
    )


# ---- client ------------------------------------------------------------------------------------------------


class Both(NamedTuple):
    """What a model computes for a client's examples and for generated images."""

    real: Output
    made: Output

    @property
    def feature(self) -> Float[Array, "both width"]:
        """The features of both."""
        return jnp.concatenate([self.real.feature, self.made.feature])


def replay_generated(options: MFCLOptions, run: Run) -> ClientRule:
    """Add the losses on generated images from the second task on: those of new classes,
    and of old ones."""
    shape = generator_config(options, run)

    def old_classes(step: ClientStep) -> Float[Array, ""]:
        noise = jax.random.normal(jax.random.fold_in(step.key, 1), (options.synthetic_batch, shape.noise))
        pixels = generate_images(shape, step.context.payload.sent["generator"], noise)
        own = Both(step.output, output_for(step, step.trainable, pixels))
        before = teacher(step.context)
        old = jax.lax.stop_gradient(
            Both(step.forward(before, False), output_for(step, before, pixels, False))
        )
        finetune = options.finetune_weight * finetune_loss(step, own, old)
        return finetune + options.distill_weight * feature_loss(step, own, old)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        # in the first task there is no generator
        later = step.context.task.index > 0
        return jax.lax.cond(later, lambda: old_classes(step), lambda: jnp.zeros(()))

    return ClientRule("mfcl", loss)


def output_for(
    step: ClientStep,
    trainable: Params,
    pixels: Float[Array, "images *shape"],
    train: bool = True,
) -> Output:
    """Compute the output of trainable parameters for generated images, of pixels in [0,
    1]."""
    batch = unlabelled(step.learner, pixels)
    return step._replace(batch=batch).forward(trainable, train)


def finetune_loss(step: ClientStep, own: Both, old: Both) -> Float[Array, ""]:
    """Cross-entropy over all seen classes, whose gradient reaches the classifier
    alone."""
    task = step.context.task
    batch = step.batch
    head = step.learner.classifier
    feature = jax.lax.stop_gradient(own.feature)
    logits = head.logits(step.context.cached.classifier, step.trainable.classifier, feature, task)
    guess = jnp.argmax(mask_logits(old.made.logits, task.old), axis=-1)
    label = jnp.concatenate([batch.label, guess])
    return cross_entropy(logits, label, task.seen, counted(step, own))


def feature_loss(step: ClientStep, own: Both, old: Both) -> Float[Array, ""]:
    """Return the mean squared distance of old and new features, as the old classes'
    classifier reads them."""
    task = step.context.task
    classifier = teacher(step.context).classifier

    def read(feature: Array) -> Float[Array, "both C"]:
        return step.learner.classifier.logits(step.context.cached.classifier, classifier, feature, task)

    squares = jnp.where(task.old, (read(own.feature) - read(old.feature)) ** 2, 0.0)
    mask = counted(step, own)
    each = jnp.where(mask, jnp.sum(squares, axis=-1), 0.0) / jnp.maximum(jnp.sum(task.old), 1)
    return jnp.sum(each) / jnp.sum(mask)


def counted(step: ClientStep, own: Both) -> Bool[Array, " both"]:
    """Return the mask of the examples that are no padding, and of all generated
    images."""
    return jnp.concatenate([step.batch.mask, jnp.ones(len(own.made.feature), bool)])


# ---- server ------------------------------------------------------------------------------------------------


def train_generator(options: MFCLOptions, run: Run) -> ServerRule:
    """After the last round of every task but the last one, steps of the generator; it
    goes on from where it was."""
    shape = generator_config(options, run)

    def first() -> PyTree:
        return jax.tree.map(jnp.zeros_like, init_image_generator(shape, jax.random.key(0)))

    train = functools.partial(trained_generator, options, shape)
    return synthesis_rule("generator", run, first, train)


def trained_generator(
    options: MFCLOptions,
    shape: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    state: PyTree,
) -> tuple[PyTree, Weighted]:
    """Return the generator after its steps, and its last loss."""
    first, rest = jax.random.split(round.key)
    fresh = init_image_generator(shape, first)
    start = jax.tree.map(lambda new, old: jnp.where(round.task.index == 0, new, old), fresh, state)
    adam = optax.adam(options.generator_lr)

    def step(i: Array, carry: tuple) -> tuple:
        generator, optimiser, _ = carry
        noise = jax.random.normal(jax.random.fold_in(rest, i), (options.generator_batch, shape.noise))

        def loss_of(generator: PyTree) -> Float[Array, ""]:
            return generator_loss(options, round, params, generate_images(shape, generator, noise))

        value, gradient = jax.value_and_grad(loss_of)(generator)
        moved, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(generator, moved), optimiser, value

    carry = start, adam.init(start), jnp.zeros(())
    generator, _, value = jax.lax.fori_loop(0, options.generator_steps, step, carry)
    return generator, Weighted(value, jnp.float32(1))


def generator_loss(
    options: MFCLOptions,
    round: ServerRound,
    params: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return the sum of the four terms of the generator's loss."""
    seen = round.task.seen
    model = global_model(round, params)
    normalises = has_statistics(model)
    output = judge(round, model, pixels, train=normalises)
    loss = certain(output.logits, options.label_temperature)
    loss += options.entropy_weight * imbalance(output.logits, seen)
    if normalises:
        loss += options.statistics_weight * statistics_gap(model.trainable.stats, output.stats)
    return loss + options.smooth_weight * roughness(pixels)


def certain(logits: Float[Array, "batch C"], temperature: float) -> Float[Array, ""]:
    """Return the cross-entropy of the class that the model is surest of."""
    label = jnp.argmax(logits, axis=-1)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits / temperature, label))


def imbalance(
    logits: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return 1 minus the entropy of the mean prediction over that of a uniform one (0:
    balanced)."""
    mean = jnp.mean(jax.nn.softmax(logits), axis=0)
    entropy = -jnp.sum(jnp.where(seen, mean * jnp.log(jnp.where(seen & (mean > 0), mean, 1.0)), 0.0))
    return 1 - entropy / jnp.log(jnp.maximum(jnp.sum(seen), 2))


def statistics_gap(running: PyTree, after: PyTree) -> Float[Array, ""]:
    """KL(running || batch) of normal distributions: the mean over channels, then over
    layers of batch normalisation."""

    def of_layer(kept: BatchStatistics, own: BatchStatistics) -> Float[Array, ""]:
        var = jnp.maximum(own.var, 0) + 1e-8
        expected = kept.var + 1e-8
        ratio = (expected + (kept.mean - own.mean) ** 2) / var
        return jnp.mean(0.5 * jnp.log(var / expected) - 0.5 * (1 - ratio))

    return jnp.mean(jnp.stack([of_layer(*each) for each in batch_statistics(running, after)]))


def roughness(pixels: Float[Array, "batch h w 3"]) -> Float[Array, ""]:
    """Return the mean squared distance of images and images that a Gaussian of 5 x 5
    pixels smoothed."""
    weight = jnp.exp(-((jnp.array(SMOOTH) / 2) ** 2))
    weight = weight / jnp.sum(weight)
    smooth = pixels
    for axis in (1, 2):
        reach = [(2, 2) if i == axis else (0, 0) for i in range(4)]
        padded = jnp.pad(smooth, reach, mode="reflect")
        shifted = [jax.lax.slice_in_dim(padded, i, i + pixels.shape[axis], axis=axis) for i in range(5)]
        smooth = sum(w * part for w, part in zip(weight, shifted, strict=True))
    return jnp.mean((pixels - smooth) ** 2)
