"""`fcljax sweep`: runs of a grid as processes, some at a time, and what is left when one fails or all are
stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from small_runs import ROOT, finished, logged

from fcljax import cli
from fcljax.runs.folder import locked
from fcljax.studies import engines, jobs, sweeps
from fcljax.studies.engines import ClusterTask, SlurmOptions, slurm_parameters
from fcljax.studies.grid import plan_of
from fcljax.studies.jobs import Job, command

BASE = "base: {tasks: 2, epochs: 1, image_size: 8, batch_size: 64, rounds: 1, clients: 2}"
TWO = f"{{method: linear, {BASE}, grid: {{lr: [0.001, 0.01]}}}}"
NAMES = ["linear_lr-0.001_seed-2023", "linear_lr-0.01_seed-2023"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def record(out="out"):
    """sweep.json: name -> what became of the run."""
    return {run["name"]: run for run in json.loads((Path(out) / "sweep.json").read_text())["runs"]}


def metrics(out="out"):
    return {path.parent.name: path.read_bytes() for path in Path(out).glob("*/metrics.jsonl")}


# ---- the loop, with runs that are none ---------------------------------------------------------------------


def job(name, folder="."):
    return Job(name, "linear", f"{folder}/{name}", "s.yaml", f"{folder}/{name}.log", (), ".", {"X": "1"})


class Fake:
    """An engine whose runs end when `steps` looks have been taken at them."""

    def __init__(self, codes, steps=2):
        self.codes, self.steps, self.log, self.most, self.now = codes, steps, [], 0, set()

    def __call__(self, job):
        looks, stopped = iter(range(1000)), []
        self.log.append((job.name, job.environment.get("CUDA_VISIBLE_DEVICES")))
        self.now.add(job.name)
        self.most = max(self.most, len(self.now))

        def code():
            if next(looks) < self.steps and not stopped:
                return None
            self.now.discard(job.name)
            return -stopped[0] if stopped else self.codes.get(job.name, 0)

        def stop(number):
            self.log.append((job.name, number))
            stopped.append(number)

        return ClusterTask(code, stop)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(sweeps, "SECONDS", 0)


def test_so_many_at_a_time_each_on_a_device_of_its_own_and_a_failure_ends_nothing(quick):
    start, codes, seen = Fake({"b": 2}), {}, []
    sweeps.run_all(
        [job(name) for name in "abcde"], start, ["0", "3"], codes, lambda *now: seen.append(len(now[1]))
    )
    assert codes == {"a": 0, "b": 2, "c": 0, "d": 0, "e": 0}
    assert [name for name, _ in start.log] == list("abcde") and start.most == 2 and max(seen) <= 2
    assert start.log[0][1] == "0" and start.log[1][1] == "3"


@pytest.mark.parametrize(
    ("engine", "slots", "runs", "wanted"),
    [
        ("local", 1, 9, None),
        ("local", 2, 9, "4"),
        ("local", 3, 9, "2"),
        ("local", 20, 20, "1"),
        ("local", 20, 2, "4"),
        ("local", 20, 1, None),
        ("slurm", 2, 9, None),
    ],
)
def test_runs_at_a_time_share_the_cores_of_this_machine(engine, slots, runs, wanted, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweeps.os, "cpu_count", lambda: 8)
    ways = sweeps.Ways([None] * slots, engine)
    given = sweeps.sharing_cores(job("a"), ways, runs).environment
    assert given.get("OPENBLAS_NUM_THREADS") == wanted
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")  # a user's own value stays
    assert "OPENBLAS_NUM_THREADS" not in sweeps.sharing_cores(job("a"), ways, runs).environment


def test_a_sweep_gives_its_runs_their_share_of_the_cores(here, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweeps.os, "cpu_count", lambda: 8)
    started = []
    monkeypatch.setattr(sweeps, "run_all", lambda jobs, *_: started.extend(jobs))
    Path("two.yaml").write_text(TWO)
    cli.main(["sweep", "two.yaml", "--out", "out", "--jobs", "2"])
    assert [each.environment["OPENBLAS_NUM_THREADS"] for each in started] == ["4", "4"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_waited_for(number, quick):
    start, codes = Fake({}, steps=1000), {}

    def watch(*_):
        signal.raise_signal(number)

    with sweeps_stopped(number):
        sweeps.run_all([job(name) for name in "abc"], start, [None, None], codes, watch)
    assert start.log == [("a", None), ("b", None), ("a", number), ("b", number)]
    assert not start.now and codes == {}


def sweeps_stopped(number):
    """That the block ends as the program does by this signal."""
    from contextlib import contextmanager

    from fcljax.runs.signals import number_of, terminable

    @contextmanager
    def check():
        with pytest.raises(KeyboardInterrupt) as found, terminable():
            yield
        assert number_of(found.value) == number

    return check()


def left_behind(monkeypatch, program):
    """A process of a sweep that is gone: the lock, which the process has, is left."""
    monkeypatch.setattr(jobs, "command", lambda job: [sys.executable, "-c", program])
    process = jobs.start(job("a"))
    (adopted, again) = jobs.start(job("a")), jobs.start(job("a"))
    assert [type(each) for each in (adopted, again)] == [jobs.Adopted, jobs.Adopted]
    assert adopted.poll() is None
    return process, adopted


def test_a_run_that_a_killed_sweep_has_left_is_waited_for_and_not_made_twice(here, monkeypatch):
    work = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    process, adopted = left_behind(monkeypatch, work + "os.makedirs('a'); open('a/summary.json', 'w')")
    Path("go").touch()
    assert process.wait() == adopted.wait() == adopted.poll() == 0
    monkeypatch.setattr(jobs, "command", lambda job: [sys.executable, "-c", "raise SystemExit(7)"])
    assert jobs.start(job("a")).wait() == 7  # nobody is at work any more


def test_a_run_that_a_killed_sweep_has_left_gets_the_signals_of_the_next_one(here, monkeypatch):
    process, adopted = left_behind(monkeypatch, "import time; time.sleep(600)")
    adopted.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM and adopted.wait() == 1
    adopted.send_signal(signal.SIGTERM)  # the number may be another process's by now: nothing is sent


@pytest.mark.parametrize("change", ["number", "group", "host", "start", "only a number", "another process"])
def test_no_process_gets_a_signal_but_the_one_that_has_the_lock(change, here, monkeypatch):
    """The lock file may be of another machine, of somebody else, or older than a number used again."""
    process, adopted = left_behind(monkeypatch, "import time; time.sleep(600)")
    lock = jobs._lock_file(job("a"))
    number, host, start = lock.read_text().split(" ", 2)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    changed = {
        "number": f"{other.pid} {host} {start}",
        "group": f"-1 {host} {start}",
        "host": f"{number} elsewhere {start}",
        "start": f"{number} {host} {start}1",
        "only a number": number,
        "another process": jobs._identity(other.pid),
    }
    sent = []
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda *call: sent.append(call))
            lock.write_text(changed[change])
            adopted.send_signal(signal.SIGTERM)
            assert sent == []
            lock.write_text(f"{number} {host} {start}")
            adopted.send_signal(signal.SIGTERM)
            assert sent == [(process.pid, signal.SIGTERM)]
    finally:
        for started in (process, other):
            started.kill()
            started.wait()


def test_a_run_that_was_begun_goes_on(here):
    assert command(job("a"))[4:] == ["linear", "--config", "s.yaml", "--out", "./a"]
    (here / "a").mkdir()
    (here / "a" / "config.yaml").write_text("")
    assert command(job("a"))[4:] == ["linear", "--resume", "./a"]


def test_what_became_of_a_run_and_why(here):
    (run,) = plan_of({"method": "linear"}, "file")
    log = here / "logs" / f"{run.name}.log"
    log.parent.mkdir()
    assert sweeps.outcome(run, here, None).state == "not finished"
    log.write_bytes(b"one\nfcljax: data\xffset: no [such] file\n\n  \n")
    found = sweeps.outcome(run, here, 2)
    assert (found.state, found.exit_code) == ("failed", 2) and found.why.endswith("set: no [such] file")
    log.write_bytes(b"")
    assert sweeps.outcome(run, here, -9).why == "no output"
    shutil.copytree(finished("linear"), here / run.name)
    assert sweeps.outcome(run, here, None).state == sweeps.outcome(run, here, 0).state == "finished"
    path = here / run.name / "summary.json"
    summary = json.loads(path.read_text())
    every = summary["config"]["rounds"] * summary["config"]["tasks"]
    summary["rounds_without_upload"] = [[1, 1]] * every
    path.write_text(json.dumps(summary))
    assert sweeps.outcome(run, here, None).why == "no upload was valid"


# ---- engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "name"), [("ray", "ray"), ("slurm", "slurm"), ("slurm-local", "slurm")])
def test_an_engine_that_is_not_installed_names_its_extra(engine, name, here, capsys, monkeypatch):
    for module in ("ray", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    (here / "sweep.yaml").write_text("method: linear")
    assert cli.main(["sweep", "sweep.yaml", "--engine", engine]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"pip install -e '.[{name}]'" in err
    assert [path.name for path in here.iterdir()] == ["sweep.yaml"]


class SubmittedJob(NamedTuple):
    """What a task reads of submitit's jobs."""

    job_id: str
    paths: Any
    cancelled: list[str]

    def cancel(self):
        self.cancelled.append(self.job_id)

    def result(self):
        return 7


