"""The final model of a run: it predicts, and is saved in one file without code and data.

The file contains a program (StableHLO), which runs when the model predicts. It may
compute, allocate and take time as it likes. It may call no native code (`CUSTOM_CALLS`),
so that it reaches no files and no network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, PyTree, UInt8
from PIL import Image

from fcljax.archives import read_npz
from fcljax.config import RunConfig
from fcljax.data.augment import Preprocess
from fcljax.data.files.any_arrays import check_alike, checked_examples
from fcljax.data.files.arrays import as_array, checked_image, checked_images, sides
from fcljax.data.files.images import fit_to
from fcljax.data.geometry import Geometry
from fcljax.data.kinds import are_tokens, longest_text, take, tree_length, with_length
from fcljax.errors import InputError, reason
from fcljax.files import atomic, machine_memory
from fcljax.runs.build import NOTHING, Experiment, Supplied
from fcljax.runs.checkpoint import State
from fcljax.runs.inputs import clean_input
from fcljax.runs.loop import final_state
from fcljax.types import Batch, RoundContext

FORMAT = "fcljax-model-3"
WITHOUT_DIGEST = "fcljax-model-2"
WITHOUT_MASK = "fcljax-model-1"
PLATFORMS = ("cpu", "cuda", "tpu")
DIGEST = "sha256"
# Native code that a program may call: how arrays are placed, and JAX's random numbers on
# GPUs. Other calls could do whatever this process can, such as run Python.
CUSTOM_CALLS = {
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
    "cu_threefry2x32_ffi",
    "hip_threefry2x32_ffi",
}
_CUSTOM_CALL = re.compile(r'custom_call\s*@(?:"([^"]*)"|([\w$.-]+))')
_TRANSFER = re.compile(r"stablehlo\.(infeed|outfeed|send|recv)\b")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A trained model of all classes of a run."""

    logits: Callable[[list[Array], PyTree, Array], Array]
    """logits(arrays, stored [B, ...], mask [B] bool) -> [B, C]; images are stored as
    uint8 [B, H, W, 3]; B, H and W are `image`'s. `mask` is False for padding."""
    arrays: list[Array]
    """Its parameters and other arrays."""
    image: tuple[int, int, int]
    """B, H, W: images of a call, and their size; H and W are 0 for other data."""
    labels: np.ndarray
    """The label of each class, as the data have it; in the order of the logits."""
    geometry: Geometry | None = None
    """How the run brings images to one size; None: not known, so only images of H x W
    pixels are taken."""
    stored: PyTree = None
    """Shapes and types of one example as it is stored, for data that are no images."""

    def __repr__(self) -> str:
        """Return the model's sizes in one line, without its parameters."""
        _, height, width = self.image
        count = sum(array.size for array in self.arrays)
        examples = f"images of {height}x{width}"
        if self.stored is not None:
            examples = f"examples of {_shapes(self.stored)}"
        return f"Model({len(self.labels)} classes, {examples}, {count:,} parameters)"

    def predict(self, images: Any, preprocess: bool = False) -> np.ndarray:
        """Return the labels of examples.

        Args:
          images: [N, H, W, 3], uint8 or float in [0, 1]; a list may have arrays or images
            of Pillow. For data that are no images, examples as the run was given them.
          preprocess: whether images of any size, and lists of several sizes, are brought
            to the size of the run's images, as the run prepares those of its test set.

        Raises:
          InputError: for anything else.
        """
        return self.labels[np.argmax(self.scores(images, preprocess), axis=-1)]

    def scores(self, images: Any, preprocess: bool = False) -> Float[np.ndarray, "N C"]:
        """Return the logits of images, as `predict` takes them.

        Raises:
          InputError: as `predict`.
        """
        if self.stored is not None:
            x = self._checked_examples(images, preprocess)
        else:
            x = self._prepared(images) if preprocess else self._checked(images)
        size = self.image[0]
        count = tree_length(x)
        # in the run's own batch size, for which the program is compiled
        batches = [self._scores(take(x, slice(start, start + size))) for start in range(0, count, size)]
        return np.concatenate(batches)

    def _checked_examples(self, examples: Any, preprocess: bool) -> PyTree:
        """Return examples as the run stored them.

        Raises:
          InputError: for examples of another structure, shape or type.
        """
        if preprocess:
            raise InputError("preprocess: True is for images, and this model reads others; leave it out")
        x = checked_examples("examples", "x", examples).input
        if are_tokens(x) and are_tokens(self.stored):
            x = _with_length_of(self.stored, x)
        check_alike("examples", "the run", jax.tree.map(_empty, self.stored), "x", x)
        return x

    def _checked(self, images: Any) -> UInt8[np.ndarray, "N H W 3"]:
        """Return images of the run's size.

        Raises:
          InputError: for other sizes, with the way to prepare them.
        """
        if isinstance(images, list | tuple) and len(set(map(_sides, images))) > 1:
            raise InputError(f"images: they are of several sizes; {self._advice()}")
        x = checked_images("images", "x", as_array("images", "x", images))
        _, height, width = self.image
        if x.shape[1:3] != (height, width):
            raise InputError(f"images: {sides(x)}; the model takes {height}x{width}; {self._advice()}")
        return x

    def _advice(self) -> str:
        """Return what a user can do with images of other sizes."""
        _, height, width = self.image
        if self.geometry is None:
            return f"resize them to {height}x{width}"
        return "nearest: preprocess=True, which prepares them as the run did"

    def _prepared(self, images: Any) -> UInt8[np.ndarray, "N H W 3"]:
        """Return images of any sizes, prepared as the run's test images.

        Raises:
          InputError: for what is no image, and for a model that does not know how.
        """
        _, height, width = self.image
        if self.geometry is None:
            raise InputError(
                "preprocess: True; the model's file does not say how its images were prepared: save it again"
            )
        if not isinstance(images, list | tuple):
            images = _several(as_array("images", "x", images))
        if not len(images):
            raise InputError("images: there are none")
        fit = fit_to(self.geometry, height, width)
        pixels = np.empty((len(images), height, width, 3), np.uint8)
        for i, image in enumerate(images):
            name = f"x[{i}]"
            image = checked_image("images", name, as_array("images", name, image))
            pixels[i] = np.asarray(fit(Image.fromarray(image)))
        return pixels

    def _scores(self, examples: PyTree) -> Float[np.ndarray, "n C"]:
        """Return the logits of at most a batch of examples, padded to one."""
        size = self.image[0]
        count = tree_length(examples)

        def padded(array: np.ndarray) -> Array:
            return jnp.asarray(np.pad(array, [(0, size - count), *[(0, 0)] * (array.ndim - 1)]))

        mask = jnp.arange(size) < count
        return np.asarray(self.logits(self.arrays, jax.tree.map(padded, examples), mask))[:count]

    def save(self, path: str | Path) -> Path:
        """Write the model as one file, which `Model.load` reads on CPUs, GPUs and TPUs.

        Raises:
          InputError: for a prediction that calls native code, such as a decomposition of a matrix.
        """
        batch, mask = _batch_shapes(self.image, self.stored)
        exported = export.export(jax.jit(self.logits), platforms=PLATFORMS)(self.arrays, batch, mask)
        try:
            _check_program(exported.mlir_module())
        except ValueError as error:
            raise InputError(f"model: {reason(error)}; nearest: compute it before predictions") from None
        about: dict[str, Any] = {"format": FORMAT, "image": self.image, "images": self.stored is None}
        if self.geometry is not None:
            about["geometry"] = self.geometry._asdict()
        content: dict[str, Any] = {
            "program": np.frombuffer(exported.serialize(), np.uint8),
            "labels": self.labels,
            "about": np.array(json.dumps(about)),
        }
        for i, array in enumerate(self.arrays):
            # numpy's files have no bfloat16
            if array.dtype == jnp.bfloat16:
                array = array.astype(jnp.float32)
            content[f"array_{i}"] = np.asarray(array)
        content[DIGEST] = np.array(_digest(content))
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **content)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Load a model that `save` wrote. It is a program: load only files that you trust.

        Raises:
          InputError: for any other file, a damaged one, or a program that calls code
            outside of itself.
        """
        try:
            file = read_npz(Path(path), machine_memory())
            about = json.loads(str(file["about"]))
            labels = file["labels"]
            _check_format(about["format"])
            if about["format"] == FORMAT and str(file.pop(DIGEST)) != _digest(file):
                raise ValueError("its content is not as it was saved")
            program = export.deserialize(bytearray(file["program"].tobytes()))
            _check_program(program.mlir_module())
            (kinds, batch, _mask), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
            arrays = [jnp.asarray(file[f"array_{i}"], x.dtype) for i, x in enumerate(kinds)]
            side = tuple(map(int, about["image"]))
            stored = None
            if not about.get("images", True):
                stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
            _check_call(program, arrays, side, stored, labels)
            # models of earlier versions do not say
            geometry = _geometry(about["geometry"]) if "geometry" in about else None
        # anything: a damaged file meets the parsers of zip, npy, JSON and StableHLO
        except Exception as error:
            raise InputError(f"model: {str(path)!r} is not a saved model ({reason(error)})") from error
        return cls(program.call, arrays, side, labels, geometry, stored)  # pyrefly: ignore[bad-argument-type]


def _with_length_of(stored: PyTree, x: PyTree) -> PyTree:
    """Return texts with the padding of the run's.

    Raises:
      InputError: for a text with more tokens.
    """
    length = stored["ids"].shape[0]
    # arrays of other shapes beside ids are a pytree of the user's, in which nothing is padding
    if "mask" not in x or {array.shape for array in x.values()} != {x["mask"].shape} or x["ids"].ndim != 2:
        return x
    longest = longest_text(x)
    if longest > length:
        raise InputError(
            f"examples: a text has {longest} tokens, and the model reads {length}; nearest: "
            f"fcljax.tokenize(texts, FILE, length={length})"
        )
    return with_length(x, length)


def _empty(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return an array of zero examples."""
    return np.empty((0, *leaf.shape), leaf.dtype)


