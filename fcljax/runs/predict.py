"""Predictions and features over a whole split, in few compiled calls."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fcljax.data.store import Split
from fcljax.data.streaming import Host, over_windows, whole
from fcljax.mesh import WHOLE, AnyMesh, by_device, device_count, jit, on_each, put
from fcljax.mesh import split as parted
from fcljax.types import Batch, PyTree, RoundContext

# most batches per call of features, so that progress is shown in between
BATCHES_PER_CALL = 16
BYTES_PER_CALL = 2**27  # bytes of images on each device, unless two batches have more

# on_progress(images): called with the number of images that have been added
OnProgress = Callable[[int], None]


class Predicted(NamedTuple):
    """Predictions for n images.

    An image whose logits have no softmax, because one is NaN or +inf, has the class -1
    and the confidence NaN.
    """

    label: Int[np.ndarray, " n"]
    """The predicted class."""
    confidence: Float[np.ndarray, " n"]
    """Its probability under the softmax of all logits."""
    label_in_task: Int[np.ndarray, " n"]
    """The predicted class among those of the image's task (Task-IL)."""


class Predictor(NamedTuple):
    """Predicts classes of images. Made by `make_predict`."""

    loops: "_Loops"
    capacity: int

    def __call__(
        self,
        round_context: RoundContext,
        model: tuple,
        split: Split | Host,
        index: np.ndarray,
        task_of: np.ndarray,
    ) -> Predicted:
        """Predict the images of an index, in its order.

        Args:
          round_context: as `predict` takes it.
          model: what `predict` takes between the context and the batch.
          split: the images.
          index: [N], of the images.
          task_of: [C], the task of each class, for Task-IL predictions.
        """
        if not len(index):
            return Predicted(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
        return Predicted(*self.loops.over((round_context, model, task_of), split, index, self.capacity))

    @property
    def function(self) -> Callable:
        """Return the compiled function of a call: ((round_context, model, task_of),
        split, index [N], batches)."""
        return self.loops.resident

    @property
    def steps(self) -> int:
        """Return the steps of a call, each with a batch for each device."""
        return self.loops.steps(self.capacity)


def make_predict(
    predict: Callable,
    read: Callable,
    batch_size: int,
    capacity: int,
    mesh: AnyMesh | None = None,
) -> Predictor:
    """Make a loop over images that predicts their classes, compiled once.

    Args:
      predict: (round_context, *model, batch) -> logits, as in the method protocol. Labels
        in the batch are 0.
      read: (split, index [B]) -> network input.
      batch_size: images per step of a device.
      capacity: the most images of a call. Fewer cost less, and need no other trace.
      mesh: the devices that share the steps; None: the first one takes them all.
    """

    def loop(
        arguments: tuple,
        split: Split,
        index: Array,
        batches: Array,
    ) -> tuple[Array, Array, Array]:
        round_context, model, task_of = arguments

        def step(i, results):
            batch_index = jax.lax.dynamic_slice(index, (i * batch_size,), (batch_size,))
            # padding (-1) reads the first image, and its result is cut off
            row = jnp.maximum(batch_index, 0)
            query = None
            if split.query is not None:
                query = split.query[row]
            # a method must not see the labels of test images
            label = jnp.zeros_like(batch_index)
            batch = Batch(read(split, row), label, batch_index >= 0, batch_index, query)
            # bfloat16 has 8 bits of precision: probabilities of different logits would
            # be equal
            logits = predict(round_context, *model, batch).astype(jnp.float32)
            in_task = task_of == task_of[split.label[row]][:, None]
            confidence = jnp.max(jax.nn.softmax(logits), axis=-1)

            def predicted_label(logits: Array) -> Array:
                # argmax takes NaN for the largest value, and would predict that class
                return jnp.where(jnp.isnan(confidence), -1, jnp.argmax(logits, -1)).astype(jnp.int32)

            def write(all_images: Array, of_batch: Array) -> Array:
                return jax.lax.dynamic_update_slice(all_images, of_batch, (i * batch_size,))

            # -inf, not a large negative number: logits may be lower than that
            label_in_task = jnp.where(in_task, logits, -jnp.inf)
            of_batch = (predicted_label(logits), confidence, predicted_label(label_in_task))
            return jax.tree.map(write, results, of_batch)

        no_labels = jnp.zeros(len(index), jnp.int32)
        no_confidence = jnp.zeros(len(index))
        return jax.lax.fori_loop(0, batches, step, (no_labels, no_confidence, no_labels))

    return Predictor(_Loops.of(loop, batch_size, mesh), capacity)


def make_features(
    features: Callable,
    read: Callable,
    batch_size: int,
    on_progress: OnProgress = lambda images: None,
    mesh: AnyMesh | None = None,
) -> Callable[..., Float[Array, "n ..."] | np.ndarray]:
    """Return compute(frozen, split, index) -> features of these images, by default of
    all.

    They are features under the clean view, on the device, or in numpy for a `Host`.

    Args:
      features: (frozen, image [B, S, S, 3]) -> [B, ...].
      read: (split, index [B]) -> network input.
      batch_size: images per step of a device.
      on_progress: called with the number of images that have been added.
      mesh: as in `make_predict`.
    """

    # jit, so that it is traced once, for the shape and for the step
    @jax.jit
    def of_batch(frozen: PyTree, split: Split, index: Array) -> Array:
        return features(frozen, read(split, index))

    def loop(frozen: PyTree, split: Split, index: Array, batches: Array) -> Array:
        shape = jax.eval_shape(of_batch, frozen, split, index[:batch_size])

        def step(i, results):
            batch_index = jax.lax.dynamic_slice(index, (i * batch_size,), (batch_size,))
            batch_features = of_batch(frozen, split, jnp.maximum(batch_index, 0))
            return jax.lax.dynamic_update_slice_in_dim(results, batch_features, i * batch_size, 0)

        return jax.lax.fori_loop(0, batches, step, jnp.zeros((len(index), *shape.shape[1:]), shape.dtype))

    def compute(
        frozen: PyTree,
        split: Split | Host,
        index: np.ndarray | None = None,
    ) -> Array | np.ndarray:
        stored = whole(split)
        if index is None:
            index = np.arange(len(stored.label))
        # large images get fewer batches a call: their window is copied to the device at
        # once
        batches = min(BATCHES_PER_CALL, BYTES_PER_CALL // (batch_size * stored.example_bytes))
        capacity = batches * batch_size * device_count(mesh)
        # Windows for any split: the loop then takes images of one shape, and one compile
        # serves training and test split.
        result = loops.over(frozen, split, index, capacity, on_progress, windows=True)
        if isinstance(split, Host):
            return result
        return jnp.asarray(result)

    loops = _Loops.of(loop, batch_size, mesh)
    return compute


class _Loops(NamedTuple):
    """A compiled loop (arguments, split, index [N], batches) -> results [N, ...] of
    each device's images.

    An index of -1 is padding.
    """

    resident: Callable  # reads images of a split that every device has
    window: Callable  # reads images of a device's own window
    take: Callable  # (split, index) -> the windows of a split that every device has
    batch_size: int
    mesh: AnyMesh | None

    @classmethod
    def of(cls, loop: Callable, batch_size: int, mesh: AnyMesh | None) -> "_Loops":
        """Compile the loop once for each kind of split. All devices get all results."""

        def compiled(images: PartitionSpec) -> Callable:
            return jit(on_each(loop, mesh, (WHOLE, images, parted(), WHOLE), parted()), mesh)

        def take(split: Split, index: Array) -> Split:
            return jax.tree.map(lambda x: x[index], split)

        return cls(compiled(WHOLE), compiled(parted()), jit(take, mesh, parted()), batch_size, mesh)

    def steps(self, capacity: int) -> int:
        """Return the steps of a call that takes so many images."""
        # At least two: XLA compiles a loop of one step differently, with other roundings.
        return max(2, -(-capacity // (device_count(self.mesh) * self.batch_size)))

    def over(
        self,
        arguments: PyTree,
        split: Split | Host,
        index: np.ndarray,
        capacity: int,
        on_progress: OnProgress = lambda images: None,
        windows: bool = False,
    ) -> PyTree:
        """Return the results of all images, at least one, in calls of at most `capacity`.

        A call has whole batches, of which the devices take turns. Calls of a `Host`, or
        with `windows` of any split, get a window of the images that each device reads,
        in order.
        """
        mesh = self.mesh
        batch_size = self.batch_size
        devices = device_count(self.mesh)
        steps = self.steps(capacity)
        if isinstance(split, Host):
            windows = True
            steps = min(steps, max(2, split.window // batch_size))
        width = steps * devices * batch_size
        order = by_device(steps, devices, batch_size)
        parts = [index[start : start + width].astype(np.int32) for start in range(0, len(index), width)]
        # padded to whole batches, so that every call has the same shape
        padded = [np.pad(part, (0, width - len(part)), constant_values=-1)[order] for part in parts]
        place_in_window = np.tile(np.arange(steps * batch_size, dtype=np.int32), devices)
        if mesh is not None:
            arguments = put(arguments, mesh)

        def step(results: list, i: int, window: Split) -> list:
            # data, not a shape: the last call stops early without another compile
            batches = np.int32(-(-len(parts[i]) // (devices * batch_size)))
            # jax dispatches calls without waiting: all windows would be on the device
            # at once
            jax.block_until_ready(results)
            if results:
                on_progress(len(parts[i - 1]))
            function = self.resident
            call_index = padded[i]
            if windows:
                function = self.window
                call_index = np.where(call_index < 0, -1, place_in_window)
            return [*results, function(arguments, window, put(call_index, mesh, parted()), batches)]

        def load(i: int) -> Split:
            rows = np.maximum(padded[i], 0)
            if isinstance(split, Host):
                return split.take(rows, mesh, parted=True)
            if windows:
                return self.take(split, rows)
            return split

        overlap = not isinstance(split, Host) or split.overlap
        results = over_windows(step, [], range(len(parts)), load, overlap)
        # results come device by device; undo the order in which they were dealt
        original_order = np.argsort(order)

        def join(*results: np.ndarray) -> np.ndarray:
            in_order = [result[original_order] for result in results]
            return np.concatenate(in_order)[: len(index)]

        # one transfer at the end, instead of one for each call
        result = jax.tree.map(join, *jax.device_get(results))
        on_progress(len(parts[-1]))
        return result
