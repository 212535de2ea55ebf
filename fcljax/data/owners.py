"""Client partitions of the user's own: who has which training example.

A partition is a file (`file:who.csv`), a column that the data set has (`column:NAME`), or in Python an array
of owners, which becomes the column OWNER of the data set.
"""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.dataset import Dataset, image_names, natural_order
from fcljax.errors import InputError, nearest
from fcljax.files import read_text

OWNER = "owner"  # the column that an array in memory becomes
CSV_BYTES = 1 << 28
NOBODY = ""
NONE = -1  # the task of an example that belongs to none


class Owners(NamedTuple):
    """The owner of each training example."""

    client: Int[np.ndarray, " N"]
    """0..K-1, in the order of the sorted names; -1: nobody."""
    names: tuple[str, ...]
    """What the user calls the clients."""

    def parts(self) -> list[Int[np.ndarray, " _"]]:
        """The examples of each client."""
        return [np.flatnonzero(self.client == k) for k in range(len(self.names))]


def find_owners(dataset: Dataset, partition: str) -> Owners:
    """The owners that a partition `file:PATH` or `column:NAME` names.

    Raises:
      InputError: naming what does not fit the data set.
    """
    kind, _, rest = partition.partition(":")
    if kind == "file":
        names = read_owners(rest, dataset)
    else:
        problem = f"partition: no column {rest!r} of the training examples"
        names = find_column(rest, dataset.columns, problem, dataset)
    named = np.unique(names[names != NOBODY])
    order = natural_order(named)
    if not order:
        raise InputError(f"partition: {partition!r} gives no example to any client")
    number = {name: k for k, name in enumerate(order)} | {NOBODY: -1}
    return Owners(np.array([number[name] for name in names.tolist()], np.int32), tuple(order))


def owners_csv(dataset: Dataset, partition: str) -> str:
    """The owners, and tasks if they are given, as a file for `file:PATH`; what was held out belongs to
    nobody."""
    owners = find_owners(dataset, partition)
    kept = np.arange(len(owners.client)) if dataset.kept is None else dataset.kept
    columns = [kept.tolist(), [owners.names[k] for k in owners.client]]
    columns += [read_tasks(partition, dataset).tolist()] if says_tasks(partition) else []
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["example", "client", "task"][: len(columns)])
    lines.writerows(line for k, *line in zip(owners.client, *columns, strict=True) if k >= 0)
    return text.getvalue()


def with_owners(dataset: Dataset, owners: object) -> Dataset:
    """The data set with an owner for each training example, also of those that are held out.

    Raises:
      InputError: for an array of another length.
    """
    names, kept = np.asarray(owners), dataset.kept
    count = len(dataset.y_train) if kept is None else dataset.whole
    if names.shape != (count,) or names.dtype.kind not in "iuU":
        raise InputError(
            f"partition: owners are {names.dtype} of shape {list(names.shape)}; expected integers or text of "
            f"shape [{count}], one for each training example"
        )
    column = names if kept is None else names[kept]
    return dataset._replace(columns={**dataset.columns, OWNER: column})


def find_column(name: str, columns: Mapping[str, np.ndarray], problem: str, dataset: Dataset) -> np.ndarray:
    """A column as text.

    Raises:
      InputError: with the `problem`, if it is not there.
    """
    if name not in columns:
        there = nearest(name, columns) if columns else f"{dataset.name!r} has none"
        raise InputError(f"{problem}; {there}")
    return columns[name].astype(str)


# ---- files -------------------------------------------------------------------------------------------------


def read_owners(path: str, dataset: Dataset) -> np.ndarray:
    """Each training example's owner [N], of a file with comma-separated values whose first line names the
    columns: `client`, `example` (the number of a training image, from 0) or `file` (its name), and perhaps
    `task`.

    Raises:
      InputError: naming the file, the line and what does not fit.
    """
    return _read_file(path, dataset)["client"]


def says_tasks(partition: str) -> bool:
    """Whether a partition's file has a column `task`.

    Raises:
      InputError: for a file that cannot be read.
    """
    kind, _, path = partition.partition(":")
    head = _text(path).partition("\n")[0] if kind == "file" else ""
    return "task" in [name.strip().lower() for name in head.split(",")]


def read_tasks(partition: str, dataset: Dataset) -> Int[np.ndarray, " N"]:
    """The task of each training example that a partition's file gives, from 0 in the order of the names; -1
    for examples of nobody.

    Raises:
      InputError: as `read_owners`.
    """
    names = _read_file(partition.partition(":")[2], dataset)["task"]
    number = {name: task for task, name in enumerate(natural_order(names[names != NOBODY]))}
    return np.array([number.get(name, NONE) for name in names.tolist()], np.int32)


def _read_file(path: str, dataset: Dataset) -> dict[str, np.ndarray]:
    """The columns `client` and, if it is there, `task`, of each training example that is not held out."""
    lines = list(csv.reader(io.StringIO(_text(path)), skipinitialspace=True))
    head = [name.strip().lower() for name in lines[0]] if lines else []
    by = next((name for name in ("example", "file") if name in head), None)
    if by is None or "client" not in head:
        raise InputError(
            f"partition: {path!r}: its first line is {','.join(head)!r}; expected 'example,client' or "
            "'file,client', and perhaps ',task'"
        )
    count = len(dataset.y_train) if dataset.kept is None else dataset.whole
    wanted = [name for name in ("client", "task") if name in head]
    find, found = _finder(by, path, dataset, count), {name: np.full(count, NOBODY, object) for name in wanted}
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        where = f"partition: {path!r}, line {number}"
        if len(line) != len(head):
            raise InputError(f"{where}: {len(line)} values for {len(head)} columns")
        values = dict(zip(head, map(str.strip, line), strict=True))
        example = find(values[by], number)
        if found["client"][example] != NOBODY:
            raise InputError(f"{where}: {by} {values[by]!r} has an owner already")
        for name in wanted:
            if not values[name]:
                raise InputError(f"{where}: no {name}; leave out examples of nobody")
            found[name][example] = values[name]
    kept = slice(None) if dataset.kept is None else dataset.kept
    return {name: values.astype(str)[kept] for name, values in found.items()}


def _text(path: str) -> str:
    try:
        return read_text(path, CSV_BYTES)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"partition: cannot read {path!r}: {why}") from None


def _finder(by: str, path: str, dataset: Dataset, count: int) -> Callable[[str, int], int]:
    """find(value, line) -> the number of a training example."""
    if by == "example":

        def by_number(value: str, line: int) -> int:
            if not (value.isascii() and value.isdigit() and int(value) < count):
                raise InputError(
                    f"partition: {path!r}, line {line}: example {value!r}; {dataset.name} has training "
                    f"examples 0 to {count - 1}"
                )
            return int(value)

        return by_number
    names = image_names(dataset, "train")
    if names is None:
        raise InputError(
            f"partition: {path!r}: {dataset.name} has no file names; nearest: a column 'example' with "
            f"numbers from 0 to {count - 1}"
        )
    number = {name: i for i, name in enumerate(names)}
    short = {
        Path(name).name: i for i, name in enumerate(names)
    }  # the last one of a name, if it is not unique
    unique = len(short) == len(names)

    def by_name(value: str, line: int) -> int:
        if value in number:
            return number[value]
        if unique and value in short:
            return short[value]
        hint = f"nearest: {names[0]!r}" if unique else f"give the whole name, such as {names[0]!r}"
        raise InputError(f"partition: {path!r}, line {line}: no training image {value!r}; {hint}")

    return by_name
