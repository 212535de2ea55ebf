"""Data that stay on the host: windows of examples that are copied to the device while it computes."""

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
    """Data for which the device has no room.

    The examples of the coming steps are copied to the device in windows (at least those of one step), each
    device of a mesh with its own. Two windows are there at a time: the device works on one while the next is
    copied.
    """

    tree: PyTree  # numpy arrays in memory or mapped from files, an example per row
    window: int  # the most examples of a window
    overlap: bool = True  # False: copy only when the device is idle, which is for measuring

    def take(
        self, indices: Int[np.ndarray, " n"], mesh: AnyMesh | None = None, parted: bool = False
    ) -> PyTree:
        """These examples: on the device, or on every device of a mesh.

        Args:
          indices: of the examples.
          mesh: of devices; None: the default device alone.
          parted: each device gets its part, and a process reads those of its own devices alone.
        """
        if mesh is None:
            return jax.device_put(jax.tree.map(lambda array: np.asarray(array[indices]), self.tree))
        spec = split() if parted else WHOLE
        return jax.tree.map(lambda array: put_rows(array, indices, mesh, spec), self.tree)


def ready(data: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Data as devices read them: copied to each device, except a `Host`, which is read in windows."""
    return data if mesh is None or isinstance(data, Host) else put(data, mesh)


def whole(data: PyTree | Host) -> PyTree:
    """The arrays of all examples, on the host or the device."""
    return data.tree if isinstance(data, Host) else data


def over_windows(
    step: Callable[[Carry, Item, Loaded], Carry],
    carry: Carry,
    items: Sequence[Item],
    load: Callable[[Item], Loaded],
    overlap: bool = True,
) -> Carry:
    """carry = step(carry, item, load(item)) over all items; a thread loads the next meanwhile.

    Args:
      step: dispatches the device's work and returns at once.
      carry: the value that goes from step to step.
      items: what to load, in order.
      load: reads an item's window and copies it to the device.
      overlap: False loads an item after the step before it has ended.
    """
    if not items:
        return carry
    with ThreadPoolExecutor(1) as loader:
        coming = loader.submit(load, items[0])
        for position, item in enumerate(items):
            window = coming.result()
            # the step before has ended and its window is free: never more than two
            jax.block_until_ready(carry)
            if not overlap:
                carry = jax.block_until_ready(step(carry, item, window))
            # before the step, whose dispatch a backend may do in its caller's time
            if position + 1 < len(items):
                coming = loader.submit(load, items[position + 1])
            if overlap:
                carry = step(carry, item, window)
    return carry
