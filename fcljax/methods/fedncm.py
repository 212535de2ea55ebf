"""FedNCM (Legate et al. 2023): a training-free classifier of class means of frozen features.

Every client sends the sum of its features and the number of its rows for each class of the task, once; the server's means are those of all
rows together, whoever holds them.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.models.heads import class_sums, mask_logits
from fcljax.models.prototypes import class_means, distance_logits, distances
from fcljax.types import Backbone, Broadcast, Method, Phase, Program, Setting, Upload, View


@dataclasses.dataclass(frozen=True)
class FedNCMConfig:
    """Options of FedNCM."""

    classifier: Literal["linear", "nearest"] = "linear"  # mean features of length 1 as weights, or the nearest mean


FIDELITY: dict[str, dict] = {"intended": {}, "paper": {}, "released": {}}


class Sums(NamedTuple):
    """Sums of features and numbers of rows per class."""

    feature: Float[Array, "classes width"]
    rows: Float[Array, " classes"]


def fedncm(config: FedNCMConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float) -> Method:
    """FedNCM as a method; a client's state is the last task that it has sent its sums for. Epochs and rate do not matter."""
    del epochs, lr
    features = lambda frozen, image, query: backbone.encode(frozen, image, None) if query is None else query
    zeros = lambda classes: Sums(jnp.zeros((classes, backbone.width)), jnp.zeros(classes))

    def look(frozen, broadcast, local: Sums, batch, task, key):
        del broadcast, key
        sums, rows = class_sums(features(frozen, batch.image, batch.query), batch.label, task.classes, batch.mask)
        return Sums(local.feature + sums, local.rows + rows), {}

    def finish(broadcast, local: Sums, sent: Int[Array, ""], task, info):
        del broadcast, info
        new = (sent != task.index).astype(jnp.float32)
        return Upload(sum=Sums(new * local.feature, new * local.rows)), task.index

    def serve(frozen, server: Sums, aggregate, task, key):
        """Add what arrived to the rows of the current classes."""
        del frozen, key
        place = jnp.where(task.classes >= 0, task.classes, setting.classes)
        add = lambda total, sums: total.at[place].add(sums, mode="drop")
        return Sums(add(server.feature, aggregate.sum.feature), add(server.rows, aggregate.sum.rows)), {}

    def predict(frozen, server: Sums, image, query, task):
        return mean_logits(features(frozen, image, query), server, task.seen, config.classifier)

    start = lambda broadcast, state, task, info, key: zeros(setting.task_classes)
    return Method(
        init=lambda key, frozen: zeros(setting.classes),
        init_client=lambda key, server: jnp.int32(-1),
        broadcast=lambda server, task: Broadcast(()),
        client=Program(start, (Phase(View(1, batch_size, shuffle=False, augment=False), look),), finish),
        server=serve,
        predict=predict,
        queries=True,
    )


def mean_logits(feature: Float[Array, "batch width"], sums: Sums, seen, classifier: str) -> Float[Array, "batch classes"]:
    """Logits of a classifier of class means; classes that are not seen, or that nobody had, never win."""
    mean, held = class_means(sums.feature, sums.rows)
    if classifier == "nearest":
        return distance_logits(distances(feature, mean, "squared"), seen & held)
    length = jnp.sqrt(jnp.maximum(jnp.sum(mean**2, axis=-1, keepdims=True), 1e-24))
    return mask_logits(feature @ (mean / length).T, seen & held)
