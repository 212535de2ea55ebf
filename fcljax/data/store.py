"""Hold a split as compiled functions read it, and the examples of each client in a task."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Int32, Int64, PyTree

from fcljax.data.kinds import tree_bytes
from fcljax.data.partition import class_counts, split_at


class Split(NamedTuple):
    """One split, on the device or (numpy) on the host."""

    # arrays [N, ...] as they are stored; images are one, uint8 [N, H, W, 3]
    input: PyTree
    label: Int[Array | np.ndarray, " N"]  # positions in the class order (`relabel`)
    # height and width before images were squeezed into a square (`augment.Geometry`);
    # None: they are square
    size: Int[Array | np.ndarray, "N 2"] | None = None
    # cached features of the frozen backbone for all examples under the clean view
    query: Float[Array | np.ndarray, "N D"] | None = None

    @property
    def input_bytes(self) -> int:
        """Return the bytes of all inputs."""
        return tree_bytes(self.input)

    @property
    def example_bytes(self) -> int:
        """Return the bytes of an input."""
        return self.input_bytes // max(1, len(self.label))


class ClientIndices(NamedTuple):
    """The examples of all clients as CSR: client k has indices[offset[k]:offset[k + 1]]."""

    indices: Int32[np.ndarray, " examples"]
    offset: Int64[np.ndarray, " K+1"]

    @classmethod
    def of(cls, parts: Sequence[Int[np.ndarray, " _"]]) -> "ClientIndices":
        """Make it from the indices of each client."""
        offset = np.cumsum([0, *map(len, parts)]).astype(np.int64)
        return cls(np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32), offset)

    def by_client(self) -> list[Int32[np.ndarray, " _"]]:
        """Return the indices of each client."""
        return split_at(self.indices, np.diff(self.offset))

    def class_counts(self, label: Int[np.ndarray, " N"], classes: int) -> Int64[np.ndarray, "K C"]:
        """Count the examples of each class at each client."""
        return class_counts(label[self.indices], np.diff(self.offset), classes)


def client_indices(
    parts: Sequence[Int[np.ndarray, " _"]] | ClientIndices, task_of: Int[np.ndarray, " N"], task: int
) -> ClientIndices:
    """Select each client's examples of the task, in their order.

    Args:
      parts: indices of each client over all tasks (`partition.dirichlet`, `partition.iid`).
      task_of: the task of each example of the store.
      task: number of the task.
    """
    clients = parts if isinstance(parts, ClientIndices) else ClientIndices.of(parts)
    in_task = task_of[clients.indices] == task
    # ends[i] of the first i examples are in the task: the offsets among those that stay,
    # without a loop over clients
    ends = np.concatenate([[0], np.cumsum(in_task)])
    return ClientIndices(clients.indices[in_task], ends[clients.offset])


def merge(tasks: Sequence[ClientIndices]) -> ClientIndices:
    """Merge the examples of each client over several tasks."""
    return ClientIndices.of(
        [
            np.concatenate(client_parts)
            for client_parts in zip(*(task.by_client() for task in tasks), strict=True)
        ]
    )
