"""Accuracy after a task on the test images of all tasks so far: of the global model, or
of personal ones."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.federated.check import in_users_code
from fcljax.mesh import jit
from fcljax.results import metrics
from fcljax.runs.build import Experiment
from fcljax.runs.checkpoint import State
from fcljax.runs.predict import Predicted, Predictor, make_predict
from fcljax.runs.records import OF_USER, Evaluated, Records, Tested
from fcljax.types import Metric, Predictions, PyTree, RoundContext, Task

# evaluate(test, state, t, records) -> accuracies after task t. `test`: the experiment's
# test split, perhaps with query features. The records get the confusion matrix and the
# calibration and, of personal models, the accuracies of each client.
Evaluate = Callable[[Split | Host, State, int, Records], Evaluated]


def make_evaluate(exp: Experiment) -> Evaluate:
    """Return the evaluation of the global model, or of personal models."""
    if exp.method.personal:
        return _evaluate_clients(exp)
    return _evaluate_server(exp)


def _evaluate_server(exp: Experiment) -> Evaluate:
    scenario = exp.scenario
    predict = predictor(exp, exp.method.predict)
    predict_provisional = None
    if exp.method.predict_provisional is not None:
        predict_provisional = predictor(exp, exp.method.predict_provisional)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        index = np.flatnonzero(scenario.tests_seen(t))
        label = scenario.test_label[index]
        task_of_class = _task_of_class([scenario.current(task) for task in range(t + 1)])
        is_of_task = [scenario.tests(task)[index] for task in range(t + 1)]

        def predictions(predict: Predictor) -> Predicted:
            records.add(evaluated_images=len(index))
            return predict(_last_round(exp, t), (state.server,), test, index, task_of_class)

        def accuracy(predicted_label: np.ndarray) -> list[float]:
            # numpy makes NaN of the None of a task without test examples
            return np.array(_accuracy_per_task(predicted_label == label, is_of_task), float).tolist()

        predicted = predictions(predict)
        _record_predictions(records, [Tested(None, index, label, predicted)], exp.sizes.classes)
        values = measured(exp.metrics, task_of_class, [predicted], [label])
        provisional = None
        if predict_provisional is not None:
            provisional = accuracy(predictions(predict_provisional).label)
        task_il = accuracy(predicted.label_in_task)
        new = None
        if exp.method.names_classes:
            new = new_classes(test, state, t, records)
        return Evaluated(accuracy(predicted.label), provisional, task_il, metrics=values, new=new)

    def new_classes(test: Split | Host, state: State, t: int, records: Records) -> float | None:
        """Return the accuracy on the classes that no task has had yet, among these."""
        index = _tests_of_new_classes(exp, t)
        if not len(index):
            return None
        records.add(evaluated_images=len(index))
        # a task in which the new classes are the seen ones: names of classes make the
        # classifier, so it can tell apart classes that it has never trained on
        round_context = _last_round(exp, t)
        last = scenario.tasks[t]
        new = ~np.asarray(last.seen)
        task = Task.of_numpy(np.asarray(last.index), np.asarray(last.classes), new, new)
        no_tasks = np.zeros(len(new), np.int32)
        predicted = predict(round_context._replace(task=task), (state.server,), test, index, no_tasks)
        return _accuracy(predicted.label == scenario.test_label[index])

    return evaluate


def _evaluate_clients(exp: Experiment) -> Evaluate:
    scenario = exp.scenario
    predict = _predict_by_client(exp, exp.method.predict_client)

    def evaluate(test: Split | Host, state: State, t: int, records: Records) -> Evaluated:
        tested = []
        class_il = []
        task_il = []
        personal = []
        for client, (index, predicted) in enumerate(predict(test, state, t)):
            records.add(evaluated_images=len(index))
            label = scenario.test_label[index]
            correct = predicted.label == label
            is_of_task = [scenario.tests(task, client)[index] for task in range(t + 1)]
            class_il.append(_accuracy_per_task(correct, is_of_task))
            task_il.append(_accuracy_per_task(predicted.label_in_task == label, is_of_task))
            personal.append(_accuracy(correct))
            tested.append(Tested(client, index, label, predicted))
        _record_predictions(records, tested, exp.sizes.classes)
        # with --eval-every-round a task is evaluated several times, and the last one
        # counts
        records.clients = [*records.clients[:t], class_il]
        records.clients_task_il = [*records.clients_task_il[:t], task_il]
        task_of_class = _task_of_class([scenario.current(task) for task in range(t + 1)])
        predictions = [model.predicted for model in tested]
        labels = [model.label for model in tested]
        values = measured(exp.metrics, task_of_class, predictions, labels)
        return Evaluated(_mean_over_clients(class_il), None, _mean_over_clients(task_il), personal, values)

    return evaluate


def measured(
    metrics: Mapping[str, Metric],
    task_of_class: Int[np.ndarray, " C"],
    predictions: list[Predicted],
    labels: list[np.ndarray],
) -> dict[str, float] | None:
    """Return name -> value of the user's metrics on all predictions together; None without any.

    Raises:
      InputError: naming the metric, and the line of the user's file if it raises.
    """
    if not metrics:
        return None
    predicted = _concatenate(predictions)
    label = np.concatenate(labels)
    test = Predictions(label, predicted.label, predicted.label_in_task, predicted.confidence, task_of_class)
    return {name: _value(name, metric, test) for name, metric in metrics.items()}


def _value(name: str, metric: Metric, predictions: Predictions) -> float:
    """Return the value of a user's metric."""
    try:
        value = metric(predictions)
    except Exception as error:
        raise in_users_code(name, error, "metrics") from error
    # a scalar of jax or numpy is a number too, so the type is not what is asked
    if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
        raise InputError(f"metrics: {name!r} returned {value!r}; needed: a number")
    return float(value)


