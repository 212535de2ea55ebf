"""Several finished runs side by side: groups that differ only in the seed, the mean and standard deviation of
each, and paired differences between methods that ran with the same seeds."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from fcljax.config import EngineConfig
from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.results.metrics import over_seeds, paired_difference
from fcljax.results.run_folder import Number, Summary, load_summary, run_folders, value_at
from fcljax.terminal import add_row, plain_text

SETUP = ("dataset", "backbone", "fidelity")  # what runs should share to be compared
# settings that decide where and how fast a run is made, and its numbers by rounding at most; and the method,
# which has a name of its own in a summary
ASIDE = {field.name for field in dataclasses.fields(EngineConfig)} | {
    "method",
    "seed",
    "data_dir",
    "data_budget",
    "devices",
}


class Group(NamedTuple):
    """Runs that differ only in the seed."""

    name: str
    """unique among the groups, for figures"""
    label: str
    """the method with the settings in which it differs from others of its method, for tables"""
    runs: list[Summary]
    """in the order of their seeds"""


def compare(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> tuple[list[Table], Path | None]:
    """Tables over several runs and, if `out` is given, their accuracy curves as a PNG there.

    Runs whose settings differ only in the seed are one row with mean and population standard deviation, and
    one curve with a band of one such deviation.

    Args:
      run_dirs: run directories, or folders of `fcljax run --seeds` and `fcljax sweep`.

    Returns:
      (tables, path of the figure or None).

    Raises:
      InputError: no run given, a run that `load_summary` refuses, or a folder that cannot be written.
    """
    if not run_dirs:
        raise InputError("run: nothing to compare; give at least one run directory")
    if out is not None:
        check_folder(Path(out).parent)
    summaries = [load_summary(folder) for run_dir in run_dirs for folder in run_folders(run_dir)]
    groups = groups_of(summaries)
    differences = differences_table(groups)
    tables = [results_table(summaries), *([differences] if differences.row_count else [])]
    if out is None:
        return tables, None
    from fcljax.results import figures

    return tables, figures.save(out, figures.accuracy_curve(*curves_of(groups)))


def curves_of(groups: Sequence[Group]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By name of the group the mean of A_t over its seeds, and of groups with several seeds the population
    standard deviation, as fractions."""
    curves = {group.name: np.array([run["A"] for run in group.runs], float) for group in groups}
    spread = {name: curve.std(0) for name, curve in curves.items() if len(curve) > 1}
    return {name: curve.mean(0) for name, curve in curves.items()}, spread


