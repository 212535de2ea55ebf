"""Find image files below folders, at any depth, in the order of their names."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fcljax.data.files.images import SUFFIXES
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import File, LabelledItems, Scan, file_facts, visible
from fcljax.errors import InputError

Tree = dict[str, list[File]]  # image files by class

# name -> index of the folder in a file's path that is its value
_Columns = dict[str, int]
# device and inode, which identify a folder whatever the path to it
_Folder = tuple[int, int]


class Contents(NamedTuple):
    """The files below a folder, at any depth."""

    images: list[File]
    """Files with a suffix of images; paths are relative to the root."""
    other_files: list[str]
    """Paths of all other files."""


def contents(root: Path, inside: str) -> Contents:
    """List the files below root/inside.

    Raises:
      InputError: for a folder that cannot be read, and for links that lead in a circle.
    """
    return _contents(root, inside, frozenset())


def _contents(root: Path, inside: str, parents: frozenset[_Folder]) -> Contents:
    try:
        status = os.stat(root / inside)
    except OSError as error:
        where = str(root / inside)
        raise InputError(f"dataset: folder {where!r} cannot be read ({error.strerror})") from error
    folder = status.st_dev, status.st_ino
    # two links to one folder are fine, a link to a parent would never end
    if folder in parents:
        raise InputError(f"dataset: {str(root / inside)!r} links to a folder above it; remove the link")
    images: list[File] = []
    other_files: list[str] = []
    for entry in visible(root / inside):
        path = path_below(inside, entry.name)
        if entry.is_dir():
            below = _contents(root, path, parents | {folder})
            images += below.images
            other_files += below.other_files
        elif is_image(entry.name):
            images.append(file_facts(entry, path))
        else:
            other_files.append(path)
    return Contents(images, other_files)


def path_below(inside: str, name: str) -> str:
    """Return the path of an entry of the folder `inside`, which is "" for the root."""
    return f"{inside}/{name}" if inside else name


def folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder."""
    return [entry.name for entry in visible(folder) if entry.is_dir()]


def images(root: Path, inside: str) -> list[File]:
    """Return the image files below root/inside.

    Raises:
      InputError: if there are none.
    """
    files = contents(root, inside)
    if not files.images:
        hint = f"; it has {in_words(files.other_files)}" if files.other_files else ""
        raise InputError(
            f"dataset: {str(root / inside)!r} has no images{hint}; expected files named "
            f"{', '.join(f'*{suffix}' for suffix in sorted(SUFFIXES))}"
        )
    return files.images


def tree(root: Path, inside: str, classes: Iterable[str] | None = None) -> Tree:
    """Return the image files below root/inside, by class; None takes each folder as a class.

    Raises:
      InputError: if there is no class, or a class has no images.
    """
    classes = folders(root / inside) if classes is None else classes
    if not classes:
        raise InputError(
            f"dataset: {str(root / inside)!r} has no class folders; expected {inside or '.'}/CLASS/*.png"
        )
    return {label: images(root, path_below(inside, label)) for label in classes}


def pooled(root: Path, insides: Sequence[str]) -> Tree:
    """Merge the files of several folders of classes, by class."""
    merged: Tree = {}
    for inside in insides:
        for label, files in tree(root, inside).items():
            merged.setdefault(label, []).extend(files)
    return merged


def is_image(name: str) -> bool:
    """Check whether a file has a suffix of images."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def in_words(paths: Sequence[str]) -> str:
    """Describe files: how many, of which kinds, and one of them."""
    kinds = Counter(os.path.splitext(path)[1].lower() or "without an ending" for path in paths)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    more = f" and {len(kinds) - 4} more" if len(kinds) > 4 else ""
    files = "file" if len(paths) == 1 else "files"
    kind = "kind" if len(kinds) == 1 else "kinds"
    return f"{len(paths):,} {files} of {len(kinds)} other {kind} ({shown}{more}), such as {paths[0]!r}"


def scan_of(
    root: Path,
    classes: Sequence[str],
    train: LabelledItems,
    test: LabelledItems,
    columns: tuple[_Columns, _Columns] = ({}, {}),
    notes: tuple[str, ...] = (),
) -> Scan:
    """Make the scan of files whose classes are known.

    Args:
      root: of the layout.
      classes: the names of the classes.
      train, test: files and labels.
      columns: of each split: further facts that are folders in a file's path.
      notes: how the files were read.
    """
    checksum = hashlib.sha256(json.dumps(classes).encode())
    for split in (train, test):
        for file, label in zip(split.items, split.labels, strict=True):
            checksum.update(
                f"{label}\0{file.path}\0{file.size}\0{file.time}\n".encode(errors="surrogateescape")
            )
        checksum.update(b"\n")
    splits = (
        _files(root, split, split_columns)
        for split, split_columns in zip((train, test), columns, strict=True)
    )
    listing = Listing(root, tuple(classes), *splits, notes=notes)
    return Scan(checksum.hexdigest(), lambda: listing)


def _files(root: Path, split: LabelledItems, columns: _Columns) -> UndecodedSplit:
    names = [os.path.join(root, file.path) for file in split.items]
    parts = [file.path.split("/") for file in split.items]
    return UndecodedSplit(
        np.array(split.labels, np.int64),
        names,
        lambda indices: [Path(names[i]) for i in indices],
        columns={name: [path_parts[index] for path_parts in parts] for name, index in columns.items()},
    )