def check_metrics(metrics: Mapping[str, Metric], lines: Sequence[dict[str, Any]]) -> None:
    """Check that a resumed run has the user's metrics with which it began.

    Raises:
      InputError: naming those that differ.
    """
    # before its first evaluation a run may be resumed with any metrics
    evaluated = [line for line in lines if "A" in line]
    if not evaluated:
        return
    before = {name.removeprefix(OF_USER) for name in evaluated[0] if name.startswith(OF_USER)}
    if before != {*metrics}:
        names = ", ".join(sorted(before)) or "none"
        raise InputError(f"metrics: the run began with {names}; give the same again")


def personal_accuracy(
    exp: Experiment,
    state: State,
    records: Records,
) -> list[float | None] | None:
    """Return the accuracy of each client's personal model, after the last task, on the
    test images of those classes that it has had.

    It is None for a client that has had none, and for a method without personal models.
    Where personal models are those that count, the last evaluation has computed it.
    """
    if records.personal:
        return records.personal[-1]
    if exp.method.predict_client is None:
        return None
    label = exp.scenario.test_label
    predict = _predict_by_client(exp, exp.method.predict_client)
    predictions = predict(exp.test, state, len(exp.scenario.tasks) - 1)
    return [_accuracy(predicted.label == label[index]) for index, predicted in predictions]


def last_predictions(exp: Experiment, state: State, records: Records) -> Sequence[Tested]:
    """Return the predictions of the last evaluation.

    They are in no checkpoint, so a run that was resumed after its last round makes them
    again.
    """
    if records.tested:
        return records.tested
    again = Records()
    make_evaluate(exp)(exp.test, state, len(exp.scenario.tasks) - 1, again)
    return again.tested


def sampled_calibration(exp: Experiment, state: State) -> dict[str, Any] | None:
    """Return the calibration after the last task of predictions that a Bayesian method
    averages over parameters drawn from the posterior, instead of predicting with their
    means; None for other methods."""
    if exp.method.predict_drawn is None:
        return None
    predict = _predict_by_client(exp, exp.method.predict_drawn)
    predictions = list(predict(exp.test, state, len(exp.scenario.tasks) - 1))
    label = np.concatenate([exp.scenario.test_label[index] for index, _ in predictions])
    predicted = _concatenate([predicted for _, predicted in predictions])
    return metrics.calibration(predicted.label == label, predicted.confidence).to_json()


def predictor(exp: Experiment, function: Callable) -> Predictor:
    """Return the prediction of test images by a function of the method."""
    images = len(exp.scenario.test_label)
    return make_predict(function, exp.read, exp.settings.eval_batch_size, images, exp.engine.mesh)


