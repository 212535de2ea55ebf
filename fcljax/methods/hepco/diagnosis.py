"""Sums of the clients' features by class, and a comparison of generated latents with them.

The diagnosis shows why HePCo's server step helps or not. It is for research in a
simulation: uploads grow by the sums, and a run with it ends with the same model as one
without. With `--latents gaussian` the server draws latents from these sums, in place of
generators.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.models import heads
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.parts import reports
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run
from fcljax.parts.reports import ClassMoments
from fcljax.types import ClientContext, Metrics, View, Weighted

PER_CLASS = 16  # latents that are drawn of each class


class Spread(NamedTuple):
    """The mean of each class, and the variance of its points."""

    mean: Float[Array, "C width"]
    variance: Float[Array, " C"]
    """The mean squared distance of a class's points from their mean."""
    present: Bool[Array, " C"]
    """Classes with two points or more."""


def real_features(run: Run, width: int) -> Report:
    """Report sums of the features of a client's clean images, under its trained model."""
    view = View(1, run.training.batch_size, augment=False)

    # all classes of the stream, since the server adds the sums up over tasks
    def init(_context: ClientContext) -> ClassMoments:
        return reports.no_moments(run.sizes.classes, width)

    def step(step: ClientStep, total: ClassMoments) -> ClassMoments:
        batch = step.batch
        classes = jnp.arange(run.sizes.classes)
        moments = reports.moments_of(step.output.feature, batch.label, classes, batch.mask)
        return jax.tree.map(jnp.add, total, moments)

    longest = functools.partial(reports.longest_feature, run)
    possible = functools.partial(reports.possible_moments, longest=longest)
    return Report("features", init, step, view=view, merge="sum", possible=possible)


def class_spread(total: ClassMoments) -> Spread:
    """Return the means of classes and E|x|^2 - |E x|^2 of each."""
    mean, variance = reports.normal_of(total)
    return Spread(mean, jnp.sum(variance, axis=1), total.examples >= 2)


def compare(
    latent: Float[Array, "latents width"],
    label: Int[Array, " latents"],
    trained: Bool[Array, " C"],
    logits: Float[Array, "latents C"],
    seen: Bool[Array, " C"],
    real: ClassMoments,
) -> Metrics:
    """Compare latents of some classes with the real features of all classes seen.

    Args:
      latent: `PER_CLASS` of every class.
      label: the classes that they were drawn for.
      trained: classes that the generator was trained for; latents of others do not count.
      logits: of the averaged model.
      seen: classes seen so far.
      real: sums of the clients' features so far.

    Returns:
      recognised: the share of latents that the averaged model assigns to their class.
      coverage: the share of classes of which it recognises half of the latents or more.
      entropy: of its class probabilities, over that of a uniform guess among the classes
        seen.
      nearest: the share of latents whose nearest real class mean is that of their class.
      distance: from the latents' mean to the real one, in standard deviations of the
        class's real features.
      spread: the standard deviation of a class's latents over that of its real features.
    """
    classes = jnp.arange(len(trained))
    no_padding = jnp.ones(len(label), bool)
    is_recognised = jnp.argmax(heads.mask_logits(logits, seen), axis=1) == label
    recognised, latents_of_class = heads.sum_by_class(
        is_recognised[:, None].astype(jnp.float32), label, classes, no_padding
    )
    share = recognised[:, 0] / latents_of_class

    generated = class_spread(reports.moments_of(latent, label, classes, no_padding))
    real_spread = class_spread(real)
    comparable = trained & real_spread.present
    # 1 where there is nothing to compare, so that no class divides by 0
    deviation = jnp.sqrt(jnp.where(comparable, real_spread.variance, 1))
    distance = jnp.sqrt(jnp.sum((generated.mean - real_spread.mean) ** 2, axis=1)) / deviation
    is_nearest = _nearest_class(latent, real_spread) == label
    return {
        "recognised": _mean(share, trained),
        "coverage": _mean(share >= 0.5, trained),
        "entropy": _mean(_entropy(logits, seen), trained[label]),
        "nearest": _mean(is_nearest, comparable[label]),
        "distance": _mean(distance, comparable),
        "spread": _mean(jnp.sqrt(generated.variance) / deviation, comparable),
    }


def _nearest_class(latent: Float[Array, "latents width"], real: Spread) -> Int[Array, " latents"]:
    """Return the class whose mean m is nearest to each latent x."""
    # |x - m|^2 without |x|^2, which is the same for all classes
    mean_square = exact_einsum("cw,cw->c", real.mean, real.mean)
    distance = mean_square - 2 * exact_matmul(latent, real.mean.T)
    return jnp.argmin(jnp.where(real.present, distance, jnp.inf), axis=1)


def _entropy(
    logits: Float[Array, "latents C"],
    seen: Bool[Array, " C"],
) -> Float[Array, " latents"]:
    """Return the entropy over the classes seen, as a share of the largest possible."""
    log_probability = jax.nn.log_softmax(heads.mask_logits(logits, seen))
    # unseen classes have probability 0, and 0 log 0 must be 0
    summand = jnp.where(seen, jnp.exp(log_probability) * log_probability, 0)
    return -jnp.sum(summand, axis=1) / jnp.log(jnp.maximum(jnp.sum(seen), 2))


def _mean(value: Array, counted: Bool[Array, " n"]) -> Weighted:
    """Return the mean over the entries that count, as a metric."""
    total = jnp.sum(jnp.where(counted, value, 0.0))
    return Weighted(total, jnp.sum(counted).astype(jnp.float32))
