"""Image data sets of the Hugging Face hub: tables in parquet or arrow files with a column of images and one
of labels, in a folder or in the caches of the hub's libraries.

Splits are named by the names of files or folders: train, test, validation. Without test examples those of the
validation split are tested on, else a random fifth. Each table's labels are read by the names that this table
gives to its classes. All other columns of short text and whole numbers are kept, as sites or domains; what is
not read is said. Reading needs pyarrow (`fcljax[tables]`).
"""

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.arrays import checked_image, checked_labels
from fcljax.data.files.arrow_files import SUFFIXES, Table, opened, values_of
from fcljax.data.files.dataset import natural_order
from fcljax.data.files.images import MAX_PIXELS, Picture
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import LabelledItems, Raw, Scan, file_facts, random_split
from fcljax.errors import InputError, reason
from fcljax.files import in_home

RULES = 2  # by which tables are read; part of what was prepared from them
SPLITS = {"train": r"train(ing)?", "test": r"test(ing)?", "validation": r"val(id(ation)?)?|dev"}
# usual names of the two columns, in the order in which they are looked for
IMAGES = ("image", "img", "jpg", "png", "pixels")
LABELS = ("label", "labels", "fine_label", "class", "category", "target")

_DARK = 16  # levels up to this one alone are of another range than 0..255
_SAMPLE = 64  # images by which that is seen
_LONG_TEXT = 200  # characters of a column's text beyond which it is no site
_SHOWN = 6  # names in a line


def table_files(name: str) -> Raw:
    """The tables of `hf:NAME`: a folder of the user's, or OWNER/NAME in a cache.

    Raises:
      InputError: if there is no such folder or no table in it, or pyarrow is missing.
    """
    root = _root(name)
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"dataset: 'hf:{name}' needs pyarrow: pip install 'fcljax[tables]'")
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files = [path for path in files if not path.name.startswith(("cache-", "tmp"))]  # results of `map`
    splits: dict[Path, str | None] = {path: _split_of(path.relative_to(root)) for path in files}
    unsplit = bool(files) and not any(splits.values())
    if unsplit:
        splits = {path: "train" for path in files}
    # a data set may be there in more than one configuration, each in a folder of its own
    folders = {path.parent for path in files if splits[path]}
    if not files or not any(split == "train" for split in splits.values()):
        raise InputError(
            f"dataset: {str(root)!r} has no table of training examples; expected train*.parquet or "
            "*-train*.arrow"
        )
    if len(folders) > 1 and not all(re.fullmatch("|".join(SPLITS.values()), f.name) for f in folders):
        names = ", ".join(sorted(str(folder.relative_to(root)) for folder in folders)[:4])
        raise InputError(f"dataset: {str(root)!r} has tables in {names}; name one of these folders: hf:PATH")
    return Raw(root, functools.partial(_scan, root, splits))


def _root(name: str) -> Path:
    """The folder of that name, or the newest version in a cache."""
    path = in_home(name, "dataset")
    if path.is_dir():
        return path
    if path.is_file():
        raise InputError(f"dataset: {str(path)!r} is a file; give the folder that it is in: hf:PATH")
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    for folder in (*_newest(hub / "snapshots"), *_newest(prepared)):
        if any(path.suffix in SUFFIXES for path in folder.rglob("*")):
            return folder
    raise InputError(
        f"dataset: 'hf:{name}' is no folder and in no cache; get it with: hf download {name} "
        "--repo-type dataset"
    )


def _newest(folder: Path) -> list[Path]:
    """The folders in it, the newest first."""
    found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _split_of(path: Path) -> str | None:
    """The split that a file's name or its folder's tells."""
    for part in (path.name, *reversed(path.parts[:-1])):
        for split, pattern in SPLITS.items():
            if re.search(rf"(^|[^a-z])({pattern})([^a-z]|$)", part.lower()):
                return split
    return None


def _scan(root: Path, splits: dict[Path, str | None]) -> Scan:
    facts = [
        (split, *file_facts(path, str(path.relative_to(root)))) for path, split in splits.items() if split
    ]
    return Scan(hashlib.sha256(repr([RULES, facts]).encode()).hexdigest(), lambda: _listing(root, splits))


# ---- listings ----------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where an example is."""

    file: int
    row: int


class _Columns(NamedTuple):
    """The columns of images and labels."""

    image: str
    label: str
    note: str


class _Split(NamedTuple):
    """What is trained or tested on."""

    train: LabelledItems
    test: LabelledItems
    notes: list[str]


