"""`fcljax watch`: the progress of runs, from their config.yaml and metrics.jsonl alone, also from another
machine. Nothing is written and no lock is taken."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from fcljax import config
from fcljax.errors import InputError
from fcljax.federated.health import training_warnings
from fcljax.methods import METHODS
from fcljax.results.run_folder import is_hidden, read_lines, rejected_uploads
from fcljax.terminal import add_row, plain_text

LOCK = ".lock"
LOCKS = Path("/proc/locks")  # where Linux lists the locks that processes of this machine hold
SETTINGS = ("config.yaml", "*/config.yaml", "*/*/config.yaml")  # of a run, and of those in a folder
BLOCKS = "▁▂▃▄▅▆▇█"  # of a curve, from low to high
WIDTH = 60  # letters of a curve
MOST_SAID = 8  # warnings below a table of several runs


class Watched(NamedTuple):
    """What is known of a run."""

    folder: Path
    settings: dict[str, Any]
    """of config.yaml; empty where it cannot be read yet"""
    lines: Sequence[dict[str, Any]]
    """of metrics.jsonl"""
    written: float | None
    """when it last wrote, in seconds since 1970; None: never"""
    owned: bool | None
    """whether a process of this machine owns its lock; None where that cannot be known"""
    has_summary: bool


def rounds_of(settings: dict[str, Any]) -> int | None:
    """Rounds of a whole run with these settings; None where they do not say."""
    method = METHODS.get(str(settings.get("method")))
    try:
        return int(settings["rounds"]) * (1 if method and method.joint else int(settings["tasks"]))
    except (KeyError, TypeError, ValueError):
        return None


def finished(run: Watched) -> bool:
    """Whether a run has logged all its rounds, or has a summary."""
    rounds = rounds_of(run.settings)
    return run.has_summary or (rounds is not None and len(run.lines) >= rounds)


def run_dirs(folder: str | Path) -> list[Path]:
    """The run directories that a folder is or holds, finished or not. In a folder of `fcljax run --seeds`
    these include the runs that have not begun.

    Raises:
      InputError: if there are none.
    """
    folder = Path(folder)
    planned = _planned(folder)
    if not planned and (folder / "metrics.jsonl").exists():
        return [folder]
    inside = [path.parent for pattern in SETTINGS[1:] for path in folder.glob(pattern)]
    holders = {path.parent for path in inside}  # a folder of seeds has a config.yaml too, and is no run
    begun = {path for path in inside if not is_hidden(path, folder) and path not in holders}
    found = sorted({*planned, *begun})
    if not found and (folder / "config.yaml").exists():
        return [folder]
    if not found:
        raise InputError(f"run: {str(folder)!r} holds no run: no config.yaml is in it")
    return found


def _planned(folder: Path) -> list[Path]:
    """The run directories that a folder of `fcljax run --seeds` has or will have."""
    try:
        seeds = config.load_yaml(folder / "seeds.yaml").get("seeds")
    except InputError:
        return []
    return [folder / f"seed-{seed}" for seed in seeds] if isinstance(seeds, list) else []


def look(folder: Path) -> Watched:
    """What a run's files say now."""
    try:
        settings = config.load_yaml(folder / "config.yaml")
    except InputError:
        settings = {}
    written = None
    for name in ("metrics.jsonl", "config.yaml"):
        with contextlib.suppress(OSError):
            written = max(written or 0.0, (folder / name).stat().st_mtime)
    lines = read_lines(folder / "metrics.jsonl")
    owned = owned_here(folder / LOCK)
    return Watched(folder, settings, lines, written, owned, (folder / "summary.json").exists())


