"""The lines by which pages, notebooks and errors say how to install. The quick suite reads what they
name, and `make test-extras` runs each in a fresh environment."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from small_runs import ROOT

from fcljax.errors import install_command

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
LINE = re.compile(r"pip install ((?:-{1,2}[a-z]+ )*(?:'[^'\n]+'|[^\s`'\",]+))")
TARGET = re.compile(r"-e '?\.(?:\[([\w-]+)\])?'?$|(?:--quiet )?\./fcljax-\*\.whl$|pandas$")
# gigabytes of libraries for chips: the index has to know them, and nothing is downloaded
DRY = ("gpu", "accelerators-aot", "torch")


def texts():
    """What people read: pages, cells of notebooks, and the errors of missing dependencies."""
    yield from (page.read_text() for page in PAGES if page.name != "changelog.md")
    for notebook in NOTEBOOKS:
        yield from ("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"])
    for module in (ROOT / "fcljax").rglob("*.py"):
        code = module.read_text()
        yield from map(install_command, re.findall(r"install_command\('([\w-]+)'\)", code))
        yield code


def install_lines():
    """What follows `pip install`, once each."""
    lines = {line for text in texts() for line in LINE.findall(text)}
    # the doctor and `install_command` fill in a name
    return sorted(line for line in lines if "{" not in line)


def extra_of(line):
    return TARGET.match(line)[1]


def test_every_install_line_names_the_clone_or_its_wheel_and_extras_that_exist():
    lines = install_lines()
    assert {"-e .", "-e '.[gpu]'", "-e '.[text]'", "--quiet ./fcljax-*.whl"} <= {*lines}
    assert [line for line in lines if not TARGET.match(line)] == []
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = {extra_of(line) for line in lines} - {None}
    assert named <= {*setup["options.extras_require"]} and len(named) > 5


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git has, with the wheel that `make release` builds."""
    folder = tmp_path_factory.mktemp("install") / "fcljax"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", ".", "."]
    subprocess.run(wheel, cwd=folder, check=True)
    return folder


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("INSTALL_LINES"), reason="needs an index: `make test-extras` has it")
@pytest.mark.parametrize("line", install_lines())
def test_an_install_line_works_in_a_fresh_environment(line, clone, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    extra = extra_of(line)
    if extra in DRY:
        line = f"--dry-run {line}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PATH"] = f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"

    def shell(command, folder):
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, check=True, capture_output=True, text=True
        )

    shell(f"pip install {line}", clone)
    if extra in DRY or line == "pandas":
        return
    shell("pip check", tmp_path)
    # outside of the clone, so that the installed package answers
    assert "fppl" in shell("fcljax list", tmp_path).stdout
