"""The rows of a paper's table as runs of a sweep, and the paper's numbers beside ours.

`papers.py` reads the tables, `paper_tables.py` compares the numbers. The folder is a sweep's (`sweeps.py`),
and has table.md and table.json besides.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table

from fcljax import config
from fcljax.config import PartitionConfig, RunConfig
from fcljax.errors import InputError, choose
from fcljax.files import write_text
from fcljax.methods import find_method
from fcljax.results import figures, page
from fcljax.results.comparison import compare
from fcljax.results.run_folder import write_json
from fcljax.studies import paper_figures, papers, sweeps
from fcljax.studies import paper_tables as tables
from fcljax.studies.grid import Planned, folder_name
from fcljax.studies.mini import MOST, RATES, mini
from fcljax.studies.paper_tables import RowResult
from fcljax.studies.papers import Column, Row, Verified
from fcljax.studies.sweeps import Outcome
from fcljax.terminal import add_row

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
        """The row's name."""
        return self.column.label(self.row)


class Plan(NamedTuple):
    """Rows of a table and their runs; rows whose settings are the same share theirs."""

    scale: Scale
    parts: list[Part]
    runs: list[Planned]

    @property
    def column(self) -> Column:
        """One of the table's columns."""
        return self.parts[0].column


# ---- runs --------------------------------------------------------------------------------------------------


def settings_of(column: Column, row: Row) -> RunConfig:
    """The settings of a row at the paper's scale.

    What the row cannot read is left out of the column's settings: options of the paper's own method or
    adapter that the row's does not have, and those of sampled clients where the row has other clients.

    Raises:
      InputError: naming the file, the row and what is wrong.
    """
    values = dict(column.settings)
    given = dict(row.options)
    try:
        adapter = given.get("adapter") or values.get("adapter")
        foreign = _fields(column.paper.method, values.get("adapter")) - _fields(row.method, adapter)
        if given.get("partition", "sampled") != "sampled":
            fields = dataclasses.fields(PartitionConfig)
            foreign |= {field.name for field in fields if "sampled" in field.metadata.get("only", ())}
        kept = {name: value for name, value in values.items() if name not in foreign}
        return config.from_mapping(row.method, {"scale": "paper"} | kept | given, "options")
    except InputError as error:
        raise InputError(f"{column.path}: {column.key}: row {row.words()!r}: {error}") from None


def _fields(method: str, adapter: str | None) -> set[str]:
    options = config.run_class(method, adapter or find_method(method).adapter)
    return {field.name for field in dataclasses.fields(options)}


def plan(found: Sequence[Column], scale: Scale, seeds: int | None, row: str | None = None) -> Plan:
    """The runs of a table, row by row, seeds innermost.

    Args:
      found: the columns of the table.
      scale: `mini` as `mini.mini` has it, or the paper's.
      seeds: how many of each row, as `seeds_of`.
      row: the rows to run alone: a label, or method and options, which stand for all columns.

    Raises:
      InputError: for a row that does not resolve at the paper's scale, or an unknown `row`.
    """
    if row is not None:
        names = [_names(column, each) for column in found for each in column.rows]
        if not any(row in each for each in names):
            choose("row", row, [label if "[" in row else words for label, words in names])
    varied = _varied(found)
    parts = []
    runs = {}
    for column in found:
        for each, cfg, why in _settings(column, scale, varied):
            if row is not None and row not in _names(column, each):
                continue
            names = [_run(runs, column, each, cfg, seed) for seed in seeds_of(column, scale, seeds) if cfg]
            parts.append(Part(column, each, tuple(names), why))
    return Plan(scale, parts, list(runs.values()))


def _varied(found: Sequence[Column]) -> set[str]:
    """The sizes that a table varies, which stay as they are at mini scale: the number of clients, and of
    tasks where the columns differ in nothing else."""
    clients = {column.settings.get("clients") for column in found}
    own = {name for each in found[0].entry.columns.values() for name in each.settings}
    return ({"clients"} if len(clients) > 1 else set()) | (own & {"tasks"} if len(own) == 1 else set())


