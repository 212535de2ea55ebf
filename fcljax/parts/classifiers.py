"""Classifiers on features: linear, learned prototypes, class means."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.models.heads import Head, apply_head, init_head, init_truncated, mask_logits, sum_by_class, unit
from fcljax.models.products import exact_matmul
from fcljax.models.prototypes import Distance, class_means, distance_logits, distances
from fcljax.parts.learner import Adapter, AtMeans, Classifier
from fcljax.types import Batch, Task


def linear(
    width: int,
    classes: int,
    init_values: Callable[..., Head] = init_head,
) -> Classifier:
    """Return a linear classifier over all classes of the stream, all of which trains.

    Args:
      width: of the features.
      classes: C.
      init_values: draws the initial values, as `init_head` does.
    """

    def init(key: PRNGKeyArray) -> Head:
        return init_values(key, width, classes)

    def logits(_cached: PyTree, trainable: Head, feature: Array, _task: Task) -> Array:
        return apply_head(trainable, feature)

    return Classifier(init, logits, at_means=weights_at_means)


def weights_at_means(
    head: Head, task: Task, means: Float[Array, "Ct width"], present: Bool[Array, " Ct"]
) -> Head:
    """Set weights as in FedNCM: mean features of length 1, and biases 0."""
    # JAX drops writes beyond the last class: absent and padding classes change nothing
    column = jnp.where(present & (task.classes >= 0), task.classes, len(head.bias))
    kernel = head.kernel.at[:, column].set(unit(means).T, mode="drop")
    return Head(kernel, head.bias.at[column].set(0.0, mode="drop"))


def linear_on(adapter: Adapter, width: int, classes: int) -> Classifier:
    """Return a linear classifier with the initial values of the adapter's authors.

    L2P and DualPrompt draw theirs from a truncated normal distribution (pMAE
    specification, section 6).
    """
    if adapter.truncated:
        return linear(width, classes, init_truncated)
    return linear(width, classes)


def prototypes(
    width: int,
    classes: int,
    form: Distance = "sqrt_scaled",
    std: float = 0.1,
) -> Classifier:
    """Return a classifier with a learned prototype per class (PILoRA, section 4.2).

    Logits are negative distances. The prototypes of the current task train.

    Args:
      width: of the features.
      classes: C.
      form: of the distance (`models.prototypes.distances`).
      std: standard deviation of the initial values.
    """

    def init(key: PRNGKeyArray) -> Float[Array, "C width"]:
        return std * jax.random.normal(key, (classes, width))

    def logits(cached: Array, trainable: Array, feature: Array, task: Task) -> Array:
        return -distances(feature, merge_current(cached, task, trainable), form)

    return Classifier(
        init,
        logits,
        current_classes,
        merge_current,
        cached=_itself,
        lasting=_none,
        at_means=prototypes_at_means,
    )


def prototypes_at_means(
    vectors: Float[Array, "C width"],
    task: Task,
    means: Float[Array, "Ct width"],
    present: Bool[Array, " Ct"],
) -> Float[Array, "C width"]:
    """Set prototypes to mean features (PILoRA +HeadTune)."""
    initial = current_classes(vectors, task)
    return merge_current(vectors, task, jnp.where(present[:, None], means, initial))


def current_classes(
    params: Float[Array, "C width"],
    task: Task,
) -> Float[Array, "Ct width"]:
    """Return the vectors of the task's classes, and 0 for padding classes."""
    # padding is -1, which would read the last class
    vectors = params[jnp.maximum(task.classes, 0)]
    return jnp.where(task.classes[:, None] >= 0, vectors, 0.0)


def merge_current(
    params: Float[Array, "C width"], task: Task, trainable: Float[Array, "Ct width"]
) -> Float[Array, "C width"]:
    """Return the vectors of all classes with those of the task replaced."""
    # JAX drops writes beyond the last class: padding classes change nothing
    index = jnp.where(task.classes >= 0, task.classes, params.shape[0])
    return params.at[index].set(trainable, mode="drop")


def _itself(params: PyTree) -> PyTree:
    return params


def _none(_trainable: PyTree) -> tuple:
    return ()


# ---- class means -----------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums of features and numbers of examples per class."""

    feature: Float[Array, "classes width"]
    examples: Float[Array, " classes"]


class MeanParams(NamedTuple):
    """The parameters of a classifier of class means."""

    inner: PyTree
    """Of the classifier that trains, if there is one."""
    sums: Sums
    """Over all clients."""


