"""Predictions over a whole split in one compiled call, and the cache of un-prompted features that prompt methods query."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fcljax.types import PyTree


class Split(NamedTuple):
    """One split on the device. `query` holds the frozen features of every image, where they have been cached."""

    image: Array  # uint8 [N, H, W, 3]
    label: Int[Array, " N"]
    query: Float[Array, "N D"] | None = None


def make_predict(predict: Callable, view: Callable, batch_size: int, capacity: int) -> Callable[..., Int[np.ndarray, " n"]]:
    """predictions(frozen, server, split, rows, task) -> predicted class of each row, in their order.

    Args:
      predict: (frozen, server, image, query, task) -> logits, as in the method protocol.
      view: uint8 images [B, H, W, 3] -> network input.
      batch_size: rows per step.
      capacity: the most rows that will be asked for. Fewer cost less, but no other trace.
    """
    padded = -(-capacity // batch_size) * batch_size

    @jax.jit
    def compiled(frozen, server, split: Split, rows, batches, task):
        def step(i, out):
            mine = jax.lax.dynamic_slice(rows, (i * batch_size,), (batch_size,))
            query = None if split.query is None else split.query[mine]
            logits = predict(frozen, server, view(split.image[mine]), query, task)
            return jax.lax.dynamic_update_slice(out, jnp.argmax(logits, -1).astype(jnp.int32), (i * batch_size,))

        return jax.lax.fori_loop(0, batches, step, jnp.zeros(padded, jnp.int32))

    def predictions(frozen: PyTree, server: PyTree, split: Split, rows: np.ndarray, task) -> np.ndarray:
        filled = np.pad(rows, (0, padded - len(rows))).astype(np.int32)
        return np.asarray(compiled(frozen, server, split, filled, np.int32(-(-len(rows) // batch_size)), task))[: len(rows)]

    return predictions


def cache_queries(query: Callable, view: Callable, frozen: PyTree, image: Array, batch_size: int) -> Float[Array, "N D"]:
    """Frozen features [N, D] of all images of a split under a deterministic view: exact, and computed once per run."""
    count = image.shape[0]
    batches = -(-count // batch_size)

    @jax.jit
    def compiled(frozen, image):
        rows = jnp.minimum(jnp.arange(batches * batch_size), count - 1).reshape(batches, batch_size)
        return jax.lax.map(lambda mine: query(frozen, view(image[mine])), rows)

    features = compiled(frozen, image)
    return features.reshape(batches * batch_size, -1)[:count]
