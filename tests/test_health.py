"""Training that went wrong says so: in `run`, `simulate`, the page and `watch`."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_watch import begun, shown

import fcljax
from fcljax import api, cli, config
from fcljax.federated.engine import RoundReport
from fcljax.federated.health import diverged, training_warnings
from fcljax.runs.records import NOT_EVALUATED, Records
from fcljax.runs.summary import NO_TRAFFIC, warnings_of


def rounds(*changes, **shared):
    """Lines of a task with a round for each of the changes."""
    usual = {"task": 0, "participants": 4, "rejected": 0, "loss": 1.0} | shared
    return [usual | {"round": r} | change for r, change in enumerate(changes)]


def test_training_that_goes_well_warns_of_nothing():
    assert training_warnings([]) == []
    assert training_warnings(rounds({}, {"train_cross_entropy": 1.0, "classes_seen": 3})) == []
    assert training_warnings(rounds({"loss": None, "participants": 0})) == []  # nobody took part
    assert training_warnings([{"task": 0, "round": 0, "participants": 2, "rejected": 1}]) == []  # no loss


def test_a_loss_that_is_not_finite_is_said_with_where_and_how_often():
    (line,) = training_warnings(rounds({}, {"loss_not_finite": 0.25}, {"loss": None}))
    assert "NaN or infinite in 2 of 3 rounds, first in task 1, round 2, for up to 100 %" in line
    (line,) = training_warnings(rounds({"loss_not_finite": 0.25}, {}))
    assert "1 of 2 rounds" in line and "25 % of the examples" in line
    # a history of a simulation has no tasks, and NaN where a log has null
    assert "first in round 1," in training_warnings([{"participants": 2, "rejected": 0, "loss": math.nan}])[0]


def test_rounds_without_a_valid_upload_are_said_and_whether_anything_was_learned():
    (line,) = training_warnings(rounds({}, {"rejected": 4, "loss": None}))
    assert (
        "no upload was valid in 1 of 2 rounds, first in task 1, round 2" in line and "unchanged" not in line
    )
    (line,) = training_warnings(rounds({"rejected": 4}, {"rejected": 5}))
    assert line.endswith("in 2 of 2 rounds, first in task 1, round 1; the model is unchanged since the start")


@pytest.mark.parametrize(("loss", "says"), [(3.01, True), (2.99, False), (None, False)])
def test_a_loss_above_guessing_at_the_end_of_a_task_is_said(loss, says):
    """The first round's does not count; guessing among 20 classes has log 20 = 2.996."""
    lines = rounds({"train_cross_entropy": 50.0}, {"train_cross_entropy": loss}, classes_seen=20)
    found = training_warnings(lines)
    assert len(found) == says
    assert all("1 of 1 tasks" in each and "in task 1 it is 3.01," in each for each in found)
    worse = rounds(
        {"task": 0, "train_cross_entropy": 4.0}, {"task": 1, "train_cross_entropy": 9.0}, classes_seen=5
    )
    assert (
        "2 of 2 tasks" in training_warnings(worse)[0] and "in task 2 it is 9," in training_warnings(worse)[0]
    )


def test_a_user_s_loss_that_doubled_is_said():
    assert diverged(1.0, 1.9) == diverged(1.0, None) == diverged(1.0, math.nan) == diverged(-3.0, -1.0) == []
    assert "4e+09" in diverged(1.0, 4e9)[0] and "initial model, 1;" in diverged(1.0, 4e9)[0]
    assert diverged(-3.0, 1.0)


@pytest.mark.parametrize(
    ("method", "trained", "says"), [("fppl", 640, True), ("fppl", 64_000, False), ("icarl", 640, False)]
)
def test_a_short_schedule_names_the_preset_that_suits_it(method, trained, says):
    """Ten visits of clients read 64 or 6,400 examples each: 2 or 200 batches of 32, in each of 3 rounds."""
    lines = rounds({}, {}, participants=5)
    records = Records(rounds=lines, counts={"rejected": 0, "refused": 0, "trained_images": trained})
    found = warnings_of(records, config.from_mapping(method, {"rounds": 3, "batch_size": 32}, "test"))
    assert len(found) == says
    assert all("about 6 steps per task" in line and "--features=both)" in line for line in found)


# ---- simulate ----------------------------------------------------------------------------------------------

X, Y, OWNER = np.array([[1.0], [3.0], [5.0], [11.0]], np.float32), np.zeros(4, int), ["a", "a", "b", "b"]


def simulated(loss, rate, capsys, rounds=2):
    client = fcljax.local_sgd(loss, optax.sgd(rate), batch_size=1)
    fcljax.simulate(fcljax.fedavg(jnp.ones(1), client), X, Y, OWNER, rounds)
    return capsys.readouterr().err


def square(model, x, y):
    return jnp.sum((x - model) ** 2, axis=-1)


@pytest.mark.parametrize(("loss", "diverged"), [(4.67, False), (5.2, True)])
def test_a_loss_near_that_of_guessing_is_named_but_no_divergence(loss, diverged):
    line = {"task": 4, "participants": 2, "rejected": 0, "train_cross_entropy": loss, "classes_seen": 100}
    (said,) = training_warnings([line])
    assert f"in task 5 it is {loss}, and guessing among 100 classes gives 4.61" in said
    assert ("diverged" in said and "lower the learning rates" in said) == diverged
    assert training_warnings([line | {"train_cross_entropy": 4.6}]) == []


