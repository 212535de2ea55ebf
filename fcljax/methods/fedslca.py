"""FedSLCA: SLCA (Zhang et al., ICCV 2023, arXiv 2303.05118) in a federation, a baseline
of FPPL's tables.

    client     trains the whole network slowly (1e-4) and the classifier faster (1e-2): the slow
               learner
    server     averages
    task end   clients send, for each class of the task, the sums of their features and of the
               features' outer products under the final model, which give the mean and the
               covariance of all examples
    server     from the second task on, aligns a copy of the classifier on features drawn from
               the Gaussians of all classes so far, by cross-entropy on normalised logits; the
               copy predicts, and the next task continues from the clients' classifier

SLCA is a method for one learner, and FPPL's FedSLCA was not released: that the server
aligns, and that sums travel, is our choice. The parameters that travel are those of
FPPL's table I.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.full import FullOptions
from fcljax.federated.claims import SUMS, norm_by_gram, possible_counts, possible_trace
from fcljax.models.heads import Head, apply_head, sum_by_class
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.options import option
from fcljax.parts.classifiers import computed, linear_on
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classifier, Params, cross_entropy_loss, learner
from fcljax.parts.reports import Longest, longest_feature, unbounded
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, Task

# scale of the first task's means after many tasks (release)
SHRINKAGE = 0.1
EXTRA_VARIANCE = 1e-4  # is added to every variance (release)


@dataclasses.dataclass(frozen=True)
class FedSLCAOptions:
    """Options of FedSLCA's classifier alignment; the values are those of SLCA's
    release."""

    align_epochs: int = 5
    """Number of server epochs over drawn features, with equally many features of every
    class."""
    align_samples: int = 256
    """Number of features drawn per class in an epoch; also the batch size."""
    align_lr: float = option(0.01, positive=True)
    """Learning rate of the alignment; its cosine schedule ends at 0."""
    align_decay: float = 5e-4
    """Weight decay of the alignment."""
    logit_norm: float = option(0.1, positive=True)
    """Temperature of the normalised logits."""


# the slow learner of FPPL's section V-A
PRESETS = {"intended": Preset(FedSLCAOptions(), RunConfig(lr=1e-2), (FullOptions(full_lr=1e-4),))}


class Aligned(NamedTuple):
    """The parameters of the classifier."""

    inner: Head
    """The one that clients train."""
    aligned: Head
    """The server's aligned copy."""
    task: Int[Array, ""]
    """The task at whose end it was aligned; -1: none yet."""


class ClassSums(NamedTuple):
    """Sums over examples of the task's classes."""

    feature: Float[Array, "Ct D"]
    outer: Float[Array, "Ct D D"]
    """Of x x^T."""
    examples: Int[Array, " Ct"]


class Gaussians(NamedTuple):
    """The distribution of the features of every class, as the server knows it."""

    mean: Float[Array, "C D"]
    root: Float[Array, "C D D"]
    """A matrix whose product with its transpose is the covariance."""
    task: Int[Array, " C"]
    """The task of each class."""
    present: Bool[Array, " C"]
    """Classes of which there were examples."""


def fedslca(options: FedSLCAOptions, run: Run) -> Method:
    """Compose FedSLCA."""
    classes = run.sizes.classes
    inner = linear_on(run.adapter, run.network.width, classes)
    model = learner(run.network, run.adapter, aligned_classifier(inner, classes))
    server_rules = (alignment(options, run),)
    return federate(run, model, loss=cross_entropy_loss(), server_rules=server_rules)


def aligned_classifier(inner: Classifier, classes: int) -> Classifier:
    """Train `inner`, and predict with the aligned copy once the task is over."""

    def init(_key: PRNGKeyArray, head: Head) -> Aligned:
        return Aligned(head, head, jnp.int32(-1))

    def predict(params: Aligned, feature: Array, task: Task) -> Array:
        # while the task trains, the clients' classifier predicts
        is_over = params.task == task.index
        aligned = apply_head(params.aligned, feature)
        return jnp.where(is_over, aligned, apply_head(params.inner, feature))

    return computed(classes, init, predict, inner)


# ---- class statistics ------------------------------------------------------------------


