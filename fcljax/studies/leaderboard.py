"""Rank methods with the same network, data, partition, rounds and search of their
learning rates. What a method's own preset has of these does not count; its optimiser
and loss weights do.

    base: {dataset: glyphs, tasks: 5, rounds: 2}  # options of all runs
    seeds: [2023, 2024, 2025]                     # of the runs on test images
    search: {holdout: 0.25, seed: 5}              # of the trials: no test images
    factors: [1, 0.1, 0.3, 3]                     # one trial each: tuned options x it
    methods: {fppl: {}, glfc: {memory_size: 50}}  # with their options; default: all
    tuned: {afcl: [ridge]}                        # default: clients' learning rates

For each method: the trials, then the runs with the factor whose trial ends with the
highest A_last on held-out training examples. A method without tuned options has no
trials. The folder has the runs of METHOD in METHOD/, its trials in search/METHOD/ (both
are folders of sweeps), and leaderboard.md, leaderboard.json and leaderboard.png, which
are written after each method.
"""

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.config import InputConfig, PartitionConfig, RunConfig, TrainConfig
from fcljax.errors import InputError
from fcljax.files import write_text
from fcljax.methods import METHODS, check_no_code, short_name
from fcljax.results import figures
from fcljax.results.comparison import is_personal, over_seeds_text, percent, total_seconds
from fcljax.results.metrics import paired_difference
from fcljax.results.repeat import all_software_of
from fcljax.results.run_folder import Summary, value_at, write_json
from fcljax.runs import rate_search
from fcljax.studies import grid, sweeps, typed
from fcljax.studies.grid import Planned
from fcljax.studies.paper_tables import markdown_table
from fcljax.studies.papers import words_of
from fcljax.studies.seeds import folder_of_runs
from fcljax.studies.sweeps import Outcome, Ways
from fcljax.terminal import add_row, new_table, say

PLAN = "leaderboard.yaml"
TEXT = "leaderboard.md"
DATA = "leaderboard.json"
FIGURE = "leaderboard.png"
SEARCH = "search"
PICTURE = "Each method's accuracy after the last task over the MB that a client exchanges in the run"
RATES = ("lr", "full_lr", "lora_lr")  # of clients
# MB of a client in the whole run. Where clients send no parameters they still send their
# numbers of examples, so "nothing is sent" is a threshold and not 0.
NOTHING_SENT = 1e-3
# Tuned options of the methods without a client's learning rate. FedRanPAC chooses its
# ridge itself, and the others have no option that decides.
TUNED: Mapping[str, Sequence[str]] = {
    "afcl": ("ridge",),
    "fedran": ("ridge",),
    "stsa": ("ridge",),
    "zero-shot": (),
    "fedranpac": (),
    "fedncm": (),
    "fedrecon": (),
}
# The package's defaults of everything that must be equal for a fair comparison: they
# stand in place of what a method's own preset has.
SHARED: Mapping[str, Any] = {
    field.name: field.default
    for options in (InputConfig, PartitionConfig)
    for field in dataclasses.fields(options)
    if field.name != "seed"
} | {
    name: getattr(TrainConfig, name)
    for name in ("participation", "rounds", "epochs", "batch_size", "augment")
}
MOST_FACTORS = 100  # each is a whole run per method

Make = Callable[[list[Planned], Path], dict[str, Outcome]]
"""(runs, their folder) -> name of a run -> its outcome"""


@dataclasses.dataclass(frozen=True)
class LeaderboardFile:
    """The content of a leaderboard's file."""

    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: int | list[int] = 3
    search: dict[str, Any] = dataclasses.field(default_factory=lambda: {"holdout": 0.25})
    factors: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    methods: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    tuned: dict[str, list[str]] = dataclasses.field(default_factory=dict)


class Contender(NamedTuple):
    """A method of the leaderboard and its runs."""

    method: str
    trials: dict[float, Planned]
    """Factor -> run on held-out examples; none for a method without tuned options."""
    runs: dict[float, list[Planned]]
    """Factor -> the runs on test images if it is chosen, seed by seed."""

    @property
    def name(self) -> str:
        """Return the name in tables and folders."""
        return short_name(self.method)


