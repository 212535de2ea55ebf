"""Several finished runs side by side: which of them differ in their seed only, mean and deviation over seeds,
and what one method has more than another where both ran with the same seeds."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fcljax.config import EngineConfig
from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.results.figures import accuracy_curve, load_summary
from fcljax.results.metrics import over_seeds, paired_difference
from fcljax.terminal import add_row, plain

Summary = dict[str, Any]  # the content of a summary.json

SIZES = ("dataset", "backbone", "fidelity")  # what runs should share to be compared
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
    """Runs that differ in their seed only, and what to call them: by a name of its own in a figure, and by
    the method with the settings in which it differs (`labels_of`) in a table."""

    name: str
    label: str
    runs: list[Summary]


def compare(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> tuple[list[Table], Path | None]:
    """Tables over several runs and, if `out` is given, their accuracy curves as a PNG there.

    Runs whose settings are the same but for the seed are one row with mean and population standard deviation,
    and one curve with a band of one such deviation.

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
    curves = {group.name: np.array([run["A"] for run in group.runs], float) for group in groups}
    spread = {name: curve.std(0) for name, curve in curves.items() if len(curve) > 1}
    return tables, accuracy_curve(out, {name: curve.mean(0) for name, curve in curves.items()}, spread)


def run_folders(folder: str | Path) -> list[Path]:
    """The finished runs in a folder of `fcljax run --seeds` or `fcljax sweep`, or of other folders that hold
    runs or such folders; a run directory, and a folder without any, is one itself."""
    if (Path(folder) / "summary.json").exists():
        return [Path(folder)]
    for pattern in ("*/summary.json", "*/*/summary.json"):
        inside = [path.parent for path in Path(folder).glob(pattern) if not _hidden(path, folder)]
        if inside:
            return sorted(inside)
    return [Path(folder)]


def _hidden(path: Path, folder: str | Path) -> bool:
    """Is the file in a folder whose name begins with a dot?"""
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def results_table(summaries: list[Summary], forgetting: str = "paper") -> Table:
    """A row per run, and one with mean and population standard deviation for runs that differ by seed only.

    Args:
      summaries: as `load_summary` returns them.
      forgetting: which of `metrics.forgetting`'s definitions to show.
    """
    shared = [field for field in SIZES if len({run[field] for run in summaries}) == 1]
    columns = [field for field in SIZES if field not in shared]
    title = ", ".join(_short(summaries[0][field]) for field in shared) if summaries else ""
    groups = groups_of(summaries)
    caption = "accuracy A and forgetting F in %, upload in scalars per client and round, images/s in training"
    if any(len(group.runs) > 1 for group in groups):
        caption += "; ± is the population standard deviation over seeds"
    table = Table(title=plain(title), caption=caption)
    table.add_column("method", overflow="fold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in ("seed", "A_avg", "A_last", f"F {forgetting}", "upload", "time", "images/s"):
        table.add_column(name, justify="right")
    for _, label, runs in groups:
        for run in runs:
            last = run is runs[-1] and len(runs) == 1
            add_row(table, label, *_cells([run], columns, forgetting), end_section=last)
        if len(runs) > 1:
            add_row(table, label, *_cells(runs, columns, forgetting), style="bold", end_section=True)
    return table


def differences_table(groups: list[Group]) -> Table:
    """What the first group has more than each other one that was run with the same seeds, two at least: the
    mean of the differences between runs of one seed, and the 95 % interval of Student's t around it."""
    table = Table(
        title=plain(f"{groups[0].name} minus another, seed by seed"),
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
    seeds = lambda group: [run["seed"] for run in group.runs]
    alike = [other for other in others if len(other.runs) > 1 and seeds(other) == seeds(first)]
    cell = lambda other, name: _difference(first.runs, other.runs, name)
    return [(other.name, len(other.runs), cell(other, "A_avg"), cell(other, "A_last")) for other in alike]


def groups_of(summaries: list[Summary]) -> list[Group]:
    """Runs that differ in their seed only, together, in the order of first appearance.

    A seed that comes twice means that the runs differ in something the summary does not show, so such runs
    stay apart.
    """
    found: dict[tuple, list[Summary]] = {}
    for run in summaries:
        settings = json.dumps(_deciding(run), sort_keys=True, default=str)
        key = (run["method"], *(run[name] for name in SIZES), len(run["A"]), settings)
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
        mine, names = _deciding(run), sorted({name for settings in alike for name in settings} - set(SIZES))
        told = [name for name in names if any(other.get(name) != mine.get(name) for other in alike)]
        labels[id(run)] = " ".join(
            [run["method"], ", ".join(f"{name} {_short(mine.get(name))}" for name in told)]
        ).strip()
    return labels


def _deciding(run: Summary) -> dict[str, Any]:
    """The settings that decide a run's numbers, but for the seed."""
    return {name: value for name, value in run.get("config", {}).items() if name not in ASIDE}


def _names(labels: list[str], together: list[list[Summary]]) -> list[str]:
    """One distinct name per group: its label, and what differs of dataset, backbone, fidelity and seed."""
    first = [runs[0] for runs in together]
    differing = [name for name in SIZES if len({run[name] for run in first}) > 1]
    names = [
        " / ".join((label, *(_short(run[name]) for name in differing)))
        for label, run in zip(labels, first, strict=True)
    ]
    names = [
        f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name
        for name, runs in zip(names, together, strict=True)
    ]
    for label in (lambda i: f"seed {first[i]['seed']}", lambda i: f"run {i + 1}"):
        names = [f"{name}, {label(i)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
    return names


def _short(sizes: object) -> str:
    """A setting without the folders of a path."""
    return str(sizes).rsplit("/", 1)[-1]


def _cells(runs: list[Summary], columns: list[str], forgetting: str) -> list[str]:
    """The table's cells after the first, for one run or for the mean over the runs of a group."""
    one = runs[0]
    return [
        *(_short(one[name]) for name in columns),
        str(one["seed"]) if len(runs) == 1 else f"{len(runs)} seeds",
        _spread([run["A_avg"] for run in runs], 100.0, 2),
        _spread([run["A_last"] for run in runs], 100.0, 2),
        _spread([run["forgetting"][forgetting] for run in runs], 100.0, 2),
        f"{one['communication']['upload_scalars']:,}",
        _duration([sum(value or 0 for value in run["time"].values()) for run in runs]),
        _spread([run["client_images_per_s"] for run in runs], 1.0, 1),
    ]


def _spread(values: list, scale: float, digits: int) -> str:
    if any(value is None for value in values):
        return "-"
    mean, deviation = over_seeds(np.array(values, float) * scale)
    return f"{mean:.{digits}f}" if len(values) == 1 else f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def _difference(ours: list[Summary], theirs: list[Summary], name: str) -> str:
    percent = lambda runs: [100 * run[name] for run in runs]
    mean, low, high = paired_difference(percent(ours), percent(theirs))
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _duration(seconds: list) -> str:
    mean = over_seeds(seconds)[0]
    if mean < 60:
        return f"{mean:.1f} s"
    minutes, rest = divmod(round(mean), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
