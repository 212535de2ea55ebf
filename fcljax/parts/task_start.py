"""The model that a task began with, which servers send so that clients need not keep a teacher; and helpers
of servers that train on the models of each client."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.models.heads import distillation
from fcljax.parts.client import ClientStep
from fcljax.parts.learner import Learner, Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.pixels import from_unit
from fcljax.types import Batch, ClientContext, Task

START = "start"


class Start(NamedTuple):
    """The trainable parameters that a task began with."""

    trainable: Params
    task: Int[Array, ""]
    """-1: no task has begun."""


def send_start_of_task() -> ServerRule:
    """Sends in every round the trainable parameters that the task began with, besides the newest ones."""

    def update(round: ServerRound, params: Params, start: Start) -> ServerUpdate:
        return ServerUpdate(params, began_with(round, start))

    def sends(task: Task, start: Start) -> Start:
        del task
        return start

    return ServerRule(START, update, no_start, sends)


def no_start(params: Params, trainable: Params) -> Start:
    """Before the first task."""
    del params
    return Start(jax.tree.map(jnp.zeros_like, trainable), jnp.int32(-1))


def began_with(round: ServerRound, start: Start) -> Start:
    """What the first round of the task broadcast, kept through its other rounds."""
    return _of_task(round.task, start, round.previous.payload.trainable)


def teacher(context: ClientContext) -> Params:
    """The trainable parameters that the task began with, at a client; in the first round the newest ones."""
    return _of_task(context.task, context.payload.sent[START], context.payload.trainable).trainable


def _of_task(task: Task, start: Start, newest: Params) -> Start:
    def pick(new: Array, kept: Array) -> Array:
        return jnp.where(start.task == task.index, kept, new)

    trainable = jax.tree.map(pick, newest, start.trainable)
    return Start(trainable, jnp.asarray(task.index, jnp.int32))


def valid_parameters(round: ServerRound, mean: Params) -> Params:
    """The trainable parameters of each client [P, ...]; `mean` stands in for clients that are absent or not
    valid, because 0 times NaN would be NaN."""

    def pick(own: Array, theirs: Array) -> Array:
        return jnp.where(round.valid.reshape(-1, *[1] * (theirs.ndim - 1)), theirs, own)

    return jax.tree.map(pick, mean._replace(extra={}), round.reports["trainable"]._replace(extra={}))


def unlabelled(learner: Learner, pixels: Float[Array, "images *shape"]) -> Batch:
    """Pixels in [0, 1] of images that belong to no client, as a batch."""
    label = jnp.zeros(len(pixels), jnp.int32)
    return Batch(from_unit(learner.network, pixels), label, label == 0, label - 1)


def distil_start(
    step: ClientStep, pixels: Float[Array, "images *shape"], temperature: float
) -> Float[Array, ""]:
    """Distillation of old classes from the model that the task began with, on images of nobody.

    Args:
      step: the client's.
      pixels: in [0, 1].
      temperature: of student and teacher.
    """
    learner, context = step.learner, step.context
    batch = unlabelled(learner, pixels)

    def logits(trainable: Params) -> Float[Array, "images C"]:
        return learner.forward(context.frozen, context.cached, trainable, batch, context.task, True).logits

    old = context.task.old
    return distillation(logits(step.trainable), logits(teacher(context)), old, batch.mask, temperature)
