"""Read the tables of papers as data, one YAML file for each paper:
fcljax/assets/papers, or a user's folder.

docs/reproducing.md describes the format with an example. The settings of a row are
those of `base`, of its table, its column and its own options; later ones win.
Accuracies and forgetting are in %, metrics that end with _bytes in MiB, those that end
with scalars in 10^6.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from fcljax import config
from fcljax.errors import InputError, choose
from fcljax.files import read_user_text, write_text
from fcljax.methods import check_no_code
from fcljax.options import flag
from fcljax.studies import typed

FOLDER = Path(__file__).parent.parent / "assets" / "papers"
Status = Literal["unverified", "reproduced", "not reproduced"]
MARK = "\ntables:"
VERIFIED = "\nverified:"


class Number(NamedTuple):
    """A number of the paper, in the unit of its metric."""

    mean: float
    deviation: float | None
    """The standard deviation; None if the paper has none."""


@dataclasses.dataclass(frozen=True)
class RowEntry:
    """A row as the file has it."""

    method: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    numbers: Any = None
    """A list with an entry for each metric, in a table with columns a mapping from
    column to such a list."""
    curve: Any = None
    """The paper's accuracies A_t in %, a list over the tasks with null where one cannot
    be read; in a table with columns a mapping from column to such a list."""


@dataclasses.dataclass(frozen=True)
class FigureEntry:
    """The figure of a table."""

    x: str
    """tasks: A_t over the tasks; rounds: A after each round; or the option that rows or
    columns vary, over which the first metric is drawn."""
    learned: list[int] = dataclasses.field(default_factory=list)
    """With x tasks: the accuracies on these tasks, from 1, in the place of A_t."""


@dataclasses.dataclass(frozen=True)
class ColumnEntry:
    """Values of a column that replace the table's, or add to them."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    upload: int | None = None
    seeds: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """A table as the file has it."""

    title: str
    source: str
    metrics: list[str] = dataclasses.field(default_factory=list)
    upload: int = 0
    rows: list[RowEntry] = dataclasses.field(default_factory=list)
    columns: dict[str, ColumnEntry] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    claims: list[str] = dataclasses.field(default_factory=list)
    """The paper's statement in words."""
    notes: list[str] = dataclasses.field(default_factory=list)
    figure: FigureEntry | None = None
    of: str | None = None
    """A table whose rows, columns, settings, metrics and upload it has: a figure of the
    same runs."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of our runs of a column at the paper's scale."""

    status: Status
    cost: str


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper's file."""

    paper: str
    method: str
    seeds: list[int]
    base: dict[str, Any]
    tables: dict[str, TableEntry]
    verified: dict[str, Verified]
    notes: list[str] = dataclasses.field(default_factory=list)


class Row(NamedTuple):
    """A row: the method, its options, and the paper's number of each metric."""

    method: str
    options: Mapping[str, Any]
    numbers: tuple[Number | None, ...]
    curve: tuple[float | None, ...] = ()
    """The paper's A_t in %."""

    def words(self) -> str:
        """Return method and options as they are typed on the command line."""
        return shlex.join([self.method, *words_of(self.options)])


class Column(NamedTuple):
    """A column of a table, or a table without columns: rows with shared settings."""

    path: str
    system: str
    table: str
    name: str
    """Empty in a table without columns."""
    paper: Paper
    entry: TableEntry
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics of the paper's numbers."""
        return self.entry.metrics

    @property
    def key(self) -> str:
        """Return the column's name in `verified`."""
        return f"{self.table} {self.name}".strip()

    @property
    def upload(self) -> int:
        """Return the parameters that a client of the paper's method uploads per round."""
        column = self.entry.columns.get(self.name, ColumnEntry())
        return column.upload or self.entry.upload

    def label(self, row: Row) -> str:
        """Return the name of a row, in a table of all columns."""
        if self.name:
            return f"{row.words()} [{self.name}]"
        return row.words()


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as they are typed on the command line."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            if not value:
                name = f"no_{name}"
            words.append(flag(name))
        else:
            words += [flag(name), str(value)]
    return words


# ---- reading ---------------------------------------------------------------------------


