"""A client's value at the end of its previous task, for rules that read it in the next task.

A client that takes part in some of a task's rounds cannot know which of them is its last.
It stores the value of its newest round, which becomes that of the previous task when the
client takes part in another task.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fcljax.types import Task


class TaskEnd(NamedTuple):
    """A value after the client's newest round, and at the end of the task before it."""

    before: PyTree
    """After the client's last round of an earlier task than that of its newest round."""
    newest: PyTree
    """After the newest round."""
    task: Int[Array, ""]
    """Of the newest round; -1 before the first participation."""


def no_task_end(value: PyTree) -> TaskEnd:
    """Return the state before the first participation, with `value` for the previous task."""
    return TaskEnd(value, value, jnp.int32(-1))


def of_task_before(state: TaskEnd, task: Task) -> PyTree:
    """Return the value of the client's last round before this task."""
    same_task = state.task == task.index
    # in a new task the newest value is that of the previous task's last round
    return jax.tree.map(lambda old, new: jnp.where(same_task, old, new), state.before, state.newest)


def after_round(previous: PyTree, newest: PyTree, task: Task) -> TaskEnd:
    """Return the state after a round of this task.

    Args:
      previous: what `of_task_before` returned in this round.
      newest: the value after this round.
      task: of the round.
    """
    return TaskEnd(previous, newest, jnp.asarray(task.index, jnp.int32))