def _shapes(stored: PyTree) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(stored))


def _digest(content: dict[str, Any]) -> str:
    """Return the sha256 of named arrays: of their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(content):
        array = np.ascontiguousarray(content[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _check_program(text: str) -> None:
    """Check that a program calls no native code and exchanges nothing with its host.

    Args:
      text: the StableHLO module.

    Raises:
      ValueError: for another call, by name.
    """
    targets = [quoted or plain for quoted, plain in _CUSTOM_CALL.findall(text)]
    # A call in a form that the pattern does not match could hide its target. `save`
    # writes no such form, so any file with one is refused.
    if len(targets) != text.count("custom_call"):
        raise ValueError("it calls native code in an unknown way")
    for target in targets:
        if target not in CUSTOM_CALLS:
            raise ValueError(f"its program calls native code, {target[:60]!r}")
    transfer = _TRANSFER.search(text)
    if transfer:
        raise ValueError(f"its program waits for its host ({transfer[1]})")


def _check_call(
    program: export.Exported,
    arrays: list[Array],
    image: tuple[int, ...],
    stored: PyTree,
    labels: np.ndarray,
) -> None:
    """Check that a program takes a batch of examples, and returns a score for each label.

    Args:
      program: of the file.
      arrays: the model's arrays.
      image: B, H, W.
      stored: of one example that is no image; None: images.
      labels: of the classes.

    Raises:
      ValueError, TypeError: if it does not.
    """
    batch, mask = _batch_shapes(image, stored)
    size = image[0]
    scores = jax.eval_shape(program.call, arrays, batch, mask)
    if scores.shape != (size, len(labels)):
        raise ValueError(f"its program returns {scores.shape} for {size} examples and {len(labels)} labels")


def _batch_shapes(image: tuple[int, ...], stored: PyTree) -> tuple[PyTree, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of stored examples and of its mask; arguments as above."""
    size, height, width = image
    if stored is None:
        stored = jax.ShapeDtypeStruct((height, width, 3), jnp.uint8)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), stored)
    return batch, jax.ShapeDtypeStruct((size,), jnp.bool_)


