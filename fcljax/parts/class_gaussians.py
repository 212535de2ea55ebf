"""Gaussians of the features of every class: the sums that clients send, how a server merges
them, and how it trains a classifier on features that it draws.

The sums of all clients give mean and covariance of all examples, whoever holds them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax import matrices
from fcljax.federated.claims import SUMS, norm_by_gram, possible_counts, possible_trace
from fcljax.models.heads import Head, sum_by_class
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.reports import Longest, unbounded
from fcljax.types import ClientContext, Task

EXTRA_VARIANCE = 1e-4  # is added to every variance (SLCA's release)


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


# ---- sums of clients -------------------------------------------------------------------


def class_statistics(width: int, classes: int, longest: Longest) -> Report:
    """Report sums of features and of their outer products by class.

    Args:
      width: D.
      classes: Ct.
      longest: bounds the norm of a feature.
    """

    def init(_context: ClientContext) -> ClassSums:
        outer = jnp.zeros((classes, width, width))
        return ClassSums(jnp.zeros((classes, width)), outer, jnp.zeros(classes, jnp.int32))

    def add(step: ClientStep, total: ClassSums) -> ClassSums:
        # features of evaluation: the classifier will be used on these
        x = step.forward(step.trainable, train=False).feature
        batch = step.batch
        task_classes = step.context.task.classes
        feature, examples = sum_by_class(x, batch.label, task_classes, batch.mask)

        def outer(label: Array) -> Float[Array, "D D"]:
            # a product of matrices per class: outer products of all examples of a batch
            # would take B x D x D scalars
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
    # sum (x - mean) (x - mean)^T = sum x x^T - n mean mean^T
    scatter = sums.outer - n[..., None] * mean[:, :, None] * mean[:, None, :]
    # a class with one example has scatter 0, and covariance 0 instead of 0 / 0
    return mean, scatter / jnp.maximum(n[..., None] - 1, 1)


def merge_gaussians(gaussians: Gaussians, sums: ClassSums, task: Task) -> Gaussians:
    """Return the Gaussians of all classes with those of the task's classes."""
    mean, covariance = gaussians_of(sums)
    # C = V S V^T has the root V S^(1/2). Eigenvalues and not Cholesky: a class with fewer
    # examples than D has a singular covariance, with values that rounding makes negative
    values, vectors = jax.vmap(matrices.eigh)(covariance)
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0) + EXTRA_VARIANCE)[:, None, :]
    task_index = jnp.full(len(task.classes), task.index)
    of_task = Gaussians(mean, root, task_index, sums.examples > 0)
    # padding classes get an index beyond the last class, and JAX drops such writes
    index = jnp.where(task.classes >= 0, task.classes, len(gaussians.task))
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new, mode="drop"), gaussians, of_task)


# ---- what the server draws -------------------------------------------------------------


def no_gaussians(width: int, classes: int) -> Gaussians:
    """Return the Gaussians before any class was seen."""
    return Gaussians(
        mean=jnp.zeros((classes, width)),
        root=jnp.zeros((classes, width, width)),
        task=jnp.zeros(classes, jnp.int32),
        present=jnp.zeros(classes, bool),
    )


def draw_features(
    gaussians: Gaussians, size: int, key: PRNGKeyArray
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """Draw `size` features of every class, shuffled; classes without examples come last."""
    classes, width = gaussians.mean.shape
    noise_key, order_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (classes, size, width))
    feature = gaussians.mean[:, None] + exact_einsum("cnd,ced->cne", noise, gaussians.root)
    label = jnp.repeat(jnp.arange(classes), size)
    # shapes are fixed, so absent classes are drawn too. Adding 2 sorts them behind all
    # others, where no step reads them
    draws = jax.random.uniform(order_key, label.shape) + 2.0 * ~gaussians.present[label]
    order = jnp.argsort(draws)
    return feature.reshape(-1, width)[order], label[order]


class DrawnTraining(NamedTuple):
    """How the server trains a classifier on drawn features."""

    epochs: int
    size: int
    """Features of each class in an epoch; also the batch size."""
    lr: float
    """Learning rate of SGD with momentum 0.9; its cosine schedule ends at 0."""
    decay: float = 0.0
    """Weight decay."""


def train_on_draws(
    training: DrawnTraining,
    head: Head,
    gaussians: Gaussians,
    logits: Callable[[Head, Array], Array],
    key: PRNGKeyArray,
) -> Head:
    """Train a classifier by cross-entropy on features drawn from all classes so far.

    Args:
      training: epochs, size, learning rate, decay.
      head: the classifier before.
      gaussians: of all classes.
      logits: logits(head, features) -> [batch, C], lowest for classes without examples.
      key: features are drawn anew in each epoch.
    """
    size = training.size
    # a batch has as many features as a class, so an epoch has a step per present class
    steps = jnp.sum(gaussians.present)
    optimiser = optax.chain(optax.add_decayed_weights(training.decay), optax.trace(0.9))

    def epoch(number: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
        features, labels = draw_features(gaussians, size, jax.random.fold_in(key, number))
        # the cosine is constant within an epoch
        rate = training.lr * (1 + jnp.cos(jnp.pi * number / training.epochs)) / 2

        def step(i: Array, carry: tuple[Head, PyTree]) -> tuple[Head, PyTree]:
            head, state = carry
            x = jax.lax.dynamic_slice_in_dim(features, i * size, size)
            y = jax.lax.dynamic_slice_in_dim(labels, i * size, size)

            def loss(head: Head) -> Float[Array, ""]:
                losses = optax.softmax_cross_entropy_with_integer_labels(logits(head, x), y)
                return jnp.mean(losses)

            direction, state = optimiser.update(jax.grad(loss)(head), state, head)
            return jax.tree.map(lambda w, d: w - rate * d, head, direction), state

        return jax.lax.fori_loop(0, steps, step, carry)

    start = (head, optimiser.init(head))
    head, _ = jax.lax.fori_loop(0, training.epochs, epoch, start)
    return head
