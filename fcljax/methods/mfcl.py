"""MFCL: a data-free approach to mitigate catastrophic forgetting in federated
class-incremental learning for vision tasks (Babakniya et al., NeurIPS 2023).

    client    trains on its examples x and on images z, which the generator makes from new
              noise in every step
                L = L_CE(x; classes of the task)
                    + w_FT L_CE(x and z; all seen classes), for the classifier only
                    + w_KD mean |V f(.) - V f_old(.)|^2 over x and z
              f_old and V are the features and the old classes' classifier of the model that
              the task began with, which also labels z
    server    averages; after the last round of each task except the last it trains the
              generator on
                L = L_CE(p, argmax p) + w_IE (1 + sum mean(p) log mean(p) / log C)
                    + w_BN KL of batch statistics + w_IP |z - smooth(z)|^2
              with p the global model's softmax over the C seen classes,
              and sends the generator in every round: no client stores images
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

# offsets of the smoothing kernel's pixels
SMOOTH_OFFSETS = (-2.0, -1.0, 0.0, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class MFCLOptions(GeneratorOptions):
    """Options of MFCL.

    `released` has the release's constants for CIFAR-100; `intended` has fewer channels,
    for machines without an accelerator.
    """

    finetune_weight: float = 1.0
    """Weight w_FT of the classifier's cross-entropy over all seen classes."""
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
    """Weight w_IE of the loss that balances classes."""
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
    """Compose MFCL, on any adapter."""
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss("current"),
        client_rules=(replay_generated(options, run),),
        server_rules=(send_start_of_task(), generator_rule(options, run)),
    )


# ---- client ----------------------------------------------------------------------------


class Outputs(NamedTuple):
    """A model's outputs for a client's examples and for generated images."""

    real: Output
    generated: Output

    @property
    def feature(self) -> Float[Array, "both width"]:
        """Return the features of the examples, then those of the images."""
        return jnp.concatenate([self.real.feature, self.generated.feature])


def replay_generated(options: MFCLOptions, run: Run) -> ClientRule:
    """Add, from the second task on, w_FT L_CE and w_KD |V f - V f_old|^2."""
    config = generator_config(options, run)

    def replay_loss(step: ClientStep) -> Float[Array, ""]:
        noise_shape = (options.synthetic_batch, config.noise)
        # all rules of a step get the same key, so each derives one of its own
        noise = jax.random.normal(jax.random.fold_in(step.key, 1), noise_shape)
        pixels = generate_images(config, step.context.payload.sent["generator"], noise)
        new = Outputs(step.output, output_for(step, step.trainable, pixels))
        old_params = teacher(step.context)
        old_output = step.forward(old_params, False)
        old = Outputs(old_output, output_for(step, old_params, pixels, False))
        old = jax.lax.stop_gradient(old)
        finetune = options.finetune_weight * finetune_loss(step, new, old)
        return finetune + options.distill_weight * feature_loss(step, new, old)

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        # `cond` and not `where`: the first task has no generator, and pays for no image
        has_generator = step.context.task.index > 0
        return jax.lax.cond(has_generator, lambda: replay_loss(step), lambda: jnp.zeros(()))

    return ClientRule("mfcl", loss)


def output_for(
    step: ClientStep,
    trainable: Params,
    pixels: Float[Array, "images *shape"],
    train: bool = True,
) -> Output:
    """Return the output for images with pixels in [0, 1]."""
    batch = unlabelled(step.learner, pixels)
    return step._replace(batch=batch).forward(trainable, train)


def finetune_loss(step: ClientStep, new: Outputs, old: Outputs) -> Float[Array, ""]:
    """Return L_CE over all seen classes, whose gradient reaches only the classifier."""
    task = step.context.task
    classifier = step.learner.classifier
    # constant features: between tasks only the classifier is balanced
    feature = jax.lax.stop_gradient(new.feature)
    cached = step.context.cached.classifier
    logits = classifier.logits(cached, step.trainable.classifier, feature, task)
    # generated images have no label; the old model says of which old class they are
    pseudo_label = jnp.argmax(mask_logits(old.generated.logits, task.old), axis=-1)
    label = jnp.concatenate([step.batch.label, pseudo_label])
    return cross_entropy(logits, label, task.seen, mask_of(step, new))


def feature_loss(step: ClientStep, new: Outputs, old: Outputs) -> Float[Array, ""]:
    """Return mean |V f - V f_old|^2, over old classes and over examples and images."""
    task = step.context.task
    # V is the old model's classifier, which gets no gradient
    classifier = teacher(step.context).classifier

    def old_logits(feature: Array) -> Float[Array, "both C"]:
        return step.learner.classifier.logits(step.context.cached.classifier, classifier, feature, task)

    squares = (old_logits(new.feature) - old_logits(old.feature)) ** 2
    squares = jnp.where(task.old, squares, 0.0)
    mask = mask_of(step, new)
    means = jnp.where(mask, jnp.sum(squares, axis=-1), 0.0) / jnp.maximum(jnp.sum(task.old), 1)
    return jnp.sum(means) / jnp.sum(mask)


def mask_of(step: ClientStep, outputs: Outputs) -> Bool[Array, " both"]:
    """Return the mask of the batch's examples, and True for each generated image."""
    return jnp.concatenate([step.batch.mask, jnp.ones(len(outputs.generated.feature), bool)])