def _geometry(values: dict[str, Any]) -> Geometry:
    """Return the geometry that a model's file describes.

    Raises:
      TypeError, ValueError: for values that it cannot have.
    """
    geometry = Geometry(**values)
    if geometry.kernel not in get_args(get_type_hints(Geometry)["kernel"]):
        raise ValueError(f"it resizes with {geometry.kernel!r}")
    return geometry


def _sides(image: Any) -> tuple[int, ...] | None:
    """Return height and width of an image; None for nested lists."""
    if isinstance(image, Image.Image):
        return image.height, image.width
    shape = getattr(image, "shape", None)
    return None if shape is None else shape[:2]


def _several(images: np.ndarray) -> np.ndarray:
    """Return an array of images.

    Raises:
      InputError: for one image, whose rows would be taken for images.
    """
    if images.ndim == 3 and images.shape[-1] in (1, 3, 4):
        raise InputError(f"images: shape {images.shape} is one image; nearest: images[None]")
    return checked_images("images", "x", images)


def _check_format(name: str) -> None:
    """Check that a file has the format that `Model.save` writes.

    Raises:
      ValueError: for another one.
    """
    if name == WITHOUT_DIGEST:
        return
    if name == WITHOUT_MASK:
        raise ValueError(
            "an older version wrote it, in which padding could change predictions: save it again"
        )
    if name != FORMAT:
        raise ValueError(f"it has format {name!r}")


