"""The features that clients really have: sums of them by class, beside which generated latents are judged.

The diagnosis says why HePCo's server step helps or not. It is for research in a simulation: uploads grow by
the sums, and a run with it ends with the same model as one without. With `--latents gaussian` the server
draws from the sums in place of generators.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.models.heads import mask_logits, sum_by_class
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run
from fcljax.parts.reports import ClassMoments, moments_of, no_moments, normal_of, possible_moments
from fcljax.types import ClientContext, Metrics, View, Weighted

PER_CLASS = 16  # latents that are drawn of each class


class Spread(NamedTuple):
    """Class means, and how far a class's points are from theirs."""

    mean: Float[Array, "C width"]
    variance: Float[Array, " C"]
    """The mean squared distance of a class's points from their mean."""
    present: Bool[Array, " C"]
    """Classes with two points or more."""


def real_features(run: Run, width: int) -> Report:
    """Sums of the features of a client's clean images under the model that it has just trained."""
    view = View(1, run.training.batch_size, augment=False)

    def init(context: ClientContext) -> ClassMoments:
        del context
        return no_moments(run.sizes.classes, width)

    def step(step: ClientStep, total: ClassMoments) -> ClassMoments:
        batch = step.batch
        more = moments_of(step.output.feature, batch.label, jnp.arange(run.sizes.classes), batch.mask)
        return jax.tree.map(jnp.add, total, more)

    return Report("features", init, step, view=view, merge="sum", possible=possible_moments)


def class_spread(total: ClassMoments) -> Spread:
    """E|x|^2 - |E x|^2 of each class."""
    mean, variance = normal_of(total)
    return Spread(mean, jnp.sum(variance, axis=1), total.examples >= 2)


def compare(
    latent: Float[Array, "latents width"],
    label: Int[Array, " latents"],
    drawn: Bool[Array, " C"],
    logits: Float[Array, "latents C"],
    seen: Bool[Array, " C"],
    real: ClassMoments,
) -> Metrics:
    """How latents of some classes compare with the real features of all classes seen.

    Args:
      latent: `PER_CLASS` of every class.
      label: the classes that they were drawn for.
      drawn: the classes that the generator was trained for; latents of others do not count.
      logits: of the averaged model.
      seen: classes seen so far.
      real: sums of the clients' features so far.

    Returns:
      recognised: the share of latents that the averaged model assigns to their class.
      coverage: the share of classes of which it recognises half of the latents or more.
      entropy: of its class probabilities, over that of a uniform guess among the classes seen.
      nearest: the share of latents whose nearest real class mean is that of their class.
      distance: from the latents' mean to the real one, in standard deviations of the class's real features.
      spread: the standard deviation of a class's latents over that of its real features.
    """
    every = jnp.arange(len(drawn))
    all_of_them = jnp.ones(len(label), bool)
    right = jnp.argmax(mask_logits(logits, seen), axis=1) == label
    count, of_class = sum_by_class(right[:, None].astype(jnp.float32), label, every, all_of_them)
    share = count[:, 0] / of_class
    made = class_spread(moments_of(latent, label, every, all_of_them))
    truth = class_spread(real)
    known = drawn & truth.present
    deviation = jnp.sqrt(jnp.where(known, truth.variance, 1))
    away = jnp.sqrt(jnp.sum((made.mean - truth.mean) ** 2, axis=1)) / deviation
    nearest = _nearest(latent, truth) == label
    return {
        "recognised": _mean(share, drawn),
        "coverage": _mean(share >= 0.5, drawn),
        "entropy": _mean(_entropy(logits, seen), drawn[label]),
        "nearest": _mean(nearest, known[label]),
        "distance": _mean(away, known),
        "spread": _mean(jnp.sqrt(made.variance) / deviation, known),
    }


def _nearest(latent: Float[Array, "latents width"], truth: Spread) -> Int[Array, " latents"]:
    """|x - m|^2 without |x|^2, which is the same for all classes."""
    apart = exact_einsum("cw,cw->c", truth.mean, truth.mean) - 2 * exact_matmul(latent, truth.mean.T)
    return jnp.argmin(jnp.where(truth.present, apart, jnp.inf), axis=1)


def _entropy(logits: Float[Array, "latents C"], seen: Bool[Array, " C"]) -> Float[Array, " latents"]:
    log = jax.nn.log_softmax(mask_logits(logits, seen))
    each = jnp.where(seen, jnp.exp(log) * log, 0)
    return -jnp.sum(each, axis=1) / jnp.log(jnp.maximum(jnp.sum(seen), 2))


def _mean(value: Array, over: Bool[Array, " n"]) -> Weighted:
    return Weighted(jnp.sum(jnp.where(over, value, 0.0)), jnp.sum(over).astype(jnp.float32))