def find_columns(folder: str | Path, system: str, table: str) -> list[Column]:
    """Read the columns of a table.

    Raises:
      InputError: for a folder without papers, an unknown system or table, or a mistake
        in the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"experiments: no folder {str(folder)!r}; without the option, the package's own files are read"
        )
    # other YAML files may lie in the folder
    papers = {path.stem: path for path in sorted(folder.glob("*.yaml")) if MARK in _text(path)}
    if not papers:
        raise InputError(f"experiments: no file in {str(folder)!r} has a paper's tables, 'tables: ...'")
    path = papers[choose("system", system, papers)]
    paper = parse_paper(str(path), config.load_yaml(path))
    return columns(str(path), paper, choose("table", table, paper.tables))


def _text(path: Path) -> str:
    return read_user_text("experiments", path, config.YAML_BYTES)


def parse_paper(path: str, values: Mapping[str, Any]) -> Paper:
    """Read a paper's file from its content.

    Raises:
      InputError: one line with the file, the place in it, and what is wrong.
    """
    paper = typed.read_typed(Paper, values, path)
    if not paper.seeds:
        raise InputError(f"{path}: seeds: none given; give the paper's, such as [2023, 2024, 2025]")
    # what a program writes must not move what people wrote
    if list(values)[-1] != "verified":
        raise InputError(f"{path}: verified: it must be the last key, because a program writes it")
    rows = [row.method for table in paper.tables.values() for row in table.rows]
    for name in (paper.method, *rows):
        check_no_code(name, path, "a paper's table names methods of the package")
    # verified columns must exist
    keys = [column.key for name in paper.tables for column in columns(path, paper, name)]
    for key in paper.verified:
        choose(f"{path}: verified", key, keys)
    return paper


def columns(path: str, paper: Paper, table: str) -> list[Column]:
    """Return the columns of a table with their rows.

    Raises:
      InputError: for numbers that do not fit metrics and columns, or for two equal rows.
    """
    entry = _complete(path, paper, table)
    table_columns = []
    for name, column in (entry.columns or {"": ColumnEntry()}).items():
        rows = tuple(
            _row(row, entry, name, f"{path}: tables.{table}.rows[{i}]") for i, row in enumerate(entry.rows)
        )
        # two equal rows would be one run with two numbers
        if len({row.words() for row in rows}) < len(rows):
            raise InputError(f"{path}: tables.{table}.rows: two rows have the same method and options")
        seeds = tuple(column.seeds or paper.seeds)
        # later settings win: base, table, column
        settings = {**paper.base, **entry.settings, **column.settings, "seed": seeds[0]}
        system = Path(path).stem
        table_columns.append(Column(path, system, table, name, paper, entry, rows, seeds, settings))
    return table_columns


def _complete(path: str, paper: Paper, table: str) -> TableEntry:
    """Return a table with what `of` takes from another one.

    Raises:
      InputError: for a table without rows, or one of a table that is itself of another.
    """
    entry = paper.tables[table]
    if entry.of is None:
        # a figure of the same runs repeats nothing
        if not (entry.rows and entry.metrics and entry.upload):
            raise InputError(
                f"{path}: tables.{table}: give rows, metrics and upload, or inherit them with of: TABLE"
            )
        return entry
    other = paper.tables[choose(f"{path}: tables.{table}.of", entry.of, paper.tables)]
    repeated = [name for name in ("rows", "columns", "metrics", "upload") if getattr(entry, name)]
    # an inherited table has no parts of its own
    if repeated or other.of:
        raise InputError(
            f"{path}: tables.{table}.{(*repeated, 'of')[0]}: inherited from {entry.of!r}; remove it"
        )
    return dataclasses.replace(
        other,
        title=entry.title,
        source=entry.source,
        settings={**other.settings, **entry.settings},
        claims=entry.claims,
        notes=[*other.notes, *entry.notes],
        figure=entry.figure,
    )


def _row(entry: RowEntry, table: TableEntry, column: str, where: str) -> Row:
    numbers = _of_column(entry.numbers, table, column, f"{where}.numbers")
    curve = _of_column(entry.curve, table, column, f"{where}.curve")
    if numbers is None:
        # a row without the paper's numbers is ours alone
        numbers = [None] * len(table.metrics)
    place = ".".join(filter(None, [f"{where}.numbers", column]))
    if not isinstance(numbers, list) or len(numbers) != len(table.metrics):
        raise InputError(f"{place}: {numbers!r} does not list a number for each of {table.metrics}")
    accuracies = typed.converted(list[float | None], curve or [], f"{where}.curve")
    parsed = tuple(_number(number, place) for number in numbers)
    return Row(entry.method, entry.options, parsed, tuple(accuracies))


def _of_column(values: Any, table: TableEntry, column: str, where: str) -> Any:
    """Return this column's part of a mapping by column; without columns all values."""
    if values is None or not column:
        return values
    by_column = typed.converted(dict[str, list], values, where)
    for name in by_column:
        choose(where, name, table.columns)
    return by_column.get(column)


def _number(value: object, where: str) -> Number | None:
    if value is None:
        return None
    # a mean without a deviation
    if not isinstance(value, list) or len(value) != 2:
        value = [value, None]
    mean, deviation = value
    if deviation is not None:
        deviation = typed.converted(float, deviation, where)
    return Number(typed.converted(float, mean, where), deviation)


# ---- writing ---------------------------------------------------------------------------


def write_verified(path: str | Path, verdicts: Mapping[str, Verified]) -> None:
    """Write the status of columns into the last part of a file."""
    path = Path(path)
    unchanged = _text(path).partition(VERIFIED)[0]
    previous = parse_paper(str(path), config.load_yaml(path)).verified
    merged = {key: dataclasses.asdict(verdict) for key, verdict in {**previous, **verdicts}.items()}
    # the comments and the order of the rest are the author's, so only the last key is
    # written anew
    write_text(path, f"{unchanged}\n{yaml.safe_dump({'verified': merged}, sort_keys=False, width=110)}")
