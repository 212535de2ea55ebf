"""A run says with which versions and which commit it was made, and which changed when it was resumed."""

import json
import shutil
import subprocess
from importlib import metadata

import pytest
import small_runs

import fcljax
from fcljax.results.repeat import software_of
from fcljax.runs import resume
from fcljax.runs import software as module

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]


def test_a_finished_run_names_the_versions_that_are_installed():
    summary = json.loads((small_runs.finished("linear") / "summary.json").read_text())
    versions = summary["software"]
    assert versions["jax"] == metadata.version("jax") and versions["fcljax"] == fcljax.__version__
    # files of the checkout may change between the run and this test
    assert versions | {"commit": None} == module.software() | {"commit": None}
    assert summary["software_changes"] == []
    assert f"jax {metadata.version('jax')}" in software_of(summary)


@needs_git
def test_the_commit_is_that_of_the_checkout_and_of_no_folder_above_it(tmp_path, monkeypatch):
    def git(*words):
        return subprocess.run([*GIT, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    (tmp_path / "file").write_text("a")
    (tmp_path / "package").mkdir()
    assert module.commit_of(tmp_path) is None
    git("init")
    assert module.commit_of(tmp_path) is None  # nothing is committed
    git("add", "file")
    git("commit", "-m", "a")
    commit = git("rev-parse", "HEAD").strip()
    assert module.commit_of(tmp_path) == commit
    assert module.commit_of(tmp_path / "package") is None
    (tmp_path / "file").write_text("b")
    assert module.commit_of(tmp_path) == f"{commit}-dirty"
    # as in a hook of another repository
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert module.commit_of(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("text", "commit"),
    [
        ('{"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}', "abc"),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', None),
        ("{", None),
        (None, None),
    ],
)
def test_an_installation_from_a_repository_has_its_commit(text, commit, monkeypatch):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return text

    monkeypatch.setattr(module.metadata, "distribution", lambda name: Distribution())
    assert module._installed_commit() == commit


@needs_git
def test_git_starts_no_monitor_of_the_checkout(tmp_path):
    (tmp_path / "file").write_text("a")
    for words in (["init"], ["add", "file"], ["commit", "-m", "a"]):
        subprocess.run([*GIT, *words], cwd=tmp_path, capture_output=True, check=True)
    program = tmp_path / "monitor"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'was_run'}\n")
    program.chmod(0o755)
    subprocess.run([*GIT, "config", "core.fsmonitor", str(program)], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("b")
    assert module.commit_of(tmp_path).endswith("-dirty")
    assert not (tmp_path / "was_run").exists()


def test_other_versions_are_named_when_a_run_is_resumed():
    before = {"software": module.software() | {"jax": "0.9.0"}}
    version = metadata.version("jax")
    assert resume.changed("software", before, module.software()) == f"jax ('{version}', not '0.9.0')"


@pytest.mark.parametrize(
    ("software", "text"),
    [
        ({"fcljax": "0.1.0", "commit": "abc", "jax": "0.10.2"}, "fcljax 0.1.0 at commit abc, jax 0.10.2"),
        ({"fcljax": "0.1.0", "commit": None, "jax": "0.10.2"}, "fcljax 0.1.0, jax 0.10.2"),
        (None, ""),
    ],
)
def test_versions_are_one_line_of_text(software, text):
    assert software_of({"software": software} if software else {}) == text
