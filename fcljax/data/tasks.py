"""A stream of tasks: the shuffled class order of a run, and which classes belong to which task.

Classes have two numberings. Original labels are those of the data set, 0..C-1. After `relabel` a class is
numbered by its position in the class order, so that the tasks that all clients share own contiguous ranges.
"""

import random
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64

from fcljax.errors import InputError, nearest
from fcljax.options import whole_number
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


def chosen_sizes(
    num_classes: int,
    tasks: int,
    base: int | None = None,
    each: int | None = None,
    listed: str | None = None,
) -> tuple[int, ...]:
    """Classes per task, as a user chooses them.

    Args:
      num_classes: C.
      tasks: their number, unless `each` or `listed` decides it.
      base: classes of the first task.
      each: classes of every other task.
      listed: classes of all tasks, such as "50,10,10,30".

    Raises:
      InputError: as `task_sizes`, or for sizes that do not add up to C.
    """
    if listed is not None:
        sizes = tuple(whole_number(part) or 0 for part in listed.split(","))
        if sum(sizes) != num_classes or min(sizes) < 1:
            raise InputError(
                f"task_sizes: {listed!r} are {sum(sizes)} classes in {len(sizes)} tasks; expected whole "
                f"numbers from 1 that add up to {num_classes}"
            )
        return sizes
    if base is None and each is None:
        return task_sizes(num_classes, tasks)
    if base is not None and not base < num_classes:
        raise InputError(f"base_classes: {base} of {num_classes} classes; nearest: {num_classes - 1}")
    first = base if base is not None else each
    assert first is not None
    if each is None:
        if tasks < 2:
            raise InputError(f"tasks: {tasks} with --base-classes {base}; nearest: 2")
        return (first, *task_sizes(num_classes - first, tasks - 1))
    others, rest = divmod(num_classes - first, each)
    if rest or others < 1:
        fitting = [n for n in range(1, num_classes - first + 1) if (num_classes - first) % n == 0]
        near = min(fitting, key=lambda n: abs(n - each)) if fitting else num_classes // 2
        raise InputError(
            f"classes_per_task: {each} does not divide the {num_classes - first} classes after the first "
            f"task; nearest: {near}"
        )
    return (first, *[each] * others)


def make_tasks(num_classes: int, tasks: int) -> tuple[Task, ...]:
    """The tasks of a run as numpy arrays, classes numbered by position in the class order.

    Raises:
      InputError: as `task_sizes`.
    """
    return tasks_of_sizes(task_sizes(num_classes, tasks))


def tasks_of_sizes(sizes: Sequence[int]) -> tuple[Task, ...]:
    """The tasks that take so many classes each, in the class order."""
    ends = np.cumsum(sizes)
    return tasks_of(np.split(np.arange(ends[-1]), ends[:-1]), int(ends[-1]))


def listed_order(class_names: Sequence[str], listed: Sequence[str]) -> Int64[np.ndarray, " C"]:
    """The class order that a user lists: names, or numbers from 0 where no class has such a name.

    Raises:
      InputError: for a class that does not exist, or is missing or repeated.
    """
    number = {str(i): i for i in range(len(class_names))} | {name: i for i, name in enumerate(class_names)}
    found: list[int] = []
    for name in listed:
        if name not in number:
            raise InputError(f"class_order: no class {name!r}; {nearest(name, class_names)}")
        if number[name] in found:
            raise InputError(f"class_order: class {name!r} comes twice")
        found.append(number[name])
    if len(found) < len(class_names):
        missing = next(name for i, name in enumerate(class_names) if i not in found)
        raise InputError(
            f"class_order: {len(found)} of {len(class_names)} classes; class {missing!r} is missing"
        )
    return np.array(found, np.int64)


def tasks_of(classes: Sequence[Int[np.ndarray, " _"]], num_classes: int) -> tuple[Task, ...]:
    """The tasks with these classes, one after the other.

    Args:
      classes: of each task, positions in the class order; later tasks may repeat them.
      num_classes: C.
    """
    widest = max(map(len, classes))
    seen = np.zeros(num_classes, bool)
    tasks = []
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
