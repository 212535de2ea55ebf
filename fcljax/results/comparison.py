"""Compare finished runs: groups that differ only in the seed, mean and standard
deviation of each group, and paired differences between methods that ran with the same
seeds."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fcljax.config import EngineConfig
from fcljax.errors import InputError
from fcljax.files import check_file
from fcljax.results.metrics import over_seeds, paired_difference
from fcljax.results.run_folder import Number, Summary, load_summary, run_folders, value_at
from fcljax.terminal import add_row, duration, new_table

# what runs should share to be compared
SETUP = ("dataset", "backbone", "fidelity")
# Settings by which runs may differ and still be one group: where and how fast they are
# made, which changes numbers by rounding at most, and the seed. The method stands in
# the summary.
ASIDE = {field.name for field in dataclasses.fields(EngineConfig)} | {
    "method",
    "seed",
    "data_dir",
    "data_budget",
    "devices",
}


# what the mark of `evaluated_method` means
PERSONAL_MODELS = (
    "(personal): of the clients' personal models, each on the classes that its client has learned, not of "
    "a global model on all classes"
)


class Group(NamedTuple):
    """Runs that differ only in the seed."""

    name: str
    """unique among the groups, for figures"""
    label: str
    """the method with the settings in which it differs from others of its method, for
    tables"""
    runs: list[Summary]
    """in the order of their seeds"""


def compare(
    run_dirs: Sequence[str | Path],
    out: str | Path | None = None,
) -> tuple[list[Table], Path | None]:
    """Compare runs in tables and, if `out` is given, by their accuracy curves as a PNG
    there.

    Runs whose settings differ only in the seed are one row with mean and population
    standard deviation, and one curve with a band of one such deviation.

    Args:
      run_dirs: run directories, or folders of `fcljax run --seeds` and `fcljax sweep`.

    Returns:
      (tables, path of the figure or None).

    Raises:
      InputError: no run given, a run that `load_summary` refuses, or a folder that
        cannot be written.
    """
    if not run_dirs:
        raise InputError("run: nothing to compare; give at least one run directory")
    if out is not None:
        check_file(out)
    summaries = [load_summary(folder) for run_dir in run_dirs for folder in run_folders(run_dir)]
    groups = groups_of(summaries)
    tables = [results_table(summaries)]
    pairs = differences_table(groups)
    if pairs.row_count:
        tables.append(pairs)
    if out is None:
        # matplotlib takes a second to import, and tables do not need it
        return tables, None
    from fcljax.results import figures

    return tables, figures.save(out, figures.accuracy_curve(*curves_of(groups)))


def curves_of(groups: Sequence[Group]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return A_t [T] by name of the group, mean over its seeds, and the population
    standard deviation [T] of groups with several seeds; both are fractions."""
    accuracies = {group.name: np.array([run["A"] for run in group.runs], float) for group in groups}
    means = {name: values.mean(0) for name, values in accuracies.items()}
    deviations = {name: values.std(0) for name, values in accuracies.items() if len(values) > 1}
    return means, deviations


def results_table(summaries: list[Summary], forgetting: str = "paper") -> Table:
    """Return a table with a row per run, and one with mean and population standard
    deviation for runs that differ only in the seed.

    Args:
      summaries: as `load_summary` returns them.
      forgetting: which of `metrics.forgetting`'s definitions to show.
    """
    # what all runs share stands in the title, so that the columns fit
    shared = [field for field in SETUP if len({run[field] for run in summaries}) == 1]
    differing = [field for field in SETUP if field not in shared]
    groups = groups_of(summaries)
    caption = "Class-IL accuracy A and forgetting F in %; MB in all; examples/s in training"
    if any(len(group.runs) > 1 for group in groups):
        caption += "; ± is the population standard deviation over seeds"
    if any(map(is_personal, summaries)):
        caption += f"; {PERSONAL_MODELS}"
    # a field that all runs share would be a column of one value
    title = ""
    if summaries:
        title = ", ".join(_file_name(summaries[0][field]) for field in shared)
    accuracies = ("A_avg", "A_last", f"F {forgetting}")
    numbers = ("seed", *accuracies, "upload\nMB", "download\nMB", "time", "examples/s")
    table = new_table(
        "method", *differing, *numbers, title=title, caption=caption, right=numbers, narrow=True
    )
    for _, label, runs in groups:
        rows = [[run] for run in runs]
        if len(runs) > 1:
            rows.append(runs)
        for row in rows:
            setup = [_file_name(row[0][field]) for field in differing]
            style = None
            if len(row) > 1:
                style = "bold"
            cells = [label, *setup, *_numbers(row, forgetting)]
            # the rows of a group end with their mean
            add_row(table, *cells, style=style, end_section=row is rows[-1])
    return table


