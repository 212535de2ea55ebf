"""Predictions over a whole split in one compiled call, and the cache of un-prompted features that prompt
methods query."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from fcljax.data.store import Split
from fcljax.data.streaming import Host, over_windows, whole
from fcljax.mesh import WHOLE, by_device, jit, on_each, put, size
from fcljax.mesh import split as parted
from fcljax.types import Batch, PyTree, RoundContext

BATCHES_PER_CALL = 16  # of features on each device: between calls, progress is shown


class Predicted(NamedTuple):
    """The predicted class of each row, its probability under the softmax of all logits, and the class that is
    predicted where the task is told: among those of the row's own task. A row whose logits have no softmax,
    as one of them is NaN or +inf, has no predicted class: -1, and a NaN as confidence."""

    label: Int[np.ndarray, " n"]
    confidence: Float[np.ndarray, " n"]
    told: Int[np.ndarray, " n"]


def make_predict(
    predict: Callable, read: Callable, batch_size: int, capacity: int, mesh: Mesh | None = None
) -> Callable[..., Predicted]:
    """predictions(turn, model, split, rows, task_of [C]) -> Predicted, in the order of the rows.

    `model` is what `predict` takes between the turn and the batch; `split` may be a `Host`; `task_of` says
    which task each class belongs to, for predictions that are told a row's.

    Args:
      predict: (turn, *model, batch) -> logits, as in the method protocol. Labels in the batch are 0.
      read: (split, rows [B]) -> network input.
      batch_size: rows per step of a device.
      capacity: the most rows that will be asked for. Fewer cost less, but no other trace.
      mesh: the devices that share the steps; None: the first one takes them all.
    """

    def loop(read_by: tuple, split: Split, rows, batches):
        round_context, model, task_of = read_by

        def step(i, out):
            mine = jax.lax.dynamic_slice(rows, (i * batch_size,), (batch_size,))
            query = None if split.query is None else split.query[mine]
            nothing = jnp.zeros_like(mine)
            batch = Batch(read(split, mine), nothing, nothing == 0, mine, query)
            logits = predict(round_context, *model, batch).astype(jnp.float32)
            mates = task_of == task_of[split.label[mine]][:, None]
            confidence = jnp.max(jax.nn.softmax(logits), axis=-1)
            # argmax takes NaN for the largest, so that rows without a prediction would be of the first class
            label = lambda of: jnp.where(jnp.isnan(confidence), -1, jnp.argmax(of, -1)).astype(jnp.int32)
            found = label(logits), confidence, label(jnp.where(mates, logits, -jnp.inf))
            put = lambda all_, some: jax.lax.dynamic_update_slice(all_, some, (i * batch_size,))
            return jax.tree.map(put, out, found)

        none = jnp.zeros(len(rows), jnp.int32)
        return jax.lax.fori_loop(0, batches, step, (none, jnp.zeros(len(rows)), none))

    def predictions(
        round_context: RoundContext, model: tuple, split: Split | Host, rows: np.ndarray, task_of: np.ndarray
    ) -> Predicted:
        if not len(rows):
            return Predicted(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
        return Predicted(
            *_over_rows(loops, (round_context, model, task_of), split, rows, batch_size, capacity)
        )

    loops = _Loops.of(loop, mesh)
    return predictions


def make_features(
    features: Callable,
    read: Callable,
    batch_size: int,
    advance: Callable[[int], None] = lambda rows: None,
    mesh: Mesh | None = None,
) -> Callable[..., Float[Array, "n ..."] | np.ndarray]:
    """cache(frozen, split, rows) -> features of these images, by default of all, under the clean view, on the
    device, or in numpy for a `Host`.

    Args:
      features: (frozen, image [B, S, S, 3]) -> [B, ...].
      read: (split, rows [B]) -> network input.
      batch_size: rows per step of a device.
      advance: is told how many rows more are done.
      mesh: as in `make_predict`.
    """

    def loop(frozen, split: Split, rows, batches):
        shape = jax.eval_shape(lambda: features(frozen, read(split, rows[:batch_size])))

        def step(i, out):
            mine = jax.lax.dynamic_slice(rows, (i * batch_size,), (batch_size,))
            return jax.lax.dynamic_update_slice_in_dim(
                out, features(frozen, read(split, mine)), i * batch_size, 0
            )

        return jax.lax.fori_loop(0, batches, step, jnp.zeros((len(rows), *shape.shape[1:]), shape.dtype))

    def cache(frozen: PyTree, split: Split | Host, rows: np.ndarray | None = None) -> Array | np.ndarray:
        everything = np.arange(len(whole(split).label))
        rows = everything if rows is None else rows
        capacity = min(len(everything), BATCHES_PER_CALL * batch_size * size(mesh))
        found = _over_rows(loops, frozen, split, rows, batch_size, capacity, advance)
        return found if isinstance(split, Host) else jnp.asarray(found)

    loops = _Loops.of(loop, mesh)
    return cache


class _Loops(NamedTuple):
    """A compiled loop (read_by, split, rows [N], batches) -> results [N, ...] of a device's rows, for each
    device of a mesh: `resident` reads rows of a split that every device has, `window` of one of its own."""

    resident: Callable
    window: Callable
    mesh: Mesh | None

    @classmethod
    def of(cls, loop: Callable, mesh: Mesh | None) -> "_Loops":
        """The loop, compiled once for each. All devices get all results."""

        def compiled(images: PartitionSpec) -> Callable:
            return jit(on_each(loop, mesh, (WHOLE, images, parted(), WHOLE), parted()), mesh)

        return cls(compiled(WHOLE), compiled(parted()), mesh)


def _over_rows(
    loops: _Loops,
    read_by: PyTree,
    split: Split | Host,
    rows: np.ndarray,
    batch_size: int,
    capacity: int,
    advance: Callable = lambda rows: None,
) -> PyTree:
    """The results of all rows, of which there are some, at most `capacity` of them in one call; a call has
    whole batches, of which the devices take turns. Calls of a `Host` get a window of the rows that each
    device reads, in order."""
    # Two steps at the least: XLA compiles a loop over one step's rows another way, with other roundings.
    devices, host = size(loops.mesh), isinstance(split, Host)
    steps = max(2, -(-capacity // (devices * batch_size)))
    steps = min(steps, max(2, split.window // batch_size)) if isinstance(split, Host) else steps
    width, order = steps * devices * batch_size, by_device(steps, devices, batch_size)
    parts = [rows[start : start + width].astype(np.int32) for start in range(0, len(rows), width)]
    padded = [np.pad(part, (0, width - len(part)))[order] for part in parts]
    place = np.tile(np.arange(steps * batch_size, dtype=np.int32), devices)
    read_by = put(read_by, loops.mesh) if loops.mesh else read_by

    def step(done: list, i: int, window: Split) -> list:
        batches = np.int32(-(-len(parts[i]) // (devices * batch_size)))
        jax.block_until_ready(done)
        if done:
            advance(len(parts[i - 1]))
        function, mine = (loops.window, place) if host else (loops.resident, padded[i])
        return [*done, function(read_by, window, put(mine, loops.mesh, parted()), batches)]

    def load(i: int) -> Split:
        return split.take(padded[i], loops.mesh, parted=True) if isinstance(split, Host) else split

    found = over_windows(step, [], range(len(parts)), load, not isinstance(split, Host) or split.overlap)
    back = np.argsort(order)
    joined = lambda *some: np.concatenate([np.asarray(x)[back] for x in some])[: len(rows)]
    result = jax.tree.map(joined, *found)
    advance(len(parts[-1]))
    return result
