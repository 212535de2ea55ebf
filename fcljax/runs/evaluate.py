"""Accuracy after a task on the test images of all tasks so far: of the global model, or of the clients'
own."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.mesh import jit
from fcljax.results import metrics
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.predict import Predicted, Predictor, make_predict
from fcljax.runs.records import Evaluated, Records
from fcljax.types import RoundContext, Task

# evaluate(test, state, t, records) -> accuracies after task t. `test`: the experiment's test split, perhaps
# with query features. The records get the confusion matrix and the calibration, and the accuracies of each
# client where clients are evaluated with models of their own.
Evaluate = Callable[[Split | Host, State, int, Records], Evaluated]


def make_evaluate(exp: Experiment) -> Evaluate:
    """The evaluation of the global model or, for a method with personal models, of those."""
    return _evaluate_clients(exp) if exp.method.personal else _evaluate_server(exp)


def _evaluate_server(exp: Experiment) -> Evaluate:
    scenario = exp.scenario
    label = exp.scenario.test_label
    classes = exp.sizes.classes
    predict = predictor(exp, exp.method.predict)
    provisional = exp.method.predict_provisional and predictor(exp, exp.method.predict_provisional)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        index = np.flatnonzero(scenario.tests_seen(t))
        tasks = range(t + 1)
        truth = label[index]
        task_of = _task_of([scenario.current(task) for task in tasks])
        of_task = [scenario.tests(task)[index] for task in tasks]

        def predicted_by(predict: Callable) -> Predicted:
            records.add(evaluated_images=len(index))
            return predict(_last_round(exp, t), (state.server,), test, index, task_of)

        def accuracy(predicted: np.ndarray) -> list[float]:
            return np.array(_share_per_task(predicted == truth, of_task), float).tolist()  # None becomes NaN

        found = predicted_by(predict)
        _describe(records, [found], [truth], classes)
        merged = accuracy(predicted_by(provisional).label) if provisional else None
        return Evaluated(accuracy(found.label), merged, accuracy(found.label_in_task))

    return evaluate


def _evaluate_clients(exp: Experiment) -> Evaluate:
    label = exp.scenario.test_label
    predict = _predict_by_client(exp, exp.method.predict_client)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        predicted = []
        truths = []
        accuracy = []
        task_il = []
        personal = []
        for client, (index, found) in enumerate(predict(test, state, t)):
            records.add(evaluated_images=len(index))
            truth = label[index]
            of_task = [exp.scenario.tests(task, client)[index] for task in range(t + 1)]
            accuracy.append(_share_per_task(found.label == truth, of_task))
            task_il.append(_share_per_task(found.label_in_task == truth, of_task))
            personal.append(_share(found.label == truth))
            predicted.append(found)
            truths.append(truth)
        _describe(records, predicted, truths, exp.sizes.classes)
        records.clients = [*records.clients[:t], accuracy]
        records.clients_task_il = [*records.clients_task_il[:t], task_il]
        return Evaluated(_mean_over_clients(accuracy), None, _mean_over_clients(task_il), personal)

    return evaluate


def personal_accuracy(exp: Experiment, state: State, records: Records) -> list[float | None] | None:
    """Accuracy of each client's personal model, after the last task, on the test images of those classes that
    it has had.

    None for a client that has had none, and for a method without personal models. Where these are what counts
    the last evaluation has it.
    """
    if records.personal:
        return records.personal[-1]
    if exp.method.predict_client is None:
        return None
    label = exp.scenario.test_label
    predict = _predict_by_client(exp, exp.method.predict_client)
    predicted = predict(exp.test, state, len(exp.scenario.tasks) - 1)
    return [_share(found.label == label[index]) for index, found in predicted]


def sampled_calibration(exp: Experiment, state: State) -> dict[str, Any] | None:
    """Calibration after the last task of a Bayesian method that averages its predictions over parameters
    drawn from the posterior, instead of predicting with their means; None for other methods."""
    if exp.method.predict_drawn is None:
        return None
    predict = _predict_by_client(exp, exp.method.predict_drawn)
    predicted = list(predict(exp.test, state, len(exp.scenario.tasks) - 1))
    truth = np.concatenate([exp.scenario.test_label[index] for index, _ in predicted])
    found = _joined([found for _, found in predicted])
    return metrics.calibration(found.label == truth, found.confidence).to_json()


def predictor(exp: Experiment, function: Callable) -> Predictor:
    """Predicts test images by a function of the method."""
    most = len(exp.scenario.test_label)
    return make_predict(function, exp.read, exp.settings.eval_batch_size, most, exp.engine.mesh)


def _predict_by_client(
    exp: Experiment, function: Callable | None
) -> Callable[..., Iterator[tuple[Int[np.ndarray, " n"], Predicted]]]:
    """predict(test, state, t) -> for each client the test images of the classes that it has had up to task t,
    and the predictions of its own model."""
    assert function is not None
    predict = predictor(exp, function)
    own_of = jit(lambda states, client: jax.tree.map(lambda x: x[client], states), exp.engine.mesh)

    def each(test: Split | Host, state: State, t: int) -> Iterator[tuple[np.ndarray, Predicted]]:
        for client, learned in enumerate(exp.scenario.learned(t)):
            personal = exp.method.personal
            round_context = _own_last_round(exp, t, client, learned) if personal else _last_round(exp, t)
            index = _own_tests(exp, t, client, learned)
            own = own_of(state.clients, np.int32(client))
            task_of = _task_of([exp.scenario.current(task, client) for task in range(t + 1)])
            yield index, predict(round_context, (state.server, own), test, index, task_of)

    return each


def _own_tests(
    exp: Experiment, t: int, client: int, learned: Bool[np.ndarray, " C"]
) -> Int[np.ndarray, " n"]:
    """The test images of the classes that a client has learned by task t."""
    return np.flatnonzero(learned[exp.scenario.test_label] & exp.scenario.tests_seen(t, client))


def evaluated_images(exp: Experiment) -> int:
    """The images of all evaluations of a run together."""
    scenario = exp.scenario
    tasks = range(len(exp.scenario.tasks))
    if not exp.method.personal:
        return sum(int(scenario.tests_seen(t).sum()) for t in tasks)
    each = ((t, client, own) for t in tasks for client, own in enumerate(scenario.learned(t)))
    return sum(len(_own_tests(exp, *of_client)) for of_client in each)


def _share_per_task(
    right: Bool[np.ndarray, " n"], of_task: list[Bool[np.ndarray, " n"]]
) -> list[float | None]:
    """The share of each task's examples that is right; None for a task without examples."""
    return [_share(right[mine]) for mine in of_task]