@pytest.mark.parametrize(("accuracy", "diverged"), [(0.59, True), (0.61, False), (None, True)])
def test_a_model_that_predicts_most_examples_correctly_has_not_diverged(accuracy, diverged):
    """Halfway from guessing among five classes to all examples lies 60 %."""
    line = {"task": 0, "participants": 2, "rejected": 0, "train_cross_entropy": 2.2, "classes_seen": 5}
    line["train_accuracy"] = accuracy
    (said,) = training_warnings([line])
    assert ("training diverged" in said and "lower the learning rates" in said) == diverged
    assert ("61 % of the predictions are right, but the wrong ones are too confident" in said) != diverged
    # a task that did diverge is named before one that is only farther from guessing
    later = line | {"task": 1, "train_accuracy": 0.2, "train_cross_entropy": 2.0}
    (said,) = training_warnings([line | {"train_accuracy": 0.9}, later])
    assert "training diverged: at the end of 2 of 2 tasks" in said and "in task 2 it is 2," in said


@pytest.mark.long
def test_a_simulation_says_what_went_wrong_in_one_line(capsys):
    def nan_added(model, x, y):
        return square(model, x, y) + jnp.log(-1.0 - jnp.abs(y))  # a constant: its gradient is 0

    def nan_gradient(model, x, y):
        return square(model, x, y) * jnp.log(-1.0 - model[0] ** 2)

    assert simulated(square, 0.1, capsys) == ""
    assert simulated(nan_added, 0.1, capsys).count("\n") == 1
    assert "NaN or infinite in 2 of 2 rounds" in simulated(nan_added, 0.1, capsys)
    said = simulated(nan_gradient, 0.1, capsys)
    assert "no upload was valid in 2 of 2 rounds" in said and said.count("\n") == 1
    assert "unchanged since the start" in said
    for count in (1, 2):
        said = simulated(square, 1e4, capsys, count)
        assert said.startswith("warning: training diverged") and said.count("\n") == 1


# ---- run, page, watch --------------------------------------------------------------------------------------

OWN = """
import jax, jax.numpy as jnp
from fcljax import Loss, MethodEntry, cross_entropy_loss, federate, linear_learner
from fcljax.settings import NoOptions

def value(output, batch, task):
    plain = cross_entropy_loss().value(output, batch, task)
    return plain + jax.lax.stop_gradient(jnp.log(-1.0 - plain**2))

METHOD = MethodEntry(
    "its loss is NaN, its gradients are not", NoOptions,
    lambda options, run: federate(run, linear_learner(run), loss=Loss(value)), adapter="linear",
)
"""


@pytest.mark.long
def test_a_run_whose_loss_is_nan_says_so_everywhere(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    options = ["--tasks", "1", "--clients", "2", "--rounds", "1", "--epochs", "1", "--image-size", "8"]
    out = tmp_path / "run"
    assert cli.main(["run", str(tmp_path / "own.py"), *options, "--lr", "1e10", "--out", str(out)]) == 0
    said = "the clients' loss was NaN or infinite in 1 of 1 rounds"
    worse = "training diverged: at the end of 1 of 1 tasks"
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [sum(part in line for line in warned) for part in (said, worse)] == [1, 1]
    page = (out / "report.html").read_text().replace("&#39;", "'")
    assert said in page and worse in page
    assert said in " ".join(shown(out).split()) and worse in " ".join(shown(out).split())
    assert any(said in line for line in api.Result.of(out, str(tmp_path / "own.py")).metrics["warnings"])


def test_warnings_of_several_runs_name_them(tmp_path):
    for name in ("a", "b"):
        begun(tmp_path / name, 2)
    assert "warning:" not in shown(tmp_path)
    begun(tmp_path / "b", 2, b'{"task": 1, "round": 0, "participants": 2, "rejected": 0, "loss": null}\n')
    said = shown(tmp_path)
    assert said.count("warning:") == 1 and "b: warning: the clients' loss was NaN" in said


# ---- metrics of server rules once a task -------------------------------------------------------------------


def test_what_a_server_rule_measures_once_a_task_is_in_the_log_and_on_the_page():
    records = Records()
    start, end = RoundReport({"ranpac_ridge": 100.0, "loss": 7.0}), RoundReport({"fedran_explained": 0.5})
    line = records.record(0, 0, RoundReport({"loss": 1.0}), NOT_EVALUATED, NO_TRAFFIC, [start, end])
    assert (line["ranpac_ridge"], line["fedran_explained"], line["loss"], line["besides_loss"]) == (
        100,
        0.5,
        1,
        7,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "key"),
    [("fedranpac", "ranpac_ridge"), ("fedran", "fedran_explained"), ("dolfin", "memory_used")],
)
def test_methods_that_measure_once_a_task_log_it_in_every_task(method, key, tmp_path):
    options = {} if method == "dolfin" else {"projection": 50}
    found = fcljax.run(
        method, tasks=2, clients=2, rounds=1, epochs=1, out=tmp_path / "run", progress=False, **options
    )
    lines = (found.folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(f'"{key}"' in line for line in lines)
