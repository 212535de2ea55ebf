"""FedCLM (a baseline of PILoRA's tables): LoRA and a linear classifier trained by FedAvg, the nearest class
mean at inference.

After the last round of a task every client sends sums of features and numbers of rows of the task's classes
under the final model. Means of old classes are not computed again: nobody has their data any more.
"""

from typing import NamedTuple

from fcljax.methods.fedncm import Sums, add_batch, add_classes, empty_sums, mean_logits
from fcljax.methods.finetune import (
    FinetuneConfig,
    Recipe,
    Tuned,
    features,
    init_tuned,
    make_client,
    make_method,
)
from fcljax.types import Backbone, Broadcast, Extra, Method, Phase, Program, Setting, Upload, View


class ServerState(NamedTuple):
    """The averaged parameters, and sums over all clients for each class."""

    tuned: Tuned
    sums: Sums


def fedclm(
    config: FinetuneConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """FedCLM as a method."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def init(key, frozen) -> ServerState:
        del frozen
        return ServerState(init_tuned(recipe, key), empty_sums(setting.classes, backbone.width))

    def look(frozen, broadcast, local: Sums, batch, task, key):
        del key
        return add_batch(local, features(recipe, frozen, broadcast.wire, batch.image), batch, task), {}

    def start(broadcast, state, task, info, key) -> Sums:
        del broadcast, state, task, info, key
        return empty_sums(setting.task_classes, backbone.width)

    def gather_means(frozen, server: ServerState, aggregate, task, key):
        del frozen, key
        return server._replace(
            sums=add_classes(server.sums, aggregate.sum, task)
        ), {}  # each class is of one task, surveyed once

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
