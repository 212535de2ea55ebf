"""FedCLM (a baseline of PILoRA's tables): LoRA and a linear classifier trained by FedAvg, the nearest class mean at inference.

After the last round of a task every client sends sums of features and numbers of rows of the task's classes under the final model. Means
of old classes are not computed again: nobody has their data any more.
"""

from typing import NamedTuple

import jax.numpy as jnp

from fcljax.methods.fedncm import Sums, mean_logits
from fcljax.methods.finetune import FinetuneConfig, Recipe, Tuned, features, init_tuned, make_client, make_method
from fcljax.models.heads import class_sums
from fcljax.types import Backbone, Broadcast, Extra, Method, Phase, Program, Setting, Upload, View


class ServerState(NamedTuple):
    """The averaged parameters, and sums over all clients for each class."""

    tuned: Tuned
    sums: Sums


def fedclm(config: FinetuneConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float) -> Method:
    """FedCLM as a method."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def init(key, frozen) -> ServerState:
        del frozen
        empty = Sums(jnp.zeros((setting.classes, backbone.width)), jnp.zeros(setting.classes))
        return ServerState(init_tuned(recipe, key), empty)

    def look(frozen, broadcast, local: Sums, batch, task, key):
        del key
        feature = features(recipe, frozen, broadcast.wire, batch.image)
        sums, rows = class_sums(feature, batch.label, task.classes, batch.mask)
        return Sums(local.feature + sums, local.rows + rows), {}

    def start(broadcast, state, task, info, key) -> Sums:
        del broadcast, state, task, info, key
        return Sums(jnp.zeros((setting.task_classes, backbone.width)), jnp.zeros(setting.task_classes))

    def gather_means(frozen, server: ServerState, aggregate, task, key):
        del frozen, key
        place = jnp.where(task.classes >= 0, task.classes, setting.classes)
        put = lambda old, new: old.at[place].set(new, mode="drop")
        return server._replace(sums=Sums(put(server.sums.feature, aggregate.sum.feature), put(server.sums.rows, aggregate.sum.rows))), {}

    def predict(frozen, server: ServerState, image, query, task):
        del query
        return mean_logits(features(recipe, frozen, server.tuned, image), server.sums, task.seen, "nearest")

    finish = lambda broadcast, local, state, task, info: (Upload(sum=local), state)
    survey = Program(start, (Phase(View(1, batch_size, shuffle=False, augment=False), look),), finish)
    return make_method(
        recipe, make_client(recipe), init=init, predict=predict,
        broadcast=lambda server, task: Broadcast(server.tuned),
        server=lambda frozen, server, aggregate, task, key: (server._replace(tuned=aggregate.mean), {}),
        closing=Extra(survey, gather_means),
        trainable=lambda server, task: server.tuned._asdict(),
    )  # fmt: skip