class Standing(NamedTuple):
    """A method's results so far."""

    method: str
    summaries: tuple[Summary, ...]
    """Of the finished runs."""
    planned: int
    """Number of planned runs."""
    trials: dict[float, float | None]
    """Factor -> A_last on held-out examples, None for a trial without a result."""
    options: Mapping[str, Any]
    """The tuned options as they were chosen."""
    why: str = ""
    """Why runs are missing."""

    def values(self, key: str) -> list[float]:
        """Return a number of each finished run, as `value_at` finds it; NaN for null."""
        return np.array([value_at(run, key) for run in self.summaries], float).tolist()

    @property
    def megabytes(self) -> float:
        """Return what a client sends and receives in the whole run, in MB."""
        totals = [run["communication_total"] for run in self.summaries]
        sizes = [total["upload_bytes"] + total["download_bytes"] for total in totals]
        return float(np.mean(sizes)) / self.summaries[0]["config"]["clients"] / 1e6

    @property
    def minutes(self) -> float:
        """Return the mean time of a run, compiling included."""
        return float(np.mean([total_seconds(run) for run in self.summaries])) / 60


# ---- planning --------------------------------------------------------------------------


def plan(
    path: str | Path,
    only: Sequence[str] = (),
    code: bool = False,
    base: Mapping[str, str] = MappingProxyType({}),
) -> list[Contender]:
    """Plan all possible runs of the methods of a file.

    Args:
      path: the file.
      only: names of the methods to keep, in this order; empty: all, in the file's.
      code: whether methods may be programs from outside of the package.
      base: options in the place of those of the file's base.

    Raises:
      InputError: one line that names the file, the method, the option and the value.
    """
    values = config.load_yaml(path)
    entries = {key: value for key, value in values.items() if value is not None}
    file = typed.read_typed(LeaderboardFile, entries, str(path))
    # the command line's options win over the file's
    file = dataclasses.replace(file, base={**file.base, **base})
    methods = file.methods or dict.fromkeys(METHODS, {})
    _check(file, methods, str(path), code)
    unknown = next((name for name in only if name not in methods), None)
    if unknown:
        raise InputError(f"methods: {unknown!r} is not one of {', '.join(methods)}")
    return [_entry(file, name, methods[name], str(path)) for name in only or methods]


def _check(
    file: LeaderboardFile,
    methods: Mapping[str, Any],
    where: str,
    code: bool,
) -> None:
    """Check the parts that do not belong to a single method.

    Raises:
      InputError: naming the place in the file.
    """
    if not code:
        for name in methods:
            check_no_code(name, where, "if you trust it, add --allow-code")
    if not file.search.get("holdout"):
        raise InputError(f"{where}: search.holdout: trials must not see test images; nearest: holdout: 0.25")
    # a factor twice would make the same trial twice
    if not 0 < len(set(file.factors)) == len(file.factors) <= MOST_FACTORS or min(file.factors) <= 0:
        raise InputError(
            f"{where}: factors: {file.factors} must be distinct positive numbers, such as [1, 0.3]"
        )
    stray = next((name for name in file.tuned if name not in methods), None)
    if stray:
        raise InputError(f"{where}: tuned.{stray}: it is not one of the methods")


def _entry(
    file: LeaderboardFile,
    method: str,
    method_options: Mapping[str, Any],
    where: str,
) -> Contender:
    shared = {**SHARED, **file.base}
    # methods such as centralised training are bounds, not federations: they have one
    # client, whatever the base says
    if method in METHODS and METHODS[method].one_client:
        shared["clients"] = 1
    shared |= method_options
    try:
        settings = config.from_mapping(method, shared, "options")
        tuned = _tuned(file, method, settings)
        options = {factor: shared | _scaled(settings, tuned, factor) for factor in file.factors}
    except InputError as error:
        raise InputError(f"{where}: methods.{method}: {str(error).removeprefix('options: ')}") from None
    # without an option to multiply, all trials would be one and the same run
    if not tuned:
        options = {1.0: shared}
    trials = {}
    runs = {}
    # all are planned, so that a wrong option is an error now and not after the trials;
    # of the runs only those of the best factor are made
    for factor, base in options.items():
        runs[factor] = grid.plan_of({"method": method, "base": base, "seeds": file.seeds}, where, True)
        if len(options) > 1:
            # search has a seed of its own, else the base's; one run is enough to rank
            # factors
            trial = grid.plan_of({"method": method, "base": base | file.search}, where, True)[0]
            trials[factor] = trial._replace(name=f"x{factor:g}")
    return Contender(method, trials, runs)


