"""How well the server can reconstruct clients' images from their uploads, and a figure
of it.

Measured after the last round on training images of the last task, some of which clients
have uploaded, and on its test images, which no client has. A client's privacy depends
on it: an upload from which an image can be reconstructed well discloses the image.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.federated.keys import RunKey
from fcljax.mesh import AnyMesh
from fcljax.runs.build import Experiment
from fcljax.types import Reconstruction, RoundContext

MOST_IMAGES = 512  # of each split
SHOWN = 8  # images in the figure
BATCH = 64


class Rebuilt(NamedTuple):
    """Images as the server reconstructs them, in numpy, and their labels."""

    images: Reconstruction
    label: Int[np.ndarray, " n"]


def restored_images(exp: Experiment, server: PyTree) -> tuple[Rebuilt, Rebuilt] | None:
    """Reconstruct training and test images of the last task, up to `MOST_IMAGES` of each.

    The training images are not augmented. Returns None if the method reconstructs nothing.
    """
    replay = exp.method.server_replay
    if replay is None or replay.reconstruct is None:
        return None
    # compiled once: the last batch is filled up to the same shape
    reconstruct = jax.jit(replay.reconstruct)
    return (
        _of_split(exp, server, reconstruct, exp.train, exp.scenario.train_label),
        _of_split(exp, server, reconstruct, exp.test, exp.scenario.test_label),
    )


def _of_split(
    exp: Experiment,
    server: PyTree,
    reconstruct: Callable[..., Reconstruction],
    split: Split | Host,
    label: np.ndarray,
) -> Rebuilt:
    task = exp.scenario.tasks[-1]
    # -1 stands for an example of no class of the run, and would index the last class
    index = np.flatnonzero(task.current[np.maximum(label, 0)] & (label >= 0))[:MOST_IMAGES]
    round_context = RoundContext.on_host(exp.frozen, task, exp.sizes.rounds - 1, True)
    key = jax.random.fold_in(exp.key, RunKey.RECONSTRUCTION)
    read = jax.jit(exp.read)
    batches = []
    for start in range(0, len(index), BATCH):
        # `resize` repeats images to fill the last batch; their results are cut off below
        batch_index = np.resize(index[start : start + BATCH], BATCH)
        image = _read(read, split, batch_index, exp.engine.mesh)
        # a key per batch: masks must not repeat over the images
        batch_key = jax.random.fold_in(key, start)
        batches.append(jax.device_get(reconstruct(round_context, server, image, batch_key)))
    images = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(index)], *batches)
    return Rebuilt(images, label[index])


def _read(read: Callable, split: Split | Host, index: np.ndarray, mesh: AnyMesh | None) -> jax.Array:
    """Read these images as the network's input."""
    index = index.astype(np.int32)
    if isinstance(split, Host):
        return read(split.take(index, mesh), np.arange(len(index), dtype=np.int32))
    return read(split, index)


def measure(train: Rebuilt, test: Rebuilt) -> dict[str, Any]:
    """Return `closeness` of training images and, under "test", of test images."""
    return closeness(*train) | {"test": closeness(*test)}


def closeness(images: Reconstruction, label: np.ndarray) -> dict[str, Any]:
    """Measure how close reconstructed images are to their originals.

    Returns:
      images: number of images.
      mse_restored, mse_unprompted: mean squared error over hidden pixels in [0, 1], with
        and without the prompt.
      psnr, psnr_unprompted: mean over images, of all pixels, in dB.
      identified: share of images whose nearest original of their class is their own.
      chance: share that guessing would identify.
    """
    original, unprompted, restored = map(np.asarray, (images.original, images.unprompted, images.restored))

    def hidden_error(pixels: np.ndarray) -> float:
        # over hidden pixels only: visible ones are inputs, and have no error
        return float(np.mean((np.clip(pixels, 0, 1) - original)[np.asarray(images.hidden)] ** 2))

    identified, chance = identification(restored, original, label)
    return {
        "images": len(label),
        "mse_restored": hidden_error(restored),
        "mse_unprompted": hidden_error(unprompted),
        "psnr": psnr(restored, original),
        "psnr_unprompted": psnr(unprompted, original),
        "identified": identified,
        "chance": chance,
    }


def psnr(
    pixels: Float[np.ndarray, "n *shape"],
    original: Float[np.ndarray, "n *shape"],
) -> float:
    """Return the mean over images of 10 log10(1 / MSE) of pixels clipped to [0, 1], in dB."""
    error = ((np.clip(pixels, 0, 1) - original) ** 2).reshape(len(original), -1).mean(axis=1)
    # 1e-12 bounds the PSNR of an exact copy at 120 dB
    return float(np.mean(-10 * np.log10(np.maximum(error, 1e-12))))


def identification(
    pixels: Float[np.ndarray, "n *shape"],
    original: Float[np.ndarray, "n *shape"],
    label: np.ndarray,
) -> tuple[float, float]:
    """Return the share of images whose nearest original of their class is their own.

    Also return the share that guessing would identify. Distance is the mean squared error.
    """

    def flat(x: np.ndarray) -> np.ndarray:
        # float64: differences of squares cancel
        return np.clip(x, 0, 1).reshape(len(x), -1).astype(np.float64)

    num_identified = 0
    classes = np.unique(label)
    for c in classes:
        a = flat(pixels[label == c])
        b = flat(original[label == c])
        # |a - b|^2 = |a|^2 - 2 a.b + |b|^2, without an array of all pairs of pixels
        distance = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)
        num_identified += int(np.sum(np.argmin(distance, axis=1) == np.arange(len(a))))
    # guessing identifies 1 of n images of a class: one image per class, of all images
    return num_identified / len(label), len(classes) / len(label)


def draw_restored(path: Path, images: Reconstruction, label: np.ndarray) -> None:
    """Draw some images of different classes, a column each."""
    from fcljax.results import figures

    def pick(x: Array) -> np.ndarray:
        return np.round(255 * np.clip(np.asarray(x)[chosen], 0, 1)).astype(np.uint8)

    # one image of each class first, then the rest in order
    of_classes = np.unique(label, return_index=True)[1]
    chosen = np.concatenate([of_classes, np.setdiff1d(np.arange(len(label)), of_classes)])[:SHOWN]
    strips = {
        "masked": pick(images.masked),
        "without prompt": pick(images.unprompted),
        "with prompt": pick(images.restored),
        "original": pick(images.original),
    }
    figures.save(path, figures.image_rows(strips))
