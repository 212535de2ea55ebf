"""Read image data sets of the Hugging Face hub: parquet or arrow files with columns of images and labels.

They are in a folder or in the caches of the hub's libraries. Names of files or folders show the split: train,
test, validation. Without test examples those of the validation split are for testing, else a random fifth.
Each table's labels are read by the names that this table gives to its classes. All other columns of short
text and integers become columns of the data set, such as sites or domains. Notes name what was not read.
Reading needs pyarrow (`fcljax[tables]`).
"""

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.data.files.arrays import checked_image, checked_labels, rows_with_label
from fcljax.data.files.arrow_files import SUFFIXES, Table, open_table, values_of
from fcljax.data.files.dataset import TextExamples, Texts, natural_order
from fcljax.data.files.images import MAX_PIXELS, Picture
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import LabelledItems, Raw, Scan, file_facts, first_names, random_split
from fcljax.errors import InputError, install_command, reason
from fcljax.files import hugging_face_home, hugging_face_hub, in_home

RULES = 3  # version of the rules by which tables are read; part of the fingerprint
SPLITS = {"train": r"train(ing)?", "test": r"test(ing)?", "validation": r"val(id(ation)?)?|dev"}


class ColumnKind(NamedTuple):
    """A kind of column that a data set needs."""

    words: str
    """What it holds, in messages."""
    feature: str
    """Type by which the hub's library declares it."""
    usual: tuple[str, ...]
    """Usual names, in order of preference."""


IMAGES = ColumnKind("images", "Image", ("image", "img", "jpg", "png", "pixels"))
TEXTS = ColumnKind("texts", "Text", ("text", "sentence", "content", "document", "question", "review"))
LABELS = ColumnKind("labels", "ClassLabel", ("label", "labels", "fine_label", "class", "category", "target"))

# Images of integers that go no further have another range than 0..255, as scikit-learn's
# digits with 0..16: read as grey levels they would be nearly black.
_DARK = 16
_SAMPLE = 64  # images that are checked for it
_LONG_TEXT = 200  # characters; a column of longer texts is a caption, not a site or a domain


def table_files(name: str) -> Raw:
    """Find the tables of `hf:NAME`: a folder of the user's, or OWNER/NAME in a cache.

    Raises:
      InputError: if there is no such folder or no table in it, or pyarrow is missing.
    """
    root = _root(name)
    return Raw(root, functools.partial(_scan, root, _splits(root, f"hf:{name}")))


def read_texts(name: str, skip_missing: bool = False) -> Texts:
    """Read the texts in the tables of a folder, or of OWNER/NAME in a cache.

    Args:
      name: of the folder or of OWNER/NAME.
      skip_missing: leave out texts without a label.

    Raises:
      InputError: as `table_files`, and naming a row without a text or a label.
    """
    root = _root(name)
    splits = {path: split for path, split in _splits(root, f"texts:{name}").items() if split}
    tables = [open_table(path, str(path.relative_to(root))) for path in splits]
    split_names = list(splits.values())
    columns = _columns(root, tables, split_names, TEXTS)
    labels = _labels(tables, split_names, columns.label)
    examples = _choose_examples(root, split_names, labels.numbers)
    examples = _with_labels(examples, tables, labels.wrong, skip_missing)
    others, column_notes = _other_columns(tables, {columns.examples, columns.label})
    texts = [values_of(table, columns.examples) for table in tables]

    def examples_of(items: LabelledItems) -> TextExamples:
        for place in items.items:
            text = texts[place.file][place.row]
            if not isinstance(text, str) or not text.strip():
                raise InputError(
                    f"{_where(tables, place)}: the column {columns.examples!r} is {text!r}; expected text"
                )

        def values(by_table: Sequence[list[str]]) -> list[str]:
            return [by_table[place.file][place.row] for place in items.items]

        columns_of = {column: np.array(values(by_table)) for column, by_table in others.items()}
        return TextExamples(values(texts), np.array(items.labels), columns_of)

    notes = [columns.note, *labels.notes, *examples.notes, *column_notes]
    note = "; ".join(note for note in notes if note)
    train, test = map(examples_of, (examples.train, examples.test))
    return Texts(train, test, labels.names, note, examples.train_rows, examples.num_rows)


