"""Client partitions of the user's own: who has which training example.

A partition is a file (`file:who.csv`), a column that the data set has (`column:NAME`), or in Python an array
of owners, which becomes the column OWNER of the data set.
"""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.dataset import Dataset, image_names
from fcljax.errors import InputError, nearest
from fcljax.files import read_text

OWNER = "owner"  # the column that an array in memory becomes
CSV_BYTES = 1 << 28
NOBODY = ""


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
    names = read_owners(rest, dataset) if kind == "file" else _column(rest, dataset)
    named = np.unique(names[names != NOBODY])
    # numbers in their own order, as a reader expects them
    order = sorted(
        named.tolist(), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
    )
    if not order:
        raise InputError(f"partition: {partition!r} gives no example to any client")
    number = {name: k for k, name in enumerate(order)} | {NOBODY: -1}
    return Owners(np.array([number[name] for name in names.tolist()], np.int32), tuple(order))


def owners_csv(dataset: Dataset, partition: str) -> str:
    """The owners as a file for `file:PATH`; what was held out belongs to nobody."""
    owners = find_owners(dataset, partition)
    kept = np.arange(len(owners.client)) if dataset.kept is None else dataset.kept
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["example", "client"])
    lines.writerows((i, owners.names[k]) for i, k in zip(kept, owners.client, strict=True) if k >= 0)
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


def _column(name: str, dataset: Dataset) -> np.ndarray:
    if name not in dataset.columns:
        there = nearest(name, dataset.columns) if dataset.columns else f"{dataset.name!r} has none"
        raise InputError(f"partition: no column {name!r} of the training examples; {there}")
    return dataset.columns[name].astype(str)


# ---- files -------------------------------------------------------------------------------------------------


def read_owners(path: str, dataset: Dataset) -> np.ndarray:
    """Each training example's owner [N], of a file with comma-separated values whose first line names the
    columns: `client`, and `example` (the number of a training image, from 0) or `file` (its name).

    Raises:
      InputError: naming the file, the line and what does not fit.
    """
    lines = list(csv.reader(io.StringIO(_text(path)), skipinitialspace=True))
    head = [name.strip().lower() for name in lines[0]] if lines else []
    by = next((name for name in ("example", "file") if name in head), None)
    if by is None or "client" not in head:
        raise InputError(
            f"partition: {path!r}: its first line is {','.join(head)!r}; expected 'example,client' or "
            "'file,client'"
        )
    if "task" in head:
        raise InputError(
            f"partition: {path!r} has a column 'task', which nothing reads; leave it out, and set tasks with "
            "--class-order and --task-sizes"
        )
    count = len(dataset.y_train) if dataset.kept is None else dataset.whole
    find, found = _finder(by, path, dataset, count), np.full(count, NOBODY, object)
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        if len(line) != len(head):
            raise InputError(
                f"partition: {path!r}, line {number}: {len(line)} values for {len(head)} columns"
            )
        values = dict(zip(head, map(str.strip, line), strict=True))
        example = find(values[by], number)
        if found[example] != NOBODY:
            raise InputError(f"partition: {path!r}, line {number}: {by} {values[by]!r} has an owner already")
        if not values["client"]:
            raise InputError(f"partition: {path!r}, line {number}: no client; leave out examples of nobody")
        found[example] = values["client"]
    names = found.astype(str)
    return names if dataset.kept is None else names[dataset.kept]


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
