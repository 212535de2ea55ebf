"""Run the rows of a paper's table as a sweep, and put the paper's numbers beside ours.

`papers.py` reads the tables, `paper_tables.py` compares the numbers. The folder is a
sweep's (`sweeps.py`), and has table.md and table.json besides.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table

from fcljax import config
from fcljax.config import RunConfig
from fcljax.errors import InputError, choose
from fcljax.files import write_text
from fcljax.methods import find_method
from fcljax.results import figures, page
from fcljax.results.comparison import compare, total_seconds
from fcljax.results.run_folder import write_json
from fcljax.studies import paper_figures, papers, sweeps
from fcljax.studies import paper_tables as tables
from fcljax.studies.grid import Planned, folder_name
from fcljax.studies.mini import MOST, RATES, mini
from fcljax.studies.paper_tables import RowResult
from fcljax.studies.papers import Column, Row, Verified
from fcljax.studies.sweeps import Outcome
from fcljax.terminal import add_row, new_table

Scale = Literal["mini", "paper"]
TEXT = "table.md"
DATA = "table.json"
FIGURE = "accuracy.png"
DRAWN = "figure.png"


class Part(NamedTuple):
    """A row of the table."""

    column: Column
    row: Row
    runs: tuple[str, ...]
    """The names of its runs, seed by seed."""
    why: str = ""
    """Why it has none."""

    @property
    def label(self) -> str:
        """Return the row's name."""
        return self.column.label(self.row)


class Plan(NamedTuple):
    """Rows of a table and their runs; rows whose settings are the same share theirs."""

    scale: Scale
    parts: list[Part]
    runs: list[Planned]

    @property
    def column(self) -> Column:
        """Return one of the table's columns."""
        return self.parts[0].column


# ---- runs ------------------------------------------------------------------------------


def settings_of(column: Column, row: Row) -> RunConfig:
    """Return the settings of a row at the paper's scale.

    What the row cannot read is left out of the column's settings: options of the
    paper's own method or adapter that the row's does not have, and those of a partition
    where the row has another one.

    Raises:
      InputError: naming the file, the row and what is wrong.
    """
    values = dict(column.settings)
    row_options = dict(row.options)
    try:
        # a column's settings are those of the paper's method; its baselines do not have
        # all of these options, and an unknown option would be an error
        adapter = row_options.get("adapter") or values.get("adapter")
        column_fields = _fields(column.paper.method, values.get("adapter"), values)
        foreign = column_fields - _fields(row.method, adapter, values | row_options)
        shared = {name: value for name, value in values.items() if name not in foreign}
        return config.from_mapping(row.method, {"scale": "paper"} | shared | row_options, "options")
    except InputError as error:
        raise InputError(f"{column.path}: {column.key}: row {row.words()!r}: {error}") from None


def _fields(method: str, adapter: str | None, values: Mapping[str, Any]) -> set[str]:
    """Return the names of the options that a run with these choices reads."""
    options = config.run_class(method, adapter, config.choices_of(method, values))
    return {field.name for field in dataclasses.fields(options)}


def plan(
    columns: Sequence[Column],
    scale: Scale,
    seeds: int | None,
    only: str | None = None,
) -> Plan:
    """Plan the runs of a table, row by row, seeds innermost.

    Args:
      columns: of the table.
      scale: `mini` as `mini.mini` has it, or the paper's.
      seeds: number of seeds of each row, as `seeds_of`.
      only: the only rows to run: a label, or method and options, which stand for all
        columns.

    Raises:
      InputError: for a row that does not resolve at the paper's scale, or an unknown
        `only`.
    """
    # before any run is planned: a mistyped row would silently plan nothing
    if only is not None:
        names = [_names(column, row) for column in columns for row in column.rows]
        if not any(only in pair for pair in names):
            choose("row", only, [label if "[" in only else words for label, words in names])
    varied = _varied(columns)
    parts = []
    runs = {}
    for column in columns:
        for row, cfg, why in _settings(column, scale, varied):
            if only is not None and only not in _names(column, row):
                continue
            names = [_run(runs, column, row, cfg, seed) for seed in seeds_of(column, scale, seeds) if cfg]
            parts.append(Part(column, row, tuple(names), why))
    return Plan(scale, parts, list(runs.values()))


