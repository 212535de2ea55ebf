"""Trackers: what they are told, that they go on with the same run, and that their failures stop nothing."""

import importlib
import json

import pytest
from small_runs import COMMON

from fcljax import cli
from fcljax.errors import InputError
from fcljax.results import trackers
from fcljax.results.trackers import Entry, Tracker, following, parse_trackers, scalars

SETTINGS = {"method": "linear", "rounds": 2, "seed": 7}
LINE = {"task": 1, "round": 0, "loss": 0.5, "accuracy": [0.25, None], "refused": 0, "best": True, "note": "x"}


def recorder(told, broken=()):
    """A tracker that writes down what it is told; what is in `broken` fails."""

    def start(beginning):
        told.append(("start", beginning.done, beginning.id))
        if "start" in broken:
            raise OSError("no network")
        return Tracker(beginning.id or "abc", *(act(name) for name in ("log", "finish")))

    def act(name):
        def tell(*values):
            if name in broken:
                raise OSError("no network")
            told.append((name, *values))

        return tell

    return start


def follow(out, names, done=0):
    said = []
    with following(names, out, SETTINGS, done, said.append) as run:
        run.heard(LINE)
        run.ended({"A_last": 0.5, "time": {"client_s": 2.0}, "config": {"lr": 1.0}})
    return said


def test_a_tracker_hears_every_line_and_the_summary(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Entry("json", recorder(told)))
    assert follow(tmp_path, ["wandb"]) == []
    assert told[0] == ("start", 0, "")
    line = {"task": 1, "round": 0, "loss": 0.5, "refused": 0, "accuracy/task 1": 0.25}
    assert told[1:] == [("log", 2, line), ("finish", {"A_last": 0.5, "time/client_s": 2.0})]


def test_a_run_that_goes_on_keeps_its_trackers_and_their_ids(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Entry("json", recorder(told)))
    follow(tmp_path, ["mlflow"])
    follow(tmp_path, ["mlflow"], done=3)
    assert [each for each in told if each[0] == "start"] == [("start", 0, ""), ("start", 3, "abc")]
    (tmp_path / trackers.NOTES).write_text("[]")
    follow(tmp_path, [])
    assert len([each for each in told if each[0] == "start"]) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"wandb": ', "[" * 60_000, '{"wandb": "' + "a" * 70_000 + '"}'])
def test_notes_that_make_no_sense_are_as_good_as_none(text, tmp_path):
    (tmp_path / trackers.NOTES).write_text(text)
    assert follow(tmp_path, []) == []


def test_a_file_starts_no_tracker(tmp_path, monkeypatch):
    """A run directory may come from anybody."""
    told = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Entry("json", recorder(told)))
    (tmp_path / trackers.NOTES).write_text('{"wandb": "somebody\'s"}')
    said = follow(tmp_path, [])
    assert told == [] and said == ["note: wandb followed this run before; to continue: --track wandb"]


@pytest.mark.parametrize("broken", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_stops_nothing(broken, tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Entry("json", recorder([], {broken})))
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Entry("json", recorder(told)))
    said = follow(tmp_path, ["wandb", "mlflow"])
    assert said == ["warning: wandb no longer follows the run: OSError: no network"]
    assert [each[0] for each in told] == ["start", "log", "finish"]


def test_a_run_that_is_cut_off_finishes_its_trackers_without_a_summary(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Entry("json", recorder(told)))
    with pytest.raises(KeyboardInterrupt), following(["wandb"], tmp_path, SETTINGS, 0, print):
        raise KeyboardInterrupt
    assert told[-1] == ("finish", {})


def test_without_trackers_nothing_is_written(tmp_path):
    follow(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_only_numbers_are_logged():
    assert scalars({"a": {"b": 1, "c": None}, "d": "x", "e": True, "f": [1]}) == {"a/b": 1}


def test_trackers_are_chosen_by_name_and_must_be_installed(monkeypatch, capsys):
    assert parse_trackers(None) == () == parse_trackers(" ,")
    with pytest.raises(InputError, match="^track: unknown value 'wandbb'.*'wandb'"):
        parse_trackers("wandbb")
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Entry("no_such_module", None))
    with pytest.raises(
        InputError, match=r"^track: 'wandb' is not installed; install it with: pip install -e '.\[wandb\]'"
    ):
        parse_trackers("wandb")
    assert cli.main(["run", "linear", "--track", "tensorbord"]) == 2
    assert "'tensorboard'" in capsys.readouterr().err
    assert cli.main(["check", "linear", "--track", "wandb"]) == 2
    assert "leave out --track" in capsys.readouterr().err


# ---- the real ones -----------------------------------------------------------------------------------------

SHORT = [*COMMON, "--rounds", "2", "--clients", "2", "--tasks", "2", "--image-size", "8"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(trackers.TRACKERS))
def test_a_real_tracker_follows_a_run(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip(trackers.TRACKERS[name].module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert cli.main(["run", "fedncm", *SHORT, "--track", name, "--out", "run"]) == 0
    assert "no longer" not in capsys.readouterr().err
    ids = json.loads((tmp_path / "run" / trackers.NOTES).read_text())
    accuracy = json.loads((tmp_path / "run" / "summary.json").read_text())["A_last"]
    again = []
    with following([name], tmp_path / "run", SETTINGS, 3, again.append) as run:
        run.heard(LINE)  # of a round that it has made before
    assert again == [] and json.loads((tmp_path / "run" / trackers.NOTES).read_text()) == ids
    if name == "tensorboard":
        files = list((tmp_path / "run" / "tensorboard").glob("events.*"))
        assert len(files) == 2 and any(b"summary/A_last" in file.read_bytes() for file in files)
    if name == "wandb":
        assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{ids['wandb']}/*.wandb"))
    if name == "mlflow":
        client = importlib.import_module("mlflow").MlflowClient()
        metrics = client.get_run(ids["mlflow"]).data.metrics
        assert metrics["summary/A_last"] == pytest.approx(accuracy)
        assert [each.step for each in client.get_metric_history(ids["mlflow"], "A")] == [1, 3]
        assert [each.step for each in client.get_metric_history(ids["mlflow"], "refused")] == [0, 1, 2, 3]
