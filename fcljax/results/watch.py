"""`fcljax watch`: how far runs have come, from their config.yaml and metrics.jsonl alone, also from another
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
from fcljax.methods import METHODS
from fcljax.results.page import read_lines
from fcljax.terminal import add_row, plain

LOCK = ".lock"
LOCKS = Path("/proc/locks")  # where Linux lists the locks that processes of this machine hold
SETTINGS = ("config.yaml", "*/config.yaml", "*/*/config.yaml")  # of a run, and of those in a folder
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille letter: [column][row]
WIDTH, HEIGHT = 60, 8  # letters of a curve


class Watched(NamedTuple):
    """What is known of a run.

    folder: where it is.
    settings: of config.yaml; empty where it cannot be read yet.
    lines: of metrics.jsonl.
    heard: when it last wrote, seconds since 1970; None: never.
    owned: does a process of this machine own its lock? None where that cannot be known.
    summed_up: is there a summary.json?
    """

    folder: Path
    settings: dict[str, Any]
    lines: Sequence[dict[str, Any]]
    heard: float | None
    owned: bool | None
    summed_up: bool


def rounds_of(settings: dict[str, Any]) -> int | None:
    """Rounds of a whole run with these settings; None where they do not say."""
    method = METHODS.get(str(settings.get("method")))
    try:
        return int(settings["rounds"]) * (1 if method and method.joint else int(settings["tasks"]))
    except (KeyError, TypeError, ValueError):
        return None


def finished(run: Watched) -> bool:
    """Has a run logged all its rounds, or summed them up?"""
    rounds = rounds_of(run.settings)
    return run.summed_up or (rounds is not None and len(run.lines) >= rounds)


def run_dirs(folder: str | Path) -> list[Path]:
    """The run directories that a folder is or holds, finished or not. In a folder of `fcljax run --seeds`
    these are also the ones that are to come.

    Raises:
      InputError: if there are none.
    """
    folder = Path(folder)
    planned = _planned(folder)
    if not planned and (folder / "metrics.jsonl").exists():
        return [folder]
    inside = [path.parent for pattern in SETTINGS[1:] for path in folder.glob(pattern)]
    shown = lambda path: not any(name.startswith(".") for name in path.relative_to(folder).parts)
    holders = {path.parent for path in inside}  # a folder of seeds has a config.yaml too, and is no run
    found = sorted({*planned, *(path for path in inside if shown(path) and path not in holders)})
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
    heard = None
    for name in ("metrics.jsonl", "config.yaml"):
        with contextlib.suppress(OSError):
            heard = max(heard or 0.0, (folder / name).stat().st_mtime)
    lines, owned = read_lines(folder / "metrics.jsonl"), owned_here(folder / LOCK)
    return Watched(folder, settings, lines, heard, owned, (folder / "summary.json").exists())


def owned_here(path: Path, locks: Path = LOCKS) -> bool | None:
    """Does a process of this machine own a lock file? None where the system does not say. Asking for the lock
    would keep a run from it that begins at this moment, so the system's list is read."""
    try:
        found = path.stat()
        listed = locks.read_text()
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(place in line.split() for line in listed.splitlines())


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
      InputError: as `run_dirs`.
    """
    runs = [look(each) for each in run_dirs(folder)]
    if once:
        console.print(view(runs, now()))
        return
    with Live(view(runs, now()), console=console, auto_refresh=False) as live:
        while not all(map(finished, runs)):
            sleep(every)
            runs = [look(each) for each in run_dirs(folder)]
            live.update(view(runs, now()), refresh=True)


def view(runs: Sequence[Watched], now: float) -> RenderableType:
    """One run with its tasks and curves, or a row for each of several."""
    return _one(runs[0], now) if len(runs) == 1 else _several(runs, now)


def _one(run: Watched, now: float) -> RenderableType:
    table = Table(
        "task", "rounds", "loss", "accuracy A_t", "participants", "rejected", title=plain(_name(run))
    )
    for task in sorted({line["task"] for line in run.lines}):
        mine = [line for line in run.lines if line["task"] == task]
        known = [line["A"] for line in mine if _is_number(line.get("A"))]
        add_row(
            table,
            task + 1,
            len(mine),
            _said(mine[-1].get("loss"), ".4g"),
            _percent(known[-1] if known else None),
            _said(mine[-1].get("participants"), ""),
            sum(line.get("rejected") or 0 for line in mine),
        )
    drawn = [plain(f"{_progress(run)} rounds; last heard of {_heard(run, now)}; {_state(run)}"), table]
    for name, key, scale in (("accuracy A (%)", "A", 100), ("loss", "loss", 1)):
        values = [scale * line[key] for line in run.lines if _is_number(line.get(key))]
        if len(values) > 1:
            low, high = min(values), max(values)
            drawn.append(plain(f"{name}, {low:.4g} to {high:.4g}, over the rounds that have it"))
            drawn += [plain(line) for line in braille(values, WIDTH, HEIGHT)]
    return Group(*drawn)


def _several(runs: Sequence[Watched], now: float) -> RenderableType:
    table = Table("run", "rounds", "loss", "A_t", "curve", "rejected", "heard", "state")
    table.columns[0].overflow = "fold"
    for run in runs:
        last = run.lines[-1] if run.lines else {}
        known = [line["A"] for line in run.lines if _is_number(line.get("A"))]
        add_row(
            table,
            f"{run.folder.parent.name}/{run.folder.name}",
            _progress(run),
            _said(last.get("loss"), ".4g"),
            _percent(known[-1] if known else None),
            braille(known, 8, 1)[0] if len(known) > 1 else "",
            sum(line.get("rejected") or 0 for line in run.lines),
            _heard(run, now),
            _state(run),
        )
    done = sum(map(finished, runs))
    names = list(dict.fromkeys(map(_name, (run for run in runs if run.settings))))
    said = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Group(plain(said), plain(f"{done} of {len(runs)} runs have all their rounds"), table)


def braille(values: Sequence[float | int], width: int, height: int) -> list[str]:
    """A curve as `height` lines of `width` braille letters, each of 2 x 4 dots. The lowest value is at the
    bottom; between values the line is straight."""
    columns, low = 2 * width, min(values)
    span, top = (max(values) - low) or 1.0, 4 * height - 1
    places = np.linspace(0, max(len(values) - 1, 0), columns)
    level = np.interp(places, np.arange(len(values)), (np.asarray(values, float) - low) / span)
    dots = np.round(top * (1 - level)).astype(int)
    cells = np.zeros((height, width), int)
    for column, dot in enumerate(dots):
        before = dots[max(column - 1, 0)]
        # steep parts are drawn without gaps
        for place in {int(dot), *range(min(before, dot) + 1, max(before, dot))}:
            cells[place // 4, column // 2] |= DOTS[column % 2][place % 4]
    return ["".join(chr(0x2800 + int(cell)) for cell in line) for line in cells]


def _name(run: Watched) -> str:
    if not run.settings:
        return "not begun"
    return "{method} on {dataset}, seed {seed}".format_map(
        {name: run.settings.get(name, "?") for name in ("method", "dataset", "seed")}
    )


def _progress(run: Watched) -> str:
    rounds = rounds_of(run.settings)
    return f"{len(run.lines)}/{'?' if rounds is None else rounds}"


def _heard(run: Watched, now: float) -> str:
    if run.heard is None:
        return "never"
    seconds = max(0, round(now - run.heard))
    minutes, hours = seconds // 60, seconds // 3600
    return (
        f"{seconds} s ago" if seconds < 120 else f"{minutes} min ago" if minutes < 120 else f"{hours} h ago"
    )


def _state(run: Watched) -> str:
    if finished(run) and not run.owned:
        return "finished"
    return {True: "at work", False: "lock free here", None: "lock unknown"}[run.owned]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _said(value: object, form: str) -> str:
    return format(value, form) if _is_number(value) else "-"


def _percent(value: float | int | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
