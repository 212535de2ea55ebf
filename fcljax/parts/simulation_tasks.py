"""The tasks of a simulation, and what is measured after each of them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from fcljax.data.files.any_arrays import check_alike
from fcljax.data.tasks import make_tasks, tasks_of
from fcljax.errors import InputError, choose, reason
from fcljax.federated.check import describe
from fcljax.parts.simulation_inputs import OwnedExamples, checked_array, checked_examples
from fcljax.parts.user_code import check_arguments
from fcljax.types import Task

METRICS = ("loss", "accuracy", "perplexity")
BATCH = 256  # test examples that are measured at a time


@runtime_checkable
class ExampleMetric(Protocol):
    """Returns a number for each example, or such numbers and their weights: the result is sum / sum."""

    def __call__(self, model: Any, x: Any, y: Any, /) -> Any: ...


class TaskSplit(NamedTuple):
    """The tasks of the training examples."""

    tasks: tuple[Task, ...]
    of_example: Int[np.ndarray, " N"]
    """The task of each example."""
    names: np.ndarray | None
    """Values of the user's array that name the tasks; None: the classes decide."""


class ScoredExamples(NamedTuple):
    """Test examples with their tasks."""

    x: PyTree
    y: np.ndarray
    of_example: Int[np.ndarray, " M"]
    """The task of each example; -1: of no task."""


class CompiledMetric(NamedTuple):
    """A metric on test examples, compiled."""

    of_examples: Callable[[PyTree, Any, Array], tuple[Array, Array]]
    """of_examples(state, x [B, ...], y [B, ...]) -> numbers [B] and their weights [B]; compiled."""
    is_perplexity: bool = False


def split_tasks(tasks: Any, examples: OwnedExamples) -> TaskSplit:
    """Return the tasks that a user asks for.

    Args:
      tasks: None, a number, the labels of each task, or the task of each example [N].
      examples: of training.

    Raises:
      InputError: naming `tasks`, for anything else.
    """
    classes = examples.classes
    if tasks is None:
        return TaskSplit(make_tasks(classes, 1), np.zeros(len(examples.y), int), None)
    # nested lists are labels of tasks; a flat array names the task of each example
    of_labels = _labels_of_tasks(tasks)
    if not of_labels and not isinstance(tasks, int | np.integer):
        return _named_tasks(tasks, examples)
    if classes == 1:
        raise InputError("tasks: y has no class numbers to divide; nearest: the task of each example, [N]")
    if of_labels:
        return _listed_tasks(of_labels, examples)
    # True is an int in Python
    if isinstance(tasks, bool) or not 1 <= tasks <= classes:
        raise InputError(f"tasks: {tasks!r} of {classes} classes; nearest: {classes if tasks > 1 else 1}")
    return _by_class(make_tasks(classes, int(tasks)), examples.y)


def _labels_of_tasks(tasks: Any) -> list[list[int]]:
    """Return the labels of each task; [] if the user's value is no list of lists."""
    is_nested = isinstance(tasks, list | tuple) and all(
        isinstance(labels, list | tuple | range | np.ndarray) for labels in tasks
    )
    if not is_nested:
        return []

    def numbers(labels: Any) -> list[int]:
        # an empty list has no dtype to check; `_listed_tasks` refuses it
        if not len(labels):
            return []
        return checked_array("tasks", list(labels), "iu").ravel().tolist()

    return [numbers(labels) for labels in tasks]


def _listed_tasks(labels: list[list[int]], examples: OwnedExamples) -> TaskSplit:
    """Return the tasks with these labels."""
    listed = sorted(label for of_task in labels for label in of_task)
    present = np.unique(examples.y).tolist()
    wrong = next((label for label in listed if not 0 <= label < examples.classes), None)
    if wrong is not None:
        raise InputError(f"tasks: no example has the label {wrong}; labels go up to {examples.classes - 1}")
    if len(set(listed)) < len(listed):
        twice = next(label for label in listed if listed.count(label) > 1)
        raise InputError(f"tasks: label {twice} is in two tasks; nearest: the task of each example, [N]")
    missing = sorted(set(present) - set(listed))
    if missing:
        raise InputError(f"tasks: label {missing[0]} of y is in no task; add it, or leave out its examples")
    if not all(labels):
        raise InputError(f"tasks: task {labels.index([]) + 1} has no labels")
    classes = [np.array(of_task) for of_task in labels]
    return _by_class(tasks_of(classes, examples.classes), examples.y)


