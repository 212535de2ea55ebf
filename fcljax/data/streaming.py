"""Data that stays on the host: windows of rows that are copied to the device while it computes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from fcljax.mesh import WHOLE, put, put_rows, split
from fcljax.types import PyTree

Carry = TypeVar("Carry")
Item = TypeVar("Item")
Window = TypeVar("Window")


class Host(NamedTuple):
    """Data for which the device has no room: numpy arrays in memory or mapped from files, one row per image.

    What the coming steps read is copied to the device in windows of at most `rows` rows (one step's at the
    least), a window of its own to each of several. Two of them are there at a time: the device works on one
    while the next is copied. Without `overlap` it waits, which is for measuring only.
    """

    tree: PyTree
    rows: int
    overlap: bool = True

    def take(self, rows: Int[np.ndarray, " n"], mesh: Mesh | None = None, parted: bool = False) -> PyTree:
        """These rows of every array: on the device, or on every device of a mesh. `parted`: each device gets
        its part of them, and a process reads those of its devices alone."""
        if mesh is None:
            return jax.device_put(jax.tree.map(lambda array: np.asarray(array[rows]), self.tree))
        spec = split() if parted else WHOLE
        return jax.tree.map(lambda array: put_rows(array, rows, mesh, spec), self.tree)


def ready(data: PyTree, mesh: Mesh | None) -> PyTree:
    """Data as the devices read it: on each of a mesh, but for a `Host`, of which they get windows."""
    return data if mesh is None or isinstance(data, Host) else put(data, mesh)


def whole(data: PyTree | Host) -> PyTree:
    """The arrays of all rows, wherever they lie."""
    return data.tree if isinstance(data, Host) else data


def over_windows(
    step: Callable[[Carry, Item, Window], Carry],
    carry: Carry,
    items: Sequence[Item],
    load: Callable[[Item], Window],
    overlap: bool = True,
) -> Carry:
    """carry = step(carry, item, load(item)) over all items; a thread loads the next meanwhile.

    Args:
      step: dispatches the device's work and returns at once.
      carry: what goes from step to step.
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