def _predict_by_client(
    exp: Experiment, function: Callable | None
) -> Callable[..., Iterator[tuple[Int[np.ndarray, " n"], Predicted]]]:
    """Return predict(test, state, t), which yields for each client the test images of
    the classes that it has had up to task t, and the predictions of its personal
    model."""
    assert function is not None
    scenario = exp.scenario
    predict = predictor(exp, function)

    # the client is an argument, not a constant: one compile serves them all
    @functools.partial(jit, mesh=exp.engine.mesh)
    def state_of(states: PyTree, client: Int[Array, ""]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[client], states)

    def predict_each(
        test: Split | Host,
        state: State,
        t: int,
    ) -> Iterator[tuple[np.ndarray, Predicted]]:
        for client, learned in enumerate(scenario.learned(t)):
            round_context = _last_round(exp, t)
            if exp.method.personal:
                round_context = _last_round_of_client(exp, t, client, learned)
            index = _tests_of_client(exp, t, client, learned)
            model = (state.server, state_of(state.clients, np.int32(client)))
            task_of_class = _task_of_class([scenario.current(task, client) for task in range(t + 1)])
            yield index, predict(round_context, model, test, index, task_of_class)

    return predict_each


def _tests_of_client(
    exp: Experiment, t: int, client: int, learned: Bool[np.ndarray, " C"]
) -> Int[np.ndarray, " n"]:
    """Return the test images of the classes that a client has learned by task t."""
    return np.flatnonzero(learned[exp.scenario.test_label] & exp.scenario.tests_seen(t, client))


def _tests_of_new_classes(exp: Experiment, t: int) -> Int[np.ndarray, " n"]:
    """Return the test images of classes that no task has had by task t."""
    seen = np.asarray(exp.scenario.tasks[t].seen)
    return np.flatnonzero(~seen[exp.scenario.test_label])


def evaluated_images(exp: Experiment) -> int:
    """Return the number of images of all evaluations of a run together."""
    scenario = exp.scenario
    images = 0
    for t in range(len(scenario.tasks)):
        if not exp.method.personal:
            images += int(scenario.tests_seen(t).sum())
            if exp.method.names_classes:
                images += len(_tests_of_new_classes(exp, t))
            continue
        for client, learned in enumerate(scenario.learned(t)):
            images += len(_tests_of_client(exp, t, client, learned))
    return images


def _accuracy_per_task(
    correct: Bool[np.ndarray, " n"], is_of_task: list[Bool[np.ndarray, " n"]]
) -> list[float | None]:
    """Return the accuracy on each task's examples; None for a task without examples."""
    return [_accuracy(correct[mask]) for mask in is_of_task]


def _accuracy(correct: Bool[np.ndarray, " n"]) -> float | None:
    """Return the share of correct predictions; None if there are none."""
    if not len(correct):
        return None
    return float(correct.mean())


def _mean_over_clients(accuracy: list[list[float | None]]) -> list[float]:
    """Return the mean per task over clients with examples of it; NaN if none has."""
    values = np.array(accuracy, float)  # None becomes NaN
    known = ~np.isnan(values)
    # not nanmean, which warns of a task that no client has
    mean = np.nansum(values, 0) / np.maximum(known.sum(0), 1)
    return np.where(known.any(0), mean, np.nan).tolist()


def _task_of_class(current: Sequence) -> Int[np.ndarray, " C"]:
    """Return the first task of each class; -1: none yet."""
    is_current = np.stack(current)
    return np.where(is_current.any(axis=0), is_current.argmax(axis=0), -1).astype(np.int32)


def _record_predictions(records: Records, tested: list[Tested], classes: int) -> None:
    """Record the predictions, and the confusion matrix and the calibration of all together."""
    records.tested = tested
    predicted = _concatenate([model.predicted for model in tested])
    label = np.concatenate([model.label for model in tested])
    records.confusion = metrics.confusion_matrix(label, predicted.label, classes).tolist()
    records.calibration = metrics.calibration(predicted.label == label, predicted.confidence).to_json()


def _concatenate(predictions: list[Predicted]) -> Predicted:
    return Predicted(*map(np.concatenate, zip(*predictions, strict=True)))


def _last_round(exp: Experiment, t: int) -> RoundContext:
    """Return the context of predictions after task t."""
    return RoundContext.on_host(exp.frozen, exp.scenario.tasks[t], exp.sizes.rounds - 1, True)


def _last_round_of_client(
    exp: Experiment, t: int, client: int, learned: Bool[np.ndarray, " C"]
) -> RoundContext:
    """Return `_last_round` with the client's task and the classes that it has learned."""
    task = exp.scenario.tasks[t]
    current = exp.scenario.current(t, client) & learned
    client_task = Task.of_numpy(np.asarray(task.index), np.asarray(task.classes), current, learned)
    return RoundContext.on_host(exp.frozen, client_task, exp.sizes.rounds - 1, True)