def _names(column: Column, row: Row) -> tuple[str, str]:
    return column.label(row), row.words()


def _settings(column: Column, scale: Scale, varied: set[str]) -> Iterator[tuple[Row, RunConfig | None, str]]:
    """The settings of a column's rows, or why one cannot be run at this scale. All see the same images."""
    full = [(row, settings_of(column, row)) for row in column.rows]
    if scale == "paper":
        yield from ((row, cfg, "") for row, cfg in full)
        return
    small: list[tuple[Row, RunConfig | None, str]] = []
    for row, cfg in full:
        # a schedule that the row itself sets is also one of the paper's length
        # another row's weight or switch is what the rows compare; its learning rate is its own
        compared = {name for each in column.rows if each.method == row.method for name in each.options}
        kept = varied | (set(row.options) | (compared - set(RATES))) - set(MOST)
        try:
            small.append((row, mini(cfg, kept), ""))
        except InputError as error:
            small.append((row, None, f"cannot run at mini scale: {error}"))
    images = max((cfg.glyph_train for _, cfg, _ in small if cfg), default=0)
    for row, cfg, why in small:
        yield row, cfg and dataclasses.replace(cfg, glyph_train=images), why


def seeds_of(column: Column, scale: Scale, count: int | None) -> list[int]:
    """The first `count` seeds of a column, then those after its largest; None: one at mini scale or all."""
    count = count or (1 if scale == "mini" else len(column.seeds))
    more = range(max(column.seeds) + 1, max(column.seeds) + 1 + count)
    return [*column.seeds, *more][:count]


def _run(runs: dict, column: Column, row: Row, cfg: RunConfig, seed: int) -> str:
    """The name of the run of a row with a seed; it is added to `runs` if none has its settings yet."""
    cfg = dataclasses.replace(cfg, seed=seed)
    if cfg not in runs:
        words = [column.name, *papers.words_of(row.options)]
        variant = " ".join(word.removeprefix("--") for word in words if word) or None
        usual = dataclasses.replace(
            config.preset(row.method, cfg.adapter, cfg.fidelity, cfg.scale),
            adapter=find_method(row.method).adapter,
            fidelity=RunConfig.fidelity,
            scale=RunConfig.scale,
        )
        given = {
            field.name: getattr(cfg, field.name)
            for field in dataclasses.fields(cfg)
            if getattr(cfg, field.name) != getattr(usual, field.name)
        }
        runs[cfg] = Planned(folder_name(row.method, variant, [], seed), given, cfg)
    return runs[cfg].name


def command(run: Planned) -> str:
    """The command line that makes a run by hand."""
    switches = {field.name for field in dataclasses.fields(run.cfg) if field.type is bool}
    typed = {name: value if name in switches else str(value) for name, value in run.given.items()}
    return shlex.join(["fcljax", "run", run.method, *papers.words_of(typed)])


# ---- results -----------------------------------------------------------------------------------------------


def results(made: Plan, outcomes: Mapping[str, Outcome], out: Path) -> list[RowResult]:
    """What became of each row, in the folder of the sweep."""
    return [_result(part, {name: outcomes[name] for name in part.runs}, out) for part in made.parts]


def _result(part: Part, outcomes: Mapping[str, Outcome], out: Path) -> RowResult:
    finished = {
        name: each.summary for name, each in outcomes.items() if each.state == "finished" and each.summary
    }
    good = list(finished.values())
    figure = part.column.entry.figure
    bad = next((each for each in outcomes.values() if each.state != "finished"), None)
    found = [[tables.value_of(summary, metric) for summary in good] for metric in part.column.metrics]
    values = tuple(tuple(value for value in each if value is not None) for each in found)
    why = part.why or ("" if bad is None else f"{bad.state}: {bad.why}" if bad.why else bad.state)
    missing = [metric for metric, each in zip(part.column.metrics, found, strict=True) if None in each]
    if missing and not why:
        why = f"no value of {', '.join(missing)}"
    curves = tuple(paper_figures.curve_of(figure, run, out / name) for name, run in finished.items())
    return RowResult(part.column, part.row, values, len(good), why, curves)