def _splits(root: Path, name: str) -> dict[Path, str | None]:
    """Return the split of each table in a folder.

    Raises:
      InputError: as `table_files`; `name` is that of the data set.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"dataset: {name!r} needs pyarrow; install it with: {install_command('tables')}")
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    # without results of the library's `map`, which lie beside the data set
    files = [path for path in files if not path.name.startswith(("cache-", "tmp"))]
    splits: dict[Path, str | None] = {path: _split_of(path.relative_to(root)) for path in files}
    unsplit = bool(files) and not any(splits.values())
    if unsplit:
        splits = {path: "train" for path in files}
    # a data set may have several configurations, each in another folder
    folders = {path.parent for path in files if splits[path]}
    if not files or not any(split == "train" for split in splits.values()):
        raise InputError(
            f"dataset: {str(root)!r} has no table of training examples; expected train*.parquet or "
            "*-train*.arrow"
        )
    if len(folders) > 1 and not all(re.fullmatch("|".join(SPLITS.values()), f.name) for f in folders):
        names = ", ".join(sorted(str(folder.relative_to(root)) for folder in folders)[:4])
        form = name.partition(":")[0]
        raise InputError(
            f"dataset: {str(root)!r} has tables in {names}; name one of these folders: {form}:PATH"
        )
    return splits


def _root(name: str) -> Path:
    """Return the folder of that name, or the newest version in a cache."""
    path = in_home(name, "dataset")
    if path.is_dir():
        return path
    if path.is_file():
        raise InputError(f"dataset: {str(path)!r} is a file; give the folder that it is in: hf:PATH")
    hub = hugging_face_hub() / f"datasets--{name.replace('/', '--')}"
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or hugging_face_home() / "datasets")
    prepared = datasets / name.replace("/", "___")
    for folder in (*_newest(hub / "snapshots"), *_newest(prepared)):
        if any(path.suffix in SUFFIXES for path in folder.rglob("*")):
            return folder
    raise InputError(
        f"dataset: 'hf:{name}' is neither a folder nor in a cache; get it with: hf download {name} "
        "--repo-type dataset"
    )


def _newest(folder: Path) -> list[Path]:
    """Return the folders in a folder, the newest first."""
    folders = [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _split_of(path: Path) -> str | None:
    """Return the split in the name of a file or its folder."""
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
    """The position of an example."""

    file: int
    row: int


class _Columns(NamedTuple):
    """The columns of examples and labels."""

    examples: str
    label: str
    note: str


class _Split(NamedTuple):
    """Training and test examples."""

    train: LabelledItems
    test: LabelledItems
    notes: list[str]
    train_rows: Int[np.ndarray, " n"]
    """Numbers of the training examples in the tables of the training split."""
    num_rows: int
    """Examples there."""


def _listing(root: Path, splits: dict[Path, str | None]) -> Listing:
    """List the examples. Labels and columns are read now, images when they are decoded."""
    paths = [path for path, split in splits.items() if split]
    split_names = [split for split in splits.values() if split]
    tables = [open_table(path, str(path.relative_to(root))) for path in paths]
    columns = _columns(root, tables, split_names, IMAGES)
    labels = _labels(tables, split_names, columns.label)
    examples = _choose_examples(root, split_names, labels.numbers)
    _check_levels(tables, columns.examples, examples.train.items[:_SAMPLE])
    used_tables = sorted({place.file for items in (examples.train, examples.test) for place in items.items})
    texts, column_notes = _other_columns([tables[i] for i in used_tables], set(columns[:2]))
    values = {name: dict(zip(used_tables, by_table, strict=True)) for name, by_table in texts.items()}

    def split(items: LabelledItems) -> UndecodedSplit:
        positions = items.items
        wrong = {i: labels.wrong[place] for i, place in enumerate(positions) if place in labels.wrong}

        def fetch(indices: Sequence[int]) -> list[Picture]:
            return [_picture(tables[positions[i].file], columns.examples, positions[i].row) for i in indices]

        return UndecodedSplit(
            np.array(items.labels, np.int64),
            [f"{tables[place.file].name}:{place.row}" for place in positions],
            fetch,
            columns={
                name: [by_table[place.file][place.row] for place in positions]
                for name, by_table in values.items()
            },
            wrong_labels=wrong,
        )

    counts = f"{len(examples.train.items):,} training and {len(examples.test.items):,} test images"
    unsplit = [str(path.relative_to(root)) for path, split in splits.items() if not split]
    if unsplit:
        examples.notes.append(f"not read: {len(unsplit)} tables of no split, such as {unsplit[0]!r}")
    notes = [
        f"{counts} of {len(labels.names)} classes",
        columns.note,
        *labels.notes,
        *examples.notes,
        *column_notes,
    ]
    line = "; ".join(note for note in notes if note)
    train = split(examples.train)._replace(rows=examples.train_rows)
    return Listing(root, tuple(labels.names), train, split(examples.test), (line,), examples.num_rows)


def _choose_examples(root: Path, split_names: list[str], labels: list[np.ndarray]) -> _Split:
    """Choose the training and test examples."""
    present = {split: LabelledItems([], []) for split in dict.fromkeys(split_names)}
    for i, split in enumerate(split_names):
        present[split].items.extend(_Place(i, row) for row in range(len(labels[i])))
        present[split].labels.extend(labels[i].tolist())
    empty = next((kind for kind, items in present.items() if not items.items), None)
    if empty:
        raise InputError(f"dataset: {str(root)!r}: its {empty} split has no rows")
    notes = []
    test_split = None
    for kind in ("test", "validation"):
        if kind not in present:
            continue
        if test_split:
            notes.append(f"not read: the {kind} split ({len(present[kind].items):,} examples)")
        # all -1, as in test splits of competitions
        elif max(present[kind].labels) < 0:
            notes.append(f"the {kind} split has no labels")
        else:
            test_split = kind
    if test_split == "validation":
        notes.append("tested on the validation split")
    all_train = present["train"]
    num_rows = len(all_train.items)
    if test_split:
        return _Split(all_train, present[test_split], notes, np.arange(num_rows), num_rows)
    notes.append("a random fifth of the training examples is for testing")
    number = {place: row for row, place in enumerate(all_train.items)}
    train, test = map(_in_order, random_split(all_train))
    train_rows = np.array([number[place] for place in train.items])
    return _Split(train, test, notes, train_rows, num_rows)


def _with_labels(
    examples: _Split, tables: list[Table], wrong: Mapping[_Place, str], skip_missing: bool
) -> _Split:
    """Return the examples that have a label.

    Raises:
      InputError: naming the row of one without, unless `skip_missing`.
    """

    def rows(items: LabelledItems) -> tuple[np.ndarray, str]:
        def place(i: int) -> str:
            return f"{_where(tables, items.items[i])} ({wrong[items.items[i]]})"

        return rows_with_label(np.array(items.labels), place, skip_missing)

    train, train_note = rows(examples.train)
    test, test_note = rows(examples.test)
    return _Split(
        examples.train.take(train.tolist()),
        examples.test.take(test.tolist()),
        [*examples.notes, *filter(None, (train_note, test_note))],
        examples.train_rows[train],
        examples.num_rows,
    )


def _where(tables: list[Table], place: _Place) -> str:
    """Return where an example is, for messages."""
    return f"dataset: {str(tables[place.file].path)!r}, row {place.row}"


def _in_order(items: LabelledItems) -> LabelledItems:
    """Sort examples in the order of the files, because neighbours are read together."""
    return items.take(sorted(range(len(items.items)), key=items.items.__getitem__))


def _columns(root: Path, tables: list[Table], split_names: list[str], kind: ColumnKind) -> _Columns:
    """Choose the columns of examples and labels, which every table must have.

    Args:
      root: folder of the tables.
      tables: of all splits.
      split_names: of each table.
      kind: of the examples.
    """
    train_table = tables[split_names.index("train")]
    examples = _candidates(train_table, kind)
    labels = _candidates(train_table, LABELS)
    if not examples or not labels:
        missing = f"{kind.words} ({kind.usual[0]!r})"
        if examples:
            missing = f"labels ({', '.join(LABELS.usual)})"
        hint = ""
        if not examples and kind is IMAGES and any(name in train_table.plain for name in TEXTS.usual):
            hint = f"; nearest: --dataset texts:{root}"
        raise InputError(
            f"dataset: {str(root)!r} has no column of {missing}; it has: {', '.join(train_table.kinds)}{hint}"
        )
    for table in tables:
        for column in (examples[0], labels[0]):
            if column not in table.kinds:
                raise InputError(
                    f"dataset: {str(table.path)!r} has no column {column!r}, and {train_table.name!r} has; "
                    f"it has: {', '.join(table.kinds)}"
                )
    others = [name for name in labels[1:] if name != examples[0]]
    notes = []
    if others:
        notes.append(f"the labels are the column {labels[0]!r}, not {first_names(others)}")
    if examples[1:]:
        notes.append(f"the {kind.words} are the column {examples[0]!r}, not {first_names(examples[1:])}")
    return _Columns(examples[0], labels[0], "; ".join(notes))


def _candidates(table: Table, kind: ColumnKind) -> list[str]:
    """List the columns of a kind, the best candidate first.

    Columns that the hub's library declares as the kind come first, among them those with a usual name.
    """
    declared = [name for name, facts in table.features.items() if facts.get("_type") == kind.feature]
    order = [*(name for name in kind.usual if name in declared), *declared, *kind.usual]
    return [name for name in dict.fromkeys(order) if name in table.kinds]


# ---- labels ------------------------------------------------------------------------------------------------


class _TableLabels(NamedTuple):
    """The labels of all tables."""

    numbers: list[np.ndarray]
    """Class numbers of each table [rows]; -1: no label."""
    names: list[str]
    """Names of the classes."""
    wrong: dict[_Place, str]
    """Values that are no labels, for example null."""
    notes: list[str]


class _LabelColumn(NamedTuple):
    """The labels of one table."""

    has_label: np.ndarray
    """[rows]"""
    labels: np.ndarray
    """Labels of the rows that have one: integers or text."""
    wrong: dict[int, str]
    """Row -> a value that is no label."""
    names: list[str] | None
    """Names of the classes, in this table's order."""


