"""Follow runs in the terminal by their config.yaml and metrics.jsonl, also from another
machine.

Nothing is written, and no lock is taken.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live

from fcljax import config
from fcljax.errors import InputError
from fcljax.federated.health import training_warnings
from fcljax.methods import METHODS
from fcljax.results.run_folder import is_hidden, read_lines, rejected_uploads
from fcljax.results.summary_fields import is_number
from fcljax.terminal import add_row, duration, new_table, plain_text

# where Linux lists the locks that processes of this machine hold
LOCK_TABLE = Path("/proc/locks")
MAX_WARNINGS = 8
MAX_TITLES = 3


class RunStatus(NamedTuple):
    """State of a run directory at one moment."""

    folder: Path
    settings: dict[str, Any]
    """of config.yaml; empty while it cannot be read"""
    rounds: Sequence[dict[str, Any]]
    """lines of metrics.jsonl"""
    written: float | None
    """time of the last write, in seconds since 1970; None: never"""
    locked: bool | None
    """whether a process of this machine runs it; None where the system does not say"""
    has_summary: bool


def total_rounds(settings: dict[str, Any]) -> int | None:
    """Return the rounds of a complete run with these settings; None where they do not
    say."""
    method = METHODS.get(str(settings.get("method")))
    try:
        tasks = 1
        if not (method and method.joint):
            tasks = int(settings["tasks"])
        return int(settings["rounds"]) * tasks
    except (KeyError, TypeError, ValueError):
        return None


def is_finished(run: RunStatus) -> bool:
    """Check whether a run has logged all its rounds, or has a summary."""
    rounds = total_rounds(run.settings)
    return run.has_summary or (rounds is not None and len(run.rounds) >= rounds)


def run_dirs(folder: str | Path) -> list[Path]:
    """Return the run directories that a folder is or holds, finished or not. A folder
    of `fcljax run --seeds` lists also the runs that have not started.

    Raises:
      InputError: if there are none.
    """
    folder = Path(folder)
    planned = _planned_dirs(folder)
    if not planned and (folder / "metrics.jsonl").exists():
        return [folder]
    configs = [path for pattern in ("*/config.yaml", "*/*/config.yaml") for path in folder.glob(pattern)]
    started = {path.parent for path in configs if not is_hidden(path.parent, folder)}
    # a folder of seeds has a config.yaml too, and is no run
    collections = {path.parent.parent for path in configs}
    # planned runs that have not started have no file yet, but belong to the list
    runs = sorted({*planned, *(started - collections)})
    if not runs and (folder / "config.yaml").exists():
        return [folder]
    if not runs:
        raise InputError(f"run: {str(folder)!r} contains no run: it has no config.yaml")
    return runs


def _planned_dirs(folder: Path) -> list[Path]:
    """Return the run directories that a folder of `fcljax run --seeds` has or will
    have."""
    try:
        seeds = config.load_yaml(folder / "seeds.yaml").get("seeds")
    except InputError:
        return []
    if isinstance(seeds, list):
        return [folder / f"seed-{seed}" for seed in seeds]
    return []


def read_status(folder: Path) -> RunStatus:
    """Read the state of a run from its files."""
    # the run writes while these files are read: what is not there yet comes at the next
    # update
    settings = {}
    with contextlib.suppress(InputError):
        settings = config.load_yaml(folder / "config.yaml")
    written = None
    for name in ("metrics.jsonl", "config.yaml"):
        with contextlib.suppress(OSError):
            written = max(written or 0.0, (folder / name).stat().st_mtime)
    rounds = read_lines(folder / "metrics.jsonl")
    has_summary = (folder / "summary.json").exists()
    return RunStatus(folder, settings, rounds, written, is_locked(folder / ".lock"), has_summary)


def is_locked(path: Path, lock_table: Path = LOCK_TABLE) -> bool | None:
    """Check whether a process of this machine locks a file; None where the system does
    not say."""
    # to try the lock would tell too, but a run that starts at that moment would fail
    try:
        status = path.stat()
        entries = lock_table.read_text().splitlines()
    except OSError:
        return None
    # as /proc/locks writes it: device in hexadecimal, inode in decimal
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(inode in entry.split() for entry in entries)


def watch(
    folder: str | Path,
    console: Console,
    every: float,
    once: bool,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Show the runs of a folder until all are finished.

    Args:
      folder: a run directory, or a folder that holds some.
      console: to print to.
      every: seconds between two updates.
      once: print the present state and return.
      sleep, now: the clock.

    Raises:
      InputError: as `run_dirs`, with `once` only; otherwise the first run is waited for.
    """
    if once:
        console.print(status_view([read_status(path) for path in run_dirs(folder)], now()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            # the folders are listed anew each time: runs of a sweep start one by one
            runs = []
            with contextlib.suppress(InputError):
                runs = [read_status(path) for path in run_dirs(folder)]
            # without `once` a folder may be watched before its first run has started
            view = plain_text(f"waiting for a run in {str(folder)!r}: none has started; Ctrl-C ends")
            live.update(status_view(runs, now()) if runs else view, refresh=True)
            if runs and all(map(is_finished, runs)):
                return
            sleep(every)


def status_view(runs: Sequence[RunStatus], now: float) -> RenderableType:
    """Return a table with a row per run, for a single run also a row per task, and
    warnings below it."""
    numbers = ("rounds", "loss", "A_t %", "clients", "rejected")
    titles = list(dict.fromkeys(_title(run.settings) for run in runs))
    title = "; ".join(titles[:MAX_TITLES]) + ("; ..." if len(titles) > MAX_TITLES else "")
    table = new_table("run", *numbers, "written", "state", title=title, right=numbers)
    for run in runs:
        # a row per task only for a single run: of several, the table would be too long
        tasks = ()
        if len(runs) == 1:
            tasks = sorted({line["task"] for line in run.rounds})
        for task in tasks:
            lines = [line for line in run.rounds if line["task"] == task]
            add_row(table, f"task {task + 1}", len(lines), *_numbers(lines))
        progress = f"{len(run.rounds)}/{total_rounds(run.settings) or '?'}"
        name = f"{run.folder.parent.name}/{run.folder.name}"
        written = "never"
        if run.written is not None:
            # max: the clock of another machine, whose folder is watched, may be ahead
            written = f"{duration(max(0, round(now - run.written)))} ago"
        add_row(table, name, progress, *_numbers(run.rounds), written, _state(run))
    count = f"{sum(map(is_finished, runs))} of {len(runs)} runs have all their rounds"
    warnings = [f"{run.folder.name}: {line}" for run in runs for line in training_warnings(run.rounds)]
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"and {len(warnings) - MAX_WARNINGS} more warnings"]
    return Group(table, *map(plain_text, [count, *warnings]))


def _title(settings: dict[str, Any]) -> str:
    method, dataset, seed = (settings.get(name, "?") for name in ("method", "dataset", "seed"))
    if settings:
        return f"{method} on {dataset}, seed {seed}"
    return "not started"


def _numbers(lines: Sequence[dict[str, Any]]) -> list[object]:
    """Return loss, accuracy in %, clients and rejected uploads of rounds; a dash where
    unknown."""
    latest = {}
    if lines:
        latest = lines[-1]
    # not every round is evaluated: the last accuracy is of the last one that was
    accuracies = [line["A"] for line in lines if is_number(line.get("A"))]
    accuracy = "-"
    if accuracies:
        accuracy = f"{100 * accuracies[-1]:.2f}"
    loss = "-"
    if isinstance(latest.get("loss"), int | float):
        loss = f"{latest['loss']:.4g}"
    return [
        loss,
        accuracy,
        latest.get("participants", "-"),
        rejected_uploads(lines),
    ]


def _state(run: RunStatus) -> str:
    # a run with all its rounds that still holds its lock is writing figures and summary
    if is_finished(run) and not run.locked:
        return "finished"
    if run.locked and not run.rounds:
        return "compiling"  # or loading: no round is over yet
    return {True: "running", False: "not running here", None: "unknown"}[run.locked]
