"""Read tables that a user writes as text with a header (CSV).

Excel, R and pandas write them differently: with a byte-order mark, quoted headers,
semicolons or tabs between the values, and the line ends of Windows or of old Macs.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fcljax.errors import InputError, nearest

SEPARATORS = ",;\t"
MOST_CHARACTERS = 4096  # of one value, as of a path


class TextTable(NamedTuple):
    """The rows of a table, without blank ones."""

    columns: dict[str, list[str]]
    """Name in lower case -> the value of each row, stripped."""
    lines: list[int]
    """Line of the file in which each row ends, counted from 1."""


def read_header(where: str, text: str) -> list[str]:
    """Return the names of the columns, in lower case; [] for an empty text.

    Args:
      where: field and file, for messages.
      text: of the whole file.

    Raises:
      InputError: for a first line that is no CSV.
    """
    for _, values in read_rows(where, text):
        return [name.lower() for name in values]
    return []


def read_table(where: str, text: str, known: Sequence[str]) -> TextTable:
    """Read the rows of a table that may have the `known` columns only.

    Args:
      where: field and file, for messages.
      text: of the whole file.
      known: names of columns, in lower case; columns may be missing.

    Raises:
      InputError: naming the file and the line, for an unknown or repeated column, another
        number of values than of columns, or text that is no CSV.
    """
    header = read_header(where, text)
    for position, name in enumerate(header):
        if name not in known:
            raise InputError(f"{where}: unknown column {name!r}; {_hint(name, position, known)}")
        if name in header[:position]:
            raise InputError(f"{where}: the column {name!r} appears twice; leave out one of them")
    columns: dict[str, list[str]] = {name: [] for name in header}
    lines: list[int] = []
    rows = read_rows(where, text)
    next(rows, None)
    for line, values in rows:
        if len(values) != len(header):
            raise InputError(f"{where}, line {line}: {len(values)} values for {len(header)} columns")
        for name, value in zip(header, values, strict=True):
            columns[name].append(value)
        lines.append(line)
    return TextTable(columns, lines)


def _hint(name: str, position: int, known: Sequence[str]) -> str:
    """Return advice on an unknown column."""
    if not name and position == 0:
        return "it numbers the rows: write the file without it (pandas: index=False; R: row.names=FALSE)"
    return nearest(name, known)


def read_rows(where: str, text: str, separators: str = SEPARATORS) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the values of each row that is not blank, the header first.

    Args:
      where: field and file, for messages.
      text: of the whole file.
      separators: the first one that is in the first row separates values; several blanks
        count as one.

    Raises:
      InputError: naming a line that is no CSV.
    """
    first_row = next((line for line in io.StringIO(text, newline=None) if line.strip()), "")
    separator = next((mark for mark in separators if mark in first_row.strip()), separators[0])
    # newline=None reads the line ends of every system
    rows = csv.reader(
        io.StringIO(text, newline=None), delimiter=separator, skipinitialspace=True, strict=True
    )
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise InputError(f"{where}, line {rows.line_num}: it is not CSV: {error}") from None
        if row is None:
            return
        values = [value.strip() for value in row]
        # several blanks align columns
        if separator == " ":
            values = [value for value in values if value]
        if any(values):
            for value in values:
                _check_value(f"{where}, line {rows.line_num}", value)
            yield rows.line_num, values


def _check_value(where: str, value: str) -> None:
    """Check that a value is one cell, without a forgotten quotation mark."""
    if len(value) > MOST_CHARACTERS:
        raise InputError(
            f"{where}: a value of {len(value):,} characters, {value[:40]!r}...; at most {MOST_CHARACTERS:,}"
        )
    if "\n" in value or "\0" in value:
        raise InputError(f"{where}: the value {value!r} is not of one line; is a quotation mark missing?")
