"""Early stop: a task ends when held-out training examples are classified no better."""

import json

import numpy as np
import pytest

from fcljax import cli, config
from fcljax.data.files.sources import hold_out, load_dataset
from fcljax.errors import InputError
from fcljax.runs import loop, signals
from fcljax.runs.early_stop import check_stop, ends_task, hold_out_training, is_flat
from fcljax.runs.records import HELD_OUT
from fcljax.runs.resume import differing


@pytest.mark.parametrize(
    ("accuracies", "flat"),
    [
        ([], False),
        ([0.5, 0.4], False),
        ([0.5, 0.4, 0.5], True),  # two rounds no better than the first
        ([0.5, 0.4, 0.6], False),
        ([0.1, 0.5, 0.4, 0.6, 0.6, 0.2], True),
        ([None, None, None], True),  # a model that is not finite
    ],
)
def test_flat_is_no_better_than_the_best_for_so_many_rounds(accuracies, flat):
    assert is_flat(accuracies, 2) == flat


def run_of(**values):
    given = {"rounds": 10, "stop_when_flat": 2, **values}
    return config.from_mapping("fedavg", given, "test")


def test_the_round_after_a_flat_one_is_the_last_of_its_task_and_other_tasks_do_not_matter():
    lines = [{"task": 0, HELD_OUT: value} for value in (0.9, 0.2, 0.2)]
    assert ends_task(run_of(), lines, 0, 3) and not ends_task(run_of(), lines[:2], 0, 2)
    assert not ends_task(run_of(), lines, 1, 0)
    assert not ends_task(run_of(stop_when_flat=0), lines, 0, 3)
    assert ends_task(run_of(stop_when_flat=0), lines, 0, 9)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rounds": 10, "stop_when_flat": 8}, "8 can end no task before its 10 rounds; nearest: 7"),
        ({"rounds": 2}, "2 can end no task before its 2 rounds; give at least 4 --rounds"),
        ({"population": "online", "epochs": 1}, "an online stream would lose the examples of later rounds"),
        ({"clip_norm": 1.0, "noise_multiplier": 1.0}, "are not covered by --noise-multiplier"),
    ],
)
def test_an_early_stop_that_makes_no_sense_is_refused_by_name(values, says):
    check_stop(run_of(), lambda: True)
    with pytest.raises(InputError, match=f"^stop_when_flat: .*{says}"):
        check_stop(run_of(**values), lambda: True)
    with pytest.raises(InputError, match="^stop_when_flat: fedavg trains nothing over rounds"):
        check_stop(run_of(), lambda: False)


def test_a_method_that_trains_nothing_has_no_early_stop(tmp_path, capsys):
    arguments = ["--rounds", "9", "--stop-when-flat", "2", "--out", str(tmp_path / "run")]
    assert cli.main(["run", "fedncm", *arguments]) == 2
    assert "stop_when_flat: fedncm trains nothing over rounds" in " ".join(capsys.readouterr().err.split())


def test_held_out_examples_are_a_tenth_of_each_class_and_no_client_has_them():
    digits = load_dataset("digits")
    reduced, validated = hold_out_training(digits)
    counts, rest, held_out = (np.bincount(y) for y in (digits.y_train, reduced.y_train, validated.y_test))
    np.testing.assert_array_equal(rest + held_out, counts)
    assert np.abs(held_out / counts - 0.1).max() < 0.01
    np.testing.assert_array_equal(reduced.x_test, digits.x_test)
    assert not set(map(bytes, validated.x_test)) & set(map(bytes, reduced.x_train))
    assert len({digits.digest, reduced.digest, validated.digest}) == 3


def test_examples_keep_their_numbers_in_the_whole_data_set_beside_holdout():
    digits = load_dataset("digits")
    reduced, _ = hold_out_training(hold_out(digits, 0.2))
    assert reduced.num_rows == len(digits.y_train)
    np.testing.assert_array_equal(digits.x_train[reduced.train_rows], reduced.x_train)


def test_a_run_of_an_earlier_version_is_one_without_early_stop():
    before = {"lr": 0.1}
    assert differing(before, {"lr": 0.1, "stop_when_flat": 0}) == {}
    assert differing(before, {"lr": 0.1, "stop_when_flat": 2}) == {
        "stop_when_flat": "stop_when_flat (2, not None)"
    }


SMALL = {
    "dataset": "digits",
    "adapter": "linear",
    "tasks": 2,
    "clients": 2,
    "rounds": 8,
    "epochs": 1,
    "image_size": 16,
    "train_share": 0.3,
    "stop_when_flat": 2,
    "lr": 1e-9,
}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_tasks_end_early_and_a_resumed_run_ends_them_where_the_uninterrupted_one_does(tmp_path):
    """A model that hardly moves is flat from its first round on: two more make it flat, and one ends the
    task."""
    settings = config.from_mapping("fedavg", SMALL, "test")
    quiet = loop.Observer(console=loop.QUIET)
    summary = loop.run(settings, tmp_path / "whole", observer=quiet)
    lines = lines_of(tmp_path / "whole")
    assert summary["rounds_played"] == [4, 4] and [line["round"] for line in lines] == [0, 1, 2, 3] * 2
    assert all(0 <= line[HELD_OUT] <= 1 for line in lines)
    assert ["A" in line for line in lines] == [False, False, False, True] * 2
    for rounds in (2, 5):
        out = tmp_path / f"cut{rounds}"
        with pytest.raises(signals.Stopped):
            loop.run(settings, out, observer=stopping_after(rounds))
        assert len(lines_of(out)) == rounds
        resumed = loop.run(settings, out, resume=True, observer=quiet)
        assert lines_of(out) == lines and resumed["accuracy"] == summary["accuracy"]


def stopping_after(rounds):
    """An observer that ends a run with SIGTERM."""
    heard = []

    def stop():
        return 15 if len(heard) == rounds - 1 else None

    return loop.Observer(console=loop.QUIET, stop=stop, heard=heard.append)


@pytest.mark.long
def test_a_task_ends_in_the_round_after_it_was_flat_and_no_sooner(tmp_path):
    settings = config.from_mapping("fedavg", SMALL | {"lr": 3e-2, "rounds": 6}, "test")
    summary = loop.run(settings, tmp_path / "run", observer=loop.Observer(console=loop.QUIET))
    lines = lines_of(tmp_path / "run")
    for task, rounds in enumerate(summary["rounds_played"]):
        accuracies = [line[HELD_OUT] for line in lines if line["task"] == task]
        assert rounds == len(accuracies) and (rounds == 6 or is_flat(accuracies[:-1], 2))
        assert not is_flat(accuracies[:-2], 2)
    assert max(line[HELD_OUT] for line in lines) > lines[0][HELD_OUT]
