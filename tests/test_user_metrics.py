"""Metrics of the user's own, measured beside accuracy."""

import json

import numpy as np
import pytest

import fcljax
from fcljax.errors import InputError
from fcljax.runs.evaluate import check_metrics, measured
from fcljax.runs.predict import Predicted

PREDICTED = Predicted(np.array([0, 1, 2]), np.array([0.5, 0.6, 0.7], np.float32), np.array([0, 1, 1]))
TASK_OF_CLASS = np.array([0, 0, 1, -1], np.int32)


def values_of(**metrics):
    """The metrics' values after the second of two tasks, of two clients' predictions."""
    return measured(metrics, TASK_OF_CLASS, [PREDICTED] * 2, [np.array([0, 2, 2]), np.array([0, 1, 1])])


def test_a_metric_gets_all_predictions_and_the_tasks_of_classes():
    def error(predictions):
        return (predictions.predicted != predictions.label).mean()

    def confidence_on_later_tasks(predictions):
        is_later = predictions.task_of_class[predictions.label] == 1
        return predictions.confidence[is_later].sum()

    values = values_of(error=error, later=confidence_on_later_tasks)
    assert values == pytest.approx({"error": 2 / 6, "later": 1.3})
    assert values_of() is None


def test_what_a_metric_does_wrong_is_one_line_that_names_it():
    def absent(predictions):
        return predictions.logits.mean()

    with pytest.raises(InputError, match="^metrics: mine: test_user_metrics.py:.* absent.*AttributeError"):
        values_of(mine=absent)
    for wrong in (np.ones(2), None, "0.5"):
        with pytest.raises(InputError, match="^metrics: 'mine' returned .*; needed: a number"):
            values_of(mine=lambda predictions, wrong=wrong: wrong)


def test_a_resumed_run_needs_its_metrics():
    lines = [{"loss": 1.0}, {"A": 0.5, "metric_mine": 0.1}]
    check_metrics({}, lines[:1])
    check_metrics({"mine": len}, lines)
    with pytest.raises(InputError, match="^metrics: the run began with mine; give the same again"):
        check_metrics({}, lines)
    with pytest.raises(InputError, match="^metrics: the run began with none"):
        check_metrics({"mine": len}, [{"A": 0.5}])


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ([len], "metrics: list; expected a dict"),
        ({"a b": len}, "metrics: 'a b' is not a name"),
        ({"mine": 3}, "metrics: mine is 3; expected a function"),
    ],
)
def test_metrics_that_are_no_functions_are_refused(metrics, says):
    with pytest.raises(InputError, match=f"^{says}"):
        fcljax.run("linear", metrics=metrics)


@pytest.mark.long
def test_values_are_in_the_log_and_in_the_summary(tmp_path):
    def accuracy(predictions):
        return (predictions.predicted == predictions.label).mean()

    options = dict(tasks=2, clients=2, rounds=2, epochs=1, image_size=16)
    result = fcljax.run(
        "linear", out=tmp_path / "run", progress=False, metrics={"share": accuracy}, **options
    )
    assert result.metrics["metrics"]["share"] == pytest.approx(result.metrics["by_image"]["acc"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [line["metric_share"] for line in lines if "metric_share" in line]
    assert shares == result.metrics["metrics"]["share"] and len(shares) == 2
