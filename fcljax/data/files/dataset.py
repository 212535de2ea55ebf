"""Labelled images in two splits, wherever they come from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, UInt8


class Dataset(NamedTuple):
    """Labelled images, all of one size within a split.

    Labels are original ones: 0..C-1, before any class order. The arrays may be memory-mapped. `size_train`
    and `size_test` hold the height and width that each image had before it was squeezed into its square
    (`augment.Geometry`); None where the pixels are square. `digest` names the pixels of both splits.
    """

    name: str
    x_train: UInt8[np.ndarray, "N H W 3"]
    y_train: Int64[np.ndarray, " N"]
    x_test: UInt8[np.ndarray, "M H W 3"]
    y_test: Int64[np.ndarray, " M"]
    class_names: tuple[str, ...]
    augment: bool = True  # whether random crops and flips keep the class: not for digits and letters
    size_train: Int32[np.ndarray, "N 2"] | None = None
    size_test: Int32[np.ndarray, "M 2"] | None = None
    digest: str = ""  # sha256 of what the arrays hold
    sources: tuple[int, ...] | None = None  # of a mixture: which of its data sets each class comes from