def _share(right: Bool[np.ndarray, " n"]) -> float | None:
    """The share that is right; None of nothing."""
    return float(right.mean()) if len(right) else None


def _mean_over_clients(shares: list[list[float | None]]) -> list[float]:
    """The mean for each task over the clients that have examples of it; NaN if none has."""
    values = np.array(shares, float)  # None becomes NaN
    known = ~np.isnan(values)
    return np.where(known.any(0), np.nansum(values, 0) / np.maximum(known.sum(0), 1), np.nan).tolist()


def _task_of(current: Sequence) -> Int[np.ndarray, " C"]:
    """The task that each class belongs to, the first one of several; -1: none yet."""
    has = np.stack(current)
    return np.where(has.any(axis=0), has.argmax(axis=0), -1).astype(np.int32)


def _describe(records: Records, predicted: list[Predicted], truths: list[np.ndarray], classes: int) -> None:
    """Record the confusion matrix and the calibration of all predictions together."""
    found = _joined(predicted)
    truth = np.concatenate(truths)
    records.confusion = metrics.confusion_matrix(truth, found.label, classes).tolist()
    records.calibration = metrics.calibration(found.label == truth, found.confidence).to_json()


def _joined(predicted: list[Predicted]) -> Predicted:
    return Predicted(*map(np.concatenate, zip(*predicted, strict=True)))


def _last_round(exp: Experiment, t: int) -> RoundContext:
    """The context of predictions after task t."""
    return RoundContext.on_host(exp.frozen, exp.scenario.tasks[t], exp.sizes.rounds - 1, True)


def _own_last_round(exp: Experiment, t: int, client: int, learned: Bool[np.ndarray, " C"]) -> RoundContext:
    """The same, where the classes seen are those that the client has learned."""
    task = exp.scenario.tasks[t]
    current = exp.scenario.current(t, client) & learned
    own = Task.of_numpy(np.asarray(task.index), np.asarray(task.classes), current, learned)
    return RoundContext.on_host(exp.frozen, own, exp.sizes.rounds - 1, True)