def model_of_run(
    settings: RunConfig,
    out: str | Path,
    supplied: Supplied = NOTHING,
    labels: np.ndarray | None = None,
    client: int | None = None,
) -> Model:
    """Return the model of a run's newest checkpoint.

    Args:
      settings: of the run.
      out: its directory.
      supplied: as of the run.
      labels: the caller's label of each class of the data; None: the data set's numbers.
      client: the client with the personal model; None: the global model.

    Raises:
      InputError: as `loop.final_state`, or for a client that has no model of its own.
    """
    exp, state = final_state(settings, out, supplied)
    has_model = exp.method.predict_client is not None
    if client is None:
        has_model = not exp.method.personal
    elif not exp.method.personal:
        has_model = False
    if not has_model:
        why = f"{client}, and {settings.method} has no personal models; leave --client out"
        if exp.method.personal:
            why = f"{settings.method} has personal models and no global one; nearest: --client 0"
        raise InputError(f"client: {why}")
    if client is not None and not 0 <= client < exp.sizes.clients:
        raise InputError(f"client: {client}; nearest: {min(max(client, 0), exp.sizes.clients - 1)}")
    dataset = exp.inputs.dataset
    # from positions in the run's class order to labels of the data set, and from these to
    # what the caller or the file calls them
    order = np.zeros(exp.sizes.classes, int)
    order[exp.scenario.train_label] = dataset.y_train
    arrays, structure = jax.tree.flatten(_arrays_of(exp, state, client))
    label_of_class = np.array(dataset.numbers or range(exp.sizes.classes))
    if labels is not None:
        label_of_class = np.asarray(labels)[label_of_class]
    label_of_class = label_of_class[order]
    logits = jax.jit(_logits(exp, structure, client))
    size = settings.eval_batch_size
    if not isinstance(exp.inputs.preprocess, Preprocess):
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), dataset.x_test)
        return Model(logits, arrays, (size, 0, 0), label_of_class, stored=stored)
    shape = (size, *dataset.x_test.shape[1:3])
    return Model(logits, arrays, shape, label_of_class, exp.inputs.preprocess.geometry)


def _arrays_of(exp: Experiment, state: State, client: int | None) -> PyTree:
    """Return the arrays that predictions read: frozen, server and client state."""
    client_state = ()
    if client is not None:
        client_state = jax.tree.map(lambda x: x[client], state.clients)
    # without what only training reads: the file needs no decoder and no images
    return exp.frozen._replace(decoder=(), surrogate=()), state.server, client_state


def _logits(
    exp: Experiment, structure: Any, client: int | None
) -> Callable[[list[Array], PyTree, Array], Array]:
    """Return the method's prediction after the last task, as a function of arrays."""
    method = exp.method
    task = exp.scenario.tasks[-1]
    rounds = exp.sizes.rounds

    def logits(arrays: list[Array], stored: PyTree, mask: Array) -> Array:
        frozen, server, client_state = jax.tree.unflatten(structure, arrays)
        # methods read no labels in predictions, and index -1 tells padding
        no_label = jnp.zeros(len(mask), jnp.int32)
        index = jnp.where(mask, 0, -1)
        batch = Batch(clean_input(exp.inputs.preprocess, stored), no_label, mask, index)
        # methods see JAX's arrays in a task, here as in the engine
        last_task = jax.tree.map(jnp.asarray, task)
        context = RoundContext.on_host(frozen, last_task, rounds - 1, True)
        if client is None:
            return method.predict(context, server, batch)
        assert method.predict_client is not None
        return method.predict_client(context, server, client_state, batch)

    return logits
