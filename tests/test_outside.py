"""Methods from outside the package: run, checked, and refused in one line where they are wrong."""

import json

import pytest
import small_runs
from small_runs import COMMON

from fcljax import cli
from fcljax.methods import METHODS, find_method

FOLDER = small_runs.ROOT / "experiments" / "methods"
SHORT = [*COMMON, "--rounds", "1", "--clients", "2"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", ["--mu", "0.1"]),
        ("distill", ["--adapter", "linear", "--spread", "0.1"]),
    ],
)
@pytest.mark.long
def test_a_method_outside_the_package_runs_with_its_own_options(name, options, tmp_path):
    out = tmp_path / "run"
    assert cli.main(["run", str(FOLDER / f"{name}.py"), *SHORT, *options, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["traces"] == 1 and len(summary["A"]) == 5
    assert summary["config"][options[-2].removeprefix("--")] == float(options[-1])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(("distill_loss" in line) == (name == "distill") for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedprox", "distill", "fedranpac"])
def test_a_method_outside_the_package_holds_what_all_must(name, capsys):
    assert cli.main(["check", str(FOLDER / f"{name}.py"), "--adapter", "linear"]) == 0
    said = capsys.readouterr().out
    assert "NO" not in said and "padding is inert" in said


def write(path, body):
    path.write_text(body)
    return str(path)


SPOILED = """
import jax.numpy as jnp
from fcljax import ClientRule, MethodEntry, cross_entropy_loss, federate, linear_learner
from fcljax.methods.fedavg import NoOptions

def spoiled(options, run):
    rules = (ClientRule("spoiled", LOSS),)
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), client_rules=rules)

METHOD = MethodEntry("wrong on purpose", NoOptions, spoiled, adapter="linear")
"""


@pytest.mark.long
def test_a_method_whose_clients_send_nothing_but_nan_is_told_so(tmp_path, capsys):
    loss = "lambda step, memory: jnp.nan * jnp.sum(step.trainable.classifier.kernel)"
    file = write(tmp_path / "spoiled.py", SPOILED.replace("LOSS", loss))
    assert cli.main(["check", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("NO" in line and "rejected 14 uploads" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, ["no file", "missing.py"]),
        ("empty.py", "x = 1", ["no MethodEntry", "METHOD"]),
        ("broken.py", "def (", ["cannot be loaded", "SyntaxError"]),
        ("raises.py", "1 / 0", ["cannot be loaded", "ZeroDivisionError"]),
    ],
)
def test_a_file_that_holds_no_method_is_refused_in_one_line(name, content, words, tmp_path, capsys):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    assert cli.main(["run", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)


def test_a_module_s_entry_can_be_named():
    with pytest.raises(ValueError, match="no MethodEntry by the name METHODS"):
        find_method("fcljax.methods:METHODS")
    with pytest.raises(ValueError, match="unknown value 'fpl'; did you mean 'fppl'"):
        find_method("fpl")
    assert find_method("fppl").summary == METHODS["fppl"].summary


def test_options_that_collide_are_refused(tmp_path, capsys):
    body = (FOLDER / "fedprox.py").read_text().replace("mu: float", "lr: float")
    assert cli.main(["run", write(tmp_path / "collides.py", body)]) == 2
    assert "both have an option 'lr'" in capsys.readouterr().err