def statistics(width: int, classes: int, longest: Longest) -> Report:
    """Report sums of features and of their outer products by class, under the final model.

    Args:
      width: D.
      classes: Ct.
      longest: bounds the norm of a feature.
    """

    def init(_context: ClientContext) -> ClassSums:
        outer = jnp.zeros((classes, width, width))
        return ClassSums(jnp.zeros((classes, width)), outer, jnp.zeros(classes, jnp.int32))

    def add(step: ClientStep, total: ClassSums) -> ClassSums:
        x = step.forward(step.trainable, train=False).feature
        batch = step.batch
        task_classes = step.context.task.classes
        feature, examples = sum_by_class(x, batch.label, task_classes, batch.mask)

        def outer(label: Array) -> Float[Array, "D D"]:
            # class by class: the batch has few classes, and D x D products are large
            in_class = batch.mask & (batch.label == label)
            x_of_class = jnp.where(in_class[:, None], x, 0.0)
            return exact_matmul(x_of_class.T, x_of_class)

        outer_sums = jax.vmap(outer)(task_classes)
        sums = ClassSums(feature, outer_sums, examples.astype(jnp.int32))
        return jax.tree.map(jnp.add, total, sums)

    possible = functools.partial(possible_statistics, longest=longest)
    return Report("statistics", init, add, merge="sum", possible=possible)


def possible_statistics(
    context: ClientContext, reported: ClassSums, longest: Longest = unbounded
) -> Bool[Array, ""]:
    """Check that these can be sums over the client's examples.

    The numbers of examples fit the client. In each class of n examples the sums G of
    outer products are a Gram matrix, and no covariance is negative: s s^T <= n G for the
    sum s of features, which is s^T G^+ s <= n.
    """
    counts_fit = possible_counts(reported.examples, context.client.examples)
    traces = jnp.trace(reported.outer, axis1=1, axis2=2)
    traces_fit = possible_trace(traces, reported.examples, longest(context))
    explained = jax.vmap(norm_by_gram)(reported.outer, reported.feature[..., None])
    sums_fit = jnp.all(explained <= reported.examples * (1 + SUMS))
    return counts_fit & traces_fit & sums_fit


def gaussians_of(sums: ClassSums) -> tuple[Float[Array, "Ct D"], Float[Array, "Ct D D"]]:
    """Return means and unbiased covariances of classes over all clients' examples."""
    n = sums.examples.astype(jnp.float32)[:, None]
    mean = sums.feature / jnp.maximum(n, 1)
    # sum of x x^T minus n mean mean^T
    scatter = sums.outer - n[..., None] * mean[:, :, None] * mean[:, None, :]
    return mean, scatter / jnp.maximum(n[..., None] - 1, 1)


def merge_gaussians(gaussians: Gaussians, sums: ClassSums, task: Task) -> Gaussians:
    """Return the Gaussians of all classes with those of the task's classes."""
    mean, covariance = gaussians_of(sums)
    # C = V S V^T has the root V S^(1/2); rounding may leave values just below 0
    values, vectors = jnp.linalg.eigh(covariance)
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0) + EXTRA_VARIANCE)[:, None, :]
    task_index = jnp.full(len(task.classes), task.index)
    of_task = Gaussians(mean, root, task_index, sums.examples > 0)
    # padding has an index beyond the last class, which is dropped
    index = jnp.where(task.classes >= 0, task.classes, len(gaussians.task))
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new, mode="drop"), gaussians, of_task)


# ---- classifier alignment --------------------------------------------------------------


def alignment(options: FedSLCAOptions, run: Run) -> ServerRule:
    """Keep the Gaussians of all classes, and align a copy of the classifier."""
    width = run.network.width
    classes = run.sizes.classes

    def init(_params: Params, _trainable: Params) -> Gaussians:
        return Gaussians(
            mean=jnp.zeros((classes, width)),
            root=jnp.zeros((classes, width, width)),
            task=jnp.zeros(classes, jnp.int32),
            present=jnp.zeros(classes, bool),
        )

    def update(round: ServerRound, params: Params, gaussians: Gaussians) -> ServerUpdate:
        gaussians = merge_gaussians(gaussians, round.reports["statistics"], round.task)
        head = params.classifier.inner
        task = round.task.index

        def align() -> Head:
            tasks = run.sizes.tasks
            return align_classifier(options, head, gaussians, task, tasks, round.key)

        # in the first task the classifier needs no alignment
        aligned = jax.lax.cond(task > 0, align, lambda: head)
        classifier = Aligned(head, aligned, task)
        return ServerUpdate(params._replace(classifier=classifier), gaussians)

    longest = functools.partial(longest_feature, run)
    report = statistics(width, run.sizes.task_classes, longest)
    return ServerRule("alignment", update, init, reports=(report,), when="task_end")


