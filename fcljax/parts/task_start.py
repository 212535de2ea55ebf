"""The model that a task began with, which servers send so that clients can distil from
it; and helpers of servers that train on the models of each client.

A client that kept the first model that it got in a task would distil from one that has
trained on the task already, unless it takes part in the task's first round.
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
    """-1: it is of no task, or of an earlier one."""


def send_start_of_task() -> ServerRule:
    """Send in every round the trainable parameters that the task began with, besides the
    newest ones."""

    def update(round: ServerRound, params: Params, start: Start) -> ServerUpdate:
        return ServerUpdate(params, began_with(round, start))

    def sends(task: Task, start: Start) -> Start:
        begun = start.task == task.index
        return start._replace(task=jnp.where(begun, start.task, -1))

    return ServerRule(START, update, no_start, sends)


def no_start(_params: Params, trainable: Params) -> Start:
    """Return the state before the first task."""
    return Start(jax.tree.map(jnp.zeros_like, trainable), jnp.int32(-1))


def began_with(round: ServerRound, start: Start) -> Start:
    """Return what the first round of the task broadcast, kept through its other
    rounds."""
    index = jnp.asarray(round.task.index, jnp.int32)
    begun = start.task == index
    return Start(_first(begun, start.trainable, round.previous.payload.trainable), index)


def teacher(context: ClientContext) -> Params:
    """Return the trainable parameters that the server's task began with, at a client;
    in the first round the newest ones. A client that stays behind in an earlier task
    gets the same."""
    start: Start = context.payload.sent[START]
    return _first(start.task >= 0, start.trainable, context.payload.trainable)


def _first(begun: Array, start: Params, newest: Params) -> Params:
    """Return the parameters that were kept if the task has begun, else the newest
    ones."""

    def pick(old: Array, new: Array) -> Array:
        return jnp.where(begun, old, new)

    return jax.tree.map(pick, start, newest)


def distil_task_start(weight: float, temperature: float) -> ClientRule:
    """Add weight * L_distil of old classes on the batch, from the model that the task
    began with (LwF). It needs the server rule `send_start_of_task`.

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
    """Return the trainable parameters of each client [P, ...]; `mean` stands in for
    clients that are absent or not valid, because 0 times NaN would be NaN."""

    def pick(mean_leaf: Array, client_leaf: Array) -> Array:
        return jnp.where(round.valid.reshape(-1, *[1] * (client_leaf.ndim - 1)), client_leaf, mean_leaf)

    return jax.tree.map(pick, mean._replace(extra={}), round.reports["trainable"]._replace(extra={}))


def unlabelled(learner: Learner, pixels: Float[Array, "images *shape"]) -> Batch:
    """Return pixels in [0, 1] of images that belong to no client, as a batch."""
    label = jnp.zeros(len(pixels), jnp.int32)
    return Batch(from_unit(learner.network, pixels), label, label == 0, label - 1)


def distil_start(
    step: ClientStep, pixels: Float[Array, "images *shape"], temperature: float
) -> Float[Array, ""]:
    """Distil old classes from the model that the task began with, on images that belong
    to no client.

    Args:
      step: the client's.
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