def results_table(summaries: list[Summary], forgetting: str = "paper") -> Table:
    """A row per run, and one with mean and population standard deviation for runs that differ only in the
    seed.

    Args:
      summaries: as `load_summary` returns them.
      forgetting: which of `metrics.forgetting`'s definitions to show.
    """
    shared = [field for field in SETUP if len({run[field] for run in summaries}) == 1]
    differing = [field for field in SETUP if field not in shared]
    groups = groups_of(summaries)
    caption = "Class-IL accuracy A and forgetting F in %; MB in all; images/s in training"
    if any(len(group.runs) > 1 for group in groups):
        caption += "; ± is the population standard deviation over seeds"
    title = ", ".join(_short(summaries[0][field]) for field in shared) if summaries else ""
    # narrow, so that the lines of a single run fit into 80 columns without a broken word
    table = Table(title=plain_text(title), caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name in ("method", *differing):
        table.add_column(name, overflow="fold")
    names = ("seed", "A_avg", "A_last", f"F {forgetting}", "upload MB", "download MB", "time", "images/s")
    for name in names:
        table.add_column(name, justify="right")
    for _, label, runs in groups:
        rows = [[run] for run in runs] if len(runs) == 1 else [*([run] for run in runs), runs]
        for each in rows:
            style = "bold" if len(each) > 1 else None
            cells = [label, *(_short(each[0][field]) for field in differing), *_cells(each, forgetting)]
            add_row(table, *cells, style=style, end_section=each is rows[-1])
    return table


def differences_table(groups: list[Group]) -> Table:
    """The first group minus each other one that has the same seeds, two at least: the mean of the differences
    between runs of one seed, and its 95 % confidence interval (Student's t)."""
    table = Table(
        title=plain_text(f"{groups[0].name} minus another, seed by seed"),
        caption="mean difference in points, and its 95 % confidence interval (Student's t over seeds)",
    )
    for name in ("the other", "seeds", "A_avg", "A_last"):
        table.add_column(name, justify="left" if name == "the other" else "right")
    for row in differences(groups):
        add_row(table, *row)
    return table


def differences(groups: list[Group]) -> list[tuple[str, int, str, str]]:
    """The rows of `differences_table`: the other's name, how many seeds, and A_avg and A_last."""
    first, *others = groups
    seeds = [run["seed"] for run in first.runs]
    return [
        (
            other.name,
            len(seeds),
            _difference(first.runs, other.runs, "A_avg"),
            _difference(first.runs, other.runs, "A_last"),
        )
        for other in others
        if len(seeds) > 1 and [run["seed"] for run in other.runs] == seeds
    ]


def groups_of(summaries: list[Summary]) -> list[Group]:
    """Runs that differ only in the seed, together, in the order of first appearance.

    A seed that comes twice means that the runs differ in something the summary does not show, so such runs
    stay apart.
    """
    found: dict[tuple, list[Summary]] = {}
    for run in summaries:
        settings = json.dumps(_deciding(run), sort_keys=True, default=str)
        shapes = [len(run.get(name) or []) for name in ("A", "accuracy", "task_confusion")]
        key = (run["method"], *(run[name] for name in SETUP), *shapes, settings)
        found.setdefault(key, []).append(run)
    together = []
    for runs in found.values():
        distinct = len({run["seed"] for run in runs}) == len(runs)
        together += [sorted(runs, key=lambda run: run["seed"])] if distinct else [[run] for run in runs]
    every = labels_of(summaries)
    labels = [every[id(runs[0])] for runs in together]
    return [Group(*parts) for parts in zip(_names(labels, together), labels, together, strict=True)]


def labels_of(summaries: list[Summary]) -> dict[int, str]:
    """By id of a summary: its method, with the settings in which it differs from others of its method."""
    labels = {}
    for run in summaries:
        alike = [_deciding(other) for other in summaries if other["method"] == run["method"]]
        mine = _deciding(run)
        names = sorted({name for settings in alike for name in settings} - set(SETUP))
        differing = [name for name in names if any(other.get(name) != mine.get(name) for other in alike)]
        settings = ", ".join(f"{name} {_short(mine.get(name))}" for name in differing)
        labels[id(run)] = f"{run['method']} {settings}".strip()
    return labels


def over_seeds_text(values: Sequence[Number | None], digits: int) -> str:
    """Mean ± population standard deviation over seeds, the mean alone of one seed, and a dash where a value
    is missing."""
    if any(value is None or np.isnan(value) for value in values):
        return "-"
    mean, deviation = over_seeds(np.array(values, float))
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def megabytes_text(values: Sequence[Number | None]) -> str:
    """Mean ± population standard deviation of bytes over seeds, in MB; the mean alone where all are equal,
    and a dash where a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean, deviation = over_seeds(np.array(known, float))
    return f"{megabytes(mean)} ± {megabytes(deviation)}" if deviation > 0 else megabytes(mean)


def percent(fraction: Number | None) -> Number | None:
    """A fraction in per cent; None where there is none."""
    return None if fraction is None else 100 * fraction


def megabytes(count: Number) -> str:
    """Bytes in MB (10^6 bytes)."""
    return f"{count / 1e6:,.2f}" if count >= 1e6 else f"{count / 1e6:.2g}"


def _deciding(run: Summary) -> dict[str, Any]:
    """The settings that decide a run's numbers, but for the seed."""
    return {name: value for name, value in run.get("config", {}).items() if name not in ASIDE}


def _names(labels: list[str], together: list[list[Summary]]) -> list[str]:
    """One distinct name per group: its label, and what differs of dataset, backbone, fidelity and seed."""
    first = [runs[0] for runs in together]
    differing = [name for name in SETUP if len({run[name] for run in first}) > 1]
    names = []
    for label, runs in zip(labels, together, strict=True):
        name = " / ".join((label, *(_short(runs[0][each]) for each in differing)))
        names.append(f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name)
    seeds = [f"seed {run['seed']}" for run in first]
    numbers = [f"run {i + 1}" for i in range(len(first))]
    for more in (seeds, numbers):
        names = [
            f"{name}, {each}" if names.count(name) > 1 else name
            for name, each in zip(names, more, strict=True)
        ]
    return names


def _short(value: object) -> str:
    """A setting without the folders of a path."""
    return str(value).rsplit("/", 1)[-1]


def _cells(runs: list[Summary], forgetting: str) -> list[str]:
    """The table's numbers of one run, or the means over the runs of a group."""
    one = runs[0]
    fractions = ("A_avg", "A_last", f"forgetting.{forgetting}")
    return [
        str(one["seed"]) if len(runs) == 1 else f"{len(runs)} seeds",
        *(over_seeds_text([percent(value_at(run, key)) for run in runs], 2) for key in fractions),
        *(_total(runs, way) for way in ("upload", "download")),
        _duration(np.mean([sum(value or 0 for value in run["time"].values()) for run in runs])),
        over_seeds_text([run.get("trained_images_per_s") for run in runs], 1).partition(" ±")[0],
    ]


def _total(runs: list[Summary], way: str) -> str:
    """What all clients upload or download in a whole run, in MB, mean over the runs; a dash where an older
    summary lacks it."""
    return megabytes_text([value_at(run, f"communication_total.{way}_bytes") for run in runs]).partition(
        " ±"
    )[0]


def _difference(ours: list[Summary], theirs: list[Summary], key: str) -> str:
    if any(run[key] is None for run in [*ours, *theirs]):
        return "-"
    mean, low, high = paired_difference([100 * run[key] for run in ours], [100 * run[key] for run in theirs])
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _duration(seconds: Number | np.floating) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
