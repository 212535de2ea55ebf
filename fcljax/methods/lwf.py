"""LwF+FL: learning without forgetting (Li and Hoiem 2016) on LoRA and a linear classifier, as in TARGET's
release (ICCV 2023).

A client distils the logits of old classes, on its own images of the current task, from the global model as it
was when the client first took part in the task. It keeps this teacher, since at later rounds the server only
sends the newest model.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fcljax.methods.finetune import (
    FinetuneConfig,
    Recipe,
    Tuned,
    logits_of,
    make_client,
    make_method,
    old_classes,
)
from fcljax.models.heads import distillation
from fcljax.types import Backbone, Method, Setting


@dataclasses.dataclass(frozen=True)
class LwFConfig(FinetuneConfig):
    """Options of LwF; the values are those of TARGET's release."""

    distill_weight: float = 3.0  # weight of the distillation
    distill_temperature: float = 2.0  # temperature of student and teacher


class Teacher(NamedTuple):
    """A client's teacher, and the task that it is for (-1: none yet)."""

    tuned: Tuned
    task: Int[Array, ""]


def lwf(
    config: LwFConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """LwF+FL as a method."""
    recipe = Recipe(config, setting, backbone, epochs, batch_size, lr)

    def distil(frozen, tuned, teacher: Teacher, batch, task, key, logits):
        del tuned, key
        target = logits_of(recipe, frozen, teacher.tuned, batch.image)
        return config.distill_weight * distillation(
            logits, target, old_classes(task), batch.mask, config.distill_temperature
        )

    client = make_client(
        recipe, open_memory=first_model_of_task, term=distil, keep=lambda local, state, task: local.memory
    )
    return make_method(recipe, client, init_client=lambda key, server: Teacher(server, jnp.int32(-1)))


def first_model_of_task(broadcast, state: Teacher, task, info, key) -> Teacher:
    """The teacher of the current task: a new one if the client's is of an earlier task."""
    del info, key
    stale = state.task != task.index
    return Teacher(
        jax.tree.map(lambda new, old: jnp.where(stale, new, old), broadcast.wire, state.tuned), task.index
    )
