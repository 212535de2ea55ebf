"""Read data sets that tensorflow-datasets has prepared as array_record files.

Reading needs the extra `tfds` but not TensorFlow, and was tried with version 4.9.10 on
archives in the official layout. Preparing needs TensorFlow, so `download` does without
the library.

imagenet_r, caltech_birds2011, cifar10 and cifar100 give the same arrays as the official
files, bit by bit. fashion_mnist, omniglot and domainnet have another order: the same
images (of domainnet the cleaned version), but other drawings of omniglot and other images
of domainnet are for testing.
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
from fcljax.errors import InputError, install_command, reason
from fcljax.options import whole_number

FOLDER = "tensorflow_datasets"  # below the data folder

# reads the folders of prepared builders
Read = Callable[[Sequence[Path]], Listing]


class _Records(NamedTuple):
    """The records of a data set; a source is one split of one builder."""

    sources: list[Any]  # random access to records
    names: list[str]  # of the sources, for messages
    features: list[Any]  # of each source


class _Row(NamedTuple):
    """A record without its image."""

    source: int
    index: int  # in its source
    values: tuple[Any, ...]  # of the requested features


def find_builders(folder: Path, builders: Sequence[str], read: Read) -> Raw | None:
    """Return the data that these builders have prepared; None if one of them has not."""
    versions = []
    for builder in builders:
        newest = _newest(folder / builder)
        if newest is None:
            return None
        versions.append(newest)
    return Raw(folder / builders[0].partition("/")[0], partial(_scan, read, versions), "tfds")


def official(versions: Sequence[Path], *, field: str | None = None) -> Listing:
    """List images with the builder's labels and splits, in the order of `field`."""
    records = _records(versions, ("train", "test"))
    rows = _rows(records, ["label", *([field] if field else [])])
    splits = []
    for source in range(2):
        # tfds shuffles records; the field gives the order of the official files
        ordered = sorted((row for row in rows if row.source == source), key=lambda row: row.values[1:])
        splits.append(LabelledItems(ordered, [row.values[0] for row in ordered]))
    return _listing(versions, records, records.features[0]["label"].names, *splits)


def from_own_splits(versions: Sequence[Path]) -> Listing:
    """List the images and labels of any data set.

    The test split is for testing, else the validation split, else a random fifth.

    Raises:
      InputError: for a data set without images, labels or training examples.
    """
    import tensorflow_datasets as tfds

    info = tfds.builder_from_directory(versions[0]).info
    for feature in ("image", "label"):
        if feature not in info.features:
            raise InputError(f"dataset: {str(versions[0])!r} has no feature {feature!r}")
    if "train" not in info.splits:
        raise InputError(f"dataset: {str(versions[0])!r} has no split 'train'")
    # where the test split is not public, the validation split is for testing
    test_split = next((split for split in ("test", "validation") if split in info.splits), None)
    records = _records(versions, [split for split in ("train", test_split) if split])
    rows = _rows(records, ["label"])
    names, labels = _class_numbers(records, [row.values[0] for row in rows])
    splits = [LabelledItems([], []) for _source in records.sources]
    for row, label in zip(rows, labels, strict=True):
        splits[row.source].items.append(row)
        splits[row.source].labels.append(label)
    if test_split:
        train, test = splits
        source = f"the {test_split} split"
    else:
        train, test = random_split(splits[0])
        source = "a random fifth of the training examples"
    notes = [f"{len(train.items):,} training and {len(test.items):,} test images of {len(names)} classes"]
    if test_split != "test":
        notes.append(f"tested on {source}, for there is no test split")
    unread = sorted(set(info.splits) - {"train", test_split})
    if unread:
        notes.append(f"not read: the splits {', '.join(unread)}")
    return _listing(versions, records, names, train, test)._replace(notes=("; ".join(notes),))


def _class_numbers(records: _Records, labels: list[str | int]) -> tuple[list[str], list[int]]:
    """Return the names of the classes, and the number of each label's class; -1: no label."""
    names = getattr(records.features[0]["label"], "names", None)
    if names is not None:
        return list(names), [label if isinstance(label, int) else names.index(label) for label in labels]
    texts = [None if _is_missing(label) else str(label) for label in labels]
    classes = natural_order([text for text in texts if text is not None])
    number: dict[str | None, int] = {name: i for i, name in enumerate(classes)}
    return classes, [number.get(text, -1) for text in texts]


def _is_missing(label: str | int) -> bool:
    if isinstance(label, str):
        return not label.strip()
    return label < 0


