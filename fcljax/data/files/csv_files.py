"""Read CSV files with a label column, as `csv:FILE` or `csv:TRAIN,TEST`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.data.files.arrays import fifth_for_testing, rows_with_label, with_row_numbers
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.text_tables import read_rows
from fcljax.errors import InputError
from fcljax.files import in_home, read_user_text

LABELS = ("label", "class", "target", "y")
MOST_CATEGORIES = 1000  # different texts of a column; each becomes a column of numbers
MOST_BYTES = 1 << 30  # most bytes of a file


class _Table(NamedTuple):
    """A file's columns as text, without the label."""

    where: str
    columns: dict[str, np.ndarray]
    labels: np.ndarray
    lines: np.ndarray
    """Line of the file of each row."""
    numbers: np.ndarray
    """Number of each row among all rows of the file."""

    def rows(self, index: np.ndarray) -> "_Table":
        """Return these rows."""
        columns = {name: values[index] for name, values in self.columns.items()}
        return _Table(self.where, columns, self.labels[index], self.lines[index], self.numbers[index])


def csv_dataset(name: str, say: Callable[[str], None], skip_missing: bool = False) -> Dataset:
    """Read the data set `csv:FILE`, of which a fifth is for testing, or `csv:TRAIN,TEST`.

    Columns of numbers are features. A column with any text is one column for each of its
    values in the training table; its texts are kept as a column of the data set, for
    partitions.

    Args:
      name: of the data set.
      say: prints a note.
      skip_missing: leave out rows without a label.

    Raises:
      InputError: naming the file, the line and the column that do not fit.
    """
    paths = [in_home(path, "dataset") for path in name.removeprefix("csv:").split(",")]
    if len(paths) > 2:
        raise InputError(f"dataset: {name!r} names {len(paths)} files; expected csv:FILE or csv:TRAIN,TEST")
    tables = [_read(path) for path in paths]
    if len(tables) == 2 and set(tables[0].columns) != set(tables[1].columns):
        unlike = sorted(set(tables[0].columns) ^ set(tables[1].columns))
        raise InputError(f"{tables[1].where}: the column {unlike[0]!r} is in one of both tables only")
    num_rows = len(tables[0].lines)
    tables = [_with_labels(name, table, say, skip_missing) for table in tables]
    # by the training table alone: a value that only tests have could never be learned
    categories = _categories(tables[0])
    if len(tables) == 1:
        train_rows, test_rows, note = fifth_for_testing(tables[0].where, tables[0].labels)
        say(f"{name}: {note}")
        tables = [tables[0].rows(train_rows), tables[0].rows(test_rows)]
    train, test = tables
    arrays = (_numbers(train, categories), train.labels, _numbers(test, categories), test.labels)
    if categories:
        listed = ", ".join(f"{column} ({len(values)})" for column, values in categories.items())
        say(f"{name}: columns of text, one column for each value: {listed}")
    texts, texts_test = ({column: table.columns[column] for column in categories} for table in tables)
    dataset = dataset_of_any_arrays(arrays, name).dataset
    dataset = dataset._replace(columns=texts, columns_test=texts_test)
    return with_row_numbers(dataset, train.numbers, num_rows)


def _with_labels(name: str, table: _Table, say: Callable[[str], None], skip_missing: bool) -> _Table:
    """Return the rows that have a label.

    Raises:
      InputError: naming the line of one without, unless `skip_missing`.
    """

    def place(row: int) -> str:
        return f"{table.where}, line {table.lines[row]}"

    index, note = rows_with_label(table.labels, place, skip_missing)
    if not note:
        return table
    say(f"{name}: {note}")
    return table.rows(index)


def _read(path: Path) -> _Table:
    """Read a file's rows.

    Raises:
      InputError: for a file that is no table with a label column.
    """
    where = f"dataset: {str(path)!r}"
    text = read_user_text("dataset", path, MOST_BYTES)
    rows = list(read_rows(where, text))
    if len(rows) < 2:
        raise InputError(f"{where} has no rows below its header")
    (_, header), *rows = rows
    twice = next((name for i, name in enumerate(header) if name in header[:i]), None)
    if twice is not None:
        raise InputError(f"{where}: the column {twice!r} comes twice; leave out one of them")
    label = [name for name in header if name.lower() in LABELS]
    if len(label) != 1:
        named = f"the label columns {' and '.join(label)}" if label else f"no column {', '.join(LABELS)}"
        raise InputError(f"{where} has {named}; it has: {', '.join(header[:8])}; name one of them label")
    for line, values in rows:
        if len(values) != len(header):
            raise InputError(f"{where}, line {line}: {len(values)} values for {len(header)} columns")
        column = label[0]
        if "" in values:
            column = next((name for name, value in zip(header, values, strict=True) if not value), column)
        if column != label[0]:
            raise InputError(
                f"{where}, line {line}: the column {column!r} is empty; fill it in, or leave the row out"
            )
    cells = np.array([values for _, values in rows])
    columns = {name: cells[:, i] for i, name in enumerate(header)}
    labels = columns.pop(label[0])
    if not columns:
        raise InputError(f"{where} has only the column {label[0]!r}; add columns to learn from")
    lines = np.array([line for line, _ in rows])
    return _Table(where, columns, _as_integers(labels), lines, np.arange(len(lines)))


def _as_integers(labels: np.ndarray) -> np.ndarray:
    """Return labels as integers if all of them are, so that they are in the order of numbers; -1 for none."""
    try:
        return np.where(labels == "", "-1", labels).astype(np.int64)
    except ValueError:
        return labels


def _as_numbers(values: np.ndarray) -> Float32[np.ndarray, " N"] | None:
    try:
        return values.astype(np.float32)
    except ValueError:
        return None


def _categories(table: _Table) -> dict[str, np.ndarray]:
    """Return the sorted values of each column of text.

    Raises:
      InputError: for a column with too many values, such as a text for each row.
    """
    categories = {}
    for name, values in table.columns.items():
        if _as_numbers(values) is not None:
            continue
        # a name or an id is different in nearly every row, and nothing can be learned
        # from it
        unique = np.unique(values)
        if len(unique) > min(MOST_CATEGORIES, max(2, len(values) // 2)):
            raise InputError(
                f"{table.where}: the column {name!r} has {len(unique)} different texts in {len(values)} "
                f"rows, such as {str(unique[0])[:40]!r}; it is no category: leave it out"
            )
        categories[name] = unique
    return categories


def _numbers(table: _Table, categories: dict[str, np.ndarray]) -> Float32[np.ndarray, "N columns"]:
    """Return the rows as numbers, columns of text as one column for each value.

    Raises:
      InputError: for a value that training rows do not have, and for NaN.
    """
    columns = []
    for name, values in table.columns.items():
        if name in categories:
            columns.append((values[:, None] == categories[name]).astype(np.float32))
            unknown = np.flatnonzero(~columns[-1].any(1))
            problem = "which no training row has"
        else:
            numbers = _as_numbers(values)
            if numbers is None:
                numbers = np.array([_number(value) for value in values], np.float32)
            columns.append(numbers[:, None])
            unknown = np.flatnonzero(~np.isfinite(numbers))
            problem = "which is not a finite number"
        if len(unknown):
            row = unknown[0]
            raise InputError(
                f"{table.where}, line {table.lines[row]}: the column {name!r} has {str(values[row])[:40]!r}, "
                f"{problem}"
            )
    return np.concatenate(columns, axis=1)


def _number(text: str) -> float:
    """Return a number, NaN for other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
