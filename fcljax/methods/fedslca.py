"""FedSLCA: SLCA (Zhang et al., ICCV 2023, arXiv 2303.05118) in a federation, a baseline of FPPL's tables.

    client     trains the whole network slowly (1e-4) and the classifier faster (1e-2): the slow learner
    server     averages
    task end   clients send, for each class of the task, the sums of their features and of the features' outer
               products under the final model; added up they are the mean and the covariance of all examples
    server     from the second task on, aligns a copy of the classifier on features drawn from the Gaussians
               of all classes so far, by cross-entropy on normalised logits; the copy predicts, and the next
               task goes on with the classifier that clients trained

SLCA is a method for one learner, and FPPL's FedSLCA was not released: that the server aligns, and that sums
travel, are ours. The parameters that travel are those of FPPL's table I.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.full import FullOptions
from fcljax.federated.claims import possible_counts
from fcljax.models.heads import Head, apply_head, sum_by_class
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.options import option
from fcljax.parts.classifiers import computed, linear_on
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classifier, Params, cross_entropy_loss, learner
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, Task

SHRUNK = 0.1  # how much the first class's mean is shrunk when many tasks have followed (release)
SPREAD = 1e-4  # is added to every variance (release)


@dataclasses.dataclass(frozen=True)
class FedSLCAOptions:
    """Options of FedSLCA's classifier alignment; the values are those of SLCA's release."""

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
    """What clients train."""
    aligned: Head
    """What the server made of it at the end of task `after`."""
    after: Int[Array, ""]


class ClassSums(NamedTuple):
    """Sums over examples of the task's classes."""

    feature: Float[Array, "Ct D"]
    outer: Float[Array, "Ct D D"]
    """Of x x^T."""
    examples: Int[Array, " Ct"]


class Gaussians(NamedTuple):
    """What the server knows of the features of every class."""

    mean: Float[Array, "C D"]
    root: Float[Array, "C D D"]
    """A matrix whose product with its transpose is the covariance."""
    task: Int[Array, " C"]
    """The task of each class."""
    present: Bool[Array, " C"]
    """Whether anybody had examples of it."""


def fedslca(options: FedSLCAOptions, run: Run) -> Method:
    """FedSLCA as a method."""
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    model = learner(run.network, run.adapter, aligned_classifier(head, run.sizes.classes))
    return federate(run, model, loss=cross_entropy_loss(), server_rules=(alignment(options, run),))


def aligned_classifier(head: Classifier, classes: int) -> Classifier:
    """Trains `head` and predicts with the aligned copy, once its task is over."""

    def first(key: PRNGKeyArray, inner: Head) -> Aligned:
        del key
        return Aligned(inner, inner, jnp.int32(-1))

    def predict(params: Aligned, feature: Array, task: Task) -> Array:
        over = params.after == task.index
        return jnp.where(over, apply_head(params.aligned, feature), apply_head(params.inner, feature))

    return computed(classes, first, predict, head)


# ---- class statistics --------------------------------------------------------------------------------------


def statistics(width: int, classes: int) -> Report:
    """Sums of features and of their outer products of the task's classes, under the final model.

    Args:
      width: D.
      classes: Ct.
    """

    def init(context: ClientContext) -> ClassSums:
        del context
        outer = jnp.zeros((classes, width, width))
        return ClassSums(jnp.zeros((classes, width)), outer, jnp.zeros(classes, jnp.int32))

    def add(step: ClientStep, total: ClassSums) -> ClassSums:
        x = step.forward(step.trainable, train=False).feature
        batch = step.batch
        own = step.context.task.classes
        feature, examples = sum_by_class(x, batch.label, own, batch.mask)

        def outer(label: Array) -> Float[Array, "D D"]:
            mine = jnp.where((batch.mask & (batch.label == label))[:, None], x, 0.0)
            return exact_matmul(mine.T, mine)

        more = ClassSums(feature, jax.vmap(outer)(own), examples.astype(jnp.int32))
        return jax.tree.map(jnp.add, total, more)

    return Report("statistics", init, add, merge="sum", possible=possible_statistics)


def possible_statistics(context: ClientContext, sent: ClassSums) -> Bool[Array, ""]:
    """Whether these can be sums over the examples of such a client: numbers of examples that it has, and
    |sum of x|^2 <= n sum of |x|^2 in each class."""
    n = sent.examples.astype(jnp.float32)
    square = jnp.trace(sent.outer, axis1=1, axis2=2)
    length = jnp.sum(sent.feature**2, axis=1)
    far = jnp.all(length <= n * jnp.maximum(square, 0) * (1 + 1e-3))  # up to rounding
    return far & possible_counts(sent.examples, context.client.examples)


def gaussians_of(sums: ClassSums) -> tuple[Float[Array, "Ct D"], Float[Array, "Ct D D"]]:
    """Means and unbiased covariances of classes from the sums of all clients: of the pooled examples."""
    n = sums.examples.astype(jnp.float32)[:, None]
    mean = sums.feature / jnp.maximum(n, 1)
    scatter = sums.outer - n[..., None] * mean[:, :, None] * mean[:, None, :]
    return mean, scatter / jnp.maximum(n[..., None] - 1, 1)


