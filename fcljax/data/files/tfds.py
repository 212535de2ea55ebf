"""Data sets that tensorflow-datasets has prepared with file_format="array_record", read without TensorFlow.

Tried with its version 4.9.10, on archives in the official layout. Its imagenet_r and caltech_birds2011 keep
the names of files and its cifar10 and cifar100 the number of each image, so that these give the same arrays
as the official files, bit by bit. Its fashion_mnist, omniglot and domainnet have an order of their own: the
same images (of domainnet the cleaned version), but other drawings of omniglot and other images of domainnet
are for testing. Preparing anything needs TensorFlow itself, and so `download` does without the library.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.dataset import natural_order
from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import (
    LabelledItems,
    Raw,
    Scan,
    file_facts,
    last_drawings,
    random_split,
    table,
    visible,
)
from fcljax.errors import InputError, reason
from fcljax.options import whole_number

FOLDER = "tensorflow_datasets"  # below the data folder

Read = Callable[[Sequence[Path]], Listing]  # from the folders of prepared builders


def find_builders(folder: Path, builders: Sequence[str], read: Read) -> Raw | None:
    """What these builders have prepared in `folder`, if all of them have."""
    versions = [_newest(folder / builder) for builder in builders]
    found = [version for version in versions if version is not None]
    if not found or len(found) < len(versions):
        return None
    return Raw(folder / builders[0].partition("/")[0], partial(_scan, read, found), "tfds")


def official(versions: Sequence[Path], *, field: str | None = None) -> Listing:
    """Labels and split as they are, images in the order of `field`."""
    records = _records(versions, ("train", "test"))
    rows = _fields(records, ["label", *([field] if field else [])])
    splits = []
    for index in range(2):
        chosen = sorted((row for row in rows if row[0] == index), key=lambda row: row[3:])
        splits.append(LabelledItems(chosen, [row[2] for row in chosen]))
    return _listing(versions, records, records.features[0]["label"].names, *splits)


def from_own_splits(versions: Sequence[Path]) -> Listing:
    """A data set that we know nothing of: its images and labels, tested on its test split, else on its
    validation split, else on a random fifth.

    Raises:
      InputError: for one without images, labels or training examples.
    """
    import tensorflow_datasets as tfds

    info = tfds.builder_from_directory(versions[0]).info
    lacks = [what for what in ("image", "label") if what not in info.features]
    if lacks or "train" not in info.splits:
        what = "split 'train'" if not lacks else f"feature {lacks[0]!r}"
        raise InputError(f"dataset: {str(versions[0])!r} has no {what}")
    tested = next((split for split in ("test", "validation") if split in info.splits), None)
    records = _records(versions, ("train", tested) if tested else ("train",))
    rows = _fields(records, ["label"])
    names, numbers = _class_numbers(records, [row[2] for row in rows])
    labelled = [(*row[:2], number) for row, number in zip(rows, numbers, strict=True)]
    splits = [
        LabelledItems(some, [row[2] for row in some]) for some in _by_source(labelled, len(records.sources))
    ]
    train, test = splits if tested else random_split(splits[0])
    notes = [f"{len(train.items):,} training and {len(test.items):,} test images of {len(names)} classes"]
    if tested != "test":
        what = f"the {tested} split" if tested else "a random fifth of the training examples"
        notes.append(f"tested on {what}, for there is no test split")
    unread = sorted(set(info.splits) - {"train", tested})
    if unread:
        notes.append(f"not read: the splits {', '.join(unread)}")
    return _listing(versions, records, names, train, test)._replace(notes=("; ".join(notes),))


def _class_numbers(records: "_Records", labels: list[str | int]) -> tuple[list[str], list[int]]:
    """The names of the classes, and each label's number among them; -1: none."""
    names = getattr(records.features[0]["label"], "names", None)
    if names is not None:
        return list(names), [label if isinstance(label, int) else names.index(label) for label in labels]
    texts = [None if _is_missing(label) else str(label) for label in labels]
    found = natural_order([text for text in texts if text is not None])
    number: dict[str | None, int] = {name: i for i, name in enumerate(found)}
    return found, [number.get(text, -1) for text in texts]


def _is_missing(label: str | int) -> bool:
    return not label.strip() if isinstance(label, str) else label < 0


def _by_source(rows: list[tuple], sources: int) -> list[list[tuple]]:
    return [[row for row in rows if row[0] == source] for source in range(sources)]


