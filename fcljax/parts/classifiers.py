"""Classifiers on features as parts of a learner: linear, learned prototypes, class means."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.models.heads import Head, apply_head, class_sums, init_head, init_truncated, mask_logits
from fcljax.models.prototypes import Distance, class_means, distance_logits, distances
from fcljax.parts.learner import Adapter, Classifier
from fcljax.types import Batch, Task


def linear(width: int, classes: int, first: Callable[..., Head] = init_head) -> Classifier:
    """A linear classifier over all classes of the stream, all of which trains and travels. `first` draws its
    first values, as `init_head` does."""

    def logits(cached: PyTree, part: PyTree, feature: Array, task: Task) -> Array:
        del cached, task
        return apply_head(part, feature)

    return Classifier(init=lambda key: first(key, width, classes), logits=logits)


def linear_on(adapter: Adapter, width: int, classes: int) -> Classifier:
    """A linear classifier with the first values that the adapter's source draws (pMAE specification, section
    6: L2P and DualPrompt have their own)."""
    return linear(width, classes, init_truncated if adapter.truncated else init_head)


def prototypes(
    width: int, classes: int, form: Distance = "sqrt_scaled", deviation: float = 0.1
) -> Classifier:
    """A learned prototype per class; those of the current task train. Logits are negative distances (PILoRA,
    section 4.2).

    Args:
      width: of the features.
      classes: C.
      form: of the distance (`models.prototypes.distances`).
      deviation: of the normal distribution of the first values.
    """

    def init(key: PRNGKeyArray) -> Float[Array, "C width"]:
        return deviation * jax.random.normal(key, (classes, width))

    def logits(cached: Array, part: Array, feature: Array, task: Task) -> Array:
        return -distances(feature, put_current(cached, task, part), form)

    return Classifier(init, logits, part=current_rows, put=put_current, cached=lambda params: params)


def current_rows(params: Float[Array, "C width"], task: Task) -> Float[Array, "Ct width"]:
    """The rows of the task's classes; those of padding classes are 0."""
    rows = params[jnp.maximum(task.classes, 0)]
    return jnp.where(task.classes[:, None] >= 0, rows, 0.0)


def put_current(
    params: Float[Array, "C width"], task: Task, part: Float[Array, "Ct width"]
) -> Float[Array, "C width"]:
    """All rows with those of the task replaced; padding classes are dropped."""
    row = jnp.where(task.classes >= 0, task.classes, params.shape[0])
    return params.at[row].set(part, mode="drop")


# ---- class means -------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums of features and numbers of rows per class."""

    feature: Float[Array, "classes width"]
    rows: Float[Array, " classes"]


class MeanParams(NamedTuple):
    """Sums over all clients for each class, and the parameters of the classifier that trains, if one does."""

    inner: PyTree
    sums: Sums


def nearest_mean(
    width: int, classes: int, kind: str = "nearest", inner: Classifier | None = None
) -> Classifier:
    """A classifier of class means of features, which nothing trains. With `inner`, that one trains and the
    means are for evaluation alone (FedCLM).

    Args:
      width: of the features.
      classes: C.
      kind: "nearest", the nearest mean; "linear", mean features of length 1 as weights.
      inner: what trains.
    """

    def init(key: PRNGKeyArray) -> MeanParams:
        return MeanParams(inner.init(key) if inner else (), empty_sums(classes, width))

    def predict(params: MeanParams, part: PyTree, feature: Array, task: Task) -> Array:
        del part
        return mean_logits(feature, params.sums, task.seen, kind)

    if inner is None:  # nothing trains, so nothing needs the logits of training
        logits = lambda cached, part, feature, task: jnp.zeros((feature.shape[0], classes))
        return Classifier(init, logits, part=lambda params, task: (), put=_as_it_is, predict=predict)
    return Classifier(
        init,
        logits=inner.logits,
        part=lambda params, task: inner.part(params.inner, task),
        put=lambda params, task, part: params._replace(inner=inner.put(params.inner, task, part)),
        cached=lambda params: inner.cached(params.inner),
        predict=predict,
    )


def _as_it_is(params: PyTree, task: Task, part: PyTree) -> PyTree:
    del task, part
    return params


def empty_sums(classes: int, width: int) -> Sums:
    """Sums of no rows yet."""
    return Sums(jnp.zeros((classes, width)), jnp.zeros(classes))


def add_batch(sums: Sums, feature: Float[Array, "batch width"], batch: Batch, task: Task) -> Sums:
    """A client's sums of the task's classes with the rows of a batch."""
    more, rows = class_sums(feature, batch.label, task.classes, batch.mask)
    return Sums(sums.feature + more, sums.rows + rows)


def add_classes(total: Sums, arrived: Sums, task: Task) -> Sums:
    """The server's sums of all classes with what arrived for the task's; padding classes are dropped."""
    place = jnp.where(task.classes >= 0, task.classes, total.rows.shape[0])
    return Sums(*(old.at[place].add(new, mode="drop") for old, new in zip(total, arrived, strict=True)))


def mean_logits(
    feature: Float[Array, "batch width"], sums: Sums, seen: Array, kind: str
) -> Float[Array, "batch classes"]:
    """Logits of a classifier of class means; classes that are not seen, or that nobody had, never win."""
    mean, cached = class_means(sums.feature, sums.rows)
    if kind == "nearest":
        return distance_logits(distances(feature, mean, "squared"), seen & cached)
    length = jnp.sqrt(jnp.maximum(jnp.sum(mean**2, axis=-1, keepdims=True), 1e-24))
    return mask_logits(feature @ (mean / length).T, seen & cached)