def merge_gaussians(known: Gaussians, sums: ClassSums, task: Task) -> Gaussians:
    """The Gaussians of all classes with those of the task's; padding classes are dropped."""
    mean, covariance = gaussians_of(sums)
    values, vectors = jnp.linalg.eigh(covariance)  # rounding may leave values just below 0
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0) + SPREAD)[:, None, :]
    number = jnp.full(len(task.classes), task.index)
    place = jnp.where(task.classes >= 0, task.classes, len(known.task))
    new = Gaussians(mean, root, number, sums.examples > 0)
    return jax.tree.map(lambda old, own: old.at[place].set(own, mode="drop"), known, new)


# ---- classifier alignment ----------------------------------------------------------------------------------


def alignment(options: FedSLCAOptions, run: Run) -> ServerRule:
    """The Gaussians of all classes, and the aligned copy of the classifier."""
    width = run.network.width
    classes = run.sizes.classes

    def init(params: Params, trainable: Params) -> Gaussians:
        del params, trainable
        root = jnp.zeros((classes, width, width))
        nobody = jnp.zeros(classes, bool)
        return Gaussians(jnp.zeros((classes, width)), root, jnp.zeros(classes, jnp.int32), nobody)

    def update(round: ServerRound, params: Params, known: Gaussians) -> ServerUpdate:
        known = merge_gaussians(known, round.reports["statistics"], round.task)
        head = params.classifier.inner
        number = round.task.index

        def aligned() -> Head:
            return align_classifier(options, head, known, number, run.sizes.tasks, round.key)

        new = jax.lax.cond(number > 0, aligned, lambda: head)
        return ServerUpdate(params._replace(classifier=Aligned(head, new, number)), known)

    report = statistics(width, run.sizes.task_classes)
    return ServerRule("alignment", update, init, reports=(report,), when="task_end")


def align_classifier(
    options: FedSLCAOptions,
    head: Head,
    known: Gaussians,
    task: Int[Array, ""],
    tasks: int,
    key: PRNGKeyArray,
) -> Head:
    """The classifier after some epochs over features of all classes so far, drawn anew in each epoch."""
    size = options.align_samples
    seen = jnp.sum(known.present)
    descent = optax.chain(optax.add_decayed_weights(options.align_decay), optax.trace(0.9))

    def epoch(number: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
        features, labels = draw_features(known, task, size, jax.random.fold_in(key, number))
        rate = options.align_lr * (1 + jnp.cos(jnp.pi * number / options.align_epochs)) / 2

        def step(i: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
            head, state = carry
            x, y = (jax.lax.dynamic_slice_in_dim(each, i * size, size) for each in (features, labels))

            def loss(head: Head) -> Float[Array, ""]:
                logits = normalised(apply_head(head, x), known, tasks, options.logit_norm)
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

            direction, state = descent.update(jax.grad(loss)(head), state, head)
            return jax.tree.map(lambda w, by: w - rate * by, head, direction), state

        return jax.lax.fori_loop(0, seen, step, carry)

    head, _ = jax.lax.fori_loop(0, options.align_epochs, epoch, (head, descent.init(head)))
    return head


def draw_features(
    known: Gaussians, task: Int[Array, ""], size: int, key: PRNGKeyArray
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """`size` features of every class, shuffled, those of classes that nobody had at the end.

    As in the release the means of old classes are shrunk: in task T those of task t by 1 - SHRUNK + SHRUNK
    (t + 1) / (T + 1).
    """
    classes, width = known.mean.shape
    normal, order = jax.random.split(key)
    shrink = 1 - SHRUNK + SHRUNK * (known.task + 1) / (task + 1)
    noise = jax.random.normal(normal, (classes, size, width))
    drawn = (shrink[:, None] * known.mean)[:, None] + exact_einsum("cnd,ced->cne", noise, known.root)
    label = jnp.repeat(jnp.arange(classes), size)
    shuffled = jnp.argsort(jax.random.uniform(order, label.shape) + 2.0 * ~known.present[label])
    return drawn.reshape(-1, width)[shuffled], label[shuffled]


def normalised(
    logits: Float[Array, "batch C"], known: Gaussians, tasks: int, temperature: float
) -> Float[Array, "batch C"]:
    """Logits divided by their length and a temperature.

    The length is the mean over the tasks so far of the length of each task's logits, as in SLCA's release.
    Classes that nobody had are left out.
    """
    member = jax.nn.one_hot(known.task, tasks) * known.present[:, None]
    exists = jnp.any(member > 0, axis=0)
    squares = jnp.maximum(exact_matmul(logits**2, member), 1e-14)  # whose root has a gradient
    length = jnp.sum(jnp.where(exists, jnp.sqrt(squares), 0.0), -1) / jnp.maximum(jnp.sum(exists), 1)
    unit = logits / (temperature * length[:, None])
    return jnp.where(known.present, unit, jnp.finfo(logits.dtype).min)
