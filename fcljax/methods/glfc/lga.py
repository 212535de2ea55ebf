"""LGA, the successor of GLFC (Dong et al., TPAMI 2023). It differs in three points:

an example's weight is balanced over all earlier tasks, and not over old and new only
the distillation is weighted too
the proxy evaluates a model on features around those of the reconstructed images
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.methods.glfc import glfc, proxy
from fcljax.methods.glfc.glfc import ClientMemory, GLFCOptions, LossWeights, over_mean
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.federate import Run
from fcljax.parts.learner import Params
from fcljax.parts.server import ServerRound
from fcljax.parts.task_start import unlabelled
from fcljax.types import Batch, Method, Task

# bounds on the weight of an example (release)
LEAST_WEIGHT = 0.5
MOST_WEIGHT = 5.0
# largest squared length of a perturbation, relative to that of its feature
NEAR = 0.1
PERTURBED = 5  # perturbations of each feature that count, at most
# perturbations of each feature that are drawn: the release draws until enough are short,
# which has no fixed shape
DRAWN = 20


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
    """Compose LGA."""
    factor = options.loss_weight
    weights = LossWeights(by_tasks, factor, factor, factor, weighs_old=True)
    evaluate = functools.partial(accuracy_around, options, run.sizes.rounds)
    return glfc.compensated(options, run, weights, evaluate)


def by_tasks(
    gap: Float[Array, " B"],
    batch: Batch,
    memory: ClientMemory,
    task: Task,
) -> Float[Array, " B"]:
    """Return category-balanced weights.

    Gaps are taken to the power t / (t + 1). A new example's weight is its gap over the
    mean gap of the new ones. An old example's weight is a sum over earlier tasks: its gap
    over the mean gap of the examples whose classes the client had learned by then.
    """
    learned = memory.current.learned
    index = task.index
    # a power below 1 brings gaps nearer to each other in early tasks
    gap = jnp.where(index > 0, gap ** (index / (index + 1)), gap)
    is_old = learned[batch.label]
    weight = jnp.where(is_old, 0.0, over_mean(gap, ~is_old & batch.mask))

    def add_task(earlier: Array, weight: Array) -> Array:
        group = is_old & (memory.class_task[batch.label] <= earlier)
        return weight + jnp.where(group, over_mean(gap, group & batch.mask), 0.0)

    weight = jax.lax.fori_loop(0, index, add_task, weight)
    clipped = jnp.clip(weight, LEAST_WEIGHT, MOST_WEIGHT)
    return jnp.where(jnp.any(learned), clipped, 1.0)


def accuracy_around(
    options: LGAOptions,
    rounds: int,
    round: ServerRound,
    params: Params,
    state: proxy.Proxy,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Return LGA's score: the accuracy on features around those of the images.

    It is 0 in a task's first rounds.
    """
    view_key, noise_key = jax.random.split(key)
    score = functools.partial(_accuracy, options, round, params, state, view_key, noise_key)
    is_quiet = round.index < options.quiet_share * rounds
    return jax.lax.cond(is_quiet, lambda: jnp.zeros(()), score)


def _accuracy(
    options: LGAOptions,
    round: ServerRound,
    params: Params,
    state: proxy.Proxy,
    view_key: PRNGKeyArray,
    noise_key: PRNGKeyArray,
) -> Float[Array, ""]:
    learner = round.learner
    monitor = state.monitor
    task = round.task
    trainable = learner.trainable(params, task)

    def features(pixels: Array) -> Float[Array, "states D"]:
        batch = unlabelled(learner, pixels)
        return learner.forward(round.frozen, params, trainable, batch, task, False).feature

    image = proxy.training_view(options, learner, monitor, view_key)
    feature = jax.lax.map(features, image.reshape(-1, *image.shape[2:]))
    label = monitor.label.reshape(-1)
    # noise of squared variance, as in the release
    scale = class_variance(feature, label, monitor.used.reshape(-1), len(task.seen)) ** 2

    def of_entry(feature_and_key: tuple[Array, Array], label: Array) -> Float[Array, ""]:
        feature, key_data = feature_and_key
        key = jax.random.wrap_key_data(key_data)
        sample, counts = perturbed(feature, state.radius * scale[label], key)
        logits = learner.classifier.logits(params.classifier, trainable.classifier, sample, task)
        prediction = jnp.argmax(jnp.where(task.seen, logits, -jnp.inf), axis=-1)
        return jnp.sum((prediction == label) & counts) / jnp.maximum(jnp.sum(counts), 1)

    # plain arrays, since the entries go through `jax.lax.map` with the features
    keys = jax.random.key_data(jax.random.split(noise_key, len(feature)))
    return proxy.mean_over_used(of_entry, (feature, keys), monitor)


def class_variance(
    feature: Float[Array, "sets states D"], label: Array, used: Array, classes: int
) -> Float[Array, "classes D"]:
    """Return the variance of each entry of a class's features, over all its used sets."""
    member = jax.nn.one_hot(label, classes) * used[:, None]
    sets = jnp.maximum(jnp.sum(member, axis=0), 1)[:, None]

    def mean(values: Float[Array, "sets states D"]) -> Float[Array, "classes D"]:
        return exact_matmul(member.T, jnp.mean(values, axis=1)) / sets

    return mean((feature - mean(feature)[label][:, None]) ** 2)


def perturbed(
    feature: Float[Array, "states D"], scale: Float[Array, " D"], key: PRNGKeyArray
) -> tuple[Float[Array, "some D"], Array]:
    """Return features with Gaussian noise of these standard deviations, and which of
    them count.

    Of each feature the first `PERTURBED` count whose noise is short enough.
    """
    noise = scale * jax.random.normal(key, (DRAWN, *feature.shape))
    is_short = jnp.sum(noise**2, axis=-1) <= NEAR * jnp.sum(feature**2, axis=-1)
    # the running number of short ones, which is at most PERTURBED for the first of them
    counts = is_short & (jnp.cumsum(is_short, axis=0) <= PERTURBED)
    return (feature + noise).reshape(-1, feature.shape[-1]), counts.reshape(-1)
