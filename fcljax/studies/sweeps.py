"""Make the runs of a grid (`grid.py`), each a run directory of its own in one folder,
some at a time.

The folder has a run directory for each run, plan.yaml (the runs and the options that
the file gives them), settings/ (their config.yaml), logs/ (their output), and at the
end sweep.json and accuracy.png.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fcljax import config
from fcljax.errors import InputError, one_line
from fcljax.files import write_text
from fcljax.results.comparison import compare
from fcljax.results.run_folder import load_summary, write_json
from fcljax.runs.resume import check_file
from fcljax.runs.signals import number_of, pause, unbroken
from fcljax.runs.summary import learned_nothing
from fcljax.studies import engines
from fcljax.studies.engines import ClusterTask, Start
from fcljax.studies.grid import Planned
from fcljax.studies.jobs import Job, carried
from fcljax.studies.seeds import folder_of_runs
from fcljax.terminal import add_row, new_table, say

PLAN = "plan.yaml"
SETTINGS = "settings"
LOGS = "logs"
RESULT = "sweep.json"
SECONDS = 0.2  # between two checks of the running processes
THREADS = "OPENBLAS_NUM_THREADS"  # threads of decompositions in numpy, scipy and JAX on a CPU


class Outcome(NamedTuple):
    """The outcome of a run."""

    state: str
    """"finished", "failed" or "not finished"."""
    exit_code: int | None
    """Of its process, if there was one."""
    why: str
    """Why it failed."""
    summary: dict[str, Any] | None
    """Its summary.json, if it has one."""


class Ways(NamedTuple):
    """How runs are made."""

    slots: Sequence[str | None]
    """CUDA_VISIBLE_DEVICES of each run at a time; None: unchanged."""
    engine: engines.Name = "local"
    slurm: engines.SlurmOptions = engines.SlurmOptions()
    ray: engines.RayOptions = engines.RayOptions()
    options: tuple[str, ...] = ()
    """Further options of `fcljax run`."""


def sweep(
    runs: list[Planned],
    out: Path,
    resume: bool,
    ways: Ways,
    console: Console,
) -> dict[str, Outcome]:
    """Make all runs that are not finished in `out`; one that fails does not end the
    others.

    Args:
      runs: all of the sweep.
      out: its folder; a new one, unless `resume`.
      resume: resume the sweep in `out`. There may be more runs than before; the others
        must be unchanged.
      ways: how they are made.
      console: where the progress bar goes.

    Returns:
      The outcome of each run, by its name, as in sweep.json.

    Raises:
      InputError: for a folder that cannot be used, or belongs to another sweep or
        process.
      KeyboardInterrupt: after all running processes have ended, with checkpoints to
        resume from.
    """
    check = (lambda: _check_same(runs, out)) if resume else None
    with folder_of_runs(out, check):
        _write_plan(runs, out)
        codes: dict[str, int] = {}
        # a finished run has a summary; a failed one is made again
        todo = [run for run in runs if outcome(run, out, None).summary is None]
        try:
            with (
                engines.engine(ways.engine, ways.slurm, ways.ray, out / LOGS / "engine") as start,
                _watched(runs, out, console) as watch,
            ):
                jobs = [sharing_cores(job_of(run, out, ways.options), ways, len(todo)) for run in todo]
                run_all(jobs, start, ways.slots, codes, watch)
        # also after Ctrl-C: what is finished by then is in the result
        finally:
            outcomes = {run.name: outcome(run, out, codes.get(run.name)) for run in runs}
            write_json(out / RESULT, result(runs, outcomes))
    return outcomes


def advice(out: Path, command: str) -> str:
    """Tell how to resume a sweep that was stopped, by `command`."""
    if (out / PLAN).exists():
        return f"resume with: {command}"
    return ""


# ---- files of the folder ---------------------------------------------------------------


def _write_plan(runs: Sequence[Planned], out: Path) -> None:
    for name in (SETTINGS, LOGS):
        (out / name).mkdir(exist_ok=True)
    for run in runs:
        write_text(_settings(run, out), config.to_yaml(run.cfg))
    write_text(out / PLAN, yaml.safe_dump(plan_values(runs), sort_keys=False))


def plan_values(runs: Sequence[Planned]) -> dict[str, dict[str, Any]]:
    """Return the content of plan.yaml: name of the run -> its method and the options
    that the file gives."""
    return {run.name: {"method": run.method} | run.given for run in runs}


def _check_same(runs: Sequence[Planned], out: Path) -> None:
    """Check that every run that has started is still planned, with the same settings.

    Raises:
      InputError: naming the first run that is not, and the settings that differ.
    """
    if not (out / PLAN).is_file():
        raise InputError(f"resume: {str(out)!r} is not a sweep folder: it has no {PLAN}")
    planned = {run.name: run for run in runs}
    for name in config.load_yaml(out / PLAN):
        # a run that has not started may still change
        if not (out / str(name) / "config.yaml").exists():
            continue
        if name not in planned:
            raise InputError(
                f"resume: the sweep in {str(out)!r} has the run {name!r}, which the file does not have"
            )
        check_file(out / name, planned[name].cfg)


def _settings(run: Planned, out: Path) -> Path:
    return out / SETTINGS / f"{run.name}.yaml"


def job_of(run: Planned, out: Path, options: tuple[str, ...]) -> Job:
    """Return the job that makes a run in the sweep's folder."""
    settings = _settings(run, out).absolute()
    log = (out / LOGS / f"{run.name}.log").absolute()
    return Job(
        run.name,
        run.method,
        str((out / run.name).absolute()),
        str(settings),
        str(log),
        options,
        os.getcwd(),
        carried(os.environ),
    )


