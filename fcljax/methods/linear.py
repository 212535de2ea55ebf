"""The linear baseline: FedAvg of a classifier on frozen features, nothing else (McMahan et al. 2017 with a
frozen backbone)."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fcljax.models.heads import apply_head, correct, cross_entropy, init_head, mask_logits
from fcljax.types import Backbone, Broadcast, Method, Phase, Program, Setting, Upload, View, Weighted


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """The linear baseline has no settings of its own."""


FIDELITY: dict[str, dict] = {"intended": {}, "paper": {}, "released": {}}


def linear(
    config: LinearConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """Head-only FedAvg: clients train the classifier with a new Adam every round on the classes of the
    current task."""
    del config
    adam = optax.adam(lr)

    def features(frozen, image, query):
        return backbone.encode(frozen, image, None) if query is None else query

    def start(broadcast, state, task, info, key):
        del state, task, info, key
        return broadcast.wire, adam.init(broadcast.wire)

    def train(frozen, broadcast, local, batch, task, key):
        del broadcast, key
        head, optimiser = local
        feature = features(frozen, batch.image, batch.query)

        def loss_of(head):
            logits = apply_head(head, feature)
            return cross_entropy(logits, batch.label, task.current, batch.mask), correct(
                logits, batch.label, task.current, batch.mask
            )

        (loss, hits), gradient = jax.value_and_grad(loss_of, has_aux=True)(head)
        update, optimiser = adam.update(gradient, optimiser)
        rows = jnp.sum(batch.mask).astype(jnp.float32)
        metrics = {"loss": Weighted(loss * rows, rows), "train_accuracy": Weighted(hits, rows)}
        return (optax.apply_updates(head, update), optimiser), metrics

    def finish(broadcast, local, state, task, info):
        del broadcast, task
        return Upload(mean=local[0], weight=info.rows), state

    def predict(frozen, server, image, query, task):
        return mask_logits(apply_head(server, features(frozen, image, query)), task.seen)

    return Method(
        init=lambda key, frozen: init_head(key, backbone.width, setting.classes),
        broadcast=lambda server, task: Broadcast(server),
        client=Program(start, (Phase(View(epochs, batch_size), train),), finish),
        server=lambda frozen, server, aggregate, task, key: (aggregate.mean, {}),
        predict=predict,
        queries=True,
        trainable=lambda server, task: {"head": server},
    )
