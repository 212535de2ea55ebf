"""Communication of a round, counted from the pytrees that are sent (arrays or
`jax.ShapeDtypeStruct`).

Scalars are the papers' unit: floating-point numbers only, since masks, indices and
counts are metadata. Bytes include everything. A buffer counts in full: a gathered [C,
D] of prototypes counts C of them, however many classes the client has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.types import Broadcast, PyTree, Upload

# an upload's weight travels as one float32, whatever its dtype in the program
WEIGHT_BYTES = 4


class Traffic(NamedTuple):
    """One client's communication in one round, in floating-point numbers and in bytes."""

    upload_scalars: int
    upload_bytes: int
    download_scalars: int
    download_bytes: int


def count_scalars(tree: PyTree) -> int:
    """Return the number of floating-point numbers in the leaves of `tree`."""
    leaves = map(_size_dtype, jax.tree.leaves(tree))
    return sum(size for size, dtype in leaves if jnp.issubdtype(dtype, jnp.floating))


def num_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves of `tree`."""
    return sum(size * dtype.itemsize for size, dtype in map(_size_dtype, jax.tree.leaves(tree)))


def traffic(upload: Upload | None, broadcast: Broadcast) -> Traffic:
    """Count what one client sends and receives in one round.

    Args:
      upload: one client's upload, leaves without a client axis: mean, sum and gather are
        counted; the weight adds 4 bytes. None: nothing is sent.
      broadcast: only `payload` is counted; `cached` is storage, see `extra_storage`.
    """
    upload_scalars = 0
    upload_bytes = 0
    if upload is not None:
        arrays = (upload.mean, upload.sum, upload.gather)
        upload_scalars = count_scalars(arrays)
        upload_bytes = num_bytes(arrays) + WEIGHT_BYTES
    payload = broadcast.payload
    return Traffic(upload_scalars, upload_bytes, count_scalars(payload), num_bytes(payload))


def extra_storage(broadcast: Broadcast) -> dict[str, int]:
    """Return {scalars, bytes} that a client stores besides the payload (FPPL's ESTG)."""
    return size(broadcast.cached)


def size(tree: PyTree) -> dict[str, int]:
    """Return {scalars, bytes} of a tree."""
    return {"scalars": count_scalars(tree), "bytes": num_bytes(tree)}


def total_traffic(traffic: Traffic, times: int) -> dict[str, int]:
    """Return the sum of several equal exchanges, by the field names of `Traffic`."""
    return {name: value * times for name, value in traffic._asdict().items()}


def _size_dtype(leaf: Any) -> tuple[int, Any]:
    if not hasattr(leaf, "dtype"):
        # a Python number: as jax would store it
        leaf = jax.eval_shape(jnp.asarray, leaf)
    return int(np.prod(leaf.shape, dtype=np.int64)), leaf.dtype