def shared(made: Plan) -> list[str]:
    """Rows that are one run, a line for each such run."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for part in made.parts:
        if part.runs:
            owners.setdefault(part.runs, []).append(part.label)
    return [", ".join(labels) for labels in owners.values() if len(labels) > 1]


def title_of(made: Plan) -> str:
    """The title of a table."""
    return f"{made.column.system} {made.column.table}, {made.scale} scale"


def notes_of(made: Plan) -> list[str]:
    """What a reader of a table must know."""
    paper = made.column.paper
    entry = made.column.entry
    notes = [
        f"Paper: {paper.paper}, {entry.source}. Ours: mean and population standard deviation over the seeds."
    ]
    notes += [*paper.notes, *entry.notes]
    if made.scale == "mini":
        notes.append(
            "At mini scale the numbers are not expected to be the paper's: the design is the same with "
            "another network, other images and a shorter schedule. What is compared is the order of the rows."
        )
    same = shared(made)
    if same:
        notes.append(
            "The same runs stand for several rows, whose settings do not differ at this scale: "
            f"{'; '.join(same)}."
        )
    return notes


def write(
    made: Plan,
    found: Sequence[RowResult],
    outcomes: Mapping[str, Outcome],
    out: Path,
    tell: Callable[[str], None],
) -> None:
    """Write table.md, table.json, the figure of `compare`, the paper's figure if the table is one, and the
    report page into the folder of the sweep. `tell` gets the reason if there is no page."""
    figure = made.column.entry.figure
    pairs = tables.orderings(found)
    claims = made.column.entry.claims
    write_text(out / TEXT, tables.markdown(title_of(made), notes_of(made), found, claims))
    write_json(
        out / DATA,
        {
            "system": made.column.system,
            "table": made.column.table,
            "scale": made.scale,
            "rows": tables.as_json(found),
            "order": {
                "alike": sum(pair.alike for pair in pairs),
                "pairs": [
                    pair._asdict() | {"alike": None if pair.ours is None else pair.alike} for pair in pairs
                ],
            },
            "claims": claims,
            "figure": figure and paper_figures.as_json(figure, found),
        },
    )
    drawn = paper_figures.draw_figure(figure, found) if figure else None
    if drawn:
        figures.save(out / DRAWN, drawn)
    done = sweeps.finished_folders(outcomes, out)
    if done:
        compare(done, out / FIGURE)
        page.try_report(done, out / page.NAME, tell)


def shown(made: Plan, found: Sequence[RowResult]) -> Table:
    """The table for a terminal."""
    table = Table(title=title_of(made))
    head, *lines = tables.lines(found)
    for name in head:
        left = name in ("row", "metric", "note")
        table.add_column(name, overflow="fold", justify="left" if left else "right")
    for cells in lines:
        add_row(table, *cells)
    return table


def record_paper_runs(
    found: Sequence[RowResult], outcomes: Mapping[str, Outcome], made: Plan, device: str, write_file: bool
) -> list[str]:
    """Judge runs at the paper's scale, and write status and cost into the file of the paper with
    `write_file`: the package's own files are not the user's to change.

    Returns:
      A line for each column: its new status, or why it stays as it was.
    """
    said = []
    verified = {}
    for key in dict.fromkeys(each.column.key for each in found):
        status = tables.status_of([each for each in found if each.column.key == key])
        if status is None:
            said.append(
                f"{key}: stays as it was: not all rows have enough seeds, or the paper has no numbers"
            )
            continue
        names = {name for part in made.parts if part.column.key == key for name in part.runs}
        summaries = [summary for name in names if (summary := outcomes[name].summary)]
        hours = sum(sum(each["time"].values()) for each in summaries) / 3600
        verified[key] = Verified(status, f"{len(names)} runs, {hours:.2f} hours in all, {device}")
        said.append(f"{key}: {status}")
    if verified and write_file:
        papers.write_verified(found[0].column.path, verified)
    return said
