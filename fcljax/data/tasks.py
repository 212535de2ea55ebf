"""Make a stream of tasks: the shuffled class order of a run, and the classes of each
task.

Classes have two numberings. Original labels are those of the data set, 0..C-1. After
`relabel` a class is numbered by its position in the class order, so that the tasks that
all clients share own contiguous ranges.
"""

import random
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int64

from fcljax.errors import InputError, nearest
from fcljax.options import whole_number
from fcljax.types import Task


def class_order(num_classes: int, rng: np.random.RandomState) -> Int64[np.ndarray, " C"]:
    """Draw the order in which tasks take the original labels.

    This must be the first draw of `RandomState(seed)`; the partition continues the same
    stream (FPPL's release, which seeds numpy's global legacy stream). Only
    `RandomState` promises the same stream for ever.
    """
    return rng.permutation(np.arange(num_classes, dtype=np.int64))


def python_order(num_classes: int, seed: int) -> Int64[np.ndarray, " C"]:
    """Draw the class order with Python's generator; natural for seed 0 (HePCo's release)."""
    order = list(range(num_classes))
    if seed:
        random.Random(seed).shuffle(order)
    return np.array(order, np.int64)


def task_sizes(num_classes: int, tasks: int) -> tuple[int, ...]:
    """Return the classes per task; the first tasks get one more if there is a remainder.

    Raises:
      InputError: for less than one task, or more tasks than classes.
    """
    if not 1 <= tasks <= num_classes:
        raise InputError(
            f"tasks: {tasks} tasks cannot share {num_classes} classes; choose 1 to {num_classes}"
        )
    size, remainder = divmod(num_classes, tasks)
    return tuple(size + (task < remainder) for task in range(tasks))


def chosen_sizes(
    num_classes: int,
    tasks: int,
    base: int | None = None,
    each: int | None = None,
    listed: str | None = None,
) -> tuple[int, ...]:
    """Return the classes per task as a user chooses them.

    Args:
      num_classes: C.
      tasks: number of tasks, unless `each` or `listed` decides it.
      base: classes of the first task.
      each: classes of every other task.
      listed: classes of all tasks, for example "50,10,10,30".

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
    # without a size of its own the first task is like the others
    first_size = each
    if base is not None:
        first_size = base
    assert first_size is not None
    if each is None:
        if tasks < 2:
            raise InputError(f"tasks: {tasks} with --base-classes {base}; nearest: 2")
        return (first_size, *task_sizes(num_classes - first_size, tasks - 1))
    remaining = num_classes - first_size
    further_tasks, remainder = divmod(remaining, each)
    if remainder or further_tasks < 1:
        # for the message: the nearest size that would divide the rest
        divisors = [n for n in range(1, remaining + 1) if remaining % n == 0]
        nearest_size = min(divisors, key=lambda n: abs(n - each)) if divisors else num_classes // 2
        raise InputError(
            f"classes_per_task: {each} does not divide the {remaining} classes after the first task; "
            f"nearest: {nearest_size}"
        )
    return (first_size, *[each] * further_tasks)


def make_tasks(num_classes: int, tasks: int) -> tuple[Task, ...]:
    """Return the tasks as numpy arrays, with classes by position in the class order.

    Raises:
      InputError: as `task_sizes`.
    """
    return tasks_of_sizes(task_sizes(num_classes, tasks))


def tasks_of_sizes(sizes: Sequence[int]) -> tuple[Task, ...]:
    """Make the tasks that take so many classes, in the class order."""
    # tasks are consecutive ranges of the class order
    ends = np.cumsum(sizes)
    return tasks_of(np.split(np.arange(ends[-1]), ends[:-1]), int(ends[-1]))


def listed_order(
    class_names: Sequence[str],
    listed: Sequence[str],
    numbers: Sequence[int] | None = None,
) -> Int64[np.ndarray, " C"]:
    """Return the class order that a user lists by names or numbers.

    Args:
      class_names: of the run's classes.
      listed: names or numbers of all of them.
      numbers: of the classes in the whole data set, where a run uses a part of them; None:
        0, 1, 2, ...

    Raises:
      InputError: for a class that does not exist, or is missing or repeated.
    """
    # a name wins over a number of the same digits
    numbers = numbers or range(len(class_names))
    number = {str(n): i for i, n in enumerate(numbers)} | {name: i for i, name in enumerate(class_names)}
    order: list[int] = []
    for name in listed:
        if name not in number:
            raise InputError(f"class_order: no class {name!r}; {nearest(name, class_names)}")
        if number[name] in order:
            raise InputError(f"class_order: class {name!r} appears twice")
        order.append(number[name])
    if len(order) < len(class_names):
        missing = next(name for i, name in enumerate(class_names) if i not in order)
        raise InputError(
            f"class_order: {len(order)} of {len(class_names)} classes; class {missing!r} is missing; "
            f"--classes chooses the classes of a run"
        )
    return np.array(order, np.int64)


def tasks_of(
    classes: Sequence[Int[np.ndarray, " _"]],
    num_classes: int,
) -> tuple[Task, ...]:
    """Make the tasks with these classes, in this order.

    Args:
      classes: of each task, positions in the class order; later tasks may repeat them.
      num_classes: C.
    """
    # lists of classes are padded to one length, so that all tasks share one compile
    widest = max(map(len, classes))
    seen = np.zeros(num_classes, bool)
    tasks = []
    for index, task_classes in enumerate(classes):
        current = np.zeros(num_classes, bool)
        current[task_classes] = True
        seen = seen | current
        ids = np.pad(task_classes, (0, widest - len(task_classes)), constant_values=-1).astype(np.int32)
        tasks.append(Task.of_numpy(np.asarray(index, np.int32), ids, current, seen))
    return tuple(tasks)


def relabel(labels: Int[np.ndarray, " N"], order: Int[np.ndarray, " C"]) -> Int64[np.ndarray, " N"]:
    """Turn original labels into positions in the class order."""
    # the inverse permutation: from a class to its place in the order
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position[labels]