def _tuned(file: LeaderboardFile, method: str, settings: RunConfig) -> Sequence[str]:
    """Return the options that a method's trials multiply."""
    # () says that there is nothing to tune; only None falls back to the rates
    names = file.tuned.get(method, TUNED.get(method))
    if names is None:
        names = [name for name in RATES if getattr(settings, name, None)]
    return names


def _scaled(settings: RunConfig, tuned: Sequence[str], factor: float) -> dict[str, float]:
    """Multiply the tuned options by a factor.

    Raises:
      InputError: naming one that is no positive number of this method.
    """
    for name in tuned:
        value = getattr(settings, name, None)
        if isinstance(value, bool) or not isinstance(value, float) or value <= 0:
            raise InputError(f"tuned: {name!r} is not one of its options with a positive number")
    return rate_search.scaled({name: getattr(settings, name) for name in tuned}, factor)


# ---- running ---------------------------------------------------------------------------


def run(
    entries: Sequence[Contender],
    out: Path,
    resume: bool,
    ways: Ways,
    command: str,
    console: Console,
) -> list[Standing]:
    """Make all trials and runs that are not finished in `out`, method by method; one
    that fails does not end the others. What is written into `out` is up to date after
    each method.

    Args:
      entries: the methods.
      out: the folder; a new one, unless `resume`.
      resume: resume the leaderboard in `out`. There may be other methods than before.
      ways: how runs are made.
      command: what was typed, for the page.
      console: where progress goes.

    Raises:
      InputError: for a folder that cannot be used, or whose runs have other settings.
      KeyboardInterrupt: after all running processes have ended, with checkpoints to
        resume from.
    """
    check = (lambda: _check_folder(out)) if resume else None
    rows: list[Standing] = []
    with folder_of_runs(out, check):
        write_text(out / PLAN, yaml.safe_dump({"methods": [entry.name for entry in entries]}))
        for entry in entries:
            say(console, f"{entry.name}, {len(rows) + 1} of {len(entries)}")
            rows.append(_row(entry, out, lambda runs, folder: _sweep(runs, folder, ways, console)))
            # a resumed leaderboard: the page keeps what an earlier call has finished of
            # the methods whose turn is still to come
            waiting = [_row(later, out, _outcomes) for later in entries[len(rows) :]]
            write([*rows, *waiting], entries, out, command)
    return rows


def _check_folder(out: Path) -> None:
    if not (out / PLAN).is_file():
        raise InputError(f"resume: {str(out)!r} is not a leaderboard folder: it has no {PLAN}")


def _row(entry: Contender, out: Path, make: Make) -> Standing:
    """Return the result of a method, after `make` has made its trials and its runs."""
    trials = {}
    factor = 1.0
    if entry.trials:
        outcomes = make(list(entry.trials.values()), out / SEARCH / entry.name)
        trials = {factor: _a_last(outcomes[run.name]) for factor, run in entry.trials.items()}
        # trials are compared on held-out training examples, so test images choose
        # nothing
        best = chosen(trials)
        if best is None:
            planned = len(next(iter(entry.runs.values())))
            return Standing(entry.name, (), planned, trials, {}, sweeps.failure(outcomes))
        factor = best
    runs = entry.runs[factor]
    outcomes = make(runs, out / entry.name)
    summaries = tuple(sweeps.finished(outcomes).values())
    options = {name: value for name, value in runs[0].given.items() if _differs(entry, name)}
    return Standing(entry.name, summaries, len(runs), trials, options, sweeps.failure(outcomes))


def _sweep(
    runs: list[Planned],
    folder: Path,
    ways: Ways,
    console: Console,
) -> dict[str, Outcome]:
    """Make the runs that are not finished."""
    return sweeps.sweep(runs, folder, (folder / sweeps.PLAN).exists(), ways, console)


