"""A short run of experiments/torture.py, which says how to make a long one."""

import importlib.util
import os

import pytest
import small_runs


@pytest.fixture
def torture(monkeypatch):
    path = small_runs.ROOT / "experiments" / "torture.py"
    spec = importlib.util.spec_from_file_location("torture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in small_runs.program_environment().items():
        monkeypatch.setenv(name, value)
    return module


def results(found, kind):
    return [outcome for outcome in found[kind] if outcome.result != "survived"], len(found[kind])


def test_bad_inputs_end_in_one_line_and_leave_nothing(torture, tmp_path, monkeypatch):
    monkeypatch.setenv("FCLJAX_DATA", os.environ["FCLJAX_DATA"])  # which the trials change
    found = torture.torture(tmp_path, 1, 10.0, {"kills": 0, "damage": 0, "bad inputs": 50})
    assert results(found, "bad inputs") == ([], 50)


def test_a_trial_that_goes_wrong_is_counted_and_kept(torture, tmp_path, monkeypatch):
    outcomes = iter([torture.Outcome("survived", "a"), torture.Outcome("different", "b")])
    monkeypatch.setitem(torture.TRIALS, "bad inputs", lambda *_: next(outcomes))
    monkeypatch.setenv("FCLJAX_DATA", os.environ["FCLJAX_DATA"])
    found = torture.torture(tmp_path, 1, 10.0, {"kills": 0, "damage": 0, "bad inputs": 2})
    assert torture.table(found).splitlines()[-1] == "| bad inputs | 2 | 1 | 1 | 0 |"
    assert (tmp_path / "wrong").read_text() == "bad inputs 1: different: 'b'\n"


def test_there_are_twenty_kinds_of_bad_inputs_and_each_is_drawn_from_the_seed(torture):
    draw = lambda: [make(torture.random.Random(i)) for make in torture.GENERATORS for i in range(3)]
    assert len({bad.kind for bad in draw()}) >= 20
    assert [bad.arguments for bad in draw()] == [bad.arguments for bad in draw()]


@pytest.mark.long
def test_kills_and_damaged_checkpoints_lose_nothing_and_change_nothing(torture, tmp_path):
    found = torture.torture(tmp_path, 1, 30.0, {"kills": 4, "damage": 12, "bad inputs": 0})
    assert results(found, "kills") == ([], 4)
    assert results(found, "damage") == ([], 12)
