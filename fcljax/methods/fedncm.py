"""FedNCM (Legate et al. 2023): a training-free classifier of class means of frozen features.

Every client sends the sum of its features and the number of its rows for each class of the task, once; the
server's means are those of all rows together, whoever holds them.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.models.heads import class_sums, mask_logits
from fcljax.models.prototypes import class_means, distance_logits, distances
from fcljax.types import Backbone, Batch, Broadcast, Method, Phase, Program, Setting, Task, Upload, View


@dataclasses.dataclass(frozen=True)
class FedNCMConfig:
    """Options of FedNCM."""

    classifier: Literal["linear", "nearest"] = (
        "linear"  # mean features of length 1 as weights, or the nearest mean
    )


FIDELITY: dict[str, dict] = {"intended": {}, "paper": {}, "released": {}}


class Sums(NamedTuple):
    """Sums of features and numbers of rows per class."""

    feature: Float[Array, "classes width"]
    rows: Float[Array, " classes"]


def fedncm(
    config: FedNCMConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """FedNCM as a method; a client's state is the last task that it has sent its sums for. Epochs and rate do
    not matter."""
    del epochs, lr
    features = lambda frozen, image, query: backbone.encode(frozen, image, None) if query is None else query

    def look(frozen, broadcast, local: Sums, batch, task, key):
        del broadcast, key
        return add_batch(local, features(frozen, batch.image, batch.query), batch, task), {}

    def finish(broadcast, local: Sums, sent: Int[Array, ""], task, info):
        del broadcast, info
        new = (sent != task.index).astype(jnp.float32)
        return Upload(sum=Sums(new * local.feature, new * local.rows)), task.index

    def serve(frozen, server: Sums, aggregate, task, key):
        del frozen, key
        return add_classes(server, aggregate.sum, task), {}

    def predict(frozen, server: Sums, image, query, task):
        return mean_logits(features(frozen, image, query), server, task.seen, config.classifier)

    start = lambda broadcast, state, task, info, key: empty_sums(setting.task_classes, backbone.width)
    return Method(
        init=lambda key, frozen: empty_sums(setting.classes, backbone.width),
        init_client=lambda key, server: jnp.int32(-1),
        broadcast=lambda server, task: Broadcast(()),
        client=Program(start, (Phase(View(1, batch_size, shuffle=False, augment=False), look),), finish),
        server=serve,
        predict=predict,
        queries=True,
    )


def empty_sums(classes: int, width: int) -> Sums:
    """Sums of no rows yet."""
    return Sums(jnp.zeros((classes, width)), jnp.zeros(classes))


def add_batch(sums: Sums, feature: Float[Array, "batch width"], batch: Batch, task: Task) -> Sums:
    """A client's sums of the task's classes with the rows of a batch."""
    more, rows = class_sums(feature, batch.label, task.classes, batch.mask)
    return Sums(sums.feature + more, sums.rows + rows)


def add_classes(total: Sums, arrived: Sums, task: Task) -> Sums:
    """The server's sums of all classes with what arrived for those of the task; padding classes are
    dropped."""
    place = jnp.where(task.classes >= 0, task.classes, total.rows.shape[0])
    return Sums(*(old.at[place].add(new, mode="drop") for old, new in zip(total, arrived, strict=True)))


def mean_logits(
    feature: Float[Array, "batch width"], sums: Sums, seen, classifier: str
) -> Float[Array, "batch classes"]:
    """Logits of a classifier of class means; classes that are not seen, or that nobody had, never win."""
    mean, held = class_means(sums.feature, sums.rows)
    if classifier == "nearest":
        return distance_logits(distances(feature, mean, "squared"), seen & held)
    length = jnp.sqrt(jnp.maximum(jnp.sum(mean**2, axis=-1, keepdims=True), 1e-24))
    return mask_logits(feature @ (mean / length).T, seen & held)