# ---- server ----------------------------------------------------------------------------


def generator_rule(options: MFCLOptions, run: Run) -> ServerRule:
    """Train the generator after the last round of each task except the last, and send it."""
    config = generator_config(options, run)

    # in the first task clients get zeros of the generator's shape, which nothing reads
    def no_generator() -> PyTree:
        return jax.tree.map(jnp.zeros_like, init_image_generator(config, jax.random.key(0)))

    train = functools.partial(train_generator, options, config)
    return synthesis_rule("generator", run, no_generator, train)


def train_generator(
    options: MFCLOptions,
    config: ImageGeneratorConfig,
    round: ServerRound,
    params: Params,
    state: PyTree,
) -> tuple[PyTree, Weighted]:
    """Return the generator after its steps, and its last loss.

    It continues from the previous task's generator.
    """
    init_key, noise_key = jax.random.split(round.key)
    fresh = init_image_generator(config, init_key)
    start = jax.tree.map(lambda new, old: jnp.where(round.task.index == 0, new, old), fresh, state)
    adam = optax.adam(options.generator_lr)

    def step(i: Array, carry: tuple) -> tuple:
        generator, optimiser, _ = carry
        noise_shape = (options.generator_batch, config.noise)
        noise = jax.random.normal(jax.random.fold_in(noise_key, i), noise_shape)

        def loss_of(generator: PyTree) -> Float[Array, ""]:
            return generator_loss(options, round, params, generate_images(config, generator, noise))

        loss, gradient = jax.value_and_grad(loss_of)(generator)
        update, optimiser = adam.update(gradient, optimiser)
        return optax.apply_updates(generator, update), optimiser, loss

    carry = (start, adam.init(start), jnp.zeros(()))
    generator, _, loss = jax.lax.fori_loop(0, options.generator_steps, step, carry)
    return generator, Weighted(loss, jnp.float32(1))


def generator_loss(
    options: MFCLOptions,
    round: ServerRound,
    params: Params,
    pixels: Float[Array, "batch h w 3"],
) -> Float[Array, ""]:
    """Return L_CE + w_IE imbalance + w_BN KL of statistics + w_IP roughness."""
    model = global_model(round, params)
    # only a forward pass in training mode returns statistics of the batch
    normalises = has_statistics(model)
    output = judge(round, model, pixels, train=normalises)
    loss = uncertainty(output.logits, options.label_temperature)
    loss += options.entropy_weight * imbalance(output.logits, round.task.seen)
    if normalises:
        loss += options.statistics_weight * statistics_gap(model.trainable.stats, output.stats)
    return loss + options.smooth_weight * roughness(pixels)


def uncertainty(logits: Float[Array, "batch C"], temperature: float) -> Float[Array, ""]:
    """Return L_CE(p, argmax p), low where the model is certain of a class."""
    # argmax has no gradient: the label is a constant
    label = jnp.argmax(logits, axis=-1)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits / temperature, label))


def imbalance(
    logits: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
) -> Float[Array, ""]:
    """Return 1 - H(mean(p)) / log C, which is 0 where classes are balanced."""
    mean = jnp.mean(jax.nn.softmax(logits), axis=0)
    # the logarithm's gradient at 0 is infinite, so entries that do not count become 1
    log_mean = jnp.log(jnp.where(seen & (mean > 0), mean, 1.0))
    entropy = -jnp.sum(jnp.where(seen, mean * log_mean, 0.0))
    return 1 - entropy / jnp.log(jnp.maximum(jnp.sum(seen), 2))


def statistics_gap(running: PyTree, after_batch: PyTree) -> Float[Array, ""]:
    """Return KL(running || batch) of normal distributions, averaged over channels, then layers."""

    def divergence(running: BatchStatistics, batch: BatchStatistics) -> Float[Array, ""]:
        # `batch_statistics` solves for the variance, and rounding may make it negative
        var = jnp.maximum(batch.var, 0) + 1e-8
        running_var = running.var + 1e-8
        ratio = (running_var + (running.mean - batch.mean) ** 2) / var
        return jnp.mean(0.5 * jnp.log(var / running_var) - 0.5 * (1 - ratio))

    layers = batch_statistics(running, after_batch)
    return jnp.mean(jnp.stack([divergence(*layer) for layer in layers]))


def roughness(pixels: Float[Array, "batch h w 3"]) -> Float[Array, ""]:
    """Return mean |z - smooth(z)|^2, smoothed by a Gaussian of 5 x 5 pixels."""
    weights = jnp.exp(-((jnp.array(SMOOTH_OFFSETS) / 2) ** 2))
    weights = weights / jnp.sum(weights)
    smooth = pixels
    # a Gaussian is separable: one axis, then the other, with 10 products in place of 25
    for axis in (1, 2):
        padding = [(0, 0)] * 4
        padding[axis] = (2, 2)
        padded = jnp.pad(smooth, padding, mode="reflect")
        side = pixels.shape[axis]
        shifted = [jax.lax.slice_in_dim(padded, i, i + side, axis=axis) for i in range(5)]
        smooth = sum(weight * image for weight, image in zip(weights, shifted, strict=True))
    return jnp.mean((pixels - smooth) ** 2)
