"""`fcljax tune`: ranges, what is refused, and whole studies where Optuna is."""

import json
import shlex
import shutil
import sys

import pytest
import yaml

from fcljax import cli
from fcljax.errors import InputError
from fcljax.runs import signals
from fcljax.studies import tuning

TINY = shlex.split("--tasks 2 --clients 2 --rounds 1 --epochs 1 --image-size 8 --batch-size 64")


def parsed(name, text, method="linear", **given):
    return tuning.parse_range(method, given, name, text)


@pytest.mark.parametrize(
    "name, text, found",
    [
        ("lr", "log:1e-4..1e-1", ((1e-4, 1e-1), "log")),
        ("lr", "0.1..0.5", ((0.1, 0.5), "linear")),
        ("batch-size", "16..64", ((16, 64), "linear")),
        ("batch_size", "16,32,16", ((16, 32), "choice")),
        ("optimiser", "sgd,adam", (("sgd", "adam"), "choice")),
    ],
)
def test_a_range_has_the_type_of_its_option(name, text, found):
    each = parsed(name, text)
    assert (each.values, each.kind) == found
    assert all(type(a) is type(b) for a, b in zip(each.values, found[0], strict=True))
    assert parsed(name, each.text()) == each


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("lrr", "0..1", "unknown option 'lrr'; did you mean 'lr'"),
        ("lr", "0.1", "'0.1' is neither a range nor a list of values"),
        ("lr", "log:0..1", "must start above 0"),
        ("lr", "0.5..0.1", "nearest: 0.1..0.5"),
        ("lr", "low..high", "lr: 'low'"),
        ("lr", "-1..1", "lr: -1.0 must be finite"),
        ("epochs", "0..3", "epochs: 0 is too small"),
        ("epochs", "1.5..3", "epochs: '1.5'"),
        ("optimiser", "sgd..adam", "it is not a number"),
        ("optimiser", "sgd,adamm", "did you mean 'adam'"),
        ("seed", "1,2,3", "a seed is not a setting to choose"),
        ("lora_rank", "1,2", "is an option of the adapter 'lora'"),
    ],
)
def test_a_wrong_range_is_one_line(name, text, says):
    with pytest.raises(InputError, match="(?s)^[^\n]*$") as error:
        parsed(name, text)
    assert says in str(error.value)


def test_an_option_has_a_range_or_a_value():
    with pytest.raises(InputError, match="both a range and a value"):
        parsed("lr", "0..1", lr=0.1)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "method: none given"),
        (["linear"], "range: none given"),
        (["linear", "lr=0..1", "--holdout", "0"], "would tune on test images"),
        (["linear", "lr=0..1", "--trials", "0"], "trials: 0 is too small"),
        (["linear", "--resume", "nowhere", "lr=0..1"], "give only --trials"),
        (["linear", "lr=0..1", "--trial", "3"], "did you mean '--trials'"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert cli.main(["tune", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_without_optuna_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["tune", "linear", "lr=0.1..1"]) == 2
    assert "pip install -e '.[tune]'" in capsys.readouterr().err


def test_the_best_trial_is_the_first_complete_one_with_the_highest_metric():
    trials = [
        tuning.Trial(0, "pruned", 0.9, {}),
        tuning.Trial(1, "complete", 0.5, {}),
        tuning.Trial(2, "complete", 0.7, {}),
        tuning.Trial(3, "complete", 0.7, {}),
        tuning.Trial(4, "failed", None, {}),
    ]
    best = tuning.best_of(trials)
    assert best is not None and best.number == 2
    assert tuning.best_of(trials[:1]) is None


# ---- whole studies: where Optuna is ------------------------------------------------------------------------


def studied(out, *more):
    """A study of four small trials."""
    arguments = ["tune", "linear", "lr=log:1e-5..1", "optimiser=sgd,adam", *TINY]
    return cli.main([*arguments, "--holdout", "0.3", "--trials", "4", "--out", str(out), *more])


@pytest.mark.long
def test_a_study_ends_with_settings_that_a_run_takes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tuning, "WARM_UP", 1)
    assert studied(tmp_path / "study") == 0
    said = json.loads((tmp_path / "study" / "trials.json").read_text())
    assert [each["number"] for each in said["trials"]] == [0, 1, 2, 3]
    values = [each["value"] for each in said["trials"] if each["state"] == "complete"]
    assert said["best"]["value"] == max(values)
    summary = json.loads(
        (tmp_path / "study" / f"trial-{said['best']['number']:03d}/summary.json").read_text()
    )
    assert summary["A_last"] == said["best"]["value"] and summary["config"]["holdout"] == 0.3
    best = yaml.safe_load((tmp_path / "study" / "best.yaml").read_text())
    assert {name: best[name] for name in ("lr", "optimiser")} == said["best"]["values"]
    assert best["holdout"] == 0 and best["tasks"] == 2
    assert not list((tmp_path / "study").glob("*/checkpoints"))
    config = ["--config", str(tmp_path / "study" / "best.yaml"), "--out", str(tmp_path / "final")]
    assert cli.main(["run", "linear", *config]) == 0
    assert "best.yaml" in capsys.readouterr().out


@pytest.mark.long
def test_a_study_that_was_stopped_and_resumed_tries_the_same(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tuning, "WARM_UP", 1)
    assert studied(tmp_path / "whole") == 0
    whole = json.loads((tmp_path / "whole" / "trials.json").read_text())
    rounds = []

    def stopped():
        rounds.append(1)
        return signals.ENDING[1] if len(rounds) == 3 else None  # in the second trial, between its tasks

    real = tuning.loop.Observer
    monkeypatch.setattr(tuning.loop, "Observer", lambda: real(stop=stopped))
    assert studied(tmp_path / "cut") == 128 + signals.ENDING[1]
    assert not (tmp_path / "cut" / "trials.json").exists()
    monkeypatch.setattr(tuning.loop, "Observer", real)
    shutil.copytree(tmp_path / "cut", tmp_path / "copy")
    assert cli.main(["tune", "linear", "--resume", str(tmp_path / "cut")]) == 0
    assert json.loads((tmp_path / "cut" / "trials.json").read_text()) == whole
    assert cli.main(["tune", "fppl", "--resume", str(tmp_path / "copy")]) == 2  # another method's
