"""LGA, the successor of GLFC (Dong et al., TPAMI 2023), in what it does otherwise (specification B').

A row's weight is balanced over all earlier tasks and not over old and new alone, the distillation is weighted
too, and the proxy judges a model by features around those of the images that it rebuilds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.methods.glfc import glfc
from fcljax.methods.glfc.glfc import GLFCOptions, Known, LossWeights, compensated, over_mean
from fcljax.methods.glfc.proxy import Proxy, over_used, shown
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.federate import Run
from fcljax.parts.learner import Params
from fcljax.parts.server import ServerRound
from fcljax.parts.task_start import unlabelled
from fcljax.types import Batch, Method, Task

# Of a row's weight
LEAST = 0.5
MOST = 5.0
NEAR = 0.1  # the squared length of a perturbation over that of its feature, at the most
# Perturbations of each feature that count, and that are drawn
PERTURBED = 5
TRIED = 20


@dataclasses.dataclass(frozen=True)
class LGAOptions(GLFCOptions):
    """Options of LGA: GLFC's and these."""

    loss_weight: float = 1.0
    """Weight lambda of the whole loss."""
    quiet_share: float = option(0.6, most=1.0)
    """Fraction of a task's rounds, counted from the first, in which the merged model
    scores 0 (release: 6 of 10)."""


PRESETS = {
    name: preset._replace(options=LGAOptions(**dataclasses.asdict(preset.options)))
    for name, preset in glfc.PRESETS.items()
}
PRESETS["released"] = PRESETS["released"]._replace(
    options=dataclasses.replace(PRESETS["released"].options, reset_best="second")
)


def lga(options: LGAOptions, run: Run) -> Method:
    """LGA as a method."""
    factor = options.loss_weight
    weights = LossWeights(by_tasks, factor, factor, factor, weighs_old=True)
    return compensated(options, run, weights, functools.partial(around, options, run.sizes.rounds))


def by_tasks(gap: Float[Array, " B"], batch: Batch, known: Known, task: Task) -> Float[Array, " B"]:
    """Category-balanced weights: gaps to the power t / (t + 1), over the mean of the new rows; and for every
    earlier task over the mean of the rows that the client had learned by then, all of which add up."""
    learned = known.now.learned
    index = task.index
    gap = jnp.where(index > 0, gap ** (index / (index + 1)), gap)
    old = learned[batch.label]
    weight = jnp.where(old, 0.0, over_mean(gap, ~old & batch.mask))

    def add(block: Array, weight: Array) -> Array:
        group = old & (known.block[batch.label] <= block)
        return weight + jnp.where(group, over_mean(gap, group & batch.mask), 0.0)

    weight = jax.lax.fori_loop(0, index, add, weight)
    return jnp.where(jnp.any(learned), jnp.clip(weight, LEAST, MOST), 1.0)


def around(
    options: LGAOptions, rounds: int, round: ServerRound, params: Params, proxy: Proxy, key: PRNGKeyArray
) -> Float[Array, ""]:
    """LGA's judge: the accuracy on features around those of the images; 0 in a task's first rounds."""
    view, draw = jax.random.split(key)
    judge = functools.partial(_accuracy, options, round, params, proxy, view, draw)
    return jax.lax.cond(round.index < options.quiet_share * rounds, lambda: jnp.zeros(()), judge)


def _accuracy(
    options: LGAOptions,
    round: ServerRound,
    params: Params,
    proxy: Proxy,
    view: PRNGKeyArray,
    draw: PRNGKeyArray,
) -> Float[Array, ""]:
    learner = round.learner
    monitor = proxy.monitor
    task = round.task
    trainable = learner.trainable(params, task)

    def features(pixels: Array) -> Float[Array, "states D"]:
        batch = unlabelled(learner, pixels)
        return learner.forward(round.frozen, params, trainable, batch, task, False).feature

    image = shown(options, learner, monitor, view)
    feature = jax.lax.map(features, image.reshape(-1, *image.shape[2:]))
    scale = class_variance(feature, monitor.label.reshape(-1), monitor.used.reshape(-1), len(task.seen)) ** 2

    def share(args: tuple) -> Array:
        (mine, key), label = args
        some, accepted = perturbed(mine, proxy.radius * scale[label], jax.random.wrap_key_data(key))
        logits = learner.classifier.logits(params.classifier, trainable.classifier, some, task)
        found = jnp.argmax(jnp.where(task.seen, logits, -jnp.inf), axis=-1)
        return jnp.sum((found == label) & accepted) / jnp.maximum(jnp.sum(accepted), 1)

    keys = jax.random.key_data(jax.random.split(draw, len(feature)))
    return over_used(share, (feature, keys), monitor)


def class_variance(
    feature: Float[Array, "sets states D"], label: Array, used: Array, classes: int
) -> Float[Array, "classes D"]:
    """The variance of each entry of a class's features, over all its used sets."""
    member = jax.nn.one_hot(label, classes) * used[:, None]
    sets = jnp.maximum(jnp.sum(member, axis=0), 1)[:, None]

    def mean(values: Float[Array, "sets states D"]) -> Float[Array, "classes D"]:
        return exact_matmul(member.T, jnp.mean(values, axis=1)) / sets

    return mean((feature - mean(feature)[label][:, None]) ** 2)


def perturbed(
    feature: Float[Array, "states D"], scale: Float[Array, " D"], key: PRNGKeyArray
) -> tuple[Float[Array, "some D"], Array]:
    """Each feature with Gaussian noise of these deviations, several times, and which of them count: the first
    few whose noise is short enough."""
    noise = scale * jax.random.normal(key, (TRIED, *feature.shape))
    short = jnp.sum(noise**2, axis=-1) <= NEAR * jnp.sum(feature**2, axis=-1)
    accepted = short & (jnp.cumsum(short, axis=0) <= PERTURBED)
    return (feature + noise).reshape(-1, feature.shape[-1]), accepted.reshape(-1)