def _labels(tables: list[Table], split_names: list[str], column: str) -> _TableLabels:
    """Number the labels of all tables; each table's labels are read by its own names of the classes."""
    columns = [_read_labels(table, column) for table in tables]
    # classes are numbered as the training tables name them
    order = sorted(range(len(tables)), key=lambda i: split_names[i] != "train")
    declared = [names for i in order if (names := columns[i].names)]
    notes = []
    shared = declared[0] if declared else None
    nameless = [i for i in order if columns[i].names is None and columns[i].labels.dtype.kind != "U"]
    if shared and nameless:
        notes.append(
            f"{tables[nameless[0]].name!r} has no names of classes: its numbers are read by the others'"
        )
    texts = [_texts(table, labels, shared) for table, labels in zip(tables, columns, strict=True)]
    present = {name for text in texts for name in np.unique(text).tolist()}
    names = list(dict.fromkeys(name for table_names in declared for name in table_names))
    unused = [name for name in names if name not in present]
    if unused:
        notes.append(f"left out: {len(unused)} classes without examples ({first_names(unused)})")
    names = [name for name in names if name in present]
    if present - set(names):
        names += natural_order(sorted(present - set(names)))
    number = {name: i for i, name in enumerate(names)}
    numbers = []
    for labels, text in zip(columns, texts, strict=True):
        label = np.full(len(labels.has_label), -1, np.int64)
        label[labels.has_label] = [number[name] for name in text.tolist()]
        numbers.append(label)
    wrong = {_Place(i, row): value for i, labels in enumerate(columns) for row, value in labels.wrong.items()}
    return _TableLabels(numbers, names, wrong, notes)


