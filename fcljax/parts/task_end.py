"""What a client had when it last worked on a task, for rules that read it in the next
one.

A client that takes part in some of a task's rounds cannot know which of them is its
last. It keeps the value of its newest round, which becomes that of the task before when
the client takes part in another task.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fcljax.types import Task


class TaskEnd(NamedTuple):
    """A value after a client's last round of a task, and after its newest round."""

    before: PyTree
    """After the client's last round of the task before its newest one."""
    newest: PyTree
    """After its newest round."""
    task: Int[Array, ""]
    """The task of its newest round; -1: it has not taken part yet."""


def no_task_end(value: PyTree) -> TaskEnd:
    """Return the state of a client that has not taken part yet; `value` stands in for a
    task before."""
    return TaskEnd(value, value, jnp.int32(-1))


def of_task_before(state: TaskEnd, task: Task) -> PyTree:
    """Return the value of the client's last round before this task."""
    same_task = state.task == task.index
    return jax.tree.map(lambda old, new: jnp.where(same_task, old, new), state.before, state.newest)


def after_round(before: PyTree, newest: PyTree, task: Task) -> TaskEnd:
    """Return the state after a round of this task; `before` is what `of_task_before`
    returned in it."""
    return TaskEnd(before, newest, jnp.asarray(task.index, jnp.int32))