def slurm_job(folder, monkeypatch):
    """A job, its task, Slurm's queue as a list of numbers, and a clock."""
    queue, clock = ["4"], [1000.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: clock[0])
    submitted = SubmittedJob("4", SimpleNamespace(result_pickle=folder / "result.pkl"), [])
    log = str(folder / "log")
    job = Job("run", "linear", str(folder), "config.yaml", log, (), str(folder), {})
    return submitted, engines.slurm_task(submitted, job, lambda: frozenset(queue)), queue, clock


def test_a_job_of_slurm_that_is_cancelled_before_it_began_ends_its_run(tmp_path, monkeypatch):
    """It leaves no result, and Slurm may have no accounting."""
    submitted, task, queue, clock = slurm_job(tmp_path, monkeypatch)
    task.stop(15)
    assert submitted.cancelled == ["4"]
    queue.clear()
    assert task.code() is None  # the queue may have been read before the job was cancelled
    clock[0] += engines.QUEUE_INTERVAL + 1
    assert task.code() == 143


def test_a_job_of_slurm_that_has_left_the_queue_without_a_result_is_lost(tmp_path, monkeypatch):
    submitted, task, queue, clock = slurm_job(tmp_path, monkeypatch)
    assert task.code() is None
    queue.clear()
    assert task.code() is None
    clock[0] += engines.LOST - 1
    assert task.code() is None
    queue.append("4")  # queued again, since its time was over
    assert task.code() is None
    queue.clear()
    assert task.code() is None
    clock[0] += engines.LOST + 1
    assert task.code() == 1
    assert "Slurm's job 4 has left the queue without a result" in (tmp_path / "log").read_text()
    submitted.paths.result_pickle.touch()
    assert task.code() == 7


