"""Several data sets as one, for streams whose tasks come from different worlds (NonIID-50 of FedWeIT)."""

import hashlib

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image

from fcljax.data.files.dataset import Dataset


def mixed(name: str, parts: list[Dataset]) -> Dataset:
    """The classes of all data sets beside each other, under the names SOURCE/CLASS. Images of another size
    than the first data set's are resized to it (bicubic); random crops and flips are off unless all allow
    them.

    Args:
      name: of the mixture.
      parts: at least one.
    """
    height, width = parts[0].x_train.shape[1:3]
    first = np.cumsum([0, *(len(part.class_names) for part in parts)])
    labels = lambda split: np.concatenate(
        [getattr(part, f"y_{split}") + start for part, start in zip(parts, first, strict=False)]
    )
    images = lambda split: np.concatenate(
        [_fitted(getattr(part, f"x_{split}"), height, width) for part in parts]
    )
    digests = "+".join(part.digest for part in parts)
    return Dataset(
        name,
        images("train"),
        labels("train"),
        images("test"),
        labels("test"),
        tuple(f"{part.name}/{own}" for part in parts for own in part.class_names),
        augment=all(part.augment for part in parts),
        size_train=_sizes([part.size_train for part in parts], [part.x_train for part in parts]),
        size_test=_sizes([part.size_test for part in parts], [part.x_test for part in parts]),
        digest=hashlib.sha256(digests.encode()).hexdigest(),
        sources=tuple(i for i, part in enumerate(parts) for _ in part.class_names),
    )


def _fitted(
    images: UInt8[np.ndarray, "N h w 3"], height: int, width: int
) -> UInt8[np.ndarray, "N height width 3"]:
    if images.shape[1:3] == (height, width):
        return images
    resize = lambda pixels: Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.stack([np.asarray(resize(pixels)) for pixels in images])


def _sizes(known: list, images: list) -> Int32[np.ndarray, "N 2"] | None:
    """Sizes before squeezing, where some data set has such images."""
    if all(each is None for each in known):
        return None
    square = lambda x: np.tile(np.int32(x.shape[1:3]), (len(x), 1))
    return np.concatenate([square(x) if own is None else own for own, x in zip(known, images, strict=True)])