def _listing(root: Path, splits: dict[Path, str | None]) -> Listing:
    """Labels and columns are read at once, images when they are decoded."""
    paths = [path for path, split in splits.items() if split]
    kinds = [split for split in splits.values() if split]
    tables = [opened(path, str(path.relative_to(root))) for path in paths]
    columns = _columns(root, tables, kinds)
    labels = _labels(tables, kinds, columns.label)
    chosen = _chosen(root, kinds, labels.numbers)
    _check_levels(tables, columns.image, chosen.train.items[:_SAMPLE])
    used = sorted({place.file for items in (chosen.train, chosen.test) for place in items.items})
    kept, unread = _kept([tables[i] for i in used], set(columns[:2]))
    values = {name: dict(zip(used, found, strict=True)) for name, found in kept.items()}

    def split(items: LabelledItems) -> UndecodedSplit:
        places = items.items
        wrong = {i: labels.wrong[place] for i, place in enumerate(places) if place in labels.wrong}

        def fetch(indices: Sequence[int]) -> list[Picture]:
            return [_picture(tables[places[i].file], columns.image, places[i].row) for i in indices]

        return UndecodedSplit(
            np.array(items.labels, np.int64),
            [f"{tables[place.file].name}:{place.row}" for place in places],
            fetch,
            columns={
                name: [found[place.file][place.row] for place in places] for name, found in values.items()
            },
            wrong_labels=wrong,
        )

    counts = f"{len(chosen.train.items):,} training and {len(chosen.test.items):,} test images"
    outside = [str(path.relative_to(root)) for path, found in splits.items() if not found]
    if outside:
        chosen.notes.append(f"not read: {len(outside)} tables of no split, such as {outside[0]!r}")
    notes = [f"{counts} of {len(labels.names)} classes", columns.note, *labels.notes, *chosen.notes, *unread]
    line = "; ".join(note for note in notes if note)
    return Listing(root, tuple(labels.names), split(chosen.train), split(chosen.test), (line,))


def _chosen(root: Path, kinds: list[str], labels: list[np.ndarray]) -> _Split:
    """The examples of the training split, and of that which is tested on."""
    present = {
        kind: LabelledItems(
            [_Place(i, row) for i, each in enumerate(kinds) if each == kind for row in range(len(labels[i]))],
            [int(label) for i, each in enumerate(kinds) if each == kind for label in labels[i]],
        )
        for kind in dict.fromkeys(kinds)
    }
    empty = next((kind for kind, items in present.items() if not items.items), None)
    if empty:
        raise InputError(f"dataset: {str(root)!r}: its {empty} split has no rows")
    notes = []
    tested = None
    for kind in ("test", "validation"):
        if kind not in present:
            continue
        if tested:
            notes.append(f"not read: the {kind} split ({len(present[kind].items):,} examples)")
        elif max(present[kind].labels) < 0:  # as those of a competition
            notes.append(f"the {kind} split has no labels")
        else:
            tested = kind
    if tested == "validation":
        notes.append("tested on the validation split")
    if tested:
        return _Split(present["train"], present[tested], notes)
    notes.append("a random fifth of the training examples is for testing")
    train, test = random_split(present["train"])
    return _Split(_in_order(train), _in_order(test), notes)


def _in_order(items: LabelledItems) -> LabelledItems:
    """In the order of the files: neighbours are read together."""
    return items.take(sorted(range(len(items.items)), key=items.items.__getitem__))


def _columns(root: Path, tables: list[Table], kinds: list[str]) -> _Columns:
    """The columns of images and labels, which every table must have."""
    first = tables[kinds.index("train")]
    images, labels = (
        _candidates(first, kind, usual) for kind, usual in (("Image", IMAGES), ("ClassLabel", LABELS))
    )
    if not images or not labels:
        lacks = f"labels ({', '.join(LABELS)})" if images else "images ('image')"
        raise InputError(f"dataset: {str(root)!r} has no column of {lacks}; it has: {', '.join(first.kinds)}")
    for table in tables:
        for column in (images[0], labels[0]):
            if column not in table.kinds:
                raise InputError(
                    f"dataset: {str(table.path)!r} has no column {column!r}, and {first.name!r} has; it has: "
                    f"{', '.join(table.kinds)}"
                )
    others = [name for name in labels[1:] if name != images[0]]
    note = f"the labels are the column {labels[0]!r}, not {_some(others)}" if others else ""
    if images[1:]:
        note += f"{'; ' if note else ''}the images are the column {images[0]!r}, not {_some(images[1:])}"
    return _Columns(images[0], labels[0], note)