def _varied(columns: Sequence[Column]) -> set[str]:
    """Return the sizes that a table varies, which stay as they are at mini scale: the
    number of clients, and of tasks where the columns differ in nothing else."""
    # a table over numbers of clients would be one number at mini scale, where all have
    # at most five
    varied = set()
    if len({column.settings.get("clients") for column in columns}) > 1:
        varied.add("clients")
    if {name for entry in columns[0].entry.columns.values() for name in entry.settings} == {"tasks"}:
        varied.add("tasks")
    return varied


def _names(column: Column, row: Row) -> tuple[str, str]:
    return column.label(row), row.words()


def _settings(
    column: Column,
    scale: Scale,
    varied: set[str],
) -> Iterator[tuple[Row, RunConfig | None, str]]:
    """Yield the settings of a column's rows, or why one cannot run at this scale. All
    see the same images."""
    full = [(row, settings_of(column, row)) for row in column.rows]
    if scale == "paper":
        yield from ((row, cfg, "") for row, cfg in full)
        return
    small: list[tuple[Row, RunConfig | None, str]] = []
    for row, cfg in full:
        # what the rows of a method compare stays; a learning rate stays only in the row
        # that sets it, and sizes never, since also a schedule that the row itself sets
        # has the paper's length
        compared = {name for other in column.rows if other.method == row.method for name in other.options}
        unchanged = varied | (set(row.options) | (compared - set(RATES))) - set(MOST)
        try:
            small.append((row, mini(cfg, unchanged), ""))
        except InputError as error:
            small.append((row, None, f"cannot run at mini scale: {error}"))
    # rows with sampled clients need more images, and rows are compared
    images = max((cfg.glyph_train for _, cfg, _ in small if cfg), default=0)
    for row, cfg, why in small:
        yield row, cfg and dataclasses.replace(cfg, glyph_train=images), why


def seeds_of(column: Column, scale: Scale, count: int | None) -> list[int]:
    """Return the first `count` seeds of a column, then those after its largest; None:
    one at mini scale, else all."""
    if count is None:
        count = 1 if scale == "mini" else len(column.seeds)
    further = range(max(column.seeds) + 1, max(column.seeds) + 1 + count)
    return [*column.seeds, *further][:count]


def _run(runs: dict, column: Column, row: Row, cfg: RunConfig, seed: int) -> str:
    """Return the name of a row's run with a seed. The run is added to `runs` if none
    has its settings yet."""
    cfg = dataclasses.replace(cfg, seed=seed)
    # by settings: at mini scale rows often become equal, and then one run serves both
    if cfg not in runs:
        words = [column.name, *papers.words_of(row.options)]
        variant = " ".join(word.removeprefix("--") for word in words if word) or None
        # what differs from the method's presets is what a user would have to type; the
        # choices that selected the presets are compared with the package's defaults
        defaults = dict(vars(config.preset_of(cfg)))
        defaults |= dict(config.usual_choices(row.method, cfg.fidelity))
        defaults |= {"adapter": find_method(row.method).adapter}
        defaults |= {"fidelity": RunConfig.fidelity, "scale": RunConfig.scale}
        changed = {name: value for name, value in vars(cfg).items() if value != defaults[name]}
        runs[cfg] = Planned(folder_name(row.method, variant, [], seed), changed, cfg)
    return runs[cfg].name


def command(run: Planned) -> str:
    """Return the command line that makes a run by hand."""
    # a switch is typed without a value (--name or --no-name), so it stays a bool
    switches = {field.name for field in dataclasses.fields(run.cfg) if field.type is bool}
    options = {name: value if name in switches else str(value) for name, value in run.given.items()}
    return shlex.join(["fcljax", "run", run.method, *papers.words_of(options)])


# ---- results ---------------------------------------------------------------------------


def results(plan: Plan, outcomes: Mapping[str, Outcome], out: Path) -> list[RowResult]:
    """Return the result of each row. `out` is the folder of the sweep."""
    return [_result(part, {name: outcomes[name] for name in part.runs}, out) for part in plan.parts]


def _result(part: Part, outcomes: Mapping[str, Outcome], out: Path) -> RowResult:
    summaries = sweeps.finished(outcomes)
    values = []
    missing = []
    for metric in part.column.metrics:
        by_seed = [tables.value_of(summary, metric) for summary in summaries.values()]
        values.append(tuple(value for value in by_seed if value is not None))
        if None in by_seed:
            missing.append(metric)
    # a failed run explains a missing value better than the missing value itself
    why = part.why or sweeps.failure(outcomes)
    if missing and not why:
        why = f"no value of {', '.join(missing)}"
    figure = part.column.entry.figure
    curves = tuple(paper_figures.curve_of(figure, run, out / name) for name, run in summaries.items())
    return RowResult(part.column, part.row, tuple(values), len(summaries), why, curves)


