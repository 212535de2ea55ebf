"""A stream of tasks: the shuffled class order of a run, and which classes belong to which task.

Classes have two numberings. Original labels are those of the data set, 0..C-1. After `relabel` a class is
numbered by its position in the class order, so that the tasks that all clients share own contiguous ranges.
"""

import random
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64

from fcljax.errors import InputError
from fcljax.types import Task


def class_order(num_classes: int, rng: np.random.RandomState) -> Int64[np.ndarray, " C"]:
    """Original labels in the order in which tasks take them.

    This must be the first draw of `RandomState(seed)`; the partition continues the same stream (FPPL's
    release, which seeds numpy's global legacy stream). Only `RandomState` promises the same stream for ever.
    """
    return rng.permutation(np.arange(num_classes, dtype=np.int64))


def python_order(num_classes: int, seed: int) -> Int64[np.ndarray, " C"]:
    """The class order drawn by Python's own generator; seed 0: the natural order (HePCo's release)."""
    order = list(range(num_classes))
    if seed:
        random.Random(seed).shuffle(order)
    return np.array(order, np.int64)


def task_sizes(num_classes: int, tasks: int) -> tuple[int, ...]:
    """Classes per task; where `tasks` does not divide them the first tasks get one more.

    Raises:
      InputError: for less than one task, or more tasks than classes.
    """
    if not 1 <= tasks <= num_classes:
        raise InputError(
            f"tasks: {tasks} tasks cannot share {num_classes} classes; choose 1 to {num_classes}"
        )
    size, rest = divmod(num_classes, tasks)
    return tuple(size + (task < rest) for task in range(tasks))


def make_tasks(num_classes: int, tasks: int) -> tuple[Task, ...]:
    """The tasks of a run as numpy arrays, classes numbered by position in the class order.

    Raises:
      InputError: as `task_sizes`.
    """
    ends = np.cumsum(task_sizes(num_classes, tasks))
    return tasks_of(np.split(np.arange(num_classes), ends[:-1]), num_classes)


def tasks_of(classes: Sequence[Int[np.ndarray, " _"]], num_classes: int) -> tuple[Task, ...]:
    """The tasks with these classes, one after the other.

    Args:
      classes: of each task, positions in the class order; later tasks may repeat them.
      num_classes: C.
    """
    widest = max(map(len, classes))
    seen, tasks = np.zeros(num_classes, bool), []
    for index, mine in enumerate(classes):
        current = np.zeros(num_classes, bool)
        current[mine] = True
        seen = seen | current
        ids = np.pad(mine, (0, widest - len(mine)), constant_values=-1).astype(np.int32)
        tasks.append(Task.of_numpy(np.asarray(index, np.int32), ids, current, seen))
    return tuple(tasks)


def relabel(labels: Int[np.ndarray, " N"], order: Int[np.ndarray, " C"]) -> Int64[np.ndarray, " N"]:
    """Original labels to positions in the class order."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position[labels]
