"""What editors and type checkers know of the package: the same as the program."""

import ast
import importlib.util
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import small_runs

import fcljax
from fcljax.choices import CHOICES, options_of
from fcljax.run_options import MergingOptions
from fcljax.settings import AggregationOptions

PACKAGE = Path(fcljax.__file__).parent
METHODS = sorted((small_runs.ROOT / "experiments" / "methods").glob("*.py"))


@pytest.fixture(scope="module")
def written():
    """experiments/write_types.py."""
    path = small_runs.ROOT / "experiments" / "write_types.py"
    spec = importlib.util.spec_from_file_location("write_types", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_type_checkers_import_the_names_that_are_loaded_lazily(written):
    (block,) = (
        node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if type(node) is ast.If
    )
    assert ast.unparse(block) == ast.unparse(ast.parse(written.import_block()))


def test_the_keyword_options_of_a_run_are_those_of_the_command_line(written):
    tree = ast.parse((PACKAGE / "run_options.py").read_text())
    fields = {
        node.target.id: ast.unparse(node.annotation) for node in ast.walk(tree) if type(node) is ast.AnnAssign
    }
    assert fields == written.run_options(), "python experiments/write_types.py"
    assert {"lr", "rounds", "ewc_weight", "lora_rank"} <= fields.keys()


def test_the_keyword_options_of_fedavg_are_those_of_the_aggregation():
    choices = {"aggregator", "server_optimiser"}
    expected = {field.name: field.type for field in AggregationOptions.__dataclass_fields__.values()}
    expected |= options_of(*choices)
    found = typing.get_type_hints(MergingOptions)
    assert found.keys() == expected.keys()
    assert {name: found[name] for name in found.keys() - choices} == {
        name: expected[name] for name in expected.keys() - choices
    }
    for name in choices:
        names = typing.get_args(typing.get_args(found[name])[0])
        assert names == tuple(CHOICES[name])


WRONG = """import fcljax
import optax

result = fcljax.run("linear", rounds=1)
result.nothing
fcljax.run("linear", epocks=2)
fcljax.run("linear", optimiser="sdg")
fcljax.local_sgd(lambda model, x, y: y)
client = fcljax.local_sgd(lambda model, x, y: y, optax.sgd(0.1))
fcljax.fedavg({}, client, agregator="median")
"""
MISTAKES = {"5", "6", "7", "8", "10"}  # its lines that are wrong


def readme_blocks():
    """The Python blocks of the README, each as a program."""
    text = (small_runs.ROOT / "README.md").read_text()
    return [block.partition("```")[0] for block in text.split("```python\n")[1:]]


def checkers(folder):
    """Name -> the command that checks a folder's programs; of those that are installed."""
    folder_of_python = Path(sys.executable).parent
    commands = {
        "mypy": [
            "mypy",
            "--follow-imports=silent",
            "--ignore-missing-imports",
            "--python-executable",
            sys.executable,
        ],
        "pyright": ["pyright", "--pythonpath", sys.executable],
        "pyrefly": [
            "pyrefly",
            "check",
            "--output-format",
            "min-text",
            "--python-interpreter-path",
            sys.executable,
        ],
    }
    found = {name: folder_of_python / words[0] for name, words in commands.items()}
    return {
        name: [str(found[name]), *commands[name][1:], str(folder)] for name in found if found[name].exists()
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["mypy", "pyright", "pyrefly"])
def test_type_checkers_find_nothing_in_methods_and_the_readme_and_find_mistakes(tmp_path, name):
    command = checkers(tmp_path).get(name)
    if command is None:
        pytest.skip(f"{name} is not installed; `make test-extras` has it")
    for path in METHODS:
        (tmp_path / path.name).write_text(path.read_text())
    for number, block in enumerate(readme_blocks()):
        (tmp_path / f"readme_{number}.py").write_text(block)
    env = small_runs.program_environment() | {"MYPYPATH": str(PACKAGE.parent)}
    right = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert right.returncode == 0, right.stdout[-3000:] + right.stderr[-2000:]
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "pyrefly.toml").write_text('preset = "default"\n')  # it finds little without
    wrong = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert set(re.findall(r"wrong\.py:(\d+)", wrong.stdout)) == MISTAKES, wrong.stdout[-3000:]