def differences_table(groups: list[Group]) -> Table:
    """Return a table of the first group minus each other one that has the same seeds,
    two at least: the mean of the differences between runs of one seed, and its 95 %
    confidence interval (Student's t)."""
    numbers = ("seeds", "A_avg", "A_last")
    table = new_table(
        "the other",
        *numbers,
        title=f"{groups[0].name} minus another, paired by seed",
        caption="mean difference in points, and its 95 % confidence interval (Student's t over seeds)",
        right=numbers,
    )
    for row in differences(groups):
        add_row(table, *row)
    return table


def differences(groups: list[Group]) -> list[tuple[str, int, str, str]]:
    """Return the rows of `differences_table`: name of the other group, number of seeds,
    A_avg and A_last."""
    # runs of one seed share partition and class order, so their difference varies less
    # than either of them; without the same seeds on both sides there are no pairs
    reference, *rivals = groups
    seeds = [run["seed"] for run in reference.runs]
    return [
        (
            rival.name,
            len(seeds),
            _difference(reference.runs, rival.runs, "A_avg"),
            _difference(reference.runs, rival.runs, "A_last"),
        )
        for rival in rivals
        if len(seeds) > 1 and [run["seed"] for run in rival.runs] == seeds
    ]


def groups_of(summaries: list[Summary]) -> list[Group]:
    """Group runs that differ only in the seed, in the order of first appearance.

    A seed that comes twice means that the runs differ in something the summary does not
    show, so such runs stay apart.
    """
    by_settings: dict[tuple, list[Summary]] = {}
    for run in summaries:
        settings = json.dumps(_deciding_settings(run), sort_keys=True, default=str)
        setup = (run[name] for name in SETUP)
        key = (run["method"], *setup, len(run["A"]), len(run["accuracy"]), settings)
        by_settings.setdefault(key, []).append(run)
    grouped: list[list[Summary]] = []
    for runs in by_settings.values():
        # otherwise something that the summary does not show differs, such as a method's
        # code
        if len({run["seed"] for run in runs}) == len(runs):
            grouped.append(sorted(runs, key=lambda run: run["seed"]))
        else:
            grouped += [[run] for run in runs]
    label_of = labels_of(summaries)
    labels = [label_of[id(runs[0])] for runs in grouped]
    names = _distinct_names(labels, grouped)
    return [Group(name, label, runs) for name, label, runs in zip(names, labels, grouped, strict=True)]


def labels_of(summaries: list[Summary]) -> dict[int, str]:
    """Return by id of a summary its `evaluated_method`, with the settings in which it
    differs from others of its method."""
    labels = {}
    for run in summaries:
        settings = _deciding_settings(run)
        same_method = [
            _deciding_settings(summary) for summary in summaries if summary["method"] == run["method"]
        ]
        names = sorted({name for settings_of_run in same_method for name in settings_of_run} - set(SETUP))
        # only what differs is named; defaults that all share say nothing
        differing = [
            f"{name} {_file_name(settings.get(name))}"
            for name in names
            if any(settings_of_run.get(name) != settings.get(name) for settings_of_run in same_method)
        ]
        labels[id(run)] = f"{evaluated_method(run)} {', '.join(differing)}".strip()
    return labels


def is_personal(run: Summary) -> bool:
    """Return whether a run's accuracies are of personal models, not of the global one."""
    return bool(run.get("personal"))


def evaluated_method(run: Summary) -> str:
    """Return a run's method; "(personal)" where its accuracies are of personal models."""
    if is_personal(run):
        return f"{run['method']} (personal)"
    return run["method"]


