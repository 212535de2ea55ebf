"""Stream data from the host: windows of examples are copied to the device while it
computes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Int

from fcljax.mesh import WHOLE, AnyMesh, put, put_rows, split
from fcljax.types import PyTree

Carry = TypeVar("Carry")
Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


class Host(NamedTuple):
    """Data that do not fit on the device.

    The examples of the next steps are copied to the device in windows of at least one
    step; each device of a mesh has other windows. Two exist at a time: the device works
    on one while the next is copied.
    """

    tree: PyTree  # numpy arrays in memory or mapped from files, an example per row
    window: int  # most examples of a window
    # False: copy only when the device is idle, which is for measuring
    overlap: bool = True

    def take(
        self,
        indices: Int[np.ndarray, " n"],
        mesh: AnyMesh | None = None,
        parted: bool = False,
    ) -> PyTree:
        """Copy these examples to the device, or to every device of a mesh.

        Args:
          indices: of the examples.
          mesh: of devices; None: the default device alone.
          parted: each device gets its part, and a process reads only those of its devices.
        """
        # indexing copies rows of a mapped array from the disk, which is what takes the
        # time
        if mesh is None:
            return jax.device_put(jax.tree.map(lambda array: np.asarray(array[indices]), self.tree))
        spec = WHOLE
        if parted:
            spec = split()
        return jax.tree.map(lambda array: put_rows(array, indices, mesh, spec), self.tree)


def ready(data: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Copy data to all devices of a mesh, except a `Host`, which is read in windows."""
    if mesh is None or isinstance(data, Host):
        return data
    return put(data, mesh)


def whole(data: PyTree | Host) -> PyTree:
    """Return the arrays of all examples, on the host or the device."""
    if isinstance(data, Host):
        return data.tree
    return data


def over_windows(
    step: Callable[[Carry, Item, Loaded], Carry],
    carry: Carry,
    items: Sequence[Item],
    load: Callable[[Item], Loaded],
    overlap: bool = True,
) -> Carry:
    """Fold carry = step(carry, item, load(item)); a thread loads the next item.

    Args:
      step: dispatches the device's work and returns at once.
      carry: the value that goes from step to step.
      items: what to load, in order.
      load: reads an item's window and copies it to the device.
      overlap: False loads an item when the previous step has ended.
    """
    if not items:
        return carry
    if len(items) == 1:
        # Nothing is left to load during the step. To start a thread for each of
        # thousands of clients, which are evaluated one after the other, takes as long
        # as their predictions.
        window = load(items[0])
        jax.block_until_ready(carry)
        carry = step(carry, items[0], window)
        if not overlap:
            carry = jax.block_until_ready(carry)
        return carry
    # one thread, because windows must come in order, and two of them fit on the device
    with ThreadPoolExecutor(1) as loader:
        next_window = loader.submit(load, items[0])
        for position, item in enumerate(items):
            window = next_window.result()
            # the previous step's window is free only when that step has ended: without
            # this line a third window could be loaded
            jax.block_until_ready(carry)
            if not overlap:
                carry = jax.block_until_ready(step(carry, item, window))
            # before the step, because some backends block their caller while they
            # dispatch
            if position + 1 < len(items):
                next_window = loader.submit(load, items[position + 1])
            if overlap:
                carry = step(carry, item, window)
    return carry
