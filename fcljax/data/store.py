"""Images in memory, and which of a client's rows belong to a task. Host-side numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt8

from fcljax.types import Task


class Store(NamedTuple):
    """All rows of one split. Labels are positions in the class order (`tasks.relabel`)."""

    image: UInt8[np.ndarray, "N H W 3"]
    label: Int32[np.ndarray, " N"]


class ClientRows(NamedTuple):
    """Rows of every client as CSR: client k holds rows[offset[k]:offset[k + 1]]."""

    rows: Int32[np.ndarray, " rows"]
    offset: Int64[np.ndarray, " K+1"]


def make_store(image: UInt8[np.ndarray, "N H W 3"], label: Int[np.ndarray, " N"]) -> Store:
    """A store of these arrays; the images are not copied."""
    return Store(image, label.astype(np.int32))


def client_rows(parts: Sequence[Int[np.ndarray, " _"]], labels: Int[np.ndarray, " N"], task: Task) -> ClientRows:
    """The rows of each client whose class belongs to the task, clients in order and rows in the order of the partition.

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