def over_seeds_text(values: Sequence[Number | None], digits: int) -> str:
    """Return mean±population standard deviation over seeds, the mean alone of one seed,
    and a dash where a value is missing."""
    if any(value is None or np.isnan(value) for value in values):
        return "-"
    # one seed has no deviation, and ±0.00 would claim one
    mean, deviation = over_seeds(np.array(values, float))
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f}±{deviation:.{digits}f}"


def megabytes_text(sizes: Sequence[Number | None]) -> str:
    """Return mean±population standard deviation of bytes over seeds, in MB; the mean
    alone where all are equal, and a dash where a value is missing."""
    valid = [size for size in sizes if size is not None]
    if len(valid) < len(sizes):
        return "-"
    # most seeds send the same; only sampled clients make them differ
    mean, deviation = over_seeds(np.array(valid, float))
    if deviation > 0:
        return f"{megabytes(mean)}±{megabytes(deviation)}"
    return megabytes(mean)


def percent(fraction: Number | None) -> Number | None:
    """Return a fraction in per cent; None for None."""
    if fraction is None:
        return None
    return 100 * fraction


def megabytes(count: Number) -> str:
    """Return bytes in MB (10^6 bytes)."""
    # two digits below 1 MB, or small uploads would all be 0.00
    if count >= 1e6:
        return f"{count / 1e6:,.2f}"
    return f"{count / 1e6:.2g}"


def total_seconds(run: Summary) -> Number:
    """Return the seconds that all parts of a run took, compiling included."""
    # None for a part that was not timed
    return sum(seconds or 0 for seconds in run["time"].values())


def _deciding_settings(run: Summary) -> dict[str, Any]:
    """Return the settings that decide a run's numbers, but for the seed."""
    return {name: value for name, value in run.get("config", {}).items() if name not in ASIDE}


def _distinct_names(labels: list[str], grouped: list[list[Summary]]) -> list[str]:
    """Name each group by its label, and what differs of dataset, backbone, fidelity and
    seed."""
    samples = [runs[0] for runs in grouped]
    differing = [field for field in SETUP if len({run[field] for run in samples}) > 1]
    names = []
    for label, runs in zip(labels, grouped, strict=True):
        name = " / ".join((label, *(_file_name(runs[0][field]) for field in differing)))
        if len(runs) > 1:
            name += f" ({len(runs)} seeds)"
        names.append(name)
    seeds = [f"seed {run['seed']}" for run in samples]
    numbers = [f"run {i + 1}" for i in range(len(samples))]
    # seeds tell most groups of one name apart, and numbers the rest
    for suffixes in (seeds, numbers):
        names = [
            f"{name}, {suffix}" if names.count(name) > 1 else name
            for name, suffix in zip(names, suffixes, strict=True)
        ]
    return names


def _file_name(value: object) -> str:
    """Return a setting without the folders of a path, or of several behind commas."""
    return ",".join(part.rsplit("/", 1)[-1] for part in str(value).split(","))


def _numbers(runs: list[Summary], forgetting: str) -> list[str]:
    """Return the numbers of a row: those of one run, or means over the runs of a
    group."""
    cells = [str(runs[0]["seed"])]
    if len(runs) > 1:
        cells = [f"{len(runs)} seeds"]
    for key in ("A_avg", "A_last", f"forgetting.{forgetting}"):
        cells.append(over_seeds_text([percent(value_at(run, key)) for run in runs], 2))
    for key in ("upload_bytes", "download_bytes"):
        cells.append(_mean(megabytes_text([value_at(run, f"communication_total.{key}") for run in runs])))
    cells.append(duration(float(np.mean([total_seconds(run) for run in runs]))))
    cells.append(_mean(over_seeds_text([run.get("trained_images_per_s") for run in runs], 1)))
    return cells


def _mean(text: str) -> str:
    return text.partition("±")[0]


def _difference(runs: list[Summary], other_runs: list[Summary], key: str) -> str:
    if any(run[key] is None for run in [*runs, *other_runs]):
        return "-"
    values = [100 * run[key] for run in runs]
    other_values = [100 * run[key] for run in other_runs]
    mean, low, high = paired_difference(values, other_values)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
