"""State of a client rule that starts at 0 in every task.

SCAFFOLD and FedDyn correct the drift of a client's objective; a new task has another
objective, so the old correction would be wrong.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.parts.learner import Params
from fcljax.types import ClientContext


class OfTask(NamedTuple):
    """A client's stored parameters, and the task that they belong to."""

    params: Params
    """Of the shapes of the trainable parameters, without running statistics."""
    task: Int[Array, ""]
    """-1 before the first task."""


def without_stats(trainable: Params) -> Params:
    """Return trainable parameters without running statistics, which have no gradient."""
    return trainable._replace(stats=())


def zeros_like(trainable: Params) -> Params:
    """Return zeros of the shapes of trainable parameters, without running statistics."""
    return jax.tree.map(jnp.zeros_like, without_stats(trainable))


def of_no_task(_key: PRNGKeyArray, trainable: Params) -> OfTask:
    """Return the state before the first participation: the `init` of a client rule."""
    return OfTask(zeros_like(trainable), jnp.int32(-1))


def of_this_task(context: ClientContext, state: OfTask, _key: PRNGKeyArray) -> OfTask:
    """Return the state, 0 if the task is new: the `on_start` of a client rule."""
    index = context.task.index
    same_task = state.task == index
    # a client that skipped the last task's rounds also starts anew
    params = jax.tree.map(lambda x: jnp.where(same_task, x, 0.0), state.params)
    return OfTask(params, index)