def nearest_mean(
    width: int, classes: int, kind: str = "nearest", inner: Classifier | None = None
) -> Classifier:
    """Return a classifier by class means of features, without trainable parameters.

    Args:
      width: of the features.
      classes: C.
      kind: "nearest", the nearest mean; "linear", mean features of length 1 as weights.
      inner: a classifier for training; the means are then only for evaluation (FedCLM).
    """

    def init(_key: PRNGKeyArray, inner_params: PyTree) -> MeanParams:
        return MeanParams(inner_params, empty_sums(classes, width))

    def predict(params: MeanParams, feature: Array, task: Task) -> Array:
        return mean_logits(feature, params.sums, task.seen, kind)

    return computed(classes, init, predict, inner)


def computed(
    classes: int,
    init_params: Callable[[PRNGKeyArray, PyTree], Any],
    predict: Callable[[Any, Array, Task], Array],
    inner: Classifier | None = None,
) -> Classifier:
    """Return a classifier that a server rule computes, and that clients neither train nor send.

    Args:
      classes: C.
      init_params: init_params(key, inner_params) -> initial parameters, a NamedTuple with
        the field `inner`.
      predict: predict(params, feature, task) -> logits of evaluation [batch, C].
      inner: a classifier for training; None: nothing trains.
    """

    def init(key: PRNGKeyArray) -> Any:
        inner_params = ()
        if inner:
            inner_params = inner.init(key)
        return init_params(key, inner_params)

    def evaluate(params: Any, _trainable: PyTree, feature: Array, task: Task) -> Array:
        return predict(params, feature, task)

    # nothing trains: no trainable parameters, and no logits in training
    if inner is None:
        return Classifier(init, no_logits(classes), _nothing, _unchanged, predict=evaluate)

    def trainable_of(params: Any, task: Task) -> PyTree:
        return inner.trainable(params.inner, task)

    def merge(params: Any, task: Task, trainable: PyTree) -> Any:
        return params._replace(inner=inner.merge(params.inner, task, trainable))

    def cached(params: Any) -> PyTree:
        return inner.cached(params.inner)

    at_means = None
    if inner.at_means:
        at_means = functools.partial(_inner_at_means, inner.at_means)

    return Classifier(init, inner.logits, trainable_of, merge, cached, evaluate, inner.lasting, at_means)


def _inner_at_means(at_means: AtMeans, params: Any, task: Task, means: Array, present: Array) -> Any:
    """Set the classifier for training to class means."""
    return params._replace(inner=at_means(params.inner, task, means, present))


def no_logits(classes: int) -> Callable[..., Array]:
    """Return a function of logits 0, for a classifier that does not train."""

    def logits(_cached: PyTree, _trainable: PyTree, feature: Array, _task: Task) -> Array:
        return jnp.zeros((feature.shape[0], classes))

    return logits


def _nothing(_params: PyTree, _task: Task) -> tuple:
    return ()


def _unchanged(params: PyTree, _task: Task, _trainable: PyTree) -> PyTree:
    return params


def empty_sums(classes: int, width: int) -> Sums:
    """Return the sums of no examples."""
    return Sums(jnp.zeros((classes, width)), jnp.zeros(classes))


def add_batch(sums: Sums, feature: Float[Array, "batch width"], batch: Batch, task: Task) -> Sums:
    """Add the examples of a batch to sums of the task's classes [Ct]."""
    feature_sum, examples = sum_by_class(feature, batch.label, task.classes, batch.mask)
    return Sums(sums.feature + feature_sum, sums.examples + examples)


def add_classes(total: Sums, task_sums: Sums, task: Task) -> Sums:
    """Add sums of the task's classes [Ct] to those of all classes [C]."""
    # JAX drops writes beyond the last class: padding classes change nothing
    index = jnp.where(task.classes >= 0, task.classes, total.examples.shape[0])
    return jax.tree.map(lambda old, new: old.at[index].add(new, mode="drop"), total, task_sums)


def mean_logits(
    feature: Float[Array, "batch width"], sums: Sums, seen: Array, kind: str
) -> Float[Array, "batch classes"]:
    """Return logits by class means; classes that are not seen, or have no examples, never win."""
    mean, present = class_means(sums.feature, sums.examples)
    if kind == "nearest":
        return distance_logits(distances(feature, mean, "squared"), seen & present)
    # 1e-12 keeps the division finite for absent classes, whose mean is 0
    return mask_logits(exact_matmul(feature, unit(mean, 1e-12).T), seen & present)