def shared(plan: Plan) -> list[str]:
    """List the rows that share their runs, in a line for each such runs."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for part in plan.parts:
        if part.runs:
            rows.setdefault(part.runs, []).append(part.label)
    return [", ".join(labels) for labels in rows.values() if len(labels) > 1]


def title_of(plan: Plan) -> str:
    """Return the title of a table."""
    return f"{plan.column.system} {plan.column.table}, {plan.scale} scale"


def notes_of(plan: Plan) -> list[str]:
    """Return what a reader of a table must know."""
    paper = plan.column.paper
    entry = plan.column.entry
    notes = [
        f"Paper: {paper.paper}, {entry.source}. Ours: mean and population standard deviation over the seeds."
    ]
    notes += [*paper.notes, *entry.notes]
    if plan.scale == "mini":
        notes.append(
            "At mini scale the numbers are not expected to match the paper's: the design is the same with "
            "another network, other images and a shorter schedule. Only the order of the rows is compared."
        )
    rows = shared(plan)
    if rows:
        notes.append(
            "Several rows share their runs, because their settings are equal at this scale: "
            f"{'; '.join(rows)}."
        )
    return notes


def write(
    plan: Plan,
    rows: Sequence[RowResult],
    outcomes: Mapping[str, Outcome],
    out: Path,
    tell: Callable[[str], None],
) -> None:
    """Write table.md, table.json, the figure of `compare`, the paper's figure if the
    table is one, and the report page into the folder of the sweep. `tell` gets the
    reason if there is no page."""
    figure = plan.column.entry.figure
    pairs = tables.orderings(rows)
    claims = plan.column.entry.claims
    write_text(out / TEXT, tables.markdown(title_of(plan), notes_of(plan), rows, claims))
    write_json(
        out / DATA,
        {
            "system": plan.column.system,
            "table": plan.column.table,
            "scale": plan.scale,
            "rows": tables.as_json(rows),
            "order": {
                "alike": sum(pair.alike for pair in pairs),
                "pairs": [
                    pair._asdict() | {"alike": None if pair.ours is None else pair.alike} for pair in pairs
                ],
            },
            "claims": claims,
            "figure": figure and paper_figures.as_json(figure, rows),
        },
    )
    drawing = None
    if figure:
        drawing = paper_figures.draw_figure(figure, rows)
    if drawing:
        figures.save(out / DRAWN, drawing)
    # where every run failed there is nothing to compare, and table.md says why
    folders = sweeps.finished_folders(outcomes, out)
    if folders:
        compare(folders, out / FIGURE)
        page.try_report(folders, out / page.NAME, tell)


def terminal_table(plan: Plan, rows: Sequence[RowResult]) -> Table:
    """Return the table for a terminal."""
    head, *lines = tables.lines(rows)
    numbers = [name for name in head if name not in ("row", "metric", "note")]
    table = new_table(*head, title=title_of(plan), right=numbers)
    for cells in lines:
        add_row(table, *cells)
    return table


def record_paper_runs(
    rows: Sequence[RowResult],
    outcomes: Mapping[str, Outcome],
    plan: Plan,
    device: str,
    write_file: bool,
) -> list[str]:
    """Judge runs at the paper's scale, and write status and cost into the file of the
    paper with `write_file`: the package's own files are not the user's to change.

    Returns:
      A line for each column: its new status, or why it stays as it was.
    """
    lines = []
    verified = {}
    for key in dict.fromkeys(row.column.key for row in rows):
        status = tables.status_of([row for row in rows if row.column.key == key])
        if status is None:
            lines.append(
                f"{key}: unchanged, because not all rows have enough seeds or the paper has no numbers"
            )
            continue
        # as a set: runs that rows share cost their hours once
        names = {name for part in plan.parts if part.column.key == key for name in part.runs}
        summaries = [summary for name in names if (summary := outcomes[name].summary)]
        hours = sum(map(total_seconds, summaries)) / 3600
        verified[key] = Verified(status, f"{len(names)} runs, {hours:.2f} hours in all, {device}")
        lines.append(f"{key}: {status}")
    if verified and write_file:
        papers.write_verified(rows[0].column.path, verified)
    return lines