def _outcomes(runs: list[Planned], folder: Path) -> dict[str, Outcome]:
    """Read the present outcomes, without making any run."""
    return {run.name: sweeps.outcome(run, folder, None) for run in runs}


def _a_last(outcome: Outcome) -> float | None:
    if outcome.state == "finished" and outcome.summary:
        return outcome.summary["A_last"]
    return None


def chosen(trials: Mapping[float, float | None]) -> float | None:
    """Return the factor whose trial has the highest A_last, of equal ones that nearest
    to 1; None: no trial finished."""
    return rate_search.best(trials, prefer=lambda factor: abs(math.log(factor)))


def _differs(entry: Contender, name: str) -> bool:
    """Check whether the trials of a method differ in an option."""
    return len({run.given.get(name) for run in entry.trials.values()}) > 1


# ---- the page --------------------------------------------------------------------------

HEAD = ("method", "seeds", "A_last", "A_avg", "forgetting", "MB", "minutes", "chosen", "A_last of trials")
PERSONAL = "†"  # marks methods that are evaluated with the clients' own models


def ranked(rows: Iterable[Standing]) -> list[Standing]:
    """Return the rows with results, the highest A_last first."""
    return sorted((row for row in rows if row.summaries), key=lambda row: -np.mean(row.values("A_last")))


def cells(row: Standing) -> list[str]:
    """Return a row of the table, in the order of HEAD."""
    mark = ""
    # a client's own model is tested on fewer classes, which is easier: not to be ranked
    # with the rest
    if any(map(is_personal, row.summaries)):
        mark = PERSONAL
    trials = ", ".join(
        f"x{factor:g}: " + over_seeds_text([percent(value)], 1) for factor, value in row.trials.items()
    )
    return [
        row.method + mark,
        str(len(row.summaries)),
        *(with_interval(row.values(key)) for key in ("A_last", "A_avg", "forgetting.paper")),
        f"{row.megabytes:.3g}",
        f"{row.minutes:.1f}",
        " ".join(words_of(row.options)),
        trials,
    ]


def with_interval(values: Sequence[float]) -> str:
    """Return the mean of fractions in %, with half of its 95 % interval if possible; "-"
    for what a run does not have, such as the forgetting of one task."""
    if np.isnan(values).any():
        return "-"
    percents = [100 * value for value in values]
    if len(percents) < 2:
        return f"{percents[0]:.2f}"
    # paired with zeros: the interval of the mean instead of that of a difference
    mean, low, _ = paired_difference(percents, [0.0] * len(percents))
    return f"{mean:.2f}±{mean - low:.2f}"


def write(
    rows: Sequence[Standing],
    entries: Sequence[Contender],
    out: Path,
    command: str,
) -> None:
    """Write leaderboard.md, leaderboard.json and leaderboard.png into the folder."""
    write_text(out / TEXT, markdown(rows, entries, command))
    content = [
        {
            "method": row.method,
            "finished": len(row.summaries),
            "planned": row.planned,
            "why": row.why,
            "trials": {f"{factor:g}": value for factor, value in row.trials.items()},
            "chosen": row.options,
        }
        | _numbers(row)
        for row in rows
    ]
    write_json(out / DATA, {"command": command, "rows": content})
    results = {}
    for row in ranked(rows):
        results[row.method] = (row.megabytes, 100 * float(np.mean(row.values("A_last"))))
    if results:
        figures.save(out / FIGURE, drawing(results))


def drawing(results: Mapping[str, tuple[float, float]]) -> figures.Figure:
    """Draw the accuracy of methods over what their clients exchange.

    Args:
      results: method -> MB of a client in the whole run, and A_last in %.
    """
    points, levels = marks(results)
    return figures.scatter(points, "MB per client in the whole run", "A_last (%)", True, levels)


