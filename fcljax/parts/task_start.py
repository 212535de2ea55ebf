"""The model that a task began with, sent by the server so that clients can distil from it.

The server sends it in every round, because a client that joins a task late has never
received it. The file also has helpers of servers that train on images or on all clients'
models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.models.heads import distillation
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.learner import Learner, Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.pixels import from_unit
from fcljax.types import Batch, ClientContext, Task

START = "start"


class Start(NamedTuple):
    """The trainable parameters that a task began with."""

    trainable: Params
    task: Int[Array, ""]
    """The task's index; -1: none, or an earlier one."""


def send_start_of_task() -> ServerRule:
    """Send in every round the trainable parameters that the task began with."""

    def update(round: ServerRound, params: Params, start: Start) -> ServerUpdate:
        return ServerUpdate(params, start_of(round, start))

    def sends(task: Task, start: Start) -> Start:
        is_current = start.task == task.index
        return start._replace(task=jnp.where(is_current, start.task, -1))

    return ServerRule(START, update, no_start, sends)


def no_start(_params: Params, trainable: Params) -> Start:
    """Return the state before the first task."""
    return Start(jax.tree.map(jnp.zeros_like, trainable), jnp.int32(-1))


def start_of(round: ServerRound, start: Start) -> Start:
    """Return the broadcast of the task's first round, from `start` in its other rounds."""
    index = jnp.asarray(round.task.index, jnp.int32)
    is_current = start.task == index
    return Start(_where(is_current, start.trainable, round.previous.payload.trainable), index)


def teacher(context: ClientContext) -> Params:
    """Return, at a client, the trainable parameters that the server's task began with.

    A client that is still in an earlier task gets the same parameters.
    """
    start: Start = context.payload.sent[START]
    # in a task's first round the broadcast itself is the start
    return _where(start.task >= 0, start.trainable, context.payload.trainable)


def _where(condition: Array, a: Params, b: Params) -> Params:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def distil_task_start(weight: float, temperature: float) -> ClientRule:
    """Add weight * L_distil of old classes, on the batch, from the task's first model (LwF).

    Needs the server rule `send_start_of_task`.

    Args:
      weight: of the loss.
      temperature: of student and teacher.
    """

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        target = step.forward(teacher(step.context)).logits
        old = step.context.task.old
        return weight * distillation(step.output.logits, target, old, step.batch.mask, temperature)

    return ClientRule("lwf", loss)


def valid_parameters(round: ServerRound, mean: Params) -> Params:
    """Return the trainable parameters of each client [P, ...].

    Absent and invalid clients get `mean`: with a weight of 0, a NaN would still be NaN.
    """

    def pick(mean_leaf: Array, client_leaf: Array) -> Array:
        is_valid = round.valid.reshape(-1, *[1] * (client_leaf.ndim - 1))
        return jnp.where(is_valid, client_leaf, mean_leaf)

    return jax.tree.map(pick, mean._replace(extra={}), round.reports["trainable"]._replace(extra={}))


def unlabelled(learner: Learner, pixels: Float[Array, "images *shape"]) -> Batch:
    """Return images with pixels in [0, 1] as a batch of label 0, index -1 and a full mask."""
    label = jnp.zeros(len(pixels), jnp.int32)
    return Batch(from_unit(learner.network, pixels), label, label == 0, label - 1)


def distil_start(
    step: ClientStep, pixels: Float[Array, "images *shape"], temperature: float
) -> Float[Array, ""]:
    """Return L_distil of old classes from the task's first model, on synthetic images.

    Args:
      step: of the client.
      pixels: in [0, 1].
      temperature: of student and teacher.
    """
    learner = step.learner
    context = step.context
    batch = unlabelled(learner, pixels)

    def logits(trainable: Params) -> Float[Array, "images C"]:
        return learner.forward(context.frozen, context.cached, trainable, batch, context.task, True).logits

    old = context.task.old
    return distillation(logits(step.trainable), logits(teacher(context)), old, batch.mask, temperature)
