"""`fcljax watch`: how far runs have come, without touching them."""

import io
import json
import os
import re
import shutil

import pytest
import small_runs
import yaml
from rich.console import Console

from fcljax import cli
from fcljax.errors import InputError
from fcljax.files import owned
from fcljax.results import watch as module
from fcljax.results.watch import is_finished, is_locked, read_status, run_dirs, total_rounds, watch

SETTINGS = {"method": "fedncm", "dataset": "digits", "seed": 7, "tasks": 2, "rounds": 2}


def begun(folder, lines=0, half=b"", **settings):
    """A run with so many lines in its log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    made = [
        {"task": i // 2, "round": i % 2, "loss": 1 / (i + 1), "A": 0.5 + i / 10, "rejected": 1}
        | {"participants": 3}
        for i in range(lines)
    ]
    text = "".join(json.dumps(line) + "\n" for line in made)
    (folder / "metrics.jsonl").write_bytes(text.encode() + half)
    return folder


def shown(folder, **more) -> str:
    console = Console(file=io.StringIO(), width=80)
    watch(folder, console, 1.0, once=True, **more)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    """The rows of the table below its line."""
    table = text.partition("─\n")[2].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in table if re.search(r"\d {2,}\d", line)]


def test_a_run_is_shown_with_its_tasks(tmp_path):
    run = begun(tmp_path / "run", 3, b'{"task": 1, "rou')
    os.utime(run / "metrics.jsonl", (1000, 1000))
    os.utime(run / "config.yaml", (900, 900))
    text = shown(run, now=lambda: 1090.0)
    assert "fedncm on digits, seed 7" in text
    assert cells(text)[:2] == [
        ["task 1", "2", "0.5", "60.00", "3", "2"],
        ["task 2", "1", "0.3333", "70.00", "3", "1"],
    ]
    assert cells(text)[2][1:7] == ["3/4", "0.3333", "70.00", "3", "3", "1:30 ago"]


def test_rejected_uploads_are_those_beside_the_rounds_too(tmp_path):
    """Such as class sums that are sent once a task."""
    for name in "ab":
        run = begun(tmp_path / "many" / name, 2)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[0]["rejected_besides"] = 5
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row[5] for row in cells(shown(tmp_path / "many" / "a"))] == ["7", "7"]
    assert [row[5] for row in cells(shown(tmp_path / "many"))] == ["7", "7"]


def test_a_run_that_diverged_takes_no_more_room_than_others(tmp_path):
    for name, loss in (("a", 0.25), ("b", 8e30)):
        run = begun(tmp_path / "many" / name, 1)
        line = json.loads((run / "metrics.jsonl").read_text()) | {"loss": loss}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    text = shown(tmp_path / "many")
    assert "0.25" in text and "8e+30" in text


def test_nothing_is_written_and_no_lock_is_taken(tmp_path):
    run = begun(tmp_path / "run", 2)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    folder = run.stat().st_mtime_ns
    with owned(run / ".lock"):
        assert "running" in shown(run)
        (run / ".lock").unlink()
    os.utime(run, ns=(folder, folder))
    shown(run)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before
    assert run.stat().st_mtime_ns == folder


def test_whether_a_process_here_owns_the_lock(tmp_path):
    lock = tmp_path / ".lock"
    assert is_locked(lock) is None
    with owned(lock):
        assert is_locked(lock) is True
        assert is_locked(lock, tmp_path / "no list") is None
    assert is_locked(lock) is False


def test_a_folder_of_seeds_has_a_row_for_each_also_for_those_to_come(tmp_path):
    many = begun(tmp_path / "many")
    (many / "metrics.jsonl").unlink()
    (many / "seeds.yaml").write_text("seeds: [1, 2]")
    begun(many / "seed-1", 4)
    assert run_dirs(many) == [many / "seed-1", many / "seed-2"]
    text = shown(many)
    assert "1 of 2 runs have all their rounds" in text and "never" in text and "4/4" in text
    assert run_dirs(tmp_path) == [many / "seed-1"], "a folder of folders"


def test_a_folder_of_runs_has_a_row_for_each(tmp_path):
    for name in ("a", "b", ".c.tmp-1"):
        begun(tmp_path / name, 1)
    assert [path.name for path in run_dirs(tmp_path)] == ["a", "b"]
    assert "0 of 2 runs" in shown(tmp_path)


def test_it_ends_when_the_last_run_is_finished(tmp_path):
    begun(tmp_path / "a", 4), begun(tmp_path / "b", 2)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        begun(tmp_path / "b", 2 + len(slept))

    watch(tmp_path, Console(file=io.StringIO()), 0.5, once=False, sleep=sleep)
    assert slept == [0.5, 0.5]


def test_a_run_that_has_not_begun_is_waited_for_and_then_compiles(tmp_path):
    console, slept = Console(file=io.StringIO(), width=140, force_terminal=True), []
    run = tmp_path / "later"

    def sleep(seconds):
        slept.append(seconds)
        begun(run, [0, 4][len(slept) > 1])
        assert "none has started" in console.file.getvalue()

    watch(run, console, 0.5, once=False, sleep=sleep)
    assert slept == [0.5, 0.5]
    begun(run, 0)
    with owned(run / ".lock"):
        assert "compiling" in shown(run)
        begun(run, 1)
        assert "compiling" not in shown(run)


def test_rounds_of_a_run_are_those_of_its_tasks_and_joint_has_one_task():
    assert total_rounds(SETTINGS) == 4 and total_rounds(SETTINGS | {"method": "joint"}) == 2
    assert total_rounds({}) is None and total_rounds({"tasks": "x", "rounds": None}) is None


def test_a_real_run_is_finished(tmp_path):
    found = read_status(small_runs.finished("linear"))
    assert is_finished(found) and len(found.rounds) == 15 == total_rounds(found.settings)
    shutil.copy(found.folder / "metrics.jsonl", tmp_path)
    assert not is_finished(read_status(tmp_path)), "without settings nobody knows"


@pytest.mark.parametrize(
    "content", [b"", b"\xff\n", b"[]\n", b'{"task": "x", "round": 0}\n', b'{"loss": NaN}\n']
)
def test_a_log_that_is_no_log_is_an_empty_one(content, tmp_path):
    run = begun(tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(content)
    assert "0/4" in shown(run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["run: give one run directory"]),
        (["absent", "--once"], ["'absent' contains no run"]),
        (["absent", "--every", "0"], ["every: 0.0", "0.1"]),
        (["absent", "--every", "nan"], ["every: nan"]),
        (["absent", "--one"], ["'--one'", "'--once'"]),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)


def test_control_c_ends_it_quietly(tmp_path, monkeypatch, capsys):
    seen = []

    def once(folder):
        if seen:
            raise KeyboardInterrupt
        seen.append(folder)
        return read_status(folder)

    run = begun(tmp_path / "run", 1)
    monkeypatch.setattr(module, "read_status", once)
    assert cli.main(["watch", str(run), "--every", "0.1"]) == 130
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError):
        run_dirs(tmp_path / "absent")
