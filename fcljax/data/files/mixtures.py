"""Join several data sets, for streams whose tasks come from different ones (NonIID-50 of
FedWeIT)."""

import hashlib

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image

from fcljax.data.files.dataset import Dataset, check_images


def mixed(name: str, parts: list[Dataset]) -> Dataset:
    """Join the classes of all data sets under the names SOURCE/CLASS.

    Images of another size than the first data set's are resized to it (bicubic). Random
    crops and flips are off unless all data sets allow them.

    Args:
      name: of the mixture.
      parts: at least one.

    Raises:
      InputError: for a data set without images.
    """
    for part in parts:
        check_images("dataset", part)
    height, width = parts[0].x_train.shape[1:3]
    # the classes of a data set follow those of the data sets before it
    first_labels = np.cumsum([0, *(len(part.class_names) for part in parts[:-1])])
    digests = "+".join(part.digest for part in parts)
    # `sources` and the column `source` name the data set of each class and of each
    # example: a task can be made within one of them, and a partition can follow them
    return Dataset(
        name,
        np.concatenate([_resized(part.x_train, height, width) for part in parts]),
        np.concatenate(
            [part.y_train + first_label for part, first_label in zip(parts, first_labels, strict=True)]
        ),
        np.concatenate([_resized(part.x_test, height, width) for part in parts]),
        np.concatenate(
            [part.y_test + first_label for part, first_label in zip(parts, first_labels, strict=True)]
        ),
        tuple(f"{part.name}/{class_name}" for part in parts for class_name in part.class_names),
        augment=all(part.augment for part in parts),
        size_train=_sizes([(part.size_train, part.x_train) for part in parts]),
        size_test=_sizes([(part.size_test, part.x_test) for part in parts]),
        digest=hashlib.sha256(digests.encode()).hexdigest(),
        columns={"source": np.repeat([part.name for part in parts], [len(part.y_train) for part in parts])},
        columns_test={
            "source": np.repeat([part.name for part in parts], [len(part.y_test) for part in parts])
        },
        sources=tuple(i for i, part in enumerate(parts) for _ in part.class_names),
    )


def _resized(
    images: UInt8[np.ndarray, "N h w 3"], height: int, width: int
) -> UInt8[np.ndarray, "N height width 3"]:
    if images.shape[1:3] == (height, width):
        return images
    bicubic = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(x).resize((width, height), bicubic)) for x in images])


def _sizes(parts: list[tuple[np.ndarray | None, np.ndarray]]) -> Int32[np.ndarray, "N 2"] | None:
    """Return the sizes before squeezing, if a data set has them."""
    if all(sizes is None for sizes, _ in parts):
        return None
    return np.concatenate(
        [
            np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1)) if sizes is None else sizes
            for sizes, images in parts
        ]
    )