def from_all_splits(versions: Sequence[Path], *, splits: Sequence[str], field: str | None = None) -> Listing:
    """All images of all splits, split at random.

    `field` holds a path that ends in CLASS/FILE; without it the label gives the class.
    """
    records = _records(versions, splits)
    names = [features["label"].names for features in records.features]
    tree = {}
    for row in _fields(records, ["label", *([field] if field else [])]):
        # each builder has names of its own
        if not field and row[2] < 0:
            raise InputError(f"dataset: {records.names[row[0]]}, record {row[1]} has the label {row[2]}")
        tree.setdefault(row[3].split("/")[-2] if field else names[row[0]][row[2]], []).append(row)
    if field:
        for rows in tree.values():
            rows.sort(key=lambda row: row[3].split("/")[-1])
    classes = sorted(tree)
    return _listing(versions, records, classes, *random_split(table(classes, tree)))


def omniglot(versions: Sequence[Path]) -> Listing:
    """Characters of all alphabets; the last 5 drawings of each are for testing."""
    records = _records(versions, ("train", "test"))
    alphabets = records.features[0]["alphabet"].names
    tree = {}
    for row in _fields(records, ["alphabet", "alphabet_char_id"]):
        tree.setdefault(f"{alphabets[row[2]]}/character{row[3] + 1:02d}", []).append(row)
    return _listing(versions, records, sorted(tree), *last_drawings(tree))


class _Records(NamedTuple):
    sources: list[Any]  # random access to records
    names: list[str]  # of the sources, for messages
    features: list[Any]  # of each source


def _newest(folder: Path) -> Path | None:
    """The newest prepared version of a builder."""
    versions = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if whole_number(path.name.replace(".", "")) is not None and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".") if part], default=None)


def _scan(read: Read, versions: Sequence[Path]) -> Scan:
    facts = [
        (version.parent.name, version.name, [tuple(file_facts(each, each.name)) for each in visible(version)])
        for version in versions
    ]
    return Scan(hashlib.sha256(repr(facts).encode()).hexdigest(), lambda: _checked(read, versions))


def _checked(read: Read, versions: Sequence[Path]) -> Listing:
    where = f"dataset: {str(versions[0])!r}"
    try:
        return read(versions)
    except (InputError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(
            f"{where} needs the packages tensorflow-datasets and array_record ({error})"
        ) from error
    except NotImplementedError as error:
        raise InputError(f"{where} is not in array_record files; prepare it with that file_format") from error
    # a damaged folder can raise anything in the library, and it is the folder's fault
    except Exception as error:
        raise InputError(f"{where} cannot be read by tensorflow-datasets ({reason(error)})") from error


def _records(versions: Sequence[Path], splits: Sequence[str]) -> _Records:
    import tensorflow_datasets as tfds

    sources = []
    names = []
    features = []
    for version in versions:
        builder = tfds.builder_from_directory(version)
        # images as files, for our own decoder
        raw = {name: tfds.decode.SkipDecoding() for name in builder.info.features}
        for split in splits:
            # pyrefly: ignore[bad-argument-type]  # the library wraps its methods, which hides their self
            sources.append(builder.as_data_source(split, decoders=raw))
            names.append(f"{version}, {split}")
            features.append(builder.info.features)
    return _Records(sources, names, features)


def _fields(records: _Records, fields: Sequence[str]) -> list[tuple]:
    """For each record its source, its index there and the fields."""
    rows = []
    for number, source in enumerate(records.sources):
        for index in range(len(source)):
            record = source[index]
            rows.append((number, index, *(_plain(record[field]) for field in fields)))
    return rows


def _plain(value: Any) -> str | int:
    return value.decode() if isinstance(value, bytes) else int(value)


def _listing(
    versions: Sequence[Path],
    records: _Records,
    classes: Sequence[str],
    train: LabelledItems,
    test: LabelledItems,
) -> Listing:
    return Listing(versions[0], tuple(classes), _split(records, train), _split(records, test))


def _split(records: _Records, split: LabelledItems) -> UndecodedSplit:
    items = [item[:2] for item in split.items]
    names = [f"{records.names[source]}, record {index}" for source, index in items]
    height, width, _ = records.features[0]["image"].shape

    def fetch(indices: Sequence[int]) -> list:
        return [_image(records, *items[i], name=names[i]) for i in indices]

    size = (height, width) if height and width else None
    return UndecodedSplit(np.array(split.labels, np.int64), names, fetch, size)


def _image(records: _Records, source: int, index: int, name: str) -> bytes:
    try:
        return records.sources[source][index]["image"]
    except Exception as error:  # as above
        raise InputError(f"dataset: {name} cannot be read ({reason(error)})") from error
