"""Assign examples to tasks: by class, by domain, or by class with blurry boundaries.

In class-incremental learning tasks have different classes. Domain-incremental tasks
have the same classes in different domains (van de Ven & Tolias, arXiv 1904.07734). With
blurry boundaries, some examples of a class belong to other tasks than most of them
(i-Blurry, Koh et al., ICLR 2022).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.dataset import natural_order
from fcljax.data.owners import NONE
from fcljax.data.tasks import chosen_sizes, tasks_of, tasks_of_sizes
from fcljax.errors import InputError, nearest
from fcljax.options import option
from fcljax.types import Task

# In seeds, the purpose of a draw: no other draw of the run uses (seed, 34).
PURPOSE = 34


@dataclasses.dataclass(frozen=True)
class ByClass:
    """A task is made of classes, of which it has all examples unless boundaries are
    blurry."""

    base_classes: int = option(0, least=0, unset="as the other tasks")
    """Number of classes of the first task; the other tasks share the rest."""
    classes_per_task: int = option(0, least=0, unset="all classes over --tasks")
    """Number of classes of each task after the first; it determines the number of
    tasks."""
    task_sizes: str = option("", unset="as even as possible")
    """Number of classes of each task, e.g. 50,10,10,30."""
    blurry: float = option(0.0, least=0.0, below=1.0)
    """Fraction of each class's examples that move to the other tasks, equally many to
    each."""
    disjoint: float = option(0.0, least=0.0, below=1.0, needs="blurry")
    """Fraction of the classes whose examples --blurry does not move."""

    def sizes(self, classes: int, tasks: int) -> tuple[int, ...]:
        """Return the number of classes of each task."""
        # 0 stands for "not given" in options, None in `chosen_sizes`
        numbers = self.base_classes or None, self.classes_per_task or None
        return chosen_sizes(classes, tasks, *numbers, self.task_sizes or None)


@dataclasses.dataclass(frozen=True)
class ByColumn:
    """A task has the examples of a domain, which a column of the data set names."""

    task_order: str = option("", unset="by name")
    """Order of the domains of --tasks-by, e.g. real,sketch,clipart."""


class TaskSchedule(NamedTuple):
    """The tasks, and the task of each example."""

    tasks: tuple[Task, ...]
    """With the classes of their training examples."""
    train: Int[np.ndarray, " N"]
    """Task of each training example; -1: no task."""
    test: Int[np.ndarray, " M"]
    """After which task each test example is evaluated first; -1: never."""


def by_class(
    sizes: Sequence[int], label: Int[np.ndarray, " N"], test_label: Int[np.ndarray, " M"]
) -> TaskSchedule:
    """Make tasks of so many classes, in the class order.

    Args:
      sizes: classes of each task.
      label: of the training examples, positions in the class order.
      test_label: of the test examples.
    """
    # labels are positions in the class order, in which tasks are consecutive ranges
    task_of = np.repeat(np.arange(len(sizes)), sizes)
    return TaskSchedule(tasks_of_sizes(sizes), task_of[label], task_of[test_label])


def blurred(
    schedule: TaskSchedule,
    label: Int[np.ndarray, " N"],
    share: float,
    disjoint: float,
    rng: np.random.RandomState,
) -> TaskSchedule:
    """Blur the boundaries of a class-incremental schedule (i-Blurry-N-M, N = 100
    disjoint, M = 100 share).

    Args:
      schedule: the tasks that keep most examples of each class, and all its test examples.
      label: of the training examples.
      share: share of the examples of each blurry class that move to the other tasks,
        equally many to each.
      disjoint: share of the classes that are not blurry.
      rng: draws these classes, then class by class the examples and, if they do not
        divide evenly, the tasks that get one more.
    """
    train = schedule.train.copy()
    tasks = len(schedule.tasks)
    classes = len(schedule.tasks[0].seen)
    # in ascending order, so that a class's draws do not depend on the order of the others
    for blurry_class in np.sort(rng.permutation(classes)[round(disjoint * classes) :]):
        members = rng.permutation(np.flatnonzero(label == blurry_class))
        minority = members[: round(share * len(members))]
        other_tasks = rng.permutation(np.setdiff1d(np.arange(tasks), train[members[:1]]))
        if len(other_tasks):
            # `resize` repeats the tasks in turn, so that all get as many as possible
            train[minority] = np.resize(other_tasks, len(minority))
    return schedule._replace(tasks=_tasks(train, label, classes), train=train)


def by_domain(
    domain: Sequence[str] | np.ndarray,
    test_domain: Sequence[str] | np.ndarray,
    order: Sequence[str],
    label: Int[np.ndarray, " N"],
    classes: int,
) -> TaskSchedule:
    """Make a task for each domain, in this order; its test examples are those of the
    domain.

    Args:
      domain: of each training example.
      test_domain: of each test example.
      order: the domains.
      label: of the training examples.
      classes: C.

    Raises:
      InputError: for an order that does not name all domains once, or a domain without
        test examples.
    """
    number = {name: task for task, name in enumerate(order)}
    domains = natural_order(domain)
    wrong = next((name for name in order if name not in domains), None)
    if wrong is not None:
        raise InputError(f"task_order: no domain {wrong!r}; {nearest(wrong, domains)}")
    missing = next((name for name in domains if name not in number), None)
    if missing is not None or len(number) < len(order):
        problem = "a domain appears twice"
        if missing is not None:
            problem = f"{missing!r} is missing"
        raise InputError(f"task_order: {','.join(order)!r}: {problem}")
    train, test = (np.array([number.get(name, NONE) for name in names]) for names in (domain, test_domain))
    # without test images a task has no accuracy, and the means over tasks would be NaN
    untested = next((name for name in order if number[name] not in test), None)
    if untested is not None:
        raise InputError(f"tasks_by: no test example is of domain {untested!r}; every task needs some")
    return TaskSchedule(_tasks(train, label, classes), train, test)


def tasks_of_examples(
    task: Int[np.ndarray, " N"],
    label: Int[np.ndarray, " N"],
    test_label: Int[np.ndarray, " M"],
    classes: int,
) -> TaskSchedule:
    """Make tasks whose training examples a user lists.

    A class's test examples belong to the first task that trains the class.

    Args:
      task: of each training example; -1: no task.
      label: of the training examples, positions in the class order.
      test_label: of the test examples.
      classes: C.
    """
    tasks = _tasks(task, label, classes)
    current = np.stack([np.asarray(scheduled.current) for scheduled in tasks])
    # argmax is the first task that trains the class
    first_task = np.where(current.any(axis=0), current.argmax(axis=0), NONE)
    return TaskSchedule(tasks, task, first_task[test_label])


def _tasks(task: np.ndarray, label: np.ndarray, classes: int) -> tuple[Task, ...]:
    """Make the tasks with the classes of their training examples."""
    return tasks_of([np.unique(label[task == number]) for number in range(task.max() + 1)], classes)
