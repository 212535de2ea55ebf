"""Image data sets of the Hugging Face hub: tables in parquet or arrow files with a column of images and one
of labels, in a folder or in the caches of the hub's libraries.

Splits are named by the names of files or folders: train, test, validation. Without test examples those of the
validation split are tested on, else a random fifth. All other columns of text and whole numbers are kept, as
sites or domains. Reading needs pyarrow (`fcljax[tables]`).
"""

import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.dataset import natural_order
from fcljax.data.files.images import Picture
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import LabelledItems, Raw, Scan, file_facts, random_split
from fcljax.errors import InputError, reason
from fcljax.files import in_home

SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train": r"train(ing)?", "test": r"test", "validation": r"val(id(ation)?)?|dev"}
LABELS = ("label", "labels", "fine_label", "class", "category", "target")  # in this order


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
    splits = {path: _split_of(path.relative_to(root)) for path in files}
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
    return Raw(root, functools.partial(_scan, root, {path: split for path, split in splits.items() if split}))


def _root(name: str) -> Path:
    """The folder of that name, or the newest version in a cache."""
    path = in_home(name, "dataset")
    if path.is_dir():
        return path
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


def _scan(root: Path, splits: dict[Path, str]) -> Scan:
    facts = [(split, *file_facts(path, str(path.relative_to(root)))) for path, split in splits.items()]
    return Scan(hashlib.sha256(repr(facts).encode()).hexdigest(), lambda: _listing(root, splits))


class _Place(NamedTuple):
    """Where an example is."""

    file: int
    row: int


class _Table(NamedTuple):
    """One file."""

    path: Path
    kinds: dict[str, str]
    """The type of each column."""
    features: dict[str, dict[str, Any]]
    """What the hub's library says of the columns."""
    column: Callable[[str], list[Any]]
    """All values of a column."""
    cell: Callable[[str, int], Any]
    """cell(column, row) -> a value, read with its neighbours."""


def _listing(root: Path, splits: dict[Path, str]) -> Listing:
    """Labels and columns are read at once, images when they are decoded."""
    tables, kinds = [_opened(path) for path in splits], list(splits.values())
    image, label = _columns(root, tables[0])
    labels, names = _labels(root, tables, label)
    present = {
        kind: LabelledItems(
            [_Place(i, row) for i, own in enumerate(kinds) if own == kind for row in range(len(labels[i]))],
            [value for i, own in enumerate(kinds) if own == kind for value in labels[i]],
        )
        for kind in dict.fromkeys(kinds)
    }
    # a competition's test examples have the label -1
    tested = next((k for k in ("test", "validation") if k in present and min(present[k].labels) >= 0), None)
    train, test = (
        (present["train"], present[tested]) if tested else map(_in_order, random_split(present["train"]))
    )
    kept = {name: [table.column(name) for table in tables] for name in _kept(tables[0], {image, label})}

    def split(items: LabelledItems) -> UndecodedSplit:
        paths = [str(table.path.relative_to(root)) for table in tables]
        places = [f"{paths[each.file]}:{each.row}" for each in items.items]
        columns = {
            name: [str(values[each.file][each.row]) for each in items.items] for name, values in kept.items()
        }

        def fetch(indices: Sequence[int]) -> list[Picture]:
            chosen = [items.items[i] for i in indices]
            return [_picture(tables[each.file], image, each.row) for each in chosen]

        return UndecodedSplit(np.array(items.labels, np.int64), places, fetch, columns=columns)

    return Listing(root, tuple(names), split(train), split(test))


def _in_order(items: LabelledItems) -> LabelledItems:
    """In the order of the files: neighbours are read together."""
    return items.take(sorted(range(len(items.items)), key=items.items.__getitem__))


def _columns(root: Path, table: _Table) -> tuple[str, str]:
    """The names of the columns of images and labels."""

    def first(kind: str, usual: Sequence[str]) -> str | None:
        named = [name for name, facts in table.features.items() if facts.get("_type") == kind]
        return next(
            (name for name in (*(set(usual) & set(named)), *named, *usual) if name in table.kinds), None
        )

    image, label = first("Image", ("image", "img")), first("ClassLabel", LABELS)
    if image is None or label is None:
        lacks = "images ('image')" if image is None else f"labels ({', '.join(LABELS)})"
        raise InputError(f"dataset: {str(root)!r} has no column of {lacks}; it has: {', '.join(table.kinds)}")
    return image, label


def _labels(root: Path, tables: list[_Table], column: str) -> tuple[list[list[int]], list[str]]:
    """The label of each example of each table, and the names of the classes."""
    values = [table.column(column) for table in tables]
    names = tables[0].features.get(column, {}).get("names")
    if isinstance(names, list):
        wrong = next((x for each in values for x in each if not isinstance(x, int) or x >= len(names)), None)
        if wrong is not None:
            raise InputError(f"dataset: {str(root)!r}: label {wrong!r} of {len(names)} classes")
        return values, [str(name) for name in names]
    different = natural_order([str(x) for each in values for x in each if x is not None and x != -1])
    number = {name: i for i, name in enumerate(different)}
    return [[number.get(str(x), -1) for x in each] for each in values], different


def _kept(table: _Table, read: set[str]) -> list[str]:
    """The columns of text and whole numbers besides images and labels."""
    plain = {
        "string",
        "large_string",
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    }
    return [name for name, kind in table.kinds.items() if kind in plain and name not in read]


def _picture(table: _Table, column: str, row: int) -> Picture:
    """The image of a row: the bytes of its file, or its pixels."""
    value = table.cell(column, row)
    value = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        pixels = np.asarray(value, np.uint8)
        return pixels[..., None] if pixels.ndim == 2 else pixels
    raise InputError(f"dataset: {str(table.path)!r}, row {row}: an image is only named there, not held")


# ---- files -------------------------------------------------------------------------------------------------


def _opened(path: Path) -> _Table:
    """A table of either kind.

    Raises:
      InputError: for a damaged file.
    """
    try:
        return _parquet(path) if path.suffix == ".parquet" else _arrow(path)
    except Exception as error:  # a damaged file can raise anything in the library, and it is the file's fault
        raise InputError(f"dataset: {str(path)!r} cannot be read ({reason(error)})") from error


def _parquet(path: Path) -> _Table:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    ends = np.cumsum(sizes)

    def column(name: str) -> list[Any]:
        return file.read(columns=[name]).column(name).to_pylist()

    @functools.lru_cache(maxsize=1)
    def group(name: str, index: int) -> Any:
        return file.read_row_group(index, columns=[name]).column(name)

    def cell(name: str, row: int) -> Any:
        index = int(np.searchsorted(ends, row, side="right"))
        return group(name, index)[row - int(ends[index]) + sizes[index]].as_py()

    return _table(path, file.schema_arrow, column, cell)


def _arrow(path: Path) -> _Table:
    """A stream, as the hub's library writes it, or a file; its bytes are mapped."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(source).read_all()

    def column(name: str) -> list[Any]:
        return table.column(name).to_pylist()

    def cell(name: str, row: int) -> Any:
        return table.column(name)[row].as_py()

    return _table(path, table.schema, column, cell)


def _table(path: Path, schema: Any, column: Callable, cell: Callable) -> _Table:
    said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = said.get("info", {}).get("features", {})
    known = {name: facts for name, facts in features.items() if isinstance(facts, dict)}
    return _Table(path, {field.name: str(field.type) for field in schema}, known, column, cell)
