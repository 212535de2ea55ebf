"""Distillation of old classes from the model that a client first got in a task."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.models.heads import distillation
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.learner import Params
from fcljax.types import ClientContext


class Teacher(NamedTuple):
    """A client's teacher."""

    trainable: Params
    task: Int[Array, ""]
    """The task that it is for; -1: none yet."""


def distil_first_model(weight: float, temperature: float) -> ClientRule:
    """weight * L_distil, from the model that the client first got in the task (LwF).

    Args:
      weight: of the loss.
      temperature: of student and teacher.
    """

    def init(key: PRNGKeyArray, trainable: Params) -> Teacher:
        del key
        return Teacher(trainable, jnp.int32(-1))

    def loss(step: ClientStep, teacher: Teacher) -> Float[Array, ""]:
        target, old = step.forward(teacher.trainable).logits, step.context.task.old
        return weight * distillation(step.output.logits, target, old, step.batch.mask, temperature)

    def keep(context: ClientContext, teacher: Teacher, trainable: Params, state: Teacher) -> Teacher:
        del context, trainable, state
        return teacher

    return ClientRule("lwf", loss, init, first_model_of_task, on_end=keep)


def first_model_of_task(context: ClientContext, state: Teacher, key: PRNGKeyArray) -> Teacher:
    """The teacher of the current task: a new one if the client's is of an earlier task."""
    del key
    stale = state.task != context.task.index

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(stale, new, old)

    trainable = jax.tree.map(pick, context.payload.trainable, state.trainable)
    return Teacher(trainable, context.task.index)
