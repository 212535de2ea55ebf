"""A split of a data set as the compiled functions read it, and which of a client's rows belong to a task."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Int32, Int64, UInt8

from fcljax.types import Task


class Split(NamedTuple):
    """One split, on the device or (numpy) on the host. Labels are positions in the class order (`relabel`).

    `size` holds the height and width that images had before they were squeezed into a square
    (`augment.Geometry`); None: they are square. `query` holds the frozen backbone's features of every image
    under the clean view, where they have been cached.
    """

    image: UInt8[Array | np.ndarray, "N H W 3"]
    label: Int[Array | np.ndarray, " N"]
    size: Int[Array | np.ndarray, "N 2"] | None = None
    query: Float[Array | np.ndarray, "N D"] | None = None


class ClientRows(NamedTuple):
    """Rows of every client as CSR: client k holds rows[offset[k]:offset[k + 1]]."""

    rows: Int32[np.ndarray, " rows"]
    offset: Int64[np.ndarray, " K+1"]


def client_rows(
    parts: Sequence[Int[np.ndarray, " _"]], labels: Int[np.ndarray, " N"], task: Task
) -> ClientRows:
    """The rows of each client whose class belongs to the task; clients and their rows keep their order.

    Args:
      parts: rows of each client over all tasks (`partition.dirichlet`, `partition.iid`).
      labels: positions in the class order, one per row of the store.
      task: whose `current` classes count.
    """
    rows = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    wanted = np.asarray(task.current)[labels[rows]]
    count = np.bincount(owner[wanted], minlength=len(parts))
    return ClientRows(rows[wanted], np.concatenate([[0], np.cumsum(count)]).astype(np.int64))


def merge(tasks: Sequence[ClientRows]) -> ClientRows:
    """The rows of each client over several tasks, as those of one."""
    own = [np.split(held.rows, held.offset[1:-1]) for held in tasks]
    rows = [np.concatenate(mine) for mine in zip(*own, strict=True)]
    return ClientRows(
        np.concatenate(rows), np.concatenate([[0], np.cumsum([len(mine) for mine in rows])]).astype(np.int64)
    )