def _by_class(tasks: tuple[Task, ...], y: np.ndarray) -> TaskSplit:
    """Return the split in which an example's class decides its task."""
    return TaskSplit(tasks, _task_of_class(tasks)[y], None)


def _task_of_class(tasks: tuple[Task, ...]) -> Int[np.ndarray, " C"]:
    """Return the task of each class; -1 for a class of none."""
    current = np.stack([np.asarray(task.current) for task in tasks])
    return np.where(current.any(0), current.argmax(0), -1)


def _named_tasks(tasks: Any, examples: OwnedExamples) -> TaskSplit:
    """Return the tasks that an array names, in the order of the numbers or of the alphabet."""
    values = checked_array("tasks", tasks, "iuU")
    if values.shape != examples.client.shape:
        raise InputError(
            f"tasks: shape {list(values.shape)}; expected a number, the labels of each task, or the task of "
            f"each example, [{len(examples.client)}]"
        )
    names, of_example = np.unique(values, return_inverse=True)
    # without class numbers all examples are of one class, which every task has
    classes = [np.zeros(1, int)] * len(names)
    if examples.classes > 1:
        classes = [np.unique(examples.y[of_example == task]) for task in range(len(names))]
    return TaskSplit(tasks_of(classes, examples.classes), of_example, names)


def checked_test(test: Any, x: PyTree, split: TaskSplit) -> ScoredExamples:
    """Return test examples with their tasks.

    Args:
      test: (x_test, y_test), or (x_test, y_test, tasks_test) where an array names the tasks.
      x: training examples, whose structure they must have.
      split: the tasks of training.

    Raises:
      InputError: naming `test`, for anything else.
    """
    expected = "(x_test, y_test)"
    if split.names is not None:
        expected = "(x_test, y_test, tasks_test)"
    # as many values as the text has
    if not isinstance(test, list | tuple) or len(test) != expected.count(",") + 1:
        described = f"{len(test)} values" if isinstance(test, list | tuple) else type(test).__name__
        raise InputError(f"test: {described}; expected {expected}")
    y_test = checked_array("test: y_test", test[1])
    if not y_test.ndim:
        raise InputError(f"test: y_test has shape []; expected {expected} with one value for each example")
    try:
        # test examples have no owners: one client stands for all
        examples = checked_examples(test[0], y_test, np.zeros(len(y_test), int))
    except InputError as error:
        # the message names `simulate`, whose x, y and owner are the training examples
        raise InputError(f"test: {str(error).removeprefix('simulate: ')}") from None
    check_alike("test", "x", x, "x_test", examples.x)
    if split.names is not None:
        values = checked_array("test", test[2], "iuU")
        return ScoredExamples(examples.x, examples.y, _named_tests(values, examples, split.names))
    if len(split.tasks) == 1:
        return ScoredExamples(examples.x, examples.y, np.zeros(len(examples.y), int))
    task_of_class = _task_of_class(split.tasks)
    if examples.classes > len(task_of_class):
        raise InputError(f"test: y_test has the label {examples.y.max()}, which no training example has")
    return ScoredExamples(examples.x, examples.y, task_of_class[examples.y])


def _named_tests(
    values: np.ndarray,
    examples: OwnedExamples,
    names: np.ndarray,
) -> Int[np.ndarray, " M"]:
    """Return the task of each test example, of the tasks that training examples name."""
    if values.shape != examples.client.shape:
        raise InputError(
            f"test: tasks_test has shape {list(values.shape)}; expected [{len(examples.client)}]"
        )
    unknown = np.setdiff1d(values, names)
    if len(unknown):
        raise InputError(f"test: tasks_test has {unknown[0].item()!r}, which tasks has not")
    # `names` are sorted and have all values, so this is each value's index
    return np.searchsorted(names, values)


