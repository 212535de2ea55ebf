"""Read lists of images: text files with a path and a label in each line, `list:FILE`.

Values are separated by commas, semicolons, tabs or blanks: `path label`,
`path,label,client,task`. A first line may name the columns, in any order; other columns
become columns of the data set. Paths are relative to the file. A column `split` separates
training from test images, or two files do: `list:train.txt,test.txt`; else a random fifth
is for testing.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from os.path import normpath
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from fcljax.data.files.dataset import natural_order
from fcljax.data.files.images import SUFFIXES, Picture
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import (
    SPLIT_NAMES,
    File,
    LabelledItems,
    Raw,
    Scan,
    file_facts,
    random_split,
    same_classes,
)
from fcljax.data.files.text_tables import read_rows
from fcljax.errors import InputError
from fcljax.files import in_home, read_user_text

RULES = b"2"  # version of the rules by which lists are read; part of the fingerprint
MOST_BYTES = 1 << 28  # most bytes of a list
SEPARATORS = ",;\t "

COLUMNS = ("path", "label", "client", "task")  # the columns of a list without a header
# what other programs call them
_NAMES = {
    "path": ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("label", "labels", "class", "class_name", "category", "target"),
    "client": ("client", "user", "owner"),
    "task": ("task",),
    "split": ("split", "set", "subset"),
}


class _Example(NamedTuple):
    """One line."""

    file: File
    """With an absolute path."""
    label: str
    split: str
    columns: tuple[str, ...]


class _List(NamedTuple):
    """The lines of one file."""

    examples: list[_Example]
    columns: tuple[str, ...]
    """Names of the columns besides path, label and split."""


class _Splits(NamedTuple):
    """The lines of both splits."""

    train: list[_Example]
    test: list[_Example]
    notes: list[str]
    train_rows: Int64[np.ndarray, " N"] | None = None
    """The number of each training line in a list of both splits without a column of splits."""
    num_rows: int | None = None
    """Lines of such a list."""


def list_of_files(word: str) -> Raw:
    """Return the images of `list:WORD` as raw data: a file, or two with a comma between.

    Raises:
      InputError: for a missing file, now or when it is scanned.
    """
    paths = [in_home(word, "dataset")]
    if not paths[0].is_file() and "," in word:
        paths = [in_home(part.strip(), "dataset") for part in word.split(",")]
    for path in paths:
        if not path.is_file():
            raise InputError(f"dataset: no such file: {str(path)!r}; expected a list of images and labels")
    if len(paths) > 2:
        raise InputError(
            f"dataset: {word!r} names {len(paths)} lists; expected one, or one for training and one for tests"
        )
    return Raw(paths[0].absolute().parent, partial(_scan, paths))


def _scan(paths: list[Path]) -> Scan:
    lists = [_read(path) for path in paths]
    checksum = hashlib.sha256(RULES)
    for image_list in lists:
        checksum.update(repr(image_list).encode(errors="surrogateescape"))
    return Scan(checksum.hexdigest(), lambda: _listing(paths, lists))


# ---- lines -----------------------------------------------------------------------------


def _read(path: Path) -> _List:
    """Read the lines of a file."""
    where = f"dataset: {str(path)!r}"
    rows = list(read_rows(where, read_user_text("dataset", path, MOST_BYTES), SEPARATORS))
    if not rows:
        raise InputError(f"{where} has no lines; expected a path and a label in each")
    header = _header(where, rows[0][1])
    names = header or list(COLUMNS[: len(rows[0][1])])
    if not header and not 2 <= len(rows[0][1]) <= len(COLUMNS):
        raise InputError(
            f"{where}, line {rows[0][0]}: {len(rows[0][1])} values; expected path,label or "
            "path,label,client,task, or a first line that names the columns"
        )
    extra = tuple(name for name in names if name not in ("path", "label", "split"))
    examples = []
    line_of: dict[str, int] = {}
    folder = path.absolute().parent
    for line, values in rows[1:] if header else rows:
        if len(values) != len(names):
            raise InputError(
                f"{where}, line {line}: {len(values)} values, and the first line has {len(names)}; a path "
                "with blanks or commas needs quotation marks"
            )
        row = dict(zip(names, values, strict=True))
        if not row["path"]:
            raise InputError(f"{where}, line {line}: no path")
        image = folder / row["path"]
        # "a.png" and "./a.png" are one image
        plain_path = normpath(image)
        if plain_path in line_of:
            first_line = line_of[plain_path]
            raise InputError(f"{where}, line {line}: {row['path']!r} is in line {first_line} already")
        line_of[plain_path] = line
        split = _split(f"{where}, line {line}", row.get("split", ""))
        examples.append(_Example(_facts(image), row["label"], split, tuple(row[name] for name in extra)))
    if not examples:
        raise InputError(f"{where} has only a line with the names of the columns")
    if all(example.file.size < 0 for example in examples):
        raise InputError(
            f"{where}: none of its {len(examples):,} files exists; "
            f"no such file: {examples[0].file.path!r}; paths are relative to the list"
        )
    return _List(examples, extra)


def _facts(path: Path) -> File:
    try:
        return file_facts(path, str(path))
    # a NUL in the name: a file that does not exist
    except ValueError:
        return File(str(path), -1, 0)


def _header(where: str, values: list[str]) -> list[str]:
    """Return the columns that a first line names, under our names; [] if it is no header."""
    lower = [value.lower() for value in values]
    column_of = {name: column for column, names in _NAMES.items() for name in names}
    names = [column_of.get(value, value) for value in lower]
    # a first line with the name of an image is no header
    if "path" not in names or any(Path(value).suffix in SUFFIXES for value in lower):
        return []
    if "label" not in names:
        raise InputError(f"{where}: its first line has no column 'label'; it has: {', '.join(values)}")
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(f"{where}: its first line has two columns for {duplicate!r}: {', '.join(values)}")
    return names


def _split(where: str, value: str) -> str:
    """Return the split that a value means; "" for an empty value."""
    split = next((split for split, names in SPLIT_NAMES.items() if value.lower() in names), "")
    if value and not split:
        raise InputError(f"{where}: unknown split {value!r}; expected train, test or val")
    return split


# ---- listings --------------------------------------------------------------------------


def _listing(paths: list[Path], lists: list[_List]) -> Listing:
    train, test, notes, train_rows, num_rows = _splits(paths, lists)
    train_labels, test_labels = (
        [example.label for example in split if not _is_missing(example.label)] for split in (train, test)
    )
    labels = train_labels + test_labels
    classes = natural_order(labels) if labels else []
    same_classes(str(paths[0]), train_labels, test_labels)
    # columns that all lists have
    columns = [name for name in lists[0].columns if name in lists[-1].columns]
    unread = sorted({*lists[0].columns, *lists[-1].columns} - set(columns))
    if unread:
        notes = [*notes, f"left out: columns that one list lacks ({', '.join(unread)})"]
    counts = f"{len(train):,} training and {len(test):,} test images of {len(classes)} classes"
    number = {name: i for i, name in enumerate(classes)}
    train_positions, test_positions = (
        {name: image_list.columns.index(name) for name in columns} for image_list in (lists[0], lists[-1])
    )
    return Listing(
        paths[0].absolute().parent,
        tuple(classes),
        _undecoded(train, number, train_positions)._replace(rows=train_rows),
        _undecoded(test, number, test_positions),
        notes=("; ".join([counts, *notes]),),
        num_rows=num_rows,
    )


def _splits(paths: list[Path], lists: list[_List]) -> _Splits:
    """Return training and test examples, with notes."""
    examples = lists[0].examples
    if len(lists) == 2:
        tests = lists[1].examples
        shared = {normpath(example.file.path) for example in examples}
        shared &= {normpath(example.file.path) for example in tests}
        notes = []
        if shared:
            notes.append(f"{len(shared):,} images are in both lists")
        return _Splits(examples, tests, notes)
    by_split = {split: [e for e in examples if e.split == split] for split in (*SPLIT_NAMES, "")}
    present = [split for split in by_split if by_split[split]]
    if present == [""]:
        rows = range(len(examples))
        train, test = random_split(LabelledItems(list(rows), list(rows)))
        return _Splits(
            [examples[row] for row in train.items],
            [examples[row] for row in test.items],
            ["a random fifth of the images is for testing"],
            np.array(train.items),
            len(examples),
        )
    test_split = next((split for split in ("test", "validation") if split in present), None)
    if by_split[""] or "train" not in present or test_split is None:
        problem = f"its splits are {', '.join(present)}"
        if by_split[""]:
            problem = f"{len(by_split[''])} lines have no split"
        raise InputError(f"dataset: {str(paths[0])!r}: {problem}; expected train, and test or val")
    notes = []
    if test_split != "test":
        notes.append(f"tested on the split {test_split}")
    elif by_split["validation"]:
        notes.append(f"not read: the validation split ({len(by_split['validation']):,} images)")
    return _Splits(by_split["train"], by_split[test_split], notes)


def _is_missing(label: str) -> bool:
    """Check whether a label is empty or a negative number."""
    return not label or (label[0] == "-" and label[1:].isdecimal())


def _undecoded(examples: list[_Example], number: dict[str, int], positions: dict[str, int]) -> UndecodedSplit:
    """Make a split, with the columns at these positions."""

    def fetch(indices: Sequence[int]) -> list[Picture]:
        return [_picture(examples[i].file) for i in indices]

    return UndecodedSplit(
        np.array([number.get(example.label, -1) for example in examples], np.int64),
        [example.file.path for example in examples],
        fetch,
        columns={
            name: [example.columns[position] for example in examples] for name, position in positions.items()
        },
        wrong_labels={
            i: repr(example.label) for i, example in enumerate(examples) if _is_missing(example.label)
        },
    )


def _picture(file: File) -> Picture:
    if file.size < 0:
        return InputError(f"dataset: no such file: {file.path!r}")
    return Path(file.path)