def from_all_splits(versions: Sequence[Path], *, splits: Sequence[str], field: str | None = None) -> Listing:
    """List all images of all splits, and split them at random.

    The class is the folder in the path CLASS/FILE of `field`, or else the label's.
    """
    records = _records(versions, splits)
    tree = {}
    for row in _rows(records, ["label", *([field] if field else [])]):
        if field:
            name = row.values[1].split("/")[-2]
        else:
            label = row.values[0]
            if label < 0:
                raise InputError(f"dataset: {_record_name(records, row)} has the label {label}")
            # by name: DomainNet has a builder for each domain, with classes in its own
            # order
            name = records.features[row.source]["label"].names[label]
        tree.setdefault(name, []).append(row)
    if field:
        for rows in tree.values():
            rows.sort(key=lambda row: row.values[1].split("/")[-1])
    classes = sorted(tree)
    return _listing(versions, records, classes, *random_split(table(classes, tree)))


def omniglot(versions: Sequence[Path]) -> Listing:
    """List the characters of all alphabets; the last 5 drawings of each are for testing."""
    records = _records(versions, ("train", "test"))
    alphabets = records.features[0]["alphabet"].names
    tree = {}
    for row in _rows(records, ["alphabet", "alphabet_char_id"]):
        alphabet, character = row.values
        tree.setdefault(f"{alphabets[alphabet]}/character{character + 1:02d}", []).append(row)
    return _listing(versions, records, sorted(tree), *last_drawings(tree))


def _newest(folder: Path) -> Path | None:
    """Return the newest prepared version of a builder."""
    if not folder.is_dir():
        return None
    versions = [
        path
        for path in folder.iterdir()
        if whole_number(path.name.replace(".", "")) is not None and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".") if part], default=None)


def _scan(read: Read, versions: Sequence[Path]) -> Scan:
    facts = [
        (version.parent.name, version.name, [tuple(file_facts(file, file.name)) for file in visible(version)])
        for version in versions
    ]
    return Scan(hashlib.sha256(repr(facts).encode()).hexdigest(), lambda: _read_checked(read, versions))


def _read_checked(read: Read, versions: Sequence[Path]) -> Listing:
    """Call `read`, and report what the library raises as one line."""
    where = f"dataset: {str(versions[0])!r}"
    try:
        return read(versions)
    except (InputError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(
            f"{where} needs the packages tensorflow-datasets and array_record ({error}): "
            f"{install_command('tfds')}"
        ) from error
    except NotImplementedError as error:
        raise InputError(f"{where} is not in array_record files; prepare it with that file_format") from error
    # anything: the library raises errors of many kinds on a damaged folder
    except Exception as error:
        raise InputError(f"{where} cannot be read by tensorflow-datasets ({reason(error)})") from error


def _records(versions: Sequence[Path], splits: Sequence[str]) -> _Records:
    import tensorflow_datasets as tfds

    records = _Records([], [], [])
    for version in versions:
        builder = tfds.builder_from_directory(version)
        # images stay encoded: the package decodes them, as those of all other sources
        decoders = {name: tfds.decode.SkipDecoding() for name in builder.info.features}
        for split in splits:
            # pyrefly: ignore[bad-argument-type]  # the library wraps its methods, which hides their self
            records.sources.append(builder.as_data_source(split, decoders=decoders))
            records.names.append(f"{version}, {split}")
            records.features.append(builder.info.features)
    return records


def _rows(records: _Records, fields: Sequence[str]) -> list[_Row]:
    """Read these features of all records."""
    rows = []
    for number, source in enumerate(records.sources):
        for index in range(len(source)):
            record = source[index]
            rows.append(_Row(number, index, tuple(_plain(record[field]) for field in fields)))
    return rows


def _plain(value: Any) -> str | int:
    if isinstance(value, bytes):
        return value.decode()
    return int(value)


def _listing(
    versions: Sequence[Path],
    records: _Records,
    classes: Sequence[str],
    train: LabelledItems,
    test: LabelledItems,
) -> Listing:
    return Listing(versions[0], tuple(classes), _split(records, train), _split(records, test))


def _split(records: _Records, split: LabelledItems) -> UndecodedSplit:
    names = [_record_name(records, row) for row in split.items]
    height, width, _channels = records.features[0]["image"].shape

    def fetch(indices: Sequence[int]) -> list:
        return [_image(records, split.items[i]) for i in indices]

    size = None
    if height and width:
        size = (height, width)
    return UndecodedSplit(np.array(split.labels, np.int64), names, fetch, size)


def _record_name(records: _Records, row: _Row) -> str:
    return f"{records.names[row.source]}, record {row.index}"


def _image(records: _Records, row: _Row) -> bytes:
    try:
        return records.sources[row.source][row.index]["image"]
    except Exception as error:  # as in `_read_checked`
        raise InputError(f"dataset: {_record_name(records, row)} cannot be read ({reason(error)})") from error