def align_classifier(
    options: FedSLCAOptions,
    head: Head,
    gaussians: Gaussians,
    task: Int[Array, ""],
    tasks: int,
    key: PRNGKeyArray,
) -> Head:
    """Train the classifier on features drawn from all classes so far.

    Args:
      options: epochs, learning rate, temperature.
      head: the clients' classifier.
      gaussians: of all classes.
      task: number of the task, for the shrinkage of old means.
      tasks: T.
      key: features are drawn anew in each epoch.
    """
    size = options.align_samples
    steps = jnp.sum(gaussians.present)  # a batch has as many features as a class
    optimiser = optax.chain(optax.add_decayed_weights(options.align_decay), optax.trace(0.9))

    def epoch(number: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
        epoch_key = jax.random.fold_in(key, number)
        features, labels = draw_features(gaussians, task, size, epoch_key)
        # a cosine to 0 over the epochs
        rate = options.align_lr * (1 + jnp.cos(jnp.pi * number / options.align_epochs)) / 2

        def step(i: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
            head, state = carry
            x = jax.lax.dynamic_slice_in_dim(features, i * size, size)
            y = jax.lax.dynamic_slice_in_dim(labels, i * size, size)

            def loss(head: Head) -> Float[Array, ""]:
                logits = normalised(apply_head(head, x), gaussians, tasks, options.logit_norm)
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

            # plain descent on the drawn features: the network takes no part
            direction, state = optimiser.update(jax.grad(loss)(head), state, head)
            return jax.tree.map(lambda w, d: w - rate * d, head, direction), state

        return jax.lax.fori_loop(0, steps, step, carry)

    start = (head, optimiser.init(head))
    head, _ = jax.lax.fori_loop(0, options.align_epochs, epoch, start)
    return head


def draw_features(
    gaussians: Gaussians, task: Int[Array, ""], size: int, key: PRNGKeyArray
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """Draw `size` features of every class, shuffled; classes without examples come last.

    As in the release the means of old classes are shrunk: in task T those of task t by
    1 - SHRINKAGE + SHRINKAGE (t + 1) / (T + 1).
    """
    classes, width = gaussians.mean.shape
    noise_key, order_key = jax.random.split(key)
    shrink = 1 - SHRINKAGE + SHRINKAGE * (gaussians.task + 1) / (task + 1)
    mean = shrink[:, None] * gaussians.mean
    noise = jax.random.normal(noise_key, (classes, size, width))
    feature = mean[:, None] + exact_einsum("cnd,ced->cne", noise, gaussians.root)
    label = jnp.repeat(jnp.arange(classes), size)
    # absent classes sort behind all others, beyond the last step
    draws = jax.random.uniform(order_key, label.shape) + 2.0 * ~gaussians.present[label]
    order = jnp.argsort(draws)
    return feature.reshape(-1, width)[order], label[order]


def normalised(
    logits: Float[Array, "batch C"], gaussians: Gaussians, tasks: int, temperature: float
) -> Float[Array, "batch C"]:
    """Return logits divided by their length and a temperature.

    The length is the mean over the tasks so far of the length of each task's logits, as
    in SLCA's release. Classes without examples get the lowest finite value.
    """
    # each task's logits have a length of their own (SLCA's release)
    member = jax.nn.one_hot(gaussians.task, tasks) * gaussians.present[:, None]
    has_classes = jnp.any(member > 0, axis=0)
    # at 0 the root would have no gradient
    squares = jnp.maximum(exact_matmul(logits**2, member), 1e-14)
    lengths = jnp.where(has_classes, jnp.sqrt(squares), 0.0)
    mean_length = jnp.sum(lengths, -1) / jnp.maximum(jnp.sum(has_classes), 1)
    scaled = logits / (temperature * mean_length[:, None])
    return jnp.where(gaussians.present, scaled, jnp.finfo(logits.dtype).min)
