"""`list:FILE`: a text file that names an image in each line, with its label and perhaps client and task.

The values are separated by commas, semicolons, tabs or blanks: `path label`, `path,label,client,task`; a
first line may name the columns, in any order, and may have others, which are kept. Paths are relative to the
file. A column `split` tells training from test images, or two files do: `list:train.txt,test.txt`; else a
random fifth is for testing.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fcljax.data.files.dataset import natural_order
from fcljax.data.files.images import SUFFIXES, Picture
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import File, LabelledItems, Raw, Scan, file_facts, random_split, same_classes
from fcljax.data.files.text_tables import read_rows
from fcljax.errors import InputError
from fcljax.files import in_home, read_user_text

MOST_BYTES = 1 << 28
SEPARATORS = ",;\t "

COLUMNS = ("path", "label", "client", "task")
_NAMES = {
    "path": ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("label", "labels", "class", "class_name", "category", "target"),
    "client": ("client", "user", "owner"),
    "task": ("task",),
    "split": ("split", "set", "subset"),
}
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}


class _Example(NamedTuple):
    """One line."""

    file: File
    """Its path is that of the list, made absolute."""
    label: str
    split: str
    columns: tuple[str, ...]


class _List(NamedTuple):
    """The lines of one file."""

    examples: list[_Example]
    columns: tuple[str, ...]
    """The names of what is known besides labels and splits."""


def list_of_files(word: str) -> Raw:
    """The images of `list:WORD`: a file, or two of them with a comma between.

    Raises:
      InputError: for a file that is not there, here or when it is scanned.
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
    sums = hashlib.sha256()
    for each in lists:
        sums.update(repr(each).encode(errors="surrogateescape"))
    return Scan(sums.hexdigest(), lambda: _listing(paths, lists))


# ---- lines -------------------------------------------------------------------------------------------------


def _read(path: Path) -> _List:
    """The lines of a file."""
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
    found = []
    seen: dict[str, int] = {}
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
        if row["path"] in seen:
            raise InputError(f"{where}, line {line}: {row['path']!r} is in line {seen[row['path']]} already")
        seen[row["path"]] = line
        split = _split(f"{where}, line {line}", row.get("split", ""))
        image = folder / row["path"]
        found.append(_Example(_facts(image), row["label"], split, tuple(row[name] for name in extra)))
    if not found:
        raise InputError(f"{where} has a line with the names of columns alone")
    if all(example.file.size < 0 for example in found):
        raise InputError(
            f"{where}: none of its {len(found):,} files is there, no such file: {found[0].file.path!r}; "
            "paths are relative to the list"
        )
    return _List(found, extra)


def _facts(path: Path) -> File:
    try:
        return file_facts(path, str(path))
    except ValueError:  # a NUL in the name
        return File(str(path), -1, 0)


def _header(where: str, values: list[str]) -> list[str]:
    """The columns that a first line names, under our names; [] if it names none."""
    small = [value.lower() for value in values]
    kinds = {name: kind for kind, names in _NAMES.items() for name in names}
    names = [kinds.get(value, value) for value in small]
    if "path" not in names or any(Path(value).suffix in SUFFIXES for value in small):
        return []
    if "label" not in names:
        raise InputError(f"{where}: its first line has no column 'label'; it has: {', '.join(values)}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: its first line has two columns for {twice!r}: {', '.join(values)}")
    return names


def _split(where: str, value: str) -> str:
    """The split that a value means; "" where none is named."""
    found = next((split for split, names in _SPLITS.items() if value.lower() in names), "")
    if value and not found:
        raise InputError(f"{where}: unknown split {value!r}; expected train, test or val")
    return found


# ---- listings ----------------------------------------------------------------------------------------------


def _listing(paths: list[Path], lists: list[_List]) -> Listing:
    train, test, notes = _splits(paths, lists)
    there = [example.label for example in (*train, *test) if not _is_missing(example.label)]
    classes = natural_order(there) if there else []
    same_classes(
        str(paths[0]),
        *([each.label for each in part if not _is_missing(each.label)] for part in (train, test)),
    )
    names = lists[0].columns
    columns = tuple(name for name in names if all(name in each.columns for each in lists))
    unread = sorted({name for each in lists for name in each.columns} - set(columns))
    if unread:
        notes = [*notes, f"left out: columns that one list lacks ({', '.join(unread)})"]
    counts = f"{len(train):,} training and {len(test):,} test images of {len(classes)} classes"
    number = {name: i for i, name in enumerate(classes)}
    places = [{name: each.columns.index(name) for name in columns} for each in (lists[0], lists[-1])]
    splits = (_undecoded(part, number, each) for part, each in zip((train, test), places, strict=True))
    return Listing(paths[0].absolute().parent, tuple(classes), *splits, notes=("; ".join([counts, *notes]),))


def _splits(paths: list[Path], lists: list[_List]) -> tuple[list[_Example], list[_Example], list[str]]:
    """Training and test examples, and what is said of them."""
    if len(lists) == 2:
        both = {example.file.path for example in lists[0].examples} & {e.file.path for e in lists[1].examples}
        notes = [f"{len(both):,} images are in both lists"] if both else []
        return lists[0].examples, lists[1].examples, notes
    by_split = {split: [e for e in lists[0].examples if e.split == split] for split in (*_SPLITS, "")}
    present = [split for split, examples in by_split.items() if examples]
    if present == [""]:
        every = lists[0].examples
        train, test = random_split(LabelledItems(every, list(range(len(every)))))
        return train.items, test.items, ["a random fifth of the images is for testing"]
    tested = next((split for split in ("test", "validation") if split in present), None)
    if by_split[""] or "train" not in present or tested is None:
        what = (
            f"{len(by_split[''])} lines have no split"
            if by_split[""]
            else f"its splits are {', '.join(present)}"
        )
        raise InputError(f"dataset: {str(paths[0])!r}: {what}; expected train, and test or val")
    notes = [f"tested on the split {tested}"] if tested != "test" else []
    if tested == "test" and by_split["validation"]:
        notes.append(f"not read: the validation split ({len(by_split['validation']):,} images)")
    return by_split["train"], by_split[tested], notes


def _is_missing(label: str) -> bool:
    """Whether a label is empty or a negative number."""
    return not label or (label[0] == "-" and label[1:].isdecimal())


def _undecoded(examples: list[_Example], number: dict[str, int], places: dict[str, int]) -> UndecodedSplit:
    """A split, with the columns at these places."""

    def fetch(indices: Sequence[int]) -> list[Picture]:
        return [_picture(examples[i].file) for i in indices]

    return UndecodedSplit(
        np.array([number.get(example.label, -1) for example in examples], np.int64),
        [example.file.path for example in examples],
        fetch,
        columns={name: [example.columns[place] for example in examples] for name, place in places.items()},
        wrong_labels={
            i: repr(example.label) for i, example in enumerate(examples) if _is_missing(example.label)
        },
    )


def _picture(file: File) -> Picture:
    if file.size < 0:
        return InputError(f"dataset: no such file: {file.path!r}")
    return Path(file.path)