def _read_labels(table: Table, column: str) -> _LabelColumn:
    """Read the labels of a table as they are written."""
    values = _scalars(table, column, values_of(table, column))
    missing = np.array([_is_missing(value) for value in values], bool)
    wrong = {row: _written(values[row]) for row in np.flatnonzero(missing).tolist()}
    has_label = ~missing
    present = [value for value, is_label in zip(values, has_label, strict=True) if is_label]
    names = table.features.get(column, {}).get("names")
    names = [str(name) for name in names] if isinstance(names, list) and names else None
    if names and len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"dataset: {str(table.path)!r}: two classes of the column {column!r} are called {duplicate!r}"
        )
    if not present:
        return _LabelColumn(has_label, np.zeros(0, np.int64), wrong, names)
    labels = checked_labels(f"dataset: {str(table.path)!r}", f"the column {column!r}", _array(present))
    return _LabelColumn(has_label, labels, wrong, names)


def _scalars(table: Table, column: str, values: list[Any]) -> list[Any]:
    """Turn labels that are one-hot or lists of one value into single values."""
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return values
    where = f"dataset: {str(table.path)!r}"
    try:
        single_labels = iter(checked_labels(where, f"the column {column!r}", np.array(lists)).tolist())
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{where}: the column {column!r} has lists of several lengths; one label is needed"
        ) from None
    return [next(single_labels) if isinstance(value, list) else value for value in values]


