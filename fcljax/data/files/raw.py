"""Describe raw data before anything is decoded: files or records, labels and splits.

Splits that have no official file are random, by the rule of HePCo's release: all images
class by class, files sorted, shuffled by Python's Random(0); the first int(0.8 n) are for
training, the rest for testing.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcljax.data.files.prepared import Listing
from fcljax.errors import InputError

# the requested classes, in the order of their labels; None: the default
Choice = tuple[str, ...] | None

# split -> the names of its folder, or its values in a column
SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}

# folders that operating systems put beside data; they would be classes without images
_NOT_DATA = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
_DRAWINGS = 5  # test images of each Omniglot character


class Scan(NamedTuple):
    """Raw data whose files have been listed."""

    # changes with the names, sizes and times of the files, the labels and the split
    fingerprint: str
    listing: Callable[[], Listing]


class Raw(NamedTuple):
    """Raw data that exist."""

    where: Path
    scan: Callable[[], Scan]
    route: str = "files"  # or "tfds"


class LabelledItems(NamedTuple):
    """Images of one split and their labels."""

    items: list[Any]  # files or records
    labels: list[int]  # -1: no label

    def take(self, indices: Sequence[int]) -> "LabelledItems":
        """Return these images, in this order."""
        return LabelledItems([self.items[i] for i in indices], [self.labels[i] for i in indices])


class File(NamedTuple):
    """The facts on a file in fingerprints."""

    path: str  # relative to the root of the layout
    size: int  # in bytes, -1 for a link that leads nowhere
    time: int  # of the last change, in ns


def file_facts(entry: os.DirEntry | Path, path: str) -> File:
    """Return size and time of a file."""
    try:
        stat = entry.stat()
    # a link that leads nowhere, which the decoder reports with the image's name
    except OSError:
        return File(path, -1, 0)
    return File(path, stat.st_size, stat.st_mtime_ns)


def visible(folder: Path) -> list[os.DirEntry]:
    """List a folder's entries by name, without files of file managers and archivers.

    Raises:
      InputError: for a folder that cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if entry.name[0] != "." and entry.name not in _NOT_DATA]
    except OSError as error:
        raise InputError(f"dataset: folder {str(folder)!r} cannot be read ({error.strerror})") from error
    return sorted(shown, key=lambda entry: entry.name)


def content(path: Path) -> bytes:
    """Return all bytes of a file.

    Raises:
      InputError: for a file that cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"dataset: {str(path)!r} cannot be read ({error.strerror})") from error


def text(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
      InputError: for a file that cannot be read or is no text.
    """
    try:
        return content(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"dataset: {str(path)!r} is not text in UTF-8; unpack the archive again") from error


def first_names(names: Sequence[str], most: int = 6) -> str:
    """List the first names, and how many more there are, for notes."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def table(classes: Sequence[str], tree: Mapping[str, Sequence]) -> LabelledItems:
    """List the images of a tree (images by class) in the order of the classes."""
    labels = [label for label, name in enumerate(classes) for _ in tree[name]]
    return LabelledItems([item for name in classes for item in tree[name]], labels)


def random_split(images: LabelledItems) -> tuple[LabelledItems, LabelledItems]:
    """Choose 80 % of the images for training, the rest for testing."""
    order = list(range(len(images.items)))
    random.Random(0).shuffle(order)
    cut = int(0.8 * len(order))
    return images.take(order[:cut]), images.take(order[cut:])


def last_drawings(tree: Mapping[str, Sequence]) -> tuple[LabelledItems, LabelledItems]:
    """Split Omniglot: the last 5 drawings of each character are for testing."""
    classes = sorted(tree)
    train = {label: tree[label][:-_DRAWINGS] for label in classes}
    test = {label: tree[label][-_DRAWINGS:] for label in classes}
    return table(classes, train), table(classes, test)


def same_classes(where: str, train: list, test: list) -> list:
    """Check that both splits have the same classes, and return those of the first.

    Raises:
      InputError: naming a class that only one split has.
    """
    for has, lacks, extra in (
        ("test", "train", set(test) - set(train)),
        ("train", "test", set(train) - set(test)),
    ):
        if extra:
            raise InputError(
                f"dataset: {where!r}: class {min(extra)!r} is in {has} but not in {lacks}; "
                "both need every class"
            )
    return train
