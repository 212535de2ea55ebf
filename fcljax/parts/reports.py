"""Reports that several methods share: sums of features by class, and inputs of LoRA pairs.

The server refuses values that are impossible for a client's number of examples and the
largest norm of a feature (`longest_feature`).
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from fcljax.errors import InputError
from fcljax.federated.claims import possible_class_sums, possible_counts, possible_trace
from fcljax.models.heads import sum_by_class
from fcljax.models.prototypes import class_means
from fcljax.models.vit import attention_inputs, longest_attention_inputs
from fcljax.parts.classifiers import Sums, add_batch, add_classes, empty_sums
from fcljax.parts.client import ClientEnd, ClientStep, Report
from fcljax.parts.federate import Run, feature_width
from fcljax.parts.learner import Learner, Params, Reads
from fcljax.parts.server import RuleTime, ServerRound, ServerRule, ServerUpdate
from fcljax.types import ClientContext, PyTree, View

# end of the metric's name, by which `runs/summary.py` finds it and warns
PROTOTYPE_DISTANCE = "prototype_distance"
# name of the server rule that starts classes at their means
HEADTUNE = "headtune"
# the server knows the broadcast weights, not those that a client trained: this much
# may one round of training raise the bound on a feature's norm
TRAINING_FACTOR = 4.0


class Prototypes(NamedTuple):
    """A vector per class."""

    vector: Float[Array, "*clients classes width"]
    present: Bool[Array, "*clients classes"]
    """Whether the class has a vector."""


@runtime_checkable
class Longest(Protocol):
    """Returns an upper bound on the Euclidean norm of a client's features, or infinity."""

    def __call__(self, context: ClientContext, /) -> Float[Array, ""]: ...


def longest_feature(
    run: Run,
    context: ClientContext,
    features: Reads = "prompted",
) -> Float[Array, ""]:
    """Return an upper bound on the Euclidean norm of the classifier's input.

    A network that ends in a layer norm has a finite bound, whatever is injected into it.
    If the network itself trains, the bound is `TRAINING_FACTOR` times that of the
    broadcast weights.
    """
    network = run.network
    broadcast = context.payload.trainable.adapter
    # a personal network is not broadcast, so the server knows nothing of its weights
    is_personal = run.adapter.network is not None and not jax.tree.leaves(broadcast)
    if network.longest is None or is_personal:
        return unbounded(context)
    # the query is a feature of the frozen network, whatever trains
    query_bound = network.longest(context.frozen.network)
    bound = query_bound
    if run.adapter.network:
        bound = TRAINING_FACTOR * network.longest(run.adapter.network(broadcast))
    if features == "both":
        # the two features are concatenated, so their squared norms add up
        return jnp.hypot(query_bound, bound)
    return bound


def unbounded(_context: ClientContext) -> Float[Array, ""]:
    """Return infinity: the features have no known bound."""
    return jnp.float32(jnp.inf)


def class_sums(
    classes: int,
    width: int,
    view: View | None = None,
    longest: Longest = unbounded,
) -> Report:
    """Report feature sums and numbers of examples of the task's classes [Ct], summed over clients.

    Args:
      classes: Ct.
      width: of the features.
      view: of the pass; None: every training batch, or the usual pass of a statistics round.
      longest: bounds the norm of a feature.
    """

    def init(_context: ClientContext) -> Sums:
        return empty_sums(classes, width)

    possible = functools.partial(possible_sums, longest=longest)
    return Report("class_sums", init, add_features, view=view, merge="sum", possible=possible)


def possible_sums(
    context: ClientContext,
    sums: Sums,
    longest: Longest = unbounded,
) -> Bool[Array, ""]:
    """Check that sums are possible for a client with its number of examples."""
    counts_are_possible = possible_counts(sums.examples, context.client.examples)
    return counts_are_possible & possible_class_sums(sums.feature, sums.examples, longest(context))


class ClassMoments(NamedTuple):
    """Sums over the examples of each class."""

    feature: Float[Array, "classes width"]
    square: Float[Array, "classes width"]
    """Of squared features."""
    examples: Float[Array, " classes"]
    """Number of examples."""