def owned_here(path: Path, locks: Path = LOCKS) -> bool | None:
    """Whether a process of this machine owns a lock file; None where the system does not say. Taking the lock
    would disturb a run that starts at this moment, so the system's list is read."""
    try:
        found = path.stat()
        listed = locks.read_text()
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(device in line.split() for line in listed.splitlines())


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
      console: where.
      every: seconds between two looks.
      once: look once only.
      sleep, now: the clock.

    Raises:
      InputError: as `run_dirs`, of a look once only; otherwise a run that has not begun is waited for.
    """
    if once:
        console.print(view([look(each) for each in run_dirs(folder)], now()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            runs = _looked(folder)
            live.update(view(runs, now()) if runs else plain_text(_waiting(folder)), refresh=True)
            if runs and all(map(finished, runs)):
                return
            sleep(every)


def _looked(folder: str | Path) -> list[Watched]:
    """The runs of a folder; none before one has begun."""
    try:
        return [look(each) for each in run_dirs(folder)]
    except InputError:
        return []


def _waiting(folder: str | Path) -> str:
    return f"waiting for a run in {str(folder)!r}: none has begun yet; Ctrl-C ends"


def view(runs: Sequence[Watched], now: float) -> RenderableType:
    """One run with its tasks and curves, or a row for each of several."""
    return _one(runs[0], now) if len(runs) == 1 else _several(runs, now)


def _one(run: Watched, now: float) -> RenderableType:
    table = Table(
        "task", "rounds", "loss", "accuracy A_t", "participants", "rejected", title=plain_text(_name(run))
    )
    for task in sorted({line["task"] for line in run.lines}):
        mine = [line for line in run.lines if line["task"] == task]
        add_row(
            table,
            task + 1,
            len(mine),
            _formatted(mine[-1].get("loss"), ".4g"),
            _percent(_values(mine, "A")),
            _formatted(mine[-1].get("participants"), ""),
            rejected_uploads(mine),
        )
    shown = [plain_text(f"{_progress(run)} rounds; last written {_age(run, now)}; {_state(run)}"), table]
    for name, key, scale in (("accuracy A (%)", "A", 100), ("loss", "loss", 1)):
        values = [scale * value for value in _values(run.lines, key)]
        if len(values) > 1:
            shown.append(
                plain_text(f"{name}, {min(values):.4g} to {max(values):.4g}, over the rounds that have it")
            )
            shown.append(plain_text(sparkline(values, WIDTH)))
    shown += map(plain_text, training_warnings(run.lines))
    return Group(*shown)


def _several(runs: Sequence[Watched], now: float) -> RenderableType:
    table = Table("run", "rounds", "loss", "A_t", "curve", "rejected", "written", "state")
    table.columns[0].overflow = "fold"
    for run in runs:
        last = run.lines[-1] if run.lines else {}
        known = _values(run.lines, "A")
        add_row(
            table,
            f"{run.folder.parent.name}/{run.folder.name}",
            _progress(run),
            _formatted(last.get("loss"), ".4g"),
            _percent(known),
            sparkline(known, 8) if len(known) > 1 else "",
            rejected_uploads(run.lines),
            _age(run, now),
            _state(run),
        )
    done = sum(map(finished, runs))
    names = list(dict.fromkeys(map(_name, (run for run in runs if run.settings))))
    title = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    said = [plain_text(f"{run.folder.name}: {line}") for run in runs for line in training_warnings(run.lines)]
    more = [plain_text(f"and {len(said) - MOST_SAID} more warnings")] if len(said) > MOST_SAID else []
    rounds = plain_text(f"{done} of {len(runs)} runs have all their rounds")
    return Group(plain_text(title), rounds, table, *said[:MOST_SAID], *more)


def sparkline(values: Sequence[float | int], width: int) -> str:
    """A curve of at most `width` letters from the lowest to the highest value; of more values, evenly spaced
    ones are shown, the first and the last among them."""
    chosen = np.linspace(0, len(values) - 1, min(width, len(values))).round().astype(int)
    low = min(values)
    high = max(values)
    steps = (len(BLOCKS) - 1) / ((high - low) or 1)
    return "".join(BLOCKS[round((values[i] - low) * steps)] for i in chosen)


def _name(run: Watched) -> str:
    if not run.settings:
        return "not started"
    return "{method} on {dataset}, seed {seed}".format_map(
        {name: run.settings.get(name, "?") for name in ("method", "dataset", "seed")}
    )


def _progress(run: Watched) -> str:
    rounds = rounds_of(run.settings)
    return f"{len(run.lines)}/{'?' if rounds is None else rounds}"


def _age(run: Watched, now: float) -> str:
    if run.written is None:
        return "never"
    seconds = max(0, round(now - run.written))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


def _state(run: Watched) -> str:
    if finished(run) and not run.owned:
        return "finished"
    if run.owned and not run.lines:
        return "compiling"  # or loading: no round is over yet
    return {True: "running", False: "not running here", None: "unknown"}[run.owned]


def _values(lines: Sequence[dict[str, Any]], key: str) -> list[float | int]:
    """The numbers that lines have at a key."""
    return [line[key] for line in lines if _is_number(line.get(key))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _formatted(value: object, form: str) -> str:
    return format(value, form) if _is_number(value) else "-"


def _percent(accuracies: Sequence[float | int]) -> str:
    """The last of some accuracies."""
    return f"{100 * accuracies[-1]:.2f} %" if accuracies else "-"
