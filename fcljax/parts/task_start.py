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
        # before the task's first update the state is still of the previous task
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
    # the broadcast of this round, and not its mean: the task began with what was sent
    broadcast = round.previous.payload.trainable
    return Start(_where(is_current, start.trainable, broadcast), index)


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
        # the teacher has not learned the task's classes. The first task has no old ones,
        # so the loss is 0
        old = step.context.task.old
        return weight * distillation(step.output.logits, target, old, step.batch.mask, temperature)

    return ClientRule("lwf", loss)


def valid_parameters(round: ServerRound, mean: Params) -> Params:
    """Return the trainable parameters of each client [P, ...].

    Absent and invalid clients get `mean`: their weight of 0 would not help, as 0 times
    NaN is NaN.
    """

    def pick(mean_leaf: Array, client_leaf: Array) -> Array:
        # [P, 1, 1, ...], which broadcasts over the leaf's other axes
        is_valid = round.valid.reshape(-1, *[1] * (client_leaf.ndim - 1))
        return jnp.where(is_valid, client_leaf, mean_leaf)

    # parameters of client rules take no part in a forward pass of the server
    of_clients = round.reports["trainable"]._replace(extra={})
    return jax.tree.map(pick, mean._replace(extra={}), of_clients)


def unlabelled(learner: Learner, pixels: Float[Array, "images *shape"]) -> Batch:
    """Return images with pixels in [0, 1] as a batch of label 0, index -1 and a full mask."""
    label = jnp.zeros(len(pixels), jnp.int32)
    # synthetic images are no examples of the training set: index -1, but not padding
    return Batch(
        input=from_unit(learner.network, pixels),
        label=label,
        mask=label == 0,
        index=label - 1,
    )


def distil_start(
    step: ClientStep, pixels: Float[Array, "images *shape"], temperature: float
) -> Float[Array, ""]:
    """Return L_distil of old classes from the task's first model, on synthetic images.

    Args:
      step: of the client.
      pixels: in [0, 1].
      temperature: of student and teacher.
    """
    context = step.context
    # the step on synthetic images in place of the client's own
    on_images = step._replace(batch=unlabelled(step.learner, pixels))

    def logits(trainable: Params) -> Float[Array, "images C"]:
        return on_images.forward(trainable, train=True).logits

    student = logits(step.trainable)
    target = logits(teacher(context))
    mask = on_images.batch.mask
    return distillation(student, target, context.task.old, mask, temperature)