def _candidates(table: Table, kind: str, usual: Sequence[str]) -> list[str]:
    """The columns that may be meant, the first of them the one that is: those that the hub's library calls so
    and that have a usual name, the others that it calls so, the others of usual names."""
    named = [name for name, facts in table.features.items() if facts.get("_type") == kind]
    order = [*(name for name in usual if name in named), *named, *usual]
    return [name for name in dict.fromkeys(order) if name in table.kinds]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


# ---- labels ------------------------------------------------------------------------------------------------


class _TableLabels(NamedTuple):
    """The labels of all tables."""

    numbers: list[np.ndarray]
    """Of each table [rows]; -1: none."""
    names: list[str]
    """Of the classes."""
    wrong: dict[_Place, str]
    """What stands in place of a label."""
    notes: list[str]


class _Read(NamedTuple):
    """The labels of one table."""

    there: np.ndarray
    """Which rows [rows] have a label."""
    labels: np.ndarray
    """Of these rows: integers or text."""
    wrong: dict[int, str]
    """Row -> what stands in place of a label."""
    names: list[str] | None
    """Of the classes, in this table's own order."""


def _labels(tables: list[Table], kinds: list[str], column: str) -> _TableLabels:
    """The labels of each table, each read by its own names of the classes."""
    read = [_read_labels(table, column) for table in tables]
    # the names of the training tables come first
    order = sorted(range(len(tables)), key=lambda i: kinds[i] != "train")
    lists = [names for i in order if (names := read[i].names)]
    notes = []
    shared = lists[0] if lists else None
    nameless = [i for i in order if read[i].names is None and read[i].labels.dtype.kind != "U"]
    if shared and nameless:
        notes.append(
            f"{tables[nameless[0]].name!r} has no names of classes: its numbers are read by the others'"
        )
    texts = [_texts(table, each, shared) for table, each in zip(tables, read, strict=True)]
    found = set().union(*(np.unique(each).tolist() for each in texts))
    names = list(dict.fromkeys(name for each in lists for name in each))
    if lists:
        unused = [name for name in names if name not in found]
        if unused:
            notes.append(f"left out: {len(unused)} classes without examples ({_some(unused)})")
        names = [name for name in names if name in found]
        names += natural_order(sorted(found - set(names))) if found - set(names) else []
    else:
        names = natural_order(sorted(found)) if found else []
    number = {name: i for i, name in enumerate(names)}
    numbers = []
    for each, text in zip(read, texts, strict=True):
        label = np.full(len(each.there), -1, np.int64)
        label[each.there] = [number[name] for name in text.tolist()]
        numbers.append(label)
    wrong = {_Place(i, row): what for i, each in enumerate(read) for row, what in each.wrong.items()}
    return _TableLabels(numbers, names, wrong, notes)


def _read_labels(table: Table, column: str) -> _Read:
    """The labels of a table as they are written."""
    values = _scalars(table, column, values_of(table, column))
    missing = np.array([_is_missing(value) for value in values], bool)
    wrong = {row: _written(values[row]) for row in np.flatnonzero(missing).tolist()}
    there = ~missing
    present = [value for value, here in zip(values, there, strict=True) if here]
    names = table.features.get(column, {}).get("names")
    names = [str(name) for name in names] if isinstance(names, list) and names else None
    if names and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"dataset: {str(table.path)!r}: two classes of the column {column!r} are called {twice!r}"
        )
    if not present:
        return _Read(there, np.zeros(0, np.int64), wrong, names)
    labels = checked_labels(f"dataset: {str(table.path)!r}", f"the column {column!r}", _array(present))
    return _Read(there, labels, wrong, names)


def _scalars(table: Table, column: str, values: list[Any]) -> list[Any]:
    """Labels that are lists of one value, or one-hot, as single values."""
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return values
    where = f"dataset: {str(table.path)!r}"
    try:
        found = iter(checked_labels(where, f"the column {column!r}", np.array(lists)).tolist())
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{where}: the column {column!r} has lists of several lengths; one label is needed"
        ) from None
    return [next(found) if isinstance(value, list) else value for value in values]


def _is_missing(value: Any) -> bool:
    """Whether nothing stands there, no number, a negative one or empty text."""
    if value is None or value != value:
        return True
    if isinstance(value, str | bytes):
        return not value.strip()
    return isinstance(value, int | float) and value < 0


