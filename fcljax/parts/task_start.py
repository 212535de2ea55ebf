"""Server steps that several methods share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.models.heads import distillation
from fcljax.parts.federate import Seen, ServerStep
from fcljax.parts.learner import Learner, Model
from fcljax.pixels import from_unit
from fcljax.types import Aggregate, Batch, ClientContext, RoundContext, Task


class Start(NamedTuple):
    """The part that a task began with, and that task (-1: none yet)."""

    part: Model
    task: Int[Array, ""]


def start_of_task() -> ServerStep:
    """The global model that a task began with goes down in every round of it, besides the newest: clients
    that keep nothing get their teacher from here (`teacher`). Nothing else changes."""

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        start: Start,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner, aggregate, key
        return params, began_with(round_context, start), {}

    return ServerStep("start", step, init=no_start, sends=lambda task, start: start)


def no_start(params: Model, part: Model) -> Start:
    """Before the first task."""
    del params
    return Start(jax.tree.map(jnp.zeros_like, part), jnp.int32(-1))


def began_with(round_context: RoundContext, start: Start) -> Start:
    """What the first round of a task broadcast, kept through its others."""
    return _of_task(round_context.task, start, round_context.previous.payload.part)


def teacher(context: ClientContext) -> Model:
    """The part that the task began with, as a client sees it; in the first round it is the newest."""
    return _of_task(context.task, context.payload.sent["start"], context.payload.part).part


def _of_task(task: Task, start: Start, newest: Model) -> Start:
    pick = lambda new, kept: jnp.where(start.task == task.index, kept, new)
    return Start(jax.tree.map(pick, newest, start.part), jnp.asarray(task.index, jnp.int32))


def sound_parts(part: Model, aggregate: Aggregate) -> Model:
    """The clients' parts [P, ...], with the averaged one, `part`, in the place of those that are absent or
    not valid: they count for nothing, and nothing times NaN would be NaN."""
    alive = lambda leaf: aggregate.valid.reshape(-1, *[1] * (leaf.ndim - 1))
    pick = lambda own, theirs: jnp.where(alive(theirs), theirs, own)
    own, theirs = part._replace(extra={}), aggregate.gather["part"]._replace(extra={})
    return jax.tree.map(pick, own, theirs)


def unlabelled(learner: Learner, pixels: Float[Array, "rows *shape"]) -> Batch:
    """Pixels in [0, 1] of images that are no rows of the run's, as a batch."""
    rows = jnp.zeros(len(pixels), jnp.int32)
    return Batch(from_unit(learner.network, pixels), rows, rows == 0, rows - 1)


def distil_start(
    learner: Learner, seen: Seen, pixels: Float[Array, "rows *shape"], temperature: float
) -> Float[Array, ""]:
    """Distillation of old classes from the model that the task began with (`start_of_task`), on images that
    are no rows of the client's."""
    context, batch = seen.context, unlabelled(learner, pixels)
    logits = lambda part: (
        learner.forward(context.frozen, context.cached, part, batch, context.task, True).logits
    )
    return distillation(
        logits(seen.part), logits(teacher(context)), context.task.old, batch.mask, temperature
    )
