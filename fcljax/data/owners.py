"""Read a user's client partition: the owner of each training example.

A partition is a file (`file:who.csv`), a column of the data set (`column:NAME`), or in
Python an array of owners, which becomes the column OWNER of the data set.
"""

import csv
import dataclasses
import io
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.dataset import Dataset, natural_order, row_numbers
from fcljax.data.partition_files import NOBODY, has_tasks, read_partition
from fcljax.errors import InputError, nearest
from fcljax.settings import Chosen

OWNER = "owner"  # the column that an array in memory becomes
NONE = -1  # the task of an example that belongs to no task


@dataclasses.dataclass(frozen=True)
class ByOwner:
    """The user says who has which example."""

    population: ClassVar[str] = "static"


class Owners(NamedTuple):
    """The owner of each training example."""

    client: Int[np.ndarray, " N"]
    """0..K-1, in the order of the sorted names; -1: no client."""
    names: tuple[str, ...]
    """The user's names of the clients."""

    def parts(self) -> list[Int[np.ndarray, " _"]]:
        """Return the examples of each client."""
        return [np.flatnonzero(self.client == k) for k in range(len(self.names))]


def find_owners(dataset: Dataset, partition: Chosen) -> Owners:
    """Return the owners in a partition `file:PATH` or `column:NAME`.

    Raises:
      InputError: for a partition that does not fit the data set.
    """
    kind, _, rest = str(partition).partition(":")
    if kind == "file":
        names = read_owners(rest, dataset)
    else:
        problem = f"partition: no column {rest!r} of the training examples"
        names = find_column(rest, dataset.columns, problem, dataset)
    owner_names = np.unique(names[names != NOBODY])
    sorted_names = natural_order(owner_names)
    if not sorted_names:
        raise InputError(f"partition: {partition!r} gives no example to any client")
    # ids in the order of the names: they do not depend on who comes first in the file
    number = {name: k for k, name in enumerate(sorted_names)} | {NOBODY: -1}
    return Owners(np.array([number[name] for name in names.tolist()], np.int32), tuple(sorted_names))


def owners_csv(dataset: Dataset, partition: Chosen) -> str:
    """Write the owners, and tasks if the partition has them, as a file for `file:PATH`.

    Held-out examples have no owner.
    """
    owners = find_owners(dataset, partition)
    # numbers of the whole data set, so that the file fits a run with another --holdout
    rows, _ = row_numbers(dataset)
    columns = [rows.tolist(), [owners.names[k] for k in owners.client]]
    if says_tasks(partition):
        columns.append(read_tasks(partition, dataset).tolist())
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["example", "client", "task"][: len(columns)])
    # examples of nobody have no line, which is what the reader expects of them
    lines.writerows(line for k, *line in zip(owners.client, *columns, strict=True) if k >= 0)
    return text.getvalue()


def with_owners(dataset: Dataset, owners: object) -> Dataset:
    """Add an owner for each training example, held-out ones included, to a data set.

    Raises:
      InputError: for an array of another length, or with negative numbers.
    """
    names = np.asarray(owners)
    # the user numbers the examples before some were held out or skipped
    rows, count = row_numbers(dataset)
    if names.shape != (count,) or names.dtype.kind not in "iuU":
        raise InputError(
            f"partition: owners are {names.dtype} of shape {list(names.shape)}; expected integers or text of "
            f"shape [{count}], one for each training example"
        )
    # many programs write -1 where nobody has an example
    if names.dtype.kind == "i" and names.size and names.min() < 0:
        example = int(np.argmax(names < 0))
        raise InputError(
            f"partition: the owner of example {example} is {names[example]}; expected numbers from 0, or "
            "text; to leave out examples, give a file: partition='file:PATH'"
        )
    return dataset._replace(columns={**dataset.columns, OWNER: names[rows]})


def find_column(
    name: str,
    columns: Mapping[str, np.ndarray],
    problem: str,
    dataset: Dataset,
) -> np.ndarray:
    """Return a column as text.

    Raises:
      InputError: with the `problem`, if it is missing.
    """
    if name not in columns:
        hint = nearest(name, columns) if columns else f"{dataset.name!r} has none"
        raise InputError(f"{problem}; {hint}")
    return columns[name].astype(str)


# ---- files -----------------------------------------------------------------------------


def read_owners(path: str, dataset: Dataset) -> np.ndarray:
    """Read each training example's owner [N] from a file in one of the forms of
    `partition_files`.

    Raises:
      InputError: naming the file, the position in it and the fault.
    """
    return read_partition(path, dataset).client


def says_tasks(partition: Chosen) -> bool:
    """Check whether a partition's file has a column `task`.

    Raises:
      InputError: for a file that cannot be read.
    """
    kind, _, path = str(partition).partition(":")
    # only a file can have a second column
    return kind == "file" and has_tasks(path)


def read_tasks(partition: Chosen, dataset: Dataset) -> Int[np.ndarray, " N"]:
    """Read the task of each training example from a partition's file.

    Tasks are numbered from 0 in the order of the names; -1: no task.

    Raises:
      InputError: as `read_owners`.
    """
    names = read_partition(str(partition).partition(":")[2], dataset).task
    assert names is not None
    # natural order: task 2 before task 10
    number = {name: task for task, name in enumerate(natural_order(names[names != NOBODY]))}
    return np.array([number.get(name, NONE) for name in names.tolist()], np.int32)
