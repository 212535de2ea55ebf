"""Reports that several methods share: sums and means of features by class, and what LoRA
pairs read.

What they can be follows from the number of examples and the norm of a feature
(`longest_feature`).
"""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from fcljax.federated.claims import possible_class_sums, possible_counts, possible_trace
from fcljax.models.heads import Head, sum_by_class, unit
from fcljax.models.prototypes import class_means
from fcljax.models.vit import attention_inputs, longest_attention_inputs
from fcljax.parts.classifiers import Sums, add_batch, add_classes, empty_sums
from fcljax.parts.client import ClientEnd, ClientStep, Report
from fcljax.parts.federate import Run, feature_width
from fcljax.parts.learner import Params, Reads
from fcljax.parts.server import RuleTime, ServerRound, ServerRule, ServerUpdate
from fcljax.types import ClientContext, PyTree, Task, View

PROTOTYPE_DISTANCE = "prototype_distance"  # what metrics of `prototype_distance` end with; runs warn by it
TRAINED = 4.0  # by which training may raise the bound on a feature's norm in one round


class Prototypes(NamedTuple):
    """A vector for each class of some list of classes."""

    vector: Float[Array, "*clients classes width"]
    present: Bool[Array, "*clients classes"]
    """Which of them exist."""


@runtime_checkable
class Longest(Protocol):
    """Returns a bound on the Euclidean norm of a client's features; infinity: none."""

    def __call__(self, context: ClientContext, /) -> Float[Array, ""]: ...


def longest_feature(run: Run, context: ClientContext, features: Reads = "prompted") -> Float[Array, ""]:
    """Return a bound on the Euclidean norm of what the classifier reads.

    A network that ends in a layer norm has one, whatever is injected into it; others have
    none. Where the network itself trains, the bound is `TRAINED` times that of the weights
    that the server sent.
    """
    network = run.network
    sent = context.payload.trainable.adapter
    # clients may keep their networks to themselves
    is_secret = run.adapter.network is not None and not jax.tree.leaves(sent)
    if network.longest is None or is_secret:
        return unbounded(context)
    longest = network.longest(context.frozen.network)
    query = longest
    if run.adapter.network:
        longest = TRAINED * network.longest(run.adapter.network(sent))
    if features == "both":
        return jnp.hypot(query, longest)
    return longest


def unbounded(_context: ClientContext) -> Float[Array, ""]:
    """Return infinity, for features of which nothing is known."""
    return jnp.float32(jnp.inf)


def class_sums(classes: int, width: int, view: View | None = None, longest: Longest = unbounded) -> Report:
    """Report sums of features and numbers of examples of the task's classes [Ct], added
    up over clients.

    Args:
      classes: Ct.
      width: of the features.
      view: of the pass; None: every training batch, or the usual pass of a round of reports.
      longest: bounds the norm of a feature.
    """

    def init(_context: ClientContext) -> Sums:
        return empty_sums(classes, width)

    possible = functools.partial(possible_sums, longest=longest)
    return Report("class_sums", init, add_features, view=view, merge="sum", possible=possible)


def possible_sums(context: ClientContext, sums: Sums, longest: Longest = unbounded) -> Bool[Array, ""]:
    """Return whether sums can be those of a client that read so many examples."""
    counts_fit = possible_counts(sums.examples, context.client.examples)
    return counts_fit & possible_class_sums(sums.feature, sums.examples, longest(context))


class ClassMoments(NamedTuple):
    """Sums over the examples of each class."""

    feature: Float[Array, "classes width"]
    """Sums of features."""
    square: Float[Array, "classes width"]
    """Sums of their squares."""
    examples: Float[Array, " classes"]
    """Numbers of examples."""


def no_moments(classes: int, width: int) -> ClassMoments:
    """Return sums of no examples yet."""
    zeros = jnp.zeros((classes, width))
    return ClassMoments(zeros, zeros, jnp.zeros(classes))


def moments_of(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    classes: Int[Array, " classes"],
    mask: Bool[Array, " batch"],
) -> ClassMoments:
    """Return the sums of a batch."""
    total, examples = sum_by_class(feature, label, classes, mask)
    return ClassMoments(total, sum_by_class(feature**2, label, classes, mask)[0], examples)


def possible_moments(
    context: ClientContext, sent: ClassMoments, longest: Longest = unbounded
) -> Bool[Array, ""]:
    """Check the numbers of examples, the sums of squares, which are not negative, and
    (sum of x)^2 <= n sum of x^2 in each class and channel."""
    most = sent.examples[:, None] * sent.square * (1 + 1e-3)  # up to rounding
    squares_fit = jnp.all(sent.square >= 0) & jnp.all(sent.feature**2 <= most)
    counts_fit = possible_counts(sent.examples, context.client.examples)
    trace = jnp.sum(sent.square, axis=1)
    return squares_fit & counts_fit & possible_trace(trace, sent.examples, longest(context))