def outcome(run: Planned, out: Path, code: int | None) -> Outcome:
    """Return the outcome of a process that ended with this code; None: no process."""
    try:
        summary = load_summary(out / run.name)
    except InputError:
        summary = None
    # a summary of an earlier process does not excuse this one's failure
    if summary and not code:
        if learned_nothing(summary):
            return Outcome("failed", code, "no upload was valid", summary)
        return Outcome("finished", code, "", summary)
    if code is None:
        return Outcome("not finished", None, "", summary)
    return Outcome("failed", code, last_line_of(out / LOGS / f"{run.name}.log"), summary)


def finished(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Return the summaries of the runs that finished, by name."""
    return {
        name: outcome.summary
        for name, outcome in outcomes.items()
        if outcome.state == "finished" and outcome.summary
    }


def failure(outcomes: Mapping[str, Outcome]) -> str:
    """Tell why the first run without a result has none; empty if all runs finished."""
    for outcome in outcomes.values():
        if outcome.state != "finished":
            if outcome.why:
                return f"{outcome.state}: {outcome.why}"
            return outcome.state
    return ""


def last_line_of(log: Path) -> str:
    """Return the last line of a process's output."""
    with log.open("rb") as file:
        # logs of long runs are large, and the last line is enough
        file.seek(max(0, log.stat().st_size - 10_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return one_line(next((line for line in reversed(lines) if line), "no output"))


def result(runs: Sequence[Planned], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return the content of sweep.json."""
    states = [outcome.state for outcome in outcomes.values()]
    rows = [
        {
            "name": run.name,
            "method": run.method,
            "seed": run.cfg.seed,
            "given": run.given,
            **{key: getattr(outcomes[run.name], key) for key in ("state", "exit_code", "why")},
            **{key: (outcomes[run.name].summary or {}).get(key) for key in ("A_avg", "A_last")},
        }
        for run in runs
    ]
    counts = {name.replace(" ", "_"): states.count(name) for name in ("finished", "failed", "not finished")}
    return counts | {"runs": rows}


# ---- running ---------------------------------------------------------------------------


def run_all(
    jobs: Sequence[Job],
    start: Start,
    slots: Sequence[str | None],
    codes: dict[str, int],
    watch: Callable[[Mapping[str, int], Sequence[str]], None],
) -> None:
    """Make runs, at most `len(slots)` at a time, and write their exit codes into
    `codes`. A signal that ends this process is passed on to the running ones, which it
    waits for."""
    waiting = deque(jobs)
    free = list(slots)
    running = {}
    try:
        while waiting or running:
            while waiting and free:
                job = waiting.popleft()
                # the first free device, so that a single run uses the first
                slot = free.pop(0)
                running[job.name] = (start(on_device(job, slot)), slot)
            for name, code in _ended(running).items():
                codes[name] = code
                free.append(running.pop(name)[1])
            # after the exit codes: the bar counts what has ended
            watch(codes, list(running))
            # a signal is noticed here; without running processes nothing is waited for
            if running:
                pause(SECONDS)
            else:
                pause(0)
    except BaseException as stop:
        # a second Ctrl-C must not leave processes behind
        with unbroken():
            number = 15
            if isinstance(stop, KeyboardInterrupt):
                number = number_of(stop)
            _end(running, number)
        raise


def on_device(job: Job, device: str | None) -> Job:
    """Return a job that sees only one GPU; None: the job itself."""
    if device is None:
        return job
    return with_variable(job, "CUDA_VISIBLE_DEVICES", device)


def sharing_cores(job: Job, ways: Ways, runs: int) -> Job:
    """Return a job whose linear algebra takes its share of this machine's cores, if several
    of these runs execute here at a time.

    Threads of OpenBLAS wait for each other at every step of a decomposition. With more threads
    than cores a decomposition takes many times as long.
    """
    at_a_time = min(len(ways.slots), runs)
    if ways.engine != "local" or at_a_time == 1 or THREADS in os.environ:
        return job
    share = max(1, (os.cpu_count() or 1) // at_a_time)
    return with_variable(job, THREADS, str(share))


def with_variable(job: Job, name: str, value: str) -> Job:
    """Return a job with one more variable in its environment."""
    return job._replace(environment={**job.environment, name: value})


def _ended(running: Mapping[str, tuple[ClusterTask, str | None]]) -> dict[str, int]:
    codes = {name: task.code() for name, (task, _) in running.items()}
    return {name: code for name, code in codes.items() if code is not None}


def _end(running: Mapping[str, tuple[ClusterTask, str | None]], number: int) -> None:
    """Send a signal to all runs, and wait until they have ended."""
    for task, _ in running.values():
        task.stop(number)
    # each process writes its checkpoint first
    while len(_ended(running)) < len(running):
        time.sleep(SECONDS)


@contextlib.contextmanager
def _watched(
    runs: Sequence[Planned], out: Path, console: Console
) -> Iterator[Callable[[Mapping[str, int], Sequence[str]], None]]:
    """Show a bar over the rounds of all runs, with the time left, and a line for each
    run that has ended."""
    columns = [
        TextColumn("runs {task.fields[ended]}/{task.fields[runs]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
    ]
    rounds = {run.name: run.cfg.tasks * run.cfg.rounds for run in runs}
    # finished in an earlier call
    ended = {run.name for run in runs if outcome(run, out, None).summary}
    # rounds of large runs take minutes, so the speed is measured over an hour
    with Progress(*columns, console=console, speed_estimate_period=3600) as progress:
        done = sum(rounds[name] for name in ended)
        bar = progress.add_task(
            "", total=sum(rounds.values()), completed=done, runs=len(runs), ended=len(ended), now=""
        )

        def watch(codes: Mapping[str, int], running: Sequence[str]) -> None:
            for name in [name for name in codes if name not in ended]:
                ended.add(name)
                say(progress.console, f"{name}: {'finished' if not codes[name] else 'FAILED'}")
            played = sum(min(rounds[name], _rounds(out / name)) for name in running)
            done = sum(rounds[name] for name in ended) + played
            progress.update(bar, completed=done, ended=len(ended), now=" ".join(running)[:60])

        yield watch


def _rounds(folder: Path) -> int:
    """Count the rounds that a run has logged."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


# ---- tables ----------------------------------------------------------------------------


def finished_folders(outcomes: Mapping[str, Outcome], out: Path) -> list[Path]:
    """Return the folders of the runs that finished."""
    return [out / name for name in finished(outcomes)]


def tables(outcomes: Mapping[str, Outcome], out: Path) -> tuple[list[Table], Path | None]:
    """Compare the finished runs in tables and a figure, and list the others."""
    folders = finished_folders(outcomes, out)
    comparison, figure = compare(folders, out / "accuracy.png") if folders else ([], None)
    failed = new_table("run", "exit code", "why", title="failed")
    for name, outcome in outcomes.items():
        if outcome.state != "finished":
            code = ""
            if outcome.exit_code is not None:
                code = outcome.exit_code
            add_row(failed, name, code, outcome.why or outcome.state)
    if failed.row_count:
        comparison = [*comparison, failed]
    return comparison, figure


def plan_table(runs: Sequence[Planned]) -> Table:
    """List the runs of a sweep, with the options in which they differ."""
    table = new_table("run", "method", "options", title=f"{len(runs)} runs")
    names = dict.fromkeys(name for run in runs for name in run.given)
    differing = [name for name in names if len({run.given.get(name) for run in runs}) > 1]
    for run in runs:
        cells = [f"{name} {run.given[name]}" for name in differing if name in run.given]
        add_row(table, run.name, run.method, ", ".join(cells))
    return table