def test_slurm_is_asked_for_what_the_file_says_and_no_more():
    assert slurm_parameters(SlurmOptions()) == {"timeout_min": 1440, "cpus_per_task": 4}
    asked = SlurmOptions(partition="p", time=5, gpus=2, memory_gb=1.5)
    assert slurm_parameters(asked) == {
        "timeout_min": 5,
        "cpus_per_task": 4,
        "gpus_per_node": 2,
        "mem_gb": 1.5,
        "slurm_partition": "p",
    }


# ---- real runs ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_fails_is_said_and_the_other_one_finishes(here, capsys):
    (here / "sweep.yaml").write_text(
        f"{{method: linear, {BASE}, runs: [{{name: good}}, {{name: bad, dataset: 'npz:missing.npz'}}]}}"
    )
    assert cli.main(["sweep", "sweep.yaml", "--out", "out", "--jobs", "2"]) == 1
    said = capsys.readouterr()
    good, bad = record()["linear_good_seed-2023"], record()["linear_bad_seed-2023"]
    assert (good["state"], good["exit_code"]) == ("finished", 0) and 0 < good["A_last"] <= 1
    assert (bad["state"], bad["exit_code"]) == ("failed", 2) and "no such file: 'missing.npz'" in bad["why"]
    assert "linear_bad_seed-2023" in said.out and "FAILED" in said.err
    assert (here / "out" / "accuracy.png").exists()
    assert (here / "out" / "linear_good_seed-2023" / "summary.json").exists()
    # a begun run has its settings; another folder, or a second process, is refused in a line
    (here / "other.yaml").write_text(
        f"{{method: linear, {BASE.replace('epochs: 1', 'epochs: 2')}, runs: [{{name: good}}]}}"
    )
    (here / "without.yaml").write_text("{method: linear, runs: [{name: bad}]}")
    refused = {
        "other.yaml --resume out": "epochs",
        "without.yaml --resume out": "'linear_good_seed-2023', which the file does not have",
        "sweep.yaml --out out": "exists already",
    }
    for arguments, words in refused.items():
        assert cli.main(["sweep", *arguments.split()]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err
    with locked(here / "out"):
        assert cli.main(["sweep", "sweep.yaml", "--resume", "out"]) == 2
    assert "another process works in" in capsys.readouterr().err


def two_runs(*options):
    """A sweep of two runs from start to end, and its metrics."""
    Path("two.yaml").write_text(TWO)
    assert cli.main(["sweep", "two.yaml", "--out", "out", "--jobs", "2", *options]) == 0
    assert [record()[name]["state"] for name in NAMES] == ["finished", "finished"]
    assert sorted(metrics()) == NAMES
    return metrics()


@pytest.mark.long
def test_only_what_is_missing_is_run_again_and_more_runs_may_join(here, capsys):
    before = two_runs()
    stamps = {path: path.stat().st_mtime_ns for path in (here / "out" / NAMES[1]).rglob("*")}
    shutil.rmtree(here / "out" / NAMES[0])
    (here / "two.yaml").write_text(TWO.replace("0.01]", "0.01, 0.1]"))
    assert cli.main(["sweep", "two.yaml", "--resume", "out"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (here / "out" / NAMES[1]).rglob("*")} == stamps
    after = metrics()
    assert {name: after[name] for name in NAMES} == before and "linear_lr-0.1_seed-2023" in after
    capsys.readouterr()
    assert cli.main(["compare", "out"]) == 0
    rows = re.findall(r"^linear.*? 2023 ", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 3
    # the settings are those of a plain run, which gives the same bits
    options = ["--tasks", "2", "--epochs", "1", "--image-size", "8", "--batch-size", "64", "--rounds", "1"]
    assert cli.main(["run", "linear", *options, "--clients", "2", "--lr", "0.01", "--out", "plain"]) == 0
    assert (here / "plain" / "metrics.jsonl").read_bytes() == before[NAMES[1]]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_goes_on_and_ends_the_same(number, here):
    more = TWO.replace("rounds: 1", "rounds: 20").replace("epochs: 1", "epochs: 2")
    (here / "two.yaml").write_text(more)
    arguments = [sys.executable, "-m", "fcljax", "sweep", "two.yaml", "--jobs", "2"]
    own = dict(os.environ)
    process = subprocess.Popen([*arguments, "--out", "out"], env=own, stderr=subprocess.PIPE, text=True)
    runs, end = [here / "out" / name for name in NAMES], time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        # where much else is at work, one run could end before the other has a round
        if all(map(Path.exists, runs)) and any(logged(run / "metrics.jsonl") >= 2 for run in runs):
            break
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == 128 + number, said
    assert "resume with: fcljax sweep two.yaml --resume out" in said
    assert {run["state"] for run in record().values()} == {"not finished"}
    assert not any((here / "out" / name / "summary.json").exists() for name in NAMES)
    with locked(here / "out" / NAMES[0]), locked(here / "out" / NAMES[1]):
        pass  # nobody is at work there any more
    assert subprocess.run([*arguments, "--resume", "out"], env=own).returncode == 0
    stopped = metrics()
    assert cli.main(["sweep", "two.yaml", "--out", "whole", "--jobs", "2"]) == 0
    assert metrics("whole") == stopped


@pytest.mark.long
def test_the_runs_of_a_killed_sweep_go_on_and_are_found_again(here):
    (here / "two.yaml").write_text(TWO.replace("rounds: 1", "rounds: 10"))
    arguments = [sys.executable, "-m", "fcljax", "sweep", "two.yaml", "--jobs", "2"]
    killed = subprocess.Popen([*arguments, "--out", "out"], env=dict(os.environ))
    locks, end = [here / "out" / "logs" / f"{name}.log.lock" for name in NAMES], time.monotonic() + 300
    while time.monotonic() < end and not all(lock.exists() and lock.read_text() for lock in locks):
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    numbers = [lock.read_text() for lock in locks]
    # at once, so that the processes of the first sweep have not even made their folders
    assert subprocess.run([*arguments, "--resume", "out"], env=dict(os.environ)).returncode == 0
    assert [lock.read_text() for lock in locks] == numbers
    assert {run["state"] for run in record().values()} == {"finished"}
    assert all(log.count(b"\n") == 20 for log in metrics().values())


@pytest.mark.long
@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm-local", "submitit")])
def test_other_engines_leave_the_same_and_are_stopped(engine, package, here):
    pytest.importorskip(package)
    (here / "two.yaml").write_text(TWO.replace("{method", "{slurm: {time: 10}, ray: {cpus: 1}, method"))
    arguments = [sys.executable, "-m", "fcljax", "sweep", "two.yaml"]
    own = dict(os.environ)
    done = subprocess.run([*arguments, "--engine", engine, "--out", "out"], env=own)
    assert done.returncode == 0
    assert [record()[name]["state"] for name in NAMES] == ["finished", "finished"]
    assert subprocess.run([*arguments, "--out", "local"], env=own).returncode == 0
    assert metrics() == metrics("local")
    # a run that fails, and one that is stopped
    (here / "bad.yaml").write_text("{method: linear, base: {dataset: 'npz:missing.npz'}}")
    done = subprocess.run([*arguments[:-1], "bad.yaml", "--engine", engine, "--out", "bad"], env=own)
    assert done.returncode == 1 and "missing.npz" in record("bad")["linear_seed-2023"]["why"]
    (here / "long.yaml").write_text("{method: linear, base: {rounds: 1000, epochs: 1}}")
    process = subprocess.Popen([*arguments[:-1], "long.yaml", "--engine", engine, "--out", "cut"], env=own)
    log, end = here / "cut" / "linear_seed-2023" / "metrics.jsonl", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end and not (log.exists() and log.stat().st_size):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == 143
    with locked(log.parent):
        pass
