"""Hold labelled examples in two splits, whatever their source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from fcljax.data.kinds import Kind, take
from fcljax.errors import InputError

TRAIN_ROWS = "train_rows"  # the array of a prepared data set with `Dataset.train_rows`


class Origin(NamedTuple):
    """The data set from whose training examples both splits were taken."""

    digest: str
    """Of its examples, before examples were held out."""
    train: Int[np.ndarray, " N"]
    """The indices of its training examples that stay training examples."""
    test: Int[np.ndarray, " M"]
    """The indices of those that replace the test examples."""


class Dataset(NamedTuple):
    """Labelled examples, all of one size within a split.

    Examples are images, uint8 [N, H, W, 3], or of another `kind`: arrays [N, ...] and
    pytrees of them. Labels are original ones: 0..C-1, before any class order. The arrays
    may be memory-mapped. `size_train` and `size_test` are height and width of each image
    before it was squeezed into its square (`augment.Geometry`); None: pixels are square.
    `digest` identifies the examples of both splits.
    """

    name: str
    x_train: Any
    y_train: Int64[np.ndarray, " N"]
    x_test: Any
    y_test: Int64[np.ndarray, " M"]
    class_names: tuple[str, ...]
    # random crops and flips preserve the class: not for digits and letters
    augment: bool = True
    size_train: Int32[np.ndarray, "N 2"] | None = None
    size_test: Int32[np.ndarray, "M 2"] | None = None
    digest: str = ""  # sha256 of the arrays' content
    sources: tuple[int, ...] | None = None  # of a mixture: the data set of each class
    # further facts on training examples [N]: a site, a camera
    columns: Mapping[str, np.ndarray] = {}
    # the same of test examples [M], if the data have them
    columns_test: Mapping[str, np.ndarray] = {}
    folder: Path | None = None  # where it is prepared, with the names of its images
    # number of each training example in the user's data, before any were held out; None: all in order
    train_rows: Int[np.ndarray, " N"] | None = None
    num_rows: int = 0  # examples in the user's data, where `train_rows` numbers them
    kind: Kind | None = None  # None: images
    # the number of each class in the whole data set, where only some classes are used
    numbers: tuple[int, ...] | None = None
    origin: Origin | None = None  # None: no examples were held out


class TextExamples(NamedTuple):
    """Labelled texts of one split."""

    texts: list[str]
    labels: np.ndarray
    """Of each text: numbers of class names, or labels as they are written."""
    columns: dict[str, np.ndarray]
    """Further facts on each text, by name."""


class Texts(NamedTuple):
    """Labelled texts of both splits."""

    train: TextExamples
    test: TextExamples
    class_names: list[str] | None
    """None: the labels themselves."""
    note: str
    """On how the texts were chosen, and on what was not read."""
    train_rows: Int[np.ndarray, " n"]
    """The numbers of the training texts in the user's data."""
    num_rows: int
    """Texts there."""


def row_numbers(dataset: Dataset) -> tuple[Int[np.ndarray, " N"], int]:
    """Return the number of each training example in the user's data, and how many examples those have."""
    if dataset.train_rows is None:
        return np.arange(len(dataset.y_train)), len(dataset.y_train)
    return dataset.train_rows, dataset.num_rows


def with_part_of_training(dataset: Dataset, indices: Int[np.ndarray, " n"]) -> Dataset:
    """Return the data set with these training examples alone.

    `train_rows` has their numbers in the whole data set, which files of owners and of
    images' names go by.
    """
    rows, num_rows = row_numbers(dataset)
    size_train = None
    if dataset.size_train is not None:
        size_train = dataset.size_train[indices]
    return dataset._replace(
        x_train=take(dataset.x_train, indices),
        y_train=dataset.y_train[indices],
        size_train=size_train,
        columns={name: values[indices] for name, values in dataset.columns.items()},
        train_rows=rows[indices],
        num_rows=num_rows,
        # its rows would be those of more examples
        origin=None,
    )


def check_images(field: str, dataset: Dataset) -> None:
    """Check that a data set has images, where nothing else can be used.

    Raises:
      InputError: naming the field and the data set.
    """
    if dataset.kind is not None:
        raise InputError(
            f"{field}: {dataset.name!r} has {dataset.kind.word}, and images are needed; nearest: 'digits'"
        )


def names_file(folder: Path, split: str) -> Path:
    """Return the file of the names of a split's prepared images."""
    return folder / f"names_{split}.json"


def columns_file(folder: Path, split: str) -> Path:
    """Return the file of the columns of a split's prepared images."""
    return folder / f"columns_{split}.json"


def prepared_columns(folder: Path, split: str, count: int) -> dict[str, np.ndarray]:
    """Read the columns of a split's `count` prepared images.

    Raises:
      InputError: for a damaged file.
    """
    try:
        text = columns_file(folder, split).read_text(encoding="utf-8")
        columns = {name: np.array(values, str) for name, values in json.loads(text).items()}
        if any(values.shape != (count,) for values in columns.values()):
            raise ValueError("not one value for each image")
        return columns
    # most data sets have no columns
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError):
        raise InputError(
            f"dataset: {str(columns_file(folder, split))!r} is damaged; prepare the data set again, with "
            "--force"
        ) from None


def image_names(dataset: Dataset, split: str) -> list[str] | None:
    """Return the names of all images of a split, held-out ones included; None for images
    that are no files.

    Raises:
      InputError: for data that an earlier version prepared, which kept no names.
    """
    if dataset.folder is None:
        return None
    try:
        names = json.loads(names_file(dataset.folder, split).read_text(encoding="utf-8"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of names")
        return names
    except (OSError, ValueError, RecursionError):
        raise InputError(
            f"dataset: {str(dataset.folder)!r} does not know the names of its images; prepare it again: "
            f"fcljax data prepare {dataset.name} --force"
        ) from None


def training_image_rows(dataset: Dataset) -> dict[str, int]:
    """Return the number of each training image in the user's data, by its name.

    {} for images that are no files; held-out images are among them, as in `image_names`.
    """
    names = image_names(dataset, "train")
    if dataset.folder is None or names is None:
        return {}
    rows = range(len(names))
    # written where images were skipped, or test images are among those that the user numbers
    path = dataset.folder / f"{TRAIN_ROWS}.npy"
    if path.exists():
        rows = np.load(path, allow_pickle=False).tolist()
    return dict(zip(names, rows, strict=True))


def natural_order(names: Sequence[str] | np.ndarray) -> list[str]:
    """Sort different names as a reader expects: numbers by value, before other text."""
    unique = np.unique(np.asarray(names, str)).tolist()
    return sorted(unique, key=_sort_key)


def _sort_key(name: str) -> tuple[bool, int, str, str]:
    # A number is compared by its digits: `int` refuses thousands of them, and characters
    # such as a superscript two are digits but no number.
    if name.isascii() and name.isdecimal():
        digits = name.lstrip("0")
        return False, len(digits), digits, name
    return True, 0, "", name