def no_moments(classes: int, width: int) -> ClassMoments:
    """Return the sums of no examples."""
    zeros = jnp.zeros((classes, width))
    return ClassMoments(zeros, zeros, jnp.zeros(classes))


def moments_of(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    classes: Int[Array, " classes"],
    mask: Bool[Array, " batch"],
) -> ClassMoments:
    """Return the sums of a batch."""
    feature_sum, examples = sum_by_class(feature, label, classes, mask)
    square_sum, _ = sum_by_class(feature**2, label, classes, mask)
    return ClassMoments(feature_sum, square_sum, examples)


def possible_moments(
    context: ClientContext, reported: ClassMoments, longest: Longest = unbounded
) -> Bool[Array, ""]:
    """Check that sums are possible for a client with its number of examples.

    Sums of squares are not negative, and (sum of x)^2 <= n (sum of x^2) in each class and
    channel (Cauchy and Schwarz).
    """
    # a class of one example reaches equality, so float32 rounding needs some slack
    most = reported.examples[:, None] * reported.square * (1 + 1e-3)
    squares_are_possible = jnp.all(reported.square >= 0) & jnp.all(reported.feature**2 <= most)
    counts_are_possible = possible_counts(reported.examples, context.client.examples)
    trace = jnp.sum(reported.square, axis=1)
    trace_is_possible = possible_trace(trace, reported.examples, longest(context))
    return squares_are_possible & counts_are_possible & trace_is_possible


def normal_of(moments: ClassMoments) -> tuple[Float[Array, "classes width"], Float[Array, "classes width"]]:
    """Return means and variances of every class, channel by channel."""
    # classes without examples have sums of 0, and get mean and variance 0
    count = jnp.maximum(moments.examples, 1)[:, None]
    mean = moments.feature / count
    # rounding may make E[x^2] - E[x]^2 negative, whose root would be NaN
    return mean, jnp.maximum(moments.square / count - mean**2, 0)


def class_prototypes(
    name: str, classes: int, width: int, view: View | None, follows_rule: bool = False
) -> Report:
    """Report the mean features of the task's classes [Ct], one set per client.

    Args:
      name: of the report.
      classes: Ct.
      width: of the features.
      view: of the pass; None: every training batch before its step.
      follows_rule: as of a `Report`.
    """

    def init(_context: ClientContext) -> Sums:
        return empty_sums(classes, width)

    def finalize(_end: ClientEnd, total: Sums) -> Prototypes:
        return Prototypes(*class_means(total.feature, total.examples))

    return Report(name, init, add_features, finalize, view, follows_rule=follows_rule)


def prototype_distance(
    prototype: Float[Array, "classes width"],
    means: Prototypes,
) -> Float[Array, ""]:
    """Return how far learned prototypes are from the mean features of their classes.

    It is the mean distance of a prototype to its class's mean, divided by the mean
    distance between the means of two classes; 0 if there are fewer than two classes.

    Args:
      prototype: of each class.
      means: mean features of each client [clients, classes, width].
    """
    # a client without the class has no mean of it: each class has its own denominator
    present = means.present[..., None]
    mean = jnp.sum(jnp.where(present, means.vector, 0.0), 0) / jnp.maximum(jnp.sum(present, 0), 1)
    has_mean = jnp.any(means.present, axis=0)
    between = jnp.sqrt(jnp.sum((mean[:, None] - mean) ** 2, axis=-1))
    # a class is no pair with itself, and padding classes have no mean
    pairs = has_mean[:, None] & has_mean & ~jnp.eye(len(has_mean), dtype=bool)
    mean_between = jnp.sum(jnp.where(pairs, between, 0.0)) / jnp.maximum(jnp.sum(pairs), 1)
    to_mean = jnp.sqrt(jnp.sum((prototype - mean) ** 2, axis=-1))
    mean_to_mean = jnp.sum(jnp.where(has_mean, to_mean, 0.0)) / jnp.maximum(jnp.sum(has_mean), 1)
    # a ratio has no unit, so that one warning level serves networks of any feature norm
    ratio = mean_to_mean / jnp.where(mean_between > 0, mean_between, 1.0)
    return jnp.where(mean_between > 0, ratio, 0.0)


