"""Accuracy after a task, over the test images of all tasks so far, of the global model or of the clients'."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.results import metrics
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.features import Predicted, make_predict
from fcljax.runs.records import Records
from fcljax.types import RoundContext, Task


class Evaluated(NamedTuple):
    """Accuracy on each task seen so far, over all its test rows, with all seen classes competing: of the
    global model, and of what was merged before the server changed it, if it did; and of the global model
    where it is told each row's task, so that only that task's classes compete. None: not evaluated.

    Where the model that counts is each client's own, the mean over clients of their accuracies on the classes
    of each task that they have learned."""

    accuracy: list[float] | None
    provisional: list[float] | None
    told: list[float] | None


NOT_EVALUATED = Evaluated(None, None, None)


def make_evaluate(exp: Experiment, batch_size: int) -> Callable[..., Evaluated]:
    """evaluate(test, state, t, records) -> accuracies after task t. `test`: the test split, as in the
    experiment or with query features; the records get the confusion matrix and the calibration, and where
    clients are evaluated as themselves everyone's accuracies."""
    make = _of_clients if exp.method.personal else _of_server
    return make(exp, batch_size)


def _of_server(exp: Experiment, batch_size: int) -> Callable[..., Evaluated]:
    label, tasks = exp.scenario.test_label, exp.scenario.tasks
    make = lambda predict: make_predict(predict, exp.read, batch_size, len(label), exp.engine.mesh)
    predict = make(exp.method.predict)
    merged = exp.method.predict_provisional and make(exp.method.predict_provisional)
    count = functools.partial(metrics.confusion_matrix, num_classes=exp.sizes.classes)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        rows = np.flatnonzero(tasks[t].seen[label])
        truth, classes = label[rows], [task.classes for task in tasks[: t + 1]]
        task_of = _task_of([task.current for task in tasks[: t + 1]])

        def found_by(predict: Callable) -> Predicted:
            records.add(evaluated_images=len(rows))
            return predict(_round_context(exp, t), (state.server,), test, rows, task_of)

        accuracy = lambda label: metrics.task_accuracy(count(truth, label), classes).tolist()
        found = found_by(predict)
        _describe(records, [found], [truth], exp.sizes.classes)
        provisional = accuracy(found_by(merged).label) if merged else None
        return Evaluated(accuracy(found.label), provisional, accuracy(found.told))

    return evaluate


def _of_clients(exp: Experiment, batch_size: int) -> Callable[..., Evaluated]:
    label = exp.scenario.test_label
    predict = _predict_clients(exp, exp.method.predict_client, batch_size)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        founds, truths, everyone, told = [], [], [], []
        for client, (rows, found) in enumerate(predict(test, state, t)):
            records.add(evaluated_images=len(rows))
            truth = label[rows]
            of_task = [exp.scenario.current(task, client)[truth] for task in range(t + 1)]
            everyone.append(_shares(found.label == truth, of_task))
            told.append(_shares(found.told == truth, of_task))
            founds, truths = [*founds, found], [*truths, truth]
        _describe(records, founds, truths, exp.sizes.classes)
        records.clients, records.clients_told = (
            [*records.clients[:t], everyone],
            [*records.clients_told[:t], told],
        )
        return Evaluated(_over_clients(everyone), None, _over_clients(told))

    return evaluate


def _shares(right: Bool[np.ndarray, " n"], of_task: list[Bool[np.ndarray, " n"]]) -> list[float | None]:
    """Of the rows of each task how many are right; None of a task without rows."""
    return [float(right[mine].mean()) if mine.any() else None for mine in of_task]


def _over_clients(shares: list[list[float | None]]) -> list[float]:
    """The mean over the clients that have rows of a task; NaN if none has."""
    values = np.array(shares, float)  # None becomes NaN
    known = ~np.isnan(values)
    return np.where(known.any(0), np.nansum(values, 0) / np.maximum(known.sum(0), 1), np.nan).tolist()


def _task_of(current: Sequence) -> Int[np.ndarray, " C"]:
    """The task that each class belongs to, the first one of several; -1: none yet."""
    has = np.stack(current)
    return np.where(has.any(axis=0), has.argmax(axis=0), -1)


def _predict_clients(
    exp: Experiment, function: Callable | None, batch_size: int
) -> Callable[..., Iterator[tuple[Int[np.ndarray, " n"], Predicted]]]:
    """predict(test, state, t) -> for each client the test rows of the classes that it has held up to task t,
    and what its own model says of them."""
    label = exp.scenario.test_label
    assert function is not None
    predict = make_predict(function, exp.read, batch_size, len(label), exp.engine.mesh)

    def each(test: Split | Host, state: State, t: int) -> Iterator[tuple[np.ndarray, Predicted]]:
        for client, learned in enumerate(exp.scenario.learned(t)):
            round_context = (
                _own_round_context(exp, t, client, learned) if exp.method.personal else _round_context(exp, t)
            )
            rows = np.flatnonzero(learned[label])
            own = jax.tree.map(lambda x, i=client: x[i], state.clients)
            task_of = _task_of([exp.scenario.current(task, client) for task in range(t + 1)])
            yield rows, predict(round_context, (state.server, own), test, rows, task_of)

    return each


def _describe(records: Records, founds: list[Predicted], truths: list[np.ndarray], classes: int) -> None:
    """Confusion matrix and calibration of all predictions together."""
    found, truth = _together(founds), np.concatenate(truths)
    records.confusion = metrics.confusion_matrix(truth, found.label, classes).tolist()
    records.calibration = metrics.calibration(found.label == truth, found.confidence).to_json()


def _together(founds: list[Predicted]) -> Predicted:
    return Predicted(*map(np.concatenate, zip(*founds, strict=True)))


def _round_context(exp: Experiment, t: int) -> RoundContext:
    """What predictions after task t may read."""
    return RoundContext.on_host(exp.frozen, exp.scenario.tasks[t], exp.sizes.rounds - 1, True)


def _own_round_context(exp: Experiment, t: int, client: int, learned: Bool[np.ndarray, " C"]) -> RoundContext:
    """The same, with the classes that a client has learned as those that it has seen."""
    task = exp.scenario.tasks[t]
    current = exp.scenario.current(t, client) & learned
    own = Task.of_numpy(np.asarray(task.index), np.asarray(task.classes), current, learned)
    return RoundContext.on_host(exp.frozen, own, exp.sizes.rounds - 1, True)


def personal_accuracy(exp: Experiment, state: State, t: int, batch_size: int) -> list[float | None] | None:
    """Accuracy of each client's personal model on the test rows of the classes that it has held.

    None if it has held none. None altogether for a method without personal models.
    """
    if exp.method.predict_client is None:
        return None
    label, predict = exp.scenario.test_label, _predict_clients(exp, exp.method.predict_client, batch_size)
    found = predict(exp.test, state, t)
    return [float(np.mean(own.label == label[rows])) if len(rows) else None for rows, own in found]


def sampled_calibration(exp: Experiment, state: State, t: int, batch_size: int) -> dict[str, Any] | None:
    """Calibration after task t where a Bayesian method predicts with parameters drawn from its posteriors, as
    the mean of their probabilities, in place of their means; None for other methods."""
    if exp.method.predict_drawn is None:
        return None
    found = list(_predict_clients(exp, exp.method.predict_drawn, batch_size)(exp.test, state, t))
    truth, own = (
        np.concatenate([exp.scenario.test_label[rows] for rows, _ in found]),
        _together([f for _, f in found]),
    )
    return metrics.calibration(own.label == truth, own.confidence).to_json()