def _is_missing(value: Any) -> bool:
    """Check whether a value is null, NaN, negative or empty text."""
    if value is None or value != value:
        return True
    if isinstance(value, str | bytes):
        return not value.strip()
    return isinstance(value, int | float) and value < 0


def _written(value: Any) -> str:
    return "null" if value is None else repr(value)


def _array(values: list[Any]) -> np.ndarray:
    """Make an array of present labels."""
    # pandas writes integers beside missing values as floats
    if all(isinstance(value, float) and value.is_integer() for value in values):
        return np.array([int(value) for value in values])
    if all(isinstance(value, bool) for value in values):
        return np.array([str(value) for value in values])
    array = np.empty(len(values), object)
    array[:] = values
    kinds = {type(value) for value in values}
    return np.array(values) if len(kinds) == 1 and kinds <= {int, float, str, bytes} else array


def _texts(table: Table, column: _LabelColumn, shared: list[str] | None) -> np.ndarray:
    """Return the name of the class of each labelled row."""
    names = column.names or shared
    if column.labels.dtype.kind == "U" or names is None:
        return column.labels.astype(str)
    largest = int(column.labels.max()) if len(column.labels) else 0
    if largest >= len(names):
        raise InputError(f"dataset: {str(table.path)!r}: label {largest} of {len(names)} classes")
    return np.array(names)[column.labels]


# ---- other columns -----------------------------------------------------------------------------------------


def _other_columns(tables: list[Table], used: set[str]) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Read the columns of short text and integers besides images and labels.

    Returns:
      Name -> the values of each table, and notes on the other columns.
    """
    names = [
        name for name in dict.fromkeys(name for table in tables for name in table.kinds) if name not in used
    ]
    texts: dict[str, list[list[str]]] = {}
    left_out = []
    for name in names:
        if not all(name in table.plain for table in tables):
            left_out.append(name)
            continue
        values = [_column_texts(table, name) for table in tables]
        if max((len(value) for table_values in values for value in table_values), default=0) > _LONG_TEXT:
            left_out.append(name)
            continue
        texts[name] = values
    notes = []
    if left_out:
        notes.append(f"left out: {len(left_out)} columns ({first_names(left_out)})")
    for name, values in texts.items():
        missing = sum(value == "" for table_values in values for value in table_values)
        if missing:
            notes.append(f"{missing:,} examples have no {name}")
    return texts, notes


def _column_texts(table: Table, name: str) -> list[str]:
    """Return a column's values as text, those of a ClassLabel by this table's names; null is empty text."""
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
    """Read the image of a row: the bytes of its file, its pixels, or the reason why there is none."""
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
        raise InputError(f"{where}: the image is missing")
    if isinstance(value, str):
        raise InputError(f"{where}: the table contains only the name of an image, not the image")
    array = _levels(where, value)
    if array.size >= 3 * MAX_PIXELS:
        raise InputError(
            f"{where}: the image has {array.size:,} values; expected less than {3 * MAX_PIXELS:,}"
        )
    return checked_image(where, f"the {column}", array)


def _levels(where: str, value: Any) -> np.ndarray:
    """Make an array of lists of numbers; integers from 0 to 255 become uint8."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{where}: the image is not an array ({reason(error)})") from None
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    return array


def _check_levels(tables: list[Table], column: str, places: Iterable[_Place]) -> None:
    """Check that images that are lists of integers have more than a few levels.

    Raises:
      InputError: if they do not; scikit-learn's digits, for example, have the levels 0 to 16.
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
