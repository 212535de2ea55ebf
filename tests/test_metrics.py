"""Metrics against hand-computed matrices."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fcljax import config
from fcljax.errors import InputError
from fcljax.parts.reports import Prototypes, prototype_distance
from fcljax.results import metrics
from fcljax.runs.records import Records
from fcljax.runs.summary import warnings_of

NAN = float("nan")
FPPL = config.preset("fppl")
MATRIX = [[0.9], [0.7, 0.8], [0.6, 0.85, 0.9]]  # FPPL section 9, item 16
SQUARE = [[0.9, None, None], [0.7, 0.8, None], [0.6, 0.85, 0.9]]
FORMS = {
    "ragged": MATRIX,
    "none": SQUARE,
    "nan": np.array(SQUARE, float),
    "zeros above": np.array([[0.9, 0, 0], [0.7, 0.8, 0], [0.6, 0.85, 0.9]]),
    "not finished": [
        [0.9] + [None] * 4,
        [0.7, 0.8] + [NAN] * 3,
        [0.6, 0.85, 0.9, NAN, NAN],
        [None] * 5,
        [NAN] * 5,
    ],
}


@pytest.mark.parametrize("matrix", FORMS.values(), ids=FORMS)
def test_the_published_example_gives_its_published_numbers(matrix):
    np.testing.assert_allclose(metrics.average_accuracy(matrix), [0.9, 0.75, 0.783333], atol=1e-6)
    assert metrics.A_avg(matrix) == pytest.approx(0.811111, abs=1e-6)
    assert metrics.A_last(matrix) == pytest.approx(0.783333, abs=1e-6)
    assert metrics.forgetting(matrix) == pytest.approx({"paper": 0.125, "released": 0.1, "diagonal": 0.125})
    assert metrics.backward_transfer(matrix) == pytest.approx(-0.125)


def test_the_definitions_of_forgetting_differ_where_they_should():
    # task 0 peaks after task 1; task 1 ends at its best
    matrix = [[0.5], [0.8, 0.6], [0.7, 0.9, 0.4]]
    expected = {"paper": (0.1 - 0.3) / 2, "released": 0.1 / 3, "diagonal": (-0.2 - 0.3) / 2}
    assert metrics.forgetting(matrix) == pytest.approx(expected)


def test_without_negative_terms_released_forgetting_is_the_papers_times_t_minus_1_over_t():
    matrix = [[0.9], [0.8, 0.9], [0.7, 0.7, 0.9], [0.5, 0.6, 0.8, 0.9]]
    forgetting = metrics.forgetting(matrix)
    assert forgetting["released"] == pytest.approx(forgetting["paper"] * 3 / 4)


def test_a_single_task_has_no_forgetting():
    assert metrics.forgetting([[0.4]]) == {"paper": None, "released": None, "diagonal": None}
    assert metrics.backward_transfer([[0.4]]) is None


def test_the_first_rows_of_a_matrix_give_the_metrics_of_that_moment():
    part = np.array(SQUARE, float)[:2]  # [2, 3]
    assert metrics.average_accuracy(part).tolist() == pytest.approx([0.9, 0.75])
    assert metrics.forgetting(part)["paper"] == pytest.approx(0.2)


def test_no_rows_at_all_give_nan_and_not_an_error():
    assert (
        metrics.average_accuracy([]).size == 0
        and np.isnan(metrics.A_avg([]))
        and np.isnan(metrics.A_last([]))
    )


def test_a_missing_task_is_left_out_of_the_means():
    matrix = [[0.8], [0.6, NAN], [0.5, NAN, 0.9]]
    np.testing.assert_allclose(metrics.average_accuracy(matrix), [0.8, 0.6, 0.7])
    assert metrics.forgetting(matrix) == pytest.approx({"paper": 0.3, "released": 0.15, "diagonal": 0.3})


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="row 1 has 1 values"):
        metrics.average_accuracy([[0.5], [0.5]])


def test_the_matrix_becomes_strict_json_with_null_above_the_diagonal():
    for matrix in FORMS.values():
        assert json.loads(json.dumps(metrics.to_json(matrix), allow_nan=False)) == SQUARE


def test_the_summary_holds_every_metric_by_name():
    summary = metrics.summarize(MATRIX)
    assert summary["accuracy"] == SQUARE and summary["A"][-1] == summary["A_last"]
    assert set(summary) == {"accuracy", "A", "A_avg", "A_last", "forgetting", "backward_transfer"}


def test_spread_over_seeds_is_the_population_standard_deviation():
    assert metrics.over_seeds([0.70, 0.72, 0.75]) == pytest.approx((0.723333, 0.020548), abs=1e-6)


# rows of classes: 10, 4, 20, 0; all have a prediction
CONFUSION = np.array([[8, 2, 0, 0, 0], [1, 3, 0, 0, 0], [0, 5, 15, 0, 0], [0, 0, 0, 0, 0]])


def test_confusion_counts_true_class_by_predicted_class():
    """In the last column those without a predicted class, which count as wrong."""
    label, prediction = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, -1, 2, 2])
    confusion = metrics.confusion_matrix(label, prediction, 4)
    assert confusion.tolist() == [
        [1, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 2, 0, 1],
        [0, 0, 0, 0, 0],
    ]
    assert metrics.unpredicted(confusion) == 1 and metrics.unpredicted(confusion[:, :4]) == 0
    np.testing.assert_allclose(metrics.per_class_accuracy(confusion), [1 / 2, 1, 2 / 3, np.nan])


@pytest.mark.parametrize(
    "label, prediction, field",
    [
        ([0, 4], [0, 0], "label"),
        ([0, -1], [0, 0], "label"),
        ([0, 1], [0, 4], "prediction"),
        ([0, 1], [0, -2], "prediction"),
    ],
)
def test_a_class_out_of_range_is_refused(label, prediction, field):
    with pytest.raises(InputError, match=f"{field}: class"):
        metrics.confusion_matrix(np.array(label), np.array(prediction), 4)


def test_task_accuracy_pools_the_rows_of_a_tasks_classes():
    np.testing.assert_allclose(metrics.task_accuracy(CONFUSION, [[1, 0], [2, -1]]), [11 / 14, 15 / 20])
    assert np.isnan(metrics.task_accuracy(CONFUSION, [[0], [3]])[1])


def test_classes_without_rows_have_no_accuracy():
    np.testing.assert_allclose(metrics.per_class_accuracy(CONFUSION), [0.8, 0.75, 0.75, NAN])


def test_calibration_by_hand():
    """Four bins; a bin has its upper edge, and a probability of 0 belongs to the first one."""
    confidence = np.array([0.0, 0.25, 0.5, 0.6, 0.75, 1.0], np.float32)
    right = np.array([False, True, True, False, True, True])
    found = metrics.calibration(right, confidence, bins=4)
    assert found.examples.tolist() == [2, 1, 2, 1]
    np.testing.assert_allclose(found.confidence, [0.125, 0.5, 0.675, 1.0], rtol=1e-6)
    assert found.accuracy.tolist() == [0.5, 1.0, 0.5, 1.0]
    assert found.ece == pytest.approx((2 * 0.375 + 0.5 + 2 * 0.175 + 0) / 6)


def test_calibration_of_the_sure_and_right_is_0_and_empty_bins_are_null():
    found = metrics.calibration(np.full(5, True), np.ones(5, np.float32)).to_json()
    assert found["ece"] == 0 and found["examples"] == [0] * 14 + [5]
    assert found["accuracy"] == [None] * 14 + [1.0] == found["confidence"]
    unknown = metrics.calibration(np.array([True, False]), np.array([0.75, np.nan]), bins=4)
    assert unknown.examples.tolist() == [0, 0, 1, 0] and unknown.ece == 0.25
    assert metrics.calibration(np.full(2, False), np.full(2, np.nan)).to_json()["ece"] is None
    sure_and_wrong = metrics.calibration(np.full(5, False), np.full(5, 0.9))
    assert sure_and_wrong.ece == pytest.approx(0.9)


def test_client_accuracy_weighs_classes_by_the_clients_own_seen_rows():
    counts = np.array([[5, 0, 0, 0], [10, 30, 0, 60], [0, 0, 0, 9], [0, 0, 0, 0]])
    np.testing.assert_allclose(metrics.client_accuracy(CONFUSION, counts), [0.8, 0.7625, NAN, NAN])


def test_a_client_with_the_test_sets_distribution_has_the_test_sets_accuracy():
    counts = CONFUSION.sum(1, keepdims=True).T
    assert metrics.client_accuracy(CONFUSION, counts)[0] == pytest.approx(
        np.trace(CONFUSION) / CONFUSION.sum()
    )


def test_a_run_that_was_not_evaluated_warns_of_no_predictions():
    """Clients' own models on Flower's nodes: the server has no model to evaluate, and no confusion matrix."""
    counts = {"rejected": 0, "refused": 0}
    confusion = np.array([[3, 0, 1], [0, 4, 2]])
    assert warnings_of(Records(counts=counts), FPPL) == []
    (line,) = warnings_of(Records(counts=counts, confusion=confusion.tolist()), FPPL)
    assert "not finite for 3 of 10 test examples" in line


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((0.0, 9e-4, None), "'ewc' contributes at most 0.09 %"),
        ((0.0, None), "'ewc' never contributes"),
        ((0.0, 2e-3, None), ""),
    ],
)
def test_a_term_that_hardly_moves_the_model_is_named(shares, says):
    rounds = [
        {"task": 0, "rejected": 0, "participants": 1, "gradient_share_ewc": value, "gradient_share_own": 0.0}
        for value in shares
    ]
    found = warnings_of(Records(counts={"rejected": 0, "refused": 0}, rounds=rounds), FPPL)
    assert len(found) == bool(says) and all(says in line for line in found)


def test_tasks_against_tasks_by_hand():
    # classes 0 and 1 are the first task, 2 the second; the last column has no prediction
    confusion = np.array([[6, 1, 3, 0], [0, 5, 5, 0], [1, 0, 8, 1]])
    shares = metrics.task_confusion(confusion, [[0, 1], [2, -1]])
    np.testing.assert_allclose(shares, [[12 / 20, 8 / 20], [1 / 10, 8 / 10]])
    assert metrics.task_confusion(confusion, [[0, 1], [1, 2]]) is None  # a class says no task
    assert metrics.task_confusion(0 * confusion, [[0, 1], [2]]) == [[None, None], [None, None]]


def test_the_worst_tenth_is_one_client_at_least():
    assert metrics.worst([0.5, 0.25, None, 1.0]) == 0.25
    assert metrics.worst([i / 100 for i in range(20)]) == pytest.approx(0.005)  # two of twenty
    assert metrics.worst([i / 100 for i in range(21)]) == pytest.approx(0.01)  # three of them
    assert metrics.worst([None]) is None


@pytest.mark.parametrize(
    ("losses", "right", "says"),
    [
        ((2.0, 1.0, 0.8), 0.5, "still fell by 20 %, and clients classify 50 %"),
        ((2.0, 1.0, 0.97), 0.5, ""),  # flat
        ((2.0, 1.0, 0.5), 0.9, ""),  # learned
        ((2.0,), 0.1, ""),  # one round says nothing
        ((1.0, 1.5), 0.1, ""),
    ],
)
def test_training_that_would_go_on_says_so_and_names_what_to_change(losses, right, says):
    rounds = [
        {"task": task, "rejected": 0, "participants": 1, "loss": loss, "train_accuracy": right}
        for task in (0, 1)
        for loss in losses
    ]
    found = warnings_of(Records(counts={"rejected": 0, "refused": 0}, rounds=rounds), FPPL)
    assert len(found) == bool(says)
    assert all(says in line and "--rounds or --epochs" in line for line in found)


@pytest.mark.parametrize(
    ("method", "name", "options"),
    [
        ("fppl", "debias", "--server-epochs and --server-lr"),
        ("pmae", "replay", "--tune-epochs and --tune-lr"),
        ("linear", "own_rule", "the options of its training"),
    ],
)
@pytest.mark.parametrize(("last", "right", "says"), [(0.8, 0.5, True), (0.97, 0.5, False), (0.8, 0.9, False)])
def test_training_at_the_server_that_would_go_on_says_so_too(method, name, options, last, right, says):
    rounds = [
        {"task": 0, "rejected": 0, "participants": 1, f"{name}_loss": loss, f"{name}_accuracy": right}
        for loss in (1.0, last)
    ]
    records = Records(counts={"rejected": 0, "refused": 0}, rounds=rounds)
    found = warnings_of(records, config.preset(method))
    assert len(found) == says
    assert all(f"{name}_loss still fell by 20 %" in each and f"values of {options}" in each for each in found)


@pytest.mark.parametrize(("away", "lines"), [((9.0, 3.25), 1), ((9.0, 0.4), 0), ((9.0, None), 0)])
def test_prototypes_that_stay_far_from_class_means_are_reported(away, lines):
    """What counts is a task's last round."""
    rounds = [
        {"task": 0, "rejected": 0, "participants": 1, "reweight_prototype_distance": value} for value in away
    ]
    found = warnings_of(Records(counts={"rejected": 0, "refused": 0}, rounds=rounds), FPPL)
    assert len(found) == lines and all(
        "is 3.2 times the distance" in line and "--headtune" in line for line in found
    )


def test_the_distance_of_prototypes_by_hand():
    """Class means (0, 0) and (4, 0), of two clients each and of one; nobody has the third class."""
    means = Prototypes(
        jnp.array([[[1.0, 0], [4, 0], [9, 9]], [[-1, 0], [7, 7], [9, 9]]]),
        jnp.array([[True, True, False], [True, False, False]]),
    )
    prototype = jnp.array([[0.0, 3], [4, 1], [0, 0]])
    assert float(prototype_distance(prototype, means)) == pytest.approx((3 + 1) / 2 / 4)
    alone = means._replace(present=means.present & jnp.array([True, False, False]))
    assert float(prototype_distance(prototype, alone)) == 0