def _written(value: Any) -> str:
    return "null" if value is None else repr(value)


def _array(values: list[Any]) -> np.ndarray:
    """Labels that are there; whole numbers that are floats, as pandas writes them beside missing ones, are
    integers."""
    if all(isinstance(value, float) and value.is_integer() for value in values):
        return np.array([int(value) for value in values])
    if all(isinstance(value, bool) for value in values):
        return np.array([str(value) for value in values])
    array = np.empty(len(values), object)
    array[:] = values
    kinds = {type(value) for value in values}
    return np.array(values) if len(kinds) == 1 and kinds <= {int, float, str, bytes} else array


def _texts(table: Table, read: _Read, shared: list[str] | None) -> np.ndarray:
    """The name of the class of each labelled row."""
    names = read.names or shared
    if read.labels.dtype.kind == "U" or names is None:
        return read.labels.astype(str)
    largest = int(read.labels.max()) if len(read.labels) else 0
    if largest >= len(names):
        raise InputError(f"dataset: {str(table.path)!r}: label {largest} of {len(names)} classes")
    return np.array(names)[read.labels]


# ---- other columns -----------------------------------------------------------------------------------------


def _kept(tables: list[Table], read: set[str]) -> tuple[dict[str, list[list[str]]], list[str]]:
    """The columns of short text and whole numbers besides images and labels, name -> the values of each
    table; and what is said of the others."""
    names = [
        name for name in dict.fromkeys(name for table in tables for name in table.kinds) if name not in read
    ]
    kept: dict[str, list[list[str]]] = {}
    left_out = []
    for name in names:
        if not all(name in table.plain for table in tables):
            left_out.append(name)
            continue
        values = [_column_texts(table, name) for table in tables]
        if max((len(value) for each in values for value in each), default=0) > _LONG_TEXT:
            left_out.append(name)
            continue
        kept[name] = values
    notes = [f"left out: {len(left_out)} columns ({_some(left_out)})"] if left_out else []
    for name, found in kept.items():
        nobody = sum(value == "" for each in found for value in each)
        if nobody:
            notes.append(f"{nobody:,} examples have no {name}")
    return kept, notes


def _column_texts(table: Table, name: str) -> list[str]:
    """A column's values as text, those of a ClassLabel by this table's names; nothing is an empty text."""
    names = table.features.get(name, {}).get("names")
    values = values_of(table, name)
    if isinstance(names, list):
        return [_named(names, value) for value in values]
    return ["" if value is None else str(value) for value in values]


def _named(names: list[Any], value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and 0 <= value < len(names):
        return str(names[value])
    return str(value)


# ---- images ------------------------------------------------------------------------------------------------


def _picture(table: Table, column: str, row: int) -> Picture:
    """The image of a row: the bytes of its file, its pixels, or why there is none."""
    value = table.cell(column, row)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    try:
        return _pixels(table, column, row, value)
    except InputError as error:
        return error


def _pixels(table: Table, column: str, row: int, value: Any) -> np.ndarray:
    where = f"dataset: {table.name!r}, row {row}"
    if value is None:
        raise InputError(f"{where}: there is no image")
    if isinstance(value, str):
        raise InputError(f"{where}: an image is only named there, not held")
    array = _levels(where, value)
    if array.size >= 3 * MAX_PIXELS:
        raise InputError(
            f"{where}: the image has {array.size:,} values; expected less than {3 * MAX_PIXELS:,}"
        )
    return checked_image(where, f"the {column}", array)


def _levels(where: str, value: Any) -> np.ndarray:
    """The numbers of lists; whole ones from 0 to 255 are grey levels."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{where}: the image is no array ({reason(error)})") from None
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    return array


def _check_levels(tables: list[Table], column: str, places: Iterable[_Place]) -> None:
    """Check that images that are lists of whole numbers go up to more than a few levels.

    Raises:
      InputError: if they do not, as those of scikit-learn's digits, which go to 16.
    """
    highest = 0
    for place in places:
        if tables[place.file].levels.get(column) != "int":
            return
        picture = _picture(tables[place.file], column, place.row)
        if isinstance(picture, np.ndarray):
            highest = max(highest, int(picture.max()))
    if 0 < highest <= _DARK:
        raise InputError(
            f"dataset: {str(tables[0].path)!r}: the images of the column {column!r} have the levels 0 to "
            f"{highest}; expected grey levels 0..255, or float in [0, 1]; nearest: x / {highest}, if "
            f"{highest} is white"
        )