def marks(
    results: Mapping[str, tuple[float, float]],
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return MB and A_last of the methods that communicate, and A_last of those that do not."""
    points = {}
    levels = {}
    for method, (megabytes, a_last) in results.items():
        # a bound such as local training has no place on a logarithmic axis of MB: it is
        # drawn as a level across the figure
        if _communicates(method, megabytes):
            points[method] = (megabytes, a_last)
        else:
            levels[method] = a_last
    return points, levels


def _communicates(method: str, megabytes: float) -> bool:
    """Check whether the method is a federation that sends parameters, not a bound."""
    one_client = method in METHODS and METHODS[method].one_client
    return not one_client and megabytes > NOTHING_SENT


def _numbers(row: Standing) -> dict[str, Any]:
    """Return the numbers of a row, seed by seed; empty for a row without results."""
    if not row.summaries:
        return {}
    numbers = {key: row.values(key) for key in ("A_last", "A_avg", "forgetting.paper")}
    seeds = [run["seed"] for run in row.summaries]
    totals = {"MB": row.megabytes, "minutes": row.minutes}
    return {"seed": seeds, **numbers, **totals, "software": all_software_of(row.summaries)}


def markdown(rows: Sequence[Standing], entries: Sequence[Contender], command: str) -> str:
    """Return the page."""
    base = " ".join(words_of(_shared(entries)))
    trials = max((len(entry.trials) for entry in entries), default=0)
    trial = next((run for entry in entries for run in entry.trials.values()), None)
    lines = ["# Leaderboard", "", f"    {command}", "", f"All runs have these options: `{base}`.", ""]
    if trial:
        lines += [
            f"Learning rates were chosen per method by {trials} trials on held-out training examples "
            f"(`--holdout {trial.cfg.holdout} --seed {trial.cfg.seed}`). A trial multiplies all of the "
            "clients' learning rates by one factor. No test image was used for a choice.",
            "",
        ]
    lines += [
        "Accuracies and forgetting are in %, with half of the 95 % interval over seeds (Student's t). MB is "
        "what a client sends and receives in the whole run. Minutes are those of a run, compiling included, "
        f"on {machine()}.",
        "",
        markdown_table([HEAD, *map(cells, ranked(rows))]),
        "",
    ]
    runs = [run for row in rows for run in row.summaries]
    if any(map(is_personal, runs)):
        lines += [
            f"`{PERSONAL}`: evaluated with personal models, so they cannot be ranked with the others.",
            "",
        ]
    if ranked(rows):
        lines += [f"![{PICTURE}]({FIGURE})", ""]
    absent = [(row.method, f"{len(row.summaries)} of {row.planned}", row.why) for row in missing(rows)]
    if absent:
        lines += ["Missing:", "", markdown_table([("method", "runs", "why"), *absent]), ""]
    for software in all_software_of(runs):
        lines += [f"Made with {software}.", ""]
    return "\n".join(lines)


def missing(rows: Iterable[Standing]) -> list[Standing]:
    """Return the rows that lack runs."""
    return [row for row in rows if row.why]


def _shared(entries: Sequence[Contender]) -> dict[str, Any]:
    """Return the options that all runs on test images share and that are not the
    defaults."""
    run_options = [run.given for entry in entries for runs in entry.runs.values() for run in runs]
    return {
        name: value
        for name, value in run_options[0].items()
        if name != "seed"
        and value != SHARED.get(name)
        and all(options.get(name) == value for options in run_options)
    }


def machine() -> str:
    """Describe this machine."""
    import jax

    device = jax.devices()[0]
    processor = platform.processor() or platform.machine()
    words = f"{os.cpu_count()} cores ({processor})"
    if device.platform == "cpu":
        return words
    return f"{words}, {device.device_kind}"


def terminal_tables(rows: Sequence[Standing]) -> list[Table]:
    """Return the tables for a terminal: the ranked methods, and those that lack runs."""
    numbers = [name for name in HEAD if name not in ("method", "chosen")]
    ranking = new_table(*HEAD, title="leaderboard", right=numbers)
    for row in ranked(rows):
        add_row(ranking, *cells(row))
    absent = new_table("method", "why", title="missing")
    for row in missing(rows):
        add_row(absent, row.method, row.why)
    return [table for table in (ranking, absent) if table.row_count]


def plan_table(entries: Sequence[Contender]) -> Table:
    """List the methods with the number of their trials and runs, for a terminal."""
    table = new_table("method", "trials", "runs", "tuned", title=f"{len(entries)} methods")
    for entry in entries:
        runs = next(iter(entry.runs.values()))
        names = [name for name in runs[0].given if _differs(entry, name)]
        add_row(table, entry.name, len(entry.trials), len(runs), ", ".join(names))
    return table