def normal_of(
    total: ClassMoments,
) -> tuple[Float[Array, "classes width"], Float[Array, "classes width"]]:
    """Return means and variances of every class, channel by channel."""
    count = jnp.maximum(total.examples, 1)[:, None]
    mean = total.feature / count
    return mean, jnp.maximum(total.square / count - mean**2, 0)


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
    """Return the mean distance of learned prototypes to the mean features of their
    classes, over the mean distance between the mean features of two classes; 0 where
    there are fewer than two.

    Args:
      prototype: of each class.
      means: mean features of each client, [clients, classes, width], and which client has which class.
    """
    holds = means.present[..., None]
    mean = jnp.sum(jnp.where(holds, means.vector, 0.0), 0) / jnp.maximum(jnp.sum(holds, 0), 1)
    known = jnp.any(means.present, axis=0)
    between_means = jnp.sqrt(jnp.sum((mean[:, None] - mean) ** 2, axis=-1))
    pairs = known[:, None] & known & ~jnp.eye(len(known), dtype=bool)
    mean_between = jnp.sum(jnp.where(pairs, between_means, 0.0)) / jnp.maximum(jnp.sum(pairs), 1)
    to_mean = jnp.sqrt(jnp.sum((prototype - mean) ** 2, axis=-1))
    mean_to_mean = jnp.sum(jnp.where(known, to_mean, 0.0)) / jnp.maximum(jnp.sum(known), 1)
    return jnp.where(mean_between > 0, mean_to_mean / jnp.where(mean_between > 0, mean_between, 1.0), 0.0)


def add_features(step: ClientStep, total: Sums) -> Sums:
    """Return the sums with the features of a batch."""
    return add_batch(total, step.output.feature, step.batch, step.context.task)


def inputs_of_pairs(step: ClientStep, blocks: int) -> Float[Array, "blocks rows width"]:
    """Return what the LoRA pairs of a ViT's first blocks read, of all tokens of a
    batch; 0 for padding.

    Args:
      step: in a pass without training; pairs act as in training.
      blocks: how many have pairs.
    """
    network = step.learner.network
    adapter = step.learner.adapter
    frozen = step.context.frozen
    assert adapter.inject is not None
    cached = step.context.cached.adapter
    task = step.context.task
    injection = adapter.inject(cached, step.trainable.adapter, None, task, True, step.batch.mask)

    def of_example(
        example: PyTree,
    ) -> Float[Array, "blocks tokens width"]:
        # a batch of one has taps whatever the microbatch;
        # vmap makes one computation of them
        batch_of_one = jax.tree.map(lambda array: array[None], example)
        features, _ = network.apply(frozen.network, batch_of_one, injection, False, None)
        return attention_inputs(frozen.network, features, blocks)[:, 0]

    x = jax.vmap(of_example)(step.batch.input)
    x = jnp.where(step.batch.mask[:, None, None, None], x, 0.0)
    return rearrange(x, "batch blocks tokens width -> blocks (batch tokens) width")


def longest_inputs(context: ClientContext, blocks: int) -> Float[Array, " blocks"]:
    """Return a bound on the norm of `inputs_of_pairs` of one example, all tokens of a
    block together."""
    return longest_attention_inputs(context.frozen.network, blocks)


def class_mean_rule(run: Run, when: RuleTime) -> ServerRule:
    """Add the clients' sums of the task's classes [Ct], once per task, to those of a
    `nearest_mean` classifier; each class belongs to one task.

    Args:
      run: for the sizes.
      when: "task_start" or "task_end".
    """

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums = add_classes(params.classifier.sums, round.reports["class_sums"], round.task)
        return ServerUpdate(params._replace(classifier=params.classifier._replace(sums=sums)), state)

    longest = functools.partial(longest_feature, run)
    report = class_sums(run.sizes.task_classes, run.network.width, longest=longest)
    return ServerRule("class_means", update, reports=(report,), when=when)


@runtime_checkable
class PlaceMeans(Protocol):
    """Puts class means into a classifier."""

    def __call__(
        self, params: Params, task: Task, means: Float[Array, "Ct width"], present: Bool[Array, " Ct"], /
    ) -> Params:
        """The server's parameters with the classifier of the task's classes at these
        means; a class that is not present keeps what it has."""
        ...


def weights_at_means(params: Params, task: Task, means: Array, present: Array) -> Params:
    """Start the task's classes of a linear classifier as in FedNCM: weights are mean
    features of length 1, without a bias."""
    head: Head = params.classifier
    column = jnp.where(present & (task.classes >= 0), task.classes, len(head.bias))
    kernel = head.kernel.at[:, column].set(unit(means).T, mode="drop")
    return params._replace(classifier=Head(kernel, head.bias.at[column].set(0.0, mode="drop")))


def start_at_class_means(
    run: Run,
    place: PlaceMeans,
    features: Reads = "prompted",
) -> ServerRule:
    """Start the classifier at the class means over all clients, whose features are
    summed once before a task's first round (FedNCM, Legate et al. 2023: HeadTune).

    Args:
      run: for the sizes.
      place: puts the means into the classifier.
      features: what the classifier reads.
    """

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sums: Sums = round.reports["class_sums"]
        means, present = class_means(sums.feature, sums.examples)
        return ServerUpdate(place(params, round.task, means, present), state)

    view = View(1, run.training.batch_size, augment=False)
    longest = functools.partial(longest_feature, run, features=features)
    report = class_sums(run.sizes.task_classes, feature_width(run, features), view, longest)
    return ServerRule("headtune", update, reports=(report,), when="task_start")