def make_metric(
    evaluate: Any,
    losses: Callable | None,
    model_of: Callable[[PyTree], Any],
) -> CompiledMetric:
    """Return what a user measures, compiled.

    Args:
      evaluate: one of `METRICS`, or an `ExampleMetric`.
      losses: (model, x, y) -> the loss of each example; None: the method has no such loss.
      model_of: (state) -> the model.

    Raises:
      InputError: naming `evaluate`, for another value or a function that does not return what it should.
    """
    measured = evaluate
    if isinstance(evaluate, str):
        choose("evaluate", evaluate, METRICS)
        if losses is None:
            raise InputError(
                f"evaluate: {evaluate!r} is for fcljax.fedavg; nearest: a function evaluate(server, x, y)"
            )
        measured = {"loss": losses, "accuracy": _hits, "perplexity": _token_losses}[evaluate]
    else:
        check_arguments("simulate", evaluate=(evaluate, 3))

    def of_examples(state: PyTree, x: Any, y: Array) -> tuple[Array, Array]:
        try:
            values = measured(model_of(state), x, y)
        # a traced value that outlived its trace has a line of its own (`leaks_in_one_line`)
        except (InputError, jax.errors.UnexpectedTracerError):
            raise
        except Exception as error:  # a user's function may raise anything
            raise InputError(f"evaluate: {_named(evaluate)}: {reason(error)}") from error
        # a number per example without weights: every example counts once
        if not isinstance(values, tuple):
            values = (values, jnp.ones(len(y)))
        shapes = [jnp.shape(value) for value in values]
        if shapes != [(len(y),)] * 2:
            raise InputError(
                f"evaluate: {_named(evaluate)} returned the shape {shapes[0]}; expected a number for each "
                f"example, ({len(y)},), or such numbers and their weights"
            )
        return values

    return CompiledMetric(jax.jit(of_examples), evaluate == "perplexity")


def _named(evaluate: Any) -> str:
    return repr(evaluate) if isinstance(evaluate, str) else describe(evaluate)


def _logits(model: Any, x: Any, y: Array) -> Array:
    """Return model(x), if these are logits [..., C] of labels y [...].

    Raises:
      InputError: for a model that cannot be called, and other shapes.
    """
    nearest_valid = "nearest: a function evaluate(model, x, y)"
    if not callable(model):
        raise InputError(
            f"evaluate: it calls the model, and a {type(model).__name__} is none; {nearest_valid}"
        )
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise InputError(f"evaluate: y is {y.dtype}, and class numbers are needed; nearest: 'loss'")
    logits = model(x)
    if jnp.shape(logits)[:-1] != y.shape:
        raise InputError(
            f"evaluate: the model returns shape {jnp.shape(logits)} for y of shape {y.shape}; expected "
            f"logits of classes on one more axis; {nearest_valid}"
        )
    return logits


def _sums(values: Array, y: Array) -> tuple[Array, Array]:
    """Return sums over the labels of each example, and their number; negative labels are left out."""
    counts = (y >= 0).reshape(len(y), -1)
    return jnp.sum(jnp.where(counts, values.reshape(len(y), -1), 0.0), -1), jnp.sum(counts, -1)


def _hits(model: Any, x: Any, y: Array) -> tuple[Array, Array]:
    """Return how many labels of each example are predicted, and how many there are."""
    return _sums(jnp.argmax(_logits(model, x, y), -1) == y, y)


def _token_losses(model: Any, x: Any, y: Array) -> tuple[Array, Array]:
    """Return the sum of the cross-entropy over each example's labels, and their number."""
    logits = _logits(model, x, y).astype(jnp.float32)
    # -1 is no index of a class; `_sums` leaves these labels out
    return _sums(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0)), y)


def measure(metric: CompiledMetric, state: PyTree, test: ScoredExamples, task: int) -> float:
    """Return the metric on the test examples of a task; NaN if it has none."""
    index = np.flatnonzero(test.of_example == task)
    total = 0.0
    weight = 0.0
    for start in range(0, len(index), BATCH):
        batch = index[start : start + BATCH]
        # `resize` repeats examples up to a full batch, so that all batches share one
        # compiled program; the repeated ones are cut off below
        rows = np.resize(batch, min(BATCH, len(test.y)))
        x = jax.tree.map(lambda leaf, rows=rows: leaf[rows], test.x)
        values, weights = metric.of_examples(state, x, jnp.asarray(test.y[rows]))
        # float64: sums over many examples would lose digits
        total += np.asarray(values, np.float64)[: len(batch)].sum()
        weight += np.asarray(weights, np.float64)[: len(batch)].sum()
    mean = total / weight if weight else np.nan
    return float(np.exp(mean) if metric.is_perplexity else mean)


def measured_row(
    metric: CompiledMetric, state: PyTree, test: ScoredExamples, task: int, tasks: int
) -> Float[np.ndarray, " T"]:
    """Return the metric on each task up to `task`; NaN for later ones."""
    row = [measure(metric, state, test, earlier) for earlier in range(task + 1)]
    return np.array(row + [np.nan] * (tasks - task - 1))
