"""What the server could rebuild of clients' images: how close it comes to them, and a figure.

Measured after the last round on training images of the last task, of which the clients' uploads are a sample,
and on its test images, which nobody has seen. A client's privacy depends on it: an upload that restores an
image well gives the image away.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.federated.keys import RunKey
from fcljax.runs.build import Experiment
from fcljax.types import Reconstruction, RoundContext

MOST_IMAGES, SHOWN, BATCH = 512, 8, 64


class Rebuilt(NamedTuple):
    """Images as the server could rebuild them, in numpy, and their labels."""

    images: Reconstruction
    label: Int[np.ndarray, " n"]


def restored_images(exp: Experiment, server: PyTree) -> tuple[Rebuilt, Rebuilt] | None:
    """Up to 512 training images of the last task, clean, and as many of its test images; None if the method
    rebuilds nothing."""
    if exp.method.restores is None:
        return None
    restores = jax.jit(exp.method.restores)
    return (
        _of_split(exp, server, restores, exp.train, exp.scenario.train_label),
        _of_split(exp, server, restores, exp.test, exp.scenario.test_label),
    )


def _of_split(
    exp: Experiment,
    server: PyTree,
    restores: Callable[..., Reconstruction],
    split: Split | Host,
    label: np.ndarray,
) -> Rebuilt:
    task = exp.scenario.tasks[-1]
    rows = np.flatnonzero(task.current[np.maximum(label, 0)] & (label >= 0))[:MOST_IMAGES]
    round_context = RoundContext.on_host(exp.frozen, task, exp.sizes.rounds - 1, True)
    key, read, found = jax.random.fold_in(exp.key, RunKey.RECONSTRUCTION), jax.jit(exp.read), []
    for first in range(0, len(rows), BATCH):
        some = np.resize(rows[first : first + BATCH], BATCH)
        image = _read(read, split, some, exp.engine.mesh)
        found.append(jax.device_get(restores(round_context, server, image, jax.random.fold_in(key, first))))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(rows)], *found)
    return Rebuilt(whole, label[rows])


def _read(read: Callable, split: Split | Host, rows: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """These images as the network's input."""
    if isinstance(split, Host):
        return read(split.take(rows.astype(np.int32), mesh), np.arange(len(rows), dtype=np.int32))
    return read(split, rows.astype(np.int32))


def measure(train: Rebuilt, test: Rebuilt) -> dict[str, Any]:
    """How close rebuilt training images come to their originals, as `closeness`; and under "test" the same of
    test images."""
    return closeness(*train) | {"test": closeness(*test)}


def closeness(images: Reconstruction, label: np.ndarray) -> dict[str, Any]:
    """How close rebuilt images come to their originals.

    Returns:
      images, how many; mse_restored and mse_unprompted over hidden pixels, of pixels in [0, 1]; psnr, the
        mean over images, in dB, of the whole image, and psnr_unprompted; identified, the share of rebuilt
        images whose nearest image of their class is their original (mean squared error); and chance, what
        guessing gives.
    """
    original, unprompted, restored = map(np.asarray, (images.original, images.unprompted, images.restored))
    hidden = lambda pixels: float(np.mean((np.clip(pixels, 0, 1) - original)[np.asarray(images.hidden)] ** 2))
    identified, chance = identification(restored, original, label)
    return {
        "images": len(label),
        "mse_restored": hidden(restored),
        "mse_unprompted": hidden(unprompted),
        "psnr": psnr(restored, original),
        "psnr_unprompted": psnr(unprompted, original),
        "identified": identified,
        "chance": chance,
    }


def psnr(pixels: Float[np.ndarray, "n *shape"], original: Float[np.ndarray, "n *shape"]) -> float:
    """Mean over images of 10 log10(1 / MSE), of pixels in [0, 1], in dB; what is beyond that is clipped."""
    error = ((np.clip(pixels, 0, 1) - original) ** 2).reshape(len(original), -1).mean(axis=1)
    return float(np.mean(-10 * np.log10(np.maximum(error, 1e-12))))


def identification(
    pixels: Float[np.ndarray, "n *shape"], original: Float[np.ndarray, "n *shape"], label: np.ndarray
) -> tuple[float, float]:
    """The share of images whose nearest original among those of their class is their own, and what guessing
    gives. The original is found or not by the mean squared error alone."""
    flat = lambda x: np.clip(x, 0, 1).reshape(len(x), -1).astype(np.float64)
    right, classes = 0, np.unique(label)
    for c in classes:
        a, b = flat(pixels[label == c]), flat(original[label == c])
        apart = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)
        right += int(np.sum(np.argmin(apart, axis=1) == np.arange(len(a))))
    return right / len(label), len(classes) / len(label)  # each of a class's n images is guessed with 1 / n


def draw_restored(path: Path, images: Reconstruction, label: np.ndarray) -> None:
    """The figure: some images of different classes, a column each."""
    from fcljax.results import figures

    first = np.unique(label, return_index=True)[1]
    chosen = np.concatenate([first, np.setdiff1d(np.arange(len(label)), first)])[:SHOWN]
    pick = lambda x: np.round(255 * np.clip(x[chosen], 0, 1)).astype(np.uint8)
    rows = {
        "masked": pick(images.masked),
        "without prompt": pick(images.unprompted),
        "with prompt": pick(images.restored),
        "original": pick(images.original),
    }
    figures.save(path, figures.image_rows(rows))
