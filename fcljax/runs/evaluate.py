"""Accuracy after a task, over the test images of all tasks so far, of the global model or of the clients'."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from fcljax.features import Predicted, make_predict
from fcljax.runs import metrics
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.records import Records
from fcljax.types import Task, Turn


class Evaluated(NamedTuple):
    """Accuracy on each task seen so far, over all its test rows, with all seen classes competing: of the
    global model, and of what was merged before the server changed it, if it did. None: not evaluated.

    Where the model that counts is each client's own, the mean over clients of their accuracies on the classes
    of each task that they have learned."""

    accuracy: list[float] | None
    provisional: list[float] | None


def make_evaluate(exp: Experiment, batch_size: int) -> Callable[[State, int, Records], Evaluated]:
    """evaluate(state, t, records) -> accuracies after task t; the records get the confusion matrix and the
    calibration, and where clients are evaluated as themselves everyone's accuracies."""
    make = _of_clients if exp.method.personal else _of_server
    return make(exp, batch_size)


def _of_server(exp: Experiment, batch_size: int) -> Callable[[State, int, Records], Evaluated]:
    label, tasks = exp.scenario.test_label, exp.scenario.tasks
    make = lambda predict: make_predict(predict, exp.read, batch_size, len(label))
    predict = make(exp.method.predict)
    merged = exp.method.predict_provisional and make(exp.method.predict_provisional)

    def evaluate(state: State, t: int, records: Records) -> Evaluated:
        rows = np.flatnonzero(tasks[t].seen[label])
        truth, classes = label[rows], [task.classes for task in tasks[: t + 1]]

        def found_by(predict: Callable) -> tuple[Predicted, np.ndarray]:
            found = predict(_turn(exp, t), (state.server,), exp.test, rows)
            records.add(evaluated_images=len(rows))
            return found, metrics.confusion_matrix(truth, found.label, exp.setting.classes)

        accuracy = lambda confusion: metrics.task_accuracy(confusion, classes).tolist()
        found, confusion = found_by(predict)
        _describe(records, [found], [truth], exp.setting.classes)
        return Evaluated(accuracy(confusion), accuracy(found_by(merged)[1]) if merged else None)

    return evaluate


def _of_clients(exp: Experiment, batch_size: int) -> Callable[[State, int, Records], Evaluated]:
    label, tasks = exp.scenario.test_label, exp.scenario.tasks
    predict = _predict_clients(exp, batch_size)

    def evaluate(state: State, t: int, records: Records) -> Evaluated:
        of_task = [task.current[label] for task in tasks[: t + 1]]
        founds, truths, everyone = [], [], []
        for rows, found in predict(state, t):
            records.add(evaluated_images=len(rows))
            right = found.label == label[rows]
            everyone.append(
                [float(right[mine[rows]].mean()) if mine[rows].any() else None for mine in of_task]
            )
            founds, truths = [*founds, found], [*truths, label[rows]]
        _describe(records, founds, truths, exp.setting.classes)
        records.clients = [*records.clients[:t], everyone]
        of_everyone = np.array(everyone, float)  # None becomes NaN
        return Evaluated(np.nanmean(of_everyone, axis=0).tolist(), None)

    return evaluate


def _predict_clients(
    exp: Experiment, batch_size: int
) -> Callable[[State, int], Iterator[tuple[Int[np.ndarray, " n"], Predicted]]]:
    """predict(state, t) -> for each client the test rows of the classes that it has held up to task t, and
    what its own model says of them."""
    label, function = exp.scenario.test_label, exp.method.predict_client
    assert function is not None
    predict = make_predict(function, exp.read, batch_size, len(label))

    def each(state: State, t: int) -> Iterator[tuple[np.ndarray, Predicted]]:
        for client in range(exp.setting.clients):
            learned = (exp.scenario.holdings[client] > 0) & exp.scenario.tasks[t].seen
            turn = _own_turn(exp, t, learned) if exp.method.personal else _turn(exp, t)
            rows = np.flatnonzero(learned[label])
            own = jax.tree.map(lambda x, i=client: x[i], state.clients)
            yield rows, predict(turn, (state.server, own), exp.test, rows)

    return each


def _describe(records: Records, founds: list[Predicted], truths: list[np.ndarray], classes: int) -> None:
    """Confusion matrix and calibration of all predictions together."""
    found = Predicted(*map(np.concatenate, zip(*founds, strict=True)))
    truth = np.concatenate(truths)
    records.confusion = metrics.confusion_matrix(truth, found.label, classes).tolist()
    records.calibration = metrics.calibration(found.label == truth, found.confidence).to_json()


def _turn(exp: Experiment, t: int) -> Turn:
    """What predictions after task t may read."""
    return Turn.on_host(exp.frozen, exp.scenario.tasks[t], exp.setting.rounds - 1, True)


def _own_turn(exp: Experiment, t: int, learned: Bool[np.ndarray, " C"]) -> Turn:
    """The same, with the classes that a client has learned as those that it has seen."""
    task = exp.scenario.tasks[t]
    numbers = (np.asarray(task.index), np.asarray(task.classes), np.asarray(task.current))
    own = Task.of_numpy(*numbers[:2], numbers[2] & learned, learned)
    return Turn.on_host(exp.frozen, own, exp.setting.rounds - 1, True)


def personal_accuracy(exp: Experiment, state: State, t: int, batch_size: int) -> list[float | None] | None:
    """Accuracy of each client's personal model on the test rows of the classes that it has held.

    None if it has held none. None altogether for a method without personal models.
    """
    if exp.method.predict_client is None:
        return None
    label, found = exp.scenario.test_label, _predict_clients(exp, batch_size)(state, t)
    return [float(np.mean(own.label == label[rows])) if len(rows) else None for rows, own in found]
