"""Runs on some of a data set's classes."""

import csv

import numpy as np
import pytest

import fcljax
from fcljax import config
from fcljax.data.files.sources import hold_out, load_dataset
from fcljax.data.files.subsets import chosen_classes, with_classes
from fcljax.errors import InputError
from fcljax.runs.inputs import used_part
from fcljax.scenario import fit_partition, make_scenario

DIGITS = load_dataset("digits")
NAMES = ["cat", "dog", "7"]


def test_a_part_has_the_examples_of_its_classes_alone():
    columns = {"writer": np.arange(len(DIGITS.y_train)) % 7}
    part = with_classes(DIGITS._replace(columns=columns), "7-9, 2")
    train = np.flatnonzero(np.isin(DIGITS.y_train, [2, 7, 8, 9]))
    test = np.flatnonzero(np.isin(DIGITS.y_test, [2, 7, 8, 9]))
    assert part.class_names == ("2", "7", "8", "9") and part.numbers == (2, 7, 8, 9)
    np.testing.assert_array_equal(part.x_train, DIGITS.x_train[train])
    np.testing.assert_array_equal(part.x_test, DIGITS.x_test[test])
    # labels count the classes of the part
    np.testing.assert_array_equal(np.array([2, 7, 8, 9])[part.y_train], DIGITS.y_train[train])
    np.testing.assert_array_equal(np.array([2, 7, 8, 9])[part.y_test], DIGITS.y_test[test])
    np.testing.assert_array_equal(part.columns["writer"], train % 7)
    assert part.digest not in ("", DIGITS.digest, with_classes(DIGITS, "6-9").digest)


def test_held_out_examples_of_a_part_keep_their_numbers_in_the_whole_data_set():
    part = hold_out(with_classes(DIGITS, "3,5"), 0.25)
    assert part.train_rows is not None and part.num_rows == len(DIGITS.y_train)
    np.testing.assert_array_equal(part.x_train, DIGITS.x_train[part.train_rows])
    assert set(DIGITS.y_train[part.train_rows]) == {3, 5}


def test_tasks_and_partition_are_of_the_classes_that_are_used():
    given = {"classes": "1,4-6", "tasks": 2, "clients": 3, "holdout": 0.25, "class_order": "6,1,5,4"}
    settings = config.from_mapping("linear", given, "test")
    dataset = used_part(DIGITS, settings)
    scenario = make_scenario(dataset, fit_partition(settings, dataset), 1, False)
    assert [task.classes.tolist() for task in scenario.tasks] == [[0, 1], [2, 3]]
    assert scenario.holdings.shape == (3, 4) and scenario.holdings.sum() == len(dataset.y_train)
    first = np.asarray(DIGITS.y_train)[dataset.train_rows][scenario.train_label == 0]
    assert set(first) == {6}


def test_classes_are_names_numbers_and_ranges():
    assert chosen_classes("7,cat", NAMES).tolist() == [0, 2]  # a name wins over a number
    assert chosen_classes("0-1", NAMES).tolist() == [0, 1]
    assert chosen_classes("2", NAMES).tolist() == [2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cow", "classes: no class 'cow'; choose from: 7, cat, dog"),
        ("dogs", "classes: no class 'dogs'; did you mean 'dog'?"),
        ("cat,,dog", "classes: no class ''; "),
        ("3", "classes: '3' of classes 0 to 2; nearest: '2'"),
        ("1-5", "classes: '1-5' of classes 0 to 2; nearest: '1-2'"),
        ("2-1", "classes: '2-1' of classes 0 to 2; nearest: '1-2'"),
        ("-1", "classes: no class '-1'; "),
        ("0-1,dog", "classes: class 'dog' appears twice"),
    ],
)
def test_wrong_classes_are_one_line(text, says):
    with pytest.raises(InputError) as error:
        chosen_classes(text, NAMES)
    assert str(error.value).startswith(says)


def test_a_class_needs_training_and_test_examples():
    tested = DIGITS.y_test != 4
    without = DIGITS._replace(x_test=DIGITS.x_test[tested], y_test=DIGITS.y_test[tested])
    with pytest.raises(InputError, match="classes: class '4' has no test examples"):
        with_classes(without, "3-5")


@pytest.mark.long
def test_a_run_predicts_and_reports_the_classes_that_it_uses():
    result = fcljax.run(
        "local", "digits", classes=["5", 7, 8, 9], tasks=2, clients=2, image_size=8, rounds=1, epochs=1,
        alpha=10.0, progress=False,
    )  # fmt: skip
    assert sorted(result.metrics["class_names"]) == ["5", "7", "8", "9"]
    assert set(result.client_model(1).predict(DIGITS.x_test[:40])) <= {5, 7, 8, 9}
    rows = list(csv.DictReader((result.folder / "predictions.csv").read_text().splitlines()))
    assert {row["client"] for row in rows} == {"0", "1"} and {row["task"] for row in rows} == {"0", "1"}
    right = [row["class"] == row["predicted"] for row in rows if row["client"] == "1"]
    assert np.mean(right) == result.metrics["personal_accuracy"][1]
