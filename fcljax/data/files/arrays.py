"""Labelled images that are arrays: a .npz file's, or the caller's own. What is wrong is one line that names
the array; what is plainly meant is converted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from fcljax.data.files.dataset import Dataset
from fcljax.data.files.prepared import digest_of_arrays
from fcljax.errors import InputError

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
NAME = "arrays"  # of a data set that the caller has in memory


class Labelled(NamedTuple):
    """A data set of the caller's arrays."""

    dataset: Dataset
    labels: np.ndarray
    """The caller's own label of each class [C], integers or text."""


def dataset_of_arrays(arrays: Sequence[np.ndarray], class_names: Sequence[str] | None = None) -> Labelled:
    """The data set of (x, y, x_test, y_test).

    Args:
      arrays: images as `checked_images` takes them, and labels: integers or text of shape [N]. They may be
        anything that numpy reads, such as jax arrays.
      class_names: of the sorted labels; None: the labels themselves.

    Raises:
      InputError: naming the array that does not fit.
    """
    if len(arrays) != 4:
        raise InputError(f"data: {len(arrays)} arrays; expected four: (x, y, x_test, y_test)")
    named = dict(zip(("x", "y", "x_test", "y_test"), map(np.asarray, arrays), strict=True))
    x, x_test = (checked_images("data", name, named[name]) for name in ("x", "x_test"))
    if x.shape[1:] != x_test.shape[1:]:
        raise InputError(f"data: images of x are {sides(x)} but of x_test {sides(x_test)}; make them equal")
    y, y_test = (_labels(name, named[name], len(named[f"x{name[1:]}"])) for name in ("y", "y_test"))
    labels, y = np.unique(y, return_inverse=True)
    unknown = np.setdiff1d(y_test, labels)
    if len(unknown) or len(labels) < 2:
        what = f"y_test has the label {unknown[0]!s}, and y has not" if len(unknown) else "y has one label"
        raise InputError(f"data: {what}")
    names = tuple(map(str, labels if class_names is None else class_names))
    if len(names) != len(labels):
        raise InputError(f"class_names: {len(names)} names for {len(labels)} classes")
    y, y_test = y.astype(np.int64), np.searchsorted(labels, y_test)
    sha256 = digest_of_arrays(dict(zip(ARRAYS, (x, y, x_test, y_test), strict=True)))
    return Labelled(Dataset(NAME, x, y, x_test, y_test, class_names=names, digest=sha256), labels)


def _labels(name: str, labels: np.ndarray, examples: int) -> np.ndarray:
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise InputError(
            f"data: {name} is {labels.dtype} of shape {list(labels.shape)}; expected integers or text of "
            f"shape [{examples}]" + (f"; nearest: {name}.argmax(-1)" if labels.ndim == 2 else "")
        )
    if len(labels) != examples:
        raise InputError(
            f"data: x{name[1:]} has {examples} examples but {name} has {len(labels)}; they must match"
        )
    return labels


def checked_images(where: str, key: str, images: np.ndarray) -> UInt8[np.ndarray, "N H W 3"]:
    """Images as grey levels, channels last.

    Args:
      where: the field or file, for messages.
      key: of the array in it.
      images: uint8, or float in [0, 1]; [N, H, W], or with 1 or 3 channels last or first. Channels are first
        only where they cannot be last.

    Raises:
      InputError: with the way to convert them.
    """
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise InputError(
            f"{where}: {key} has shape {images.shape}; expected [N, H, W, 3], [N, 3, H, W] or [N, H, W]"
        )
    if 0 in images.shape:
        raise InputError(f"{where}: {key} is empty, shape {images.shape}")
    if images.dtype != np.uint8:
        images = _grey_levels(where, key, images)
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))


def _grey_levels(where: str, key: str, images: np.ndarray) -> np.ndarray:
    """Pixels in [0, 1] as 0..255."""
    wanted = "expected uint8, grey levels 0..255, or float in [0, 1]"
    if images.dtype.kind == "f":
        low, high = float(images.min()), float(images.max())
        if low >= 0 and high <= 1:
            return np.rint(images * np.float32(255)).astype(np.uint8)
        how = "x.astype('uint8')" if low >= 0 and high <= 255 else "(x - x.min()) / (x.max() - x.min())"
        raise InputError(f"{where}: {key} has values from {low:g} to {high:g}; {wanted}; nearest: {how}")
    how = "x.astype('uint8')" if images.dtype.kind in "iu" else "an array of numbers"
    raise InputError(f"{where}: {key} is {images.dtype}; {wanted}; nearest: {how}")


def sides(images: np.ndarray) -> str:
    """Height and width of images, for messages."""
    return f"{images.shape[1]}x{images.shape[2]}"