def add_features(step: ClientStep, total: Sums) -> Sums:
    """Return the sums with the features of a batch."""
    return add_batch(total, step.output.feature, step.batch, step.context.task)


def inputs_of_pairs(step: ClientStep, blocks: int) -> Float[Array, "blocks rows width"]:
    """Return the inputs of the LoRA pairs of a ViT's first blocks, for all tokens of a batch.

    Padding has inputs of 0.

    Args:
      step: of a pass without training; pairs act as in training.
      blocks: number of blocks with pairs.
    """
    network = step.learner.network
    adapter = step.learner.adapter
    frozen = step.context.frozen
    assert adapter.inject is not None
    cached = step.context.cached.adapter
    task = step.context.task
    injection = adapter.inject(cached, step.trainable.adapter, None, task, True, step.batch.mask)

    def of_example(example: PyTree) -> Float[Array, "blocks tokens width"]:
        # a forward pass that is split into microbatches returns no inputs of blocks, but
        # a batch of one is never split
        batch_of_one = jax.tree.map(lambda array: array[None], example)
        features, _ = network.apply(frozen.network, batch_of_one, injection, False, None)
        return attention_inputs(frozen.network, features, blocks)[:, 0]

    x = jax.vmap(of_example)(step.batch.input)
    x = jnp.where(step.batch.mask[:, None, None, None], x, 0.0)
    return rearrange(x, "batch blocks tokens width -> blocks (batch tokens) width")


def longest_inputs(context: ClientContext, blocks: int) -> Float[Array, " blocks"]:
    """Return a bound on the norm of one example's `inputs_of_pairs`, over all tokens of a
    block."""
    return longest_attention_inputs(context.frozen.network, blocks)


def class_mean_rule(run: Run, when: RuleTime) -> ServerRule:
    """Add the clients' sums of the task's classes [Ct] to a `nearest_mean` classifier,
    once per task.

    Args:
      run: for the sizes, and the bound on a feature's norm.
      when: "task_start" or "task_end".
    """

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums = add_classes(params.classifier.sums, round.reports["class_sums"], round.task)
        classifier = params.classifier._replace(sums=sums)
        return ServerUpdate(params._replace(classifier=classifier), state)

    longest = functools.partial(longest_feature, run)
    report = class_sums(run.sizes.task_classes, run.network.width, longest=longest)
    return ServerRule("class_means", update, reports=(report,), when=when)


def start_at_class_means(run: Run, learner: Learner) -> ServerRule:
    """Set the task's new classes to their means over all clients before its first round.

    This is HeadTune's initialisation (FedNCM, Legate et al. 2023).

    Raises:
      InputError: for a classifier whose classes cannot start at means.
    """
    at_means = learner.classifier.at_means
    if at_means is None:
        raise InputError(
            "headtune: classes of this method's classifier cannot start at mean features; leave it out"
        )

    def no_class(_params: Params, _trainable: Params) -> Bool[Array, " C"]:
        return jnp.zeros(run.sizes.classes, bool)

    def update(round: ServerRound, params: Params, started: Bool[Array, " C"]) -> ServerUpdate:
        sums: Sums = round.reports["class_sums"]
        means, present = class_means(sums.feature, sums.examples)
        classes = round.task.classes
        # classes that come back, as in a stream of domains, keep their learned weights
        is_new = present & (classes >= 0) & ~started[classes]
        classifier = at_means(params.classifier, round.task, means, is_new)
        # JAX drops writes beyond the last class: only new classes are marked
        index = jnp.where(is_new, classes, run.sizes.classes)
        started = started.at[index].set(True, mode="drop")
        return ServerUpdate(params._replace(classifier=classifier), started)

    # one pass without augmentation: means of the images as they are evaluated
    view = View(1, run.training.batch_size, augment=False)
    longest = functools.partial(longest_feature, run, features=learner.features)
    width = feature_width(run, learner.features)
    report = class_sums(run.sizes.task_classes, width, view, longest)
    return ServerRule(HEADTUNE, update, no_class, reports=(report,), when="task_start")
