"""Named data sets: what images with which labels are in which split.

They are found in official folder layouts or in tensorflow-datasets data, and nothing is decoded here. A data
set is looked for in three steps, each dearer than the one before: `find` sees whether a layout is there,
`Raw.scan` goes through its files (names, sizes, times) and knows their fingerprint, and `Scan.listing` says
what is what.

Splits that have no official file are random, by the rule of HePCo's release: all images class by class, files
sorted, shuffled by Python's Random(0); the first int(0.8 n) train, the rest test.

What tensorflow-datasets has prepared with file_format="array_record" is read without TensorFlow (tried with
its version 4.9.10, on archives in the official layout). Its imagenet_r and caltech_birds2011 keep the names
of files and its cifar10 and cifar100 the number of each image, so that these give the same arrays as the
official files, bit by bit. Its fashion_mnist, omniglot and domainnet come in an order of their own: the same
images (of domainnet the cleaned version), but other drawings of omniglot and other images of domainnet are
for testing. To prepare anything it needs TensorFlow itself, so that `download` does without it.
"""

import gzip
import hashlib
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from fcljax.data.files.download import OFFICIAL, volume
from fcljax.data.files.images import one_line
from fcljax.data.files.prepared import Listing, Split
from fcljax.errors import InputError
from fcljax.files import in_home, read_text

SUFFIXES = {".png", ".jpg", ".jpeg"}

_TFDS = "tensorflow_datasets"  # folder below the data folder
_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_LIST_BYTES = 1 << 24  # most of a list of classes
_DRAWINGS = 5  # of each Omniglot character that are for testing
_SUBSET_SEED = 1993  # of the ImageNet subsets


class Scan(NamedTuple):
    """Raw data whose files have been looked at."""

    fingerprint: str  # changes with the names, sizes and times of the files, the labels and the split
    listing: Callable[[], Listing]


class Raw(NamedTuple):
    """Raw data that is there."""

    route: str  # "files" or "tfds"
    where: Path
    scan: Callable[[], Scan]


class Named(NamedTuple):
    """A data set that has a name."""

    what: str  # in one line
    put: str  # the official files, relative to the data folder
    find: Callable[[Path, "Choice"], Raw | None]  # in a folder that may hold the official files
    images: int | None  # of the official release, both splits
    tfds: tuple[str, ...] = ()  # its builders in tensorflow-datasets
    tfds_listing: Callable[[Sequence[Path]], Listing] | None = None  # from the folders that they prepared
    augment: bool = True  # whether random crops and flips keep the class


Choice = tuple[str, ...] | None  # the classes asked for, in the order of their labels; None: the default


class _File(NamedTuple):
    path: str  # relative to the root of the layout
    size: int  # in bytes, -1 for a link that leads nowhere
    time: int  # of the last change, in ns


class _Table(NamedTuple):
    items: list[Any]  # files or records
    labels: list[int]


def find(name: str, folder: Path, choice: Choice = None) -> Raw | None:
    """Raw data of the named set below the data folder.

    Official files come first, then what tensorflow-datasets has prepared. Files are looked for in `folder`
    and in `folder`/name.

    Raises:
      InputError: for a layout that is there but incomplete.
    """
    named = NAMED[name]
    for base in (folder, folder / name, folder / name.replace("_", "-")):
        raw = named.find(base, choice)
        if raw is not None:
            return raw
    found = [_tfds_version(folder / _TFDS / builder) for builder in named.tfds]
    versions = [version for version in found if version is not None]
    if named.tfds_listing is None or not versions or len(versions) < len(found):
        return None
    return Raw(
        "tfds",
        folder / _TFDS / named.tfds[0].partition("/")[0],
        partial(_tfds_scan, named.tfds_listing, versions),
    )


def how_to_get(name: str, folder: Path) -> str:
    """What to put where or to run, for a data set that is not there."""
    if name in OFFICIAL:
        download = f"or have it downloaded ({volume(OFFICIAL[name])}): fcljax data prepare {name}"
        return f"{what_to_put(name, folder)}, {download}"
    return f"{what_to_put(name, folder)}, then run: fcljax data prepare {name}"


def what_to_put(name: str, folder: Path) -> str:
    """The official files, and where."""
    pickled = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name)
    for base in (folder, folder / name):
        if pickled and (base / pickled).exists():
            where = f"{str(base / pickled)!r} holds pickles, which are never loaded"
            return f"{where}; put the binary version beside it, {NAMED[name].put}"
    return f"put {NAMED[name].put} in {str(folder)!r}"


def class_list(path: str | Path) -> tuple[str, ...]:
    """The classes that a text file names, one per line (the first word of it), in that order.

    Raises:
      InputError: for a file that cannot be read, names no class or names one twice.
    """
    try:
        lines = read_text(in_home(path, "class_list"), _LIST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"class_list: {str(path)!r} cannot be read ({one_line(error)}); "
            "expected a text file, a class per line"
        ) from error
    names = tuple(line.split()[0] for line in lines if line.strip())
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice or not names:
        raise InputError(
            f"class_list: {str(path)!r} names {f'{twice[0]!r} twice' if twice else 'no class'}; "
            "expected a class per line"
        )
    return names


def folder_of_classes(root: Path) -> Raw:
    """train/CLASS/* and test/CLASS/* below `root`, for a data set of the user's own.

    Raises:
      InputError: for missing folders, here or when it is scanned.
    """
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise InputError(
                f"dataset: no such folder: {str(root / split)!r}; "
                "expected train/CLASS/*.png|jpg|jpeg and test/CLASS/..."
            )
    return Raw("files", root, partial(_train_and_test, root))


def same_classes(where: str, train: list, test: list) -> list:
    """The classes of both splits.

    Raises:
      InputError: naming one that only one split has.
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


# Folders of image files


def _visible(folder: Path) -> list[os.DirEntry]:
    # Hidden entries are what file managers and notebooks leave behind.
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name
            )
    except OSError as error:
        raise InputError(f"dataset: folder {str(folder)!r} cannot be read ({error.strerror})") from error


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _visible(folder) if entry.is_dir()]


def _images(root: Path, inside: str) -> list[_File]:
    found = [
        entry
        for entry in _visible(root / inside)
        if os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()
    ]
    if not found:
        raise InputError(
            f"dataset: {str(root / inside)!r} has no images; expected files named *.png, *.jpg or *.jpeg"
        )
    return [_file(entry, f"{inside}/{entry.name}") for entry in found]


def _file(entry: os.DirEntry | Path, path: str) -> _File:
    try:
        stat = entry.stat()
    except OSError:  # a link that leads nowhere is for the decoder to name
        return _File(path, -1, 0)
    return _File(path, stat.st_size, stat.st_mtime_ns)


def _tree(root: Path, inside: str, classes: Iterable[str] | None = None) -> dict[str, list[_File]]:
    """Image files by class, below root/inside."""
    classes = _folders(root / inside) if classes is None else classes
    if not classes:
        raise InputError(
            f"dataset: {str(root / inside)!r} has no class folders; "
            f"expected {inside or '.'}/CLASS/*.png|jpg|jpeg"
        )
    return {label: _images(root, f"{inside}/{label}" if inside else label) for label in classes}


def _merged(trees: Iterable[dict[str, list[_File]]]) -> dict[str, list[_File]]:
    together: dict[str, list[_File]] = {}
    for tree in trees:
        for label, files in tree.items():
            together.setdefault(label, []).extend(files)
    return {label: together[label] for label in sorted(together)}


def _table(classes: Sequence[str], tree: dict[str, list]) -> _Table:
    labels = [label for label, name in enumerate(classes) for _ in tree[name]]
    return _Table([item for name in classes for item in tree[name]], labels)


def _random_split(table: _Table) -> tuple[_Table, _Table]:
    rows = list(range(len(table.items)))
    random.Random(0).shuffle(rows)
    cut = int(0.8 * len(rows))
    train, test = (
        _Table([table.items[row] for row in part], [table.labels[row] for row in part])
        for part in (rows[:cut], rows[cut:])
    )
    return train, test


def _scan_files(root: Path, classes: Sequence[str], train: _Table, test: _Table) -> Scan:
    sums = hashlib.sha256(json.dumps(classes).encode())
    for table in (train, test):
        for file, label in zip(table.items, table.labels, strict=True):
            sums.update(f"{label}\0{file.path}\0{file.size}\0{file.time}\n".encode(errors="surrogateescape"))
        sums.update(b"\n")
    return Scan(
        sums.hexdigest(),
        lambda: Listing(root, tuple(classes), _file_split(root, train), _file_split(root, test)),
    )


def _file_split(root: Path, table: _Table) -> Split:
    names = [os.path.join(root, file.path) for file in table.items]
    return Split(np.array(table.labels, np.int64), names, lambda rows: [Path(names[row]) for row in rows])


def _train_and_test(root: Path) -> Scan:
    train, test = (_tree(root, split) for split in ("train", "test"))
    classes = same_classes(str(root), list(train), list(test))
    return _scan_files(root, classes, _table(classes, train), _table(classes, test))


def _pooled(root: Path, insides: Sequence[str], by_name: bool = False) -> Scan:
    tree = _merged(_tree(root, inside) for inside in insides)
    if by_name:  # the order that the files would have if they were in one folder
        tree = {
            label: sorted(files, key=lambda file: os.path.basename(file.path))
            for label, files in tree.items()
        }
    return _scan_files(root, list(tree), *_random_split(_table(list(tree), tree)))


def _is_split(root: Path) -> bool:
    return (root / "train").is_dir() or (root / "test").is_dir()


def _imagenet_r(base: Path, choice: Choice) -> Raw | None:
    root = base / "imagenet-r"
    if not root.is_dir():
        return None
    return folder_of_classes(root) if _is_split(root) else Raw("files", root, partial(_pooled, root, [""]))


def _imagenet_r_hepco(base: Path, choice: Choice) -> Raw | None:
    root = base / "imagenet-r"
    if not root.is_dir():
        return None
    return Raw(
        "files", root, partial(_pooled, root, ["train", "test"] if _is_split(root) else [""], by_name=True)
    )


def _cub200(base: Path, choice: Choice) -> Raw | None:
    if _is_split(base / "cub"):
        return folder_of_classes(base / "cub")
    root = base / "CUB_200_2011" / "images"
    return Raw("files", root, partial(_pooled, root, [""])) if root.is_dir() else None


def _domainnet(base: Path, choice: Choice) -> Raw | None:
    root = base / "domainnet"
    present = [domain for domain in _DOMAINS if (root / domain).is_dir()]
    if not present:
        return None
    if len(present) < len(_DOMAINS):
        missing = next(domain for domain in _DOMAINS if domain not in present)
        raise InputError(
            f"dataset: domain {missing!r} is missing in {str(root)!r}; expected {', '.join(_DOMAINS)}"
        )
    return Raw("files", root, partial(_pooled, root, _DOMAINS))


def _tiny_imagenet(base: Path, choice: Choice) -> Raw | None:
    root = base / "tiny-imagenet-200"
    return Raw("files", root, partial(_scan_tiny_imagenet, root)) if root.is_dir() else None


def _scan_tiny_imagenet(root: Path) -> Scan:
    for needed in ("train", "val/images", "val/val_annotations.txt"):
        if not (root / needed).exists():
            raise InputError(
                f"dataset: {str(root / needed)!r} is missing; expected {NAMED['tiny_imagenet'].put}"
            )
    wnids = _folders(root / "train")
    train = {wnid: _images(root, f"train/{wnid}/images") for wnid in wnids}
    test: dict[str, list[_File]] = {wnid: [] for wnid in wnids}
    label_of = dict(
        line.split("\t")[:2] for line in _text(root / "val/val_annotations.txt").splitlines() if "\t" in line
    )
    for file in _images(root, "val/images"):
        wnid = label_of.get(os.path.basename(file.path))
        if wnid not in test:
            problem = "has no line" if wnid is None else f"is of unknown class {wnid!r}"
            raise InputError(
                f"dataset: {str(root / file.path)!r} {problem} in val_annotations.txt; "
                "unpack the archive again"
            )
        test[wnid].append(file)
    return _scan_files(root, _words(root, wnids), _table(wnids, train), _table(wnids, test))


def _words(root: Path, wnids: list[str]) -> list[str]:
    if not (root / "words.txt").is_file():
        return wnids
    words = dict(line.split("\t")[:2] for line in _text(root / "words.txt").splitlines() if "\t" in line)
    names = [words.get(wnid, wnid).partition(",")[0].strip() for wnid in wnids]
    return [
        name if names.count(name) == 1 else f"{name} ({wnid})"
        for name, wnid in zip(names, wnids, strict=True)
    ]


def _text(path: Path) -> str:
    try:
        return _content(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"dataset: {str(path)!r} is no text in UTF-8; unpack the archive again") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"dataset: {str(path)!r} cannot be read ({error.strerror})") from error


def _imagenet(base: Path, choice: Choice, *, count: int) -> Raw | None:
    root = base / "imagenet"
    return (
        Raw("files", root, partial(_scan_imagenet, root, choice, count))
        if _is_split(root) or (root / "val").is_dir()
        else None
    )


def _scan_imagenet(root: Path, choice: Choice, count: int) -> Scan:
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise InputError(
                f"dataset: no such folder: {str(root / split)!r}; expected {NAMED[f'imagenet{count}'].put}"
            )
    wnids = _folders(root / "train")
    if choice is None:
        if len(wnids) != 1000:
            raise InputError(
                f"dataset: {str(root / 'train')!r} has {len(wnids)} class folders, not 1000; "
                "name yours with --class-list"
            )
        choice = tuple(
            wnids[index] for index in np.random.RandomState(_SUBSET_SEED).permutation(1000)[:count]
        )
    if len(choice) != count:
        raise InputError(f"class_list: {len(choice)} classes are listed; imagenet{count} needs {count}")
    for wnid in choice:
        for split in ("train", "val"):
            if not (root / split / wnid).is_dir():
                raise InputError(
                    f"class_list: class {wnid!r} is not in {str(root / split)!r}; it must be a folder there"
                )
    train, test = (_table(choice, _tree(root, split, choice)) for split in ("train", "val"))
    return _scan_files(root, choice, train, test)


def _omniglot(base: Path, choice: Choice) -> Raw | None:
    parts = ("images_background", "images_evaluation")
    present = [part for part in parts if (base / part).is_dir()]
    if not present:
        return None
    if len(present) == 1:
        raise InputError(f"dataset: {str(base)!r} has {present[0]} only; expected {' and '.join(parts)}")
    return Raw("files", base, partial(_scan_omniglot, base, parts))


def _scan_omniglot(base: Path, parts: Sequence[str]) -> Scan:
    tree = {}
    for part in parts:
        for alphabet in _folders(base / part):
            characters = _tree(base, f"{part}/{alphabet}")
            tree |= {f"{alphabet}/{character}": files for character, files in characters.items()}
    return _scan_files(base, sorted(tree), *_last_drawings(tree))


def _last_drawings(tree: dict[str, list]) -> tuple[_Table, _Table]:
    classes = sorted(tree)
    train, test = (
        {label: tree[label][part] for label in classes}
        for part in (slice(-_DRAWINGS), slice(-_DRAWINGS, None))
    )
    return _table(classes, train), _table(classes, test)


# Official array files


def _scan_arrays(where: Path, files: Sequence[Path], listing: Callable[[], Listing]) -> Scan:
    return Scan(
        hashlib.sha256(repr([tuple(_file(file, file.name)) for file in files]).encode()).hexdigest(), listing
    )


def _array_split(path: Path, images: UInt8[np.ndarray, "N H W C"], labels: Int64[np.ndarray, " N"]) -> Split:
    names = [f"{path}, image {row}" for row in range(len(labels))]
    return Split(
        labels, names, lambda rows: [images[row] for row in rows], (images.shape[1], images.shape[2])
    )


def _cifar(
    base: Path, choice: Choice, *, folder: str, train: Sequence[str], test: str, names: str, label_bytes: int
) -> Raw | None:
    root = base / folder
    if not root.is_dir():
        return None
    for file in (*train, test, names):
        if not (root / file).is_file():
            raise InputError(f"dataset: {str(root / file)!r} is missing; unpack the archive again")

    def listing() -> Listing:
        classes = tuple(line.strip() for line in _text(root / names).splitlines() if line.strip())
        batches = [_cifar_batch(root / file, len(classes), label_bytes) for file in (*train, test)]
        images, labels = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
        return Listing(
            root,
            classes,
            _array_split(root / "training", images, labels),
            _array_split(root / test, *batches[-1]),
        )

    return Raw(
        "files", root, lambda: _scan_arrays(root, [root / file for file in (*train, test, names)], listing)
    )


def _cifar_batch(
    path: Path, classes: int, label_bytes: int
) -> tuple[UInt8[np.ndarray, "N 32 32 3"], Int64[np.ndarray, " N"]]:
    content = np.frombuffer(_content(path), np.uint8)
    if len(content) == 0 or len(content) % (label_bytes + 3072):
        raise InputError(
            f"dataset: {str(path)!r} has {len(content)} bytes, no multiple of {label_bytes + 3072}; "
            "it is truncated"
        )
    content = content.reshape(-1, label_bytes + 3072)
    labels = content[:, label_bytes - 1].astype(np.int64)  # of CIFAR-100's two the fine one is last
    if labels.max() >= classes:
        raise InputError(
            f"dataset: {str(path)!r} holds label {labels.max()}, but there are names for {classes} classes; "
            "it is damaged"
        )
    return content[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _fashion_mnist(base: Path, choice: Choice) -> Raw | None:
    stems = [
        f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    found = [
        next((base / name for name in (stem, f"{stem}.gz") if (base / name).is_file()), None)
        for stem in stems
    ]
    if not any(found):
        return None
    if None in found:
        missing = stems[found.index(None)]
        raise InputError(
            f"dataset: {str(base / missing)!r} is missing; expected {NAMED['fashion_mnist'].put}"
        )
    files = [file for file in found if file is not None]

    def listing() -> Listing:
        return Listing(base, _FASHION, _idx_split(files[0], files[1]), _idx_split(files[2], files[3]))

    return Raw("files", base, lambda: _scan_arrays(base, files, listing))


def _idx_split(images: Path, labels: Path) -> Split:
    x, y = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)
    if len(x) != len(y):
        raise InputError(
            f"dataset: {str(images)!r} has {len(x)} images, but {str(labels)!r} {len(y)} labels; "
            "they must match"
        )
    if len(y) == 0 or y.max() >= len(_FASHION):
        raise InputError(
            f"dataset: {str(labels)!r} does not hold labels from 0 to {len(_FASHION) - 1}; it is damaged"
        )
    return _array_split(images, x[..., None], y)


def read_idx(path: Path, dimensions: int) -> UInt8[np.ndarray, "..."]:
    """An array of bytes in the idx format of MNIST, packed by gzip or not.

    Raises:
      InputError: for a file that is something else, is truncated or holds more than its header says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            header = np.frombuffer(stream.read(4 + 4 * dimensions), ">u4")
            shape = tuple(map(int, header[1:]))
            if len(header) != 1 + dimensions or header[0] != 0x800 + dimensions:
                raise ValueError(f"no idx header of {dimensions} dimensions")
            count = int(np.prod(shape, dtype=object))
            if count >= 1 << 31:
                raise ValueError(f"its header promises an array of {shape}")
            content = stream.read(count + 1)
            if len(content) != count:
                more = "more" if len(content) > count else "less"
                raise ValueError(f"{more} content than the {shape} that its header promises")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"dataset: {str(path)!r} is damaged or no idx file ({one_line(error)})") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


# What tensorflow-datasets has prepared


class _Records(NamedTuple):
    sources: list[Any]  # random access to records
    names: list[str]  # of the sources, for messages
    features: Any  # of the first source


def _tfds_version(folder: Path) -> Path | None:
    """The newest prepared version of a builder."""
    if not folder.is_dir():
        return None
    versions = [
        path
        for path in folder.iterdir()
        if path.name.replace(".", "").isdigit() and (path / "dataset_info.json").is_file()
    ]
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".") if part], default=None)


def _tfds_scan(listing: Callable[[Sequence[Path]], Listing], versions: Sequence[Path]) -> Scan:
    facts = [
        (version.parent.name, version.name, [tuple(_file(entry, entry.name)) for entry in _visible(version)])
        for version in versions
    ]
    return Scan(hashlib.sha256(repr(facts).encode()).hexdigest(), lambda: _tfds_listing(listing, versions))


def _tfds_listing(listing: Callable[[Sequence[Path]], Listing], versions: Sequence[Path]) -> Listing:
    try:
        return listing(versions)
    except (InputError, MemoryError):
        raise
    except ImportError as error:
        raise InputError(
            f"dataset: {str(versions[0])!r} needs the packages tensorflow-datasets and array_record ({error})"
        ) from error
    except NotImplementedError as error:
        raise InputError(
            f"dataset: {str(versions[0])!r} is not in array_record files; prepare it with that file_format"
        ) from error
    # a damaged folder can raise anything in the library, and it is the folder's fault
    except Exception as error:
        raise InputError(
            f"dataset: {str(versions[0])!r} cannot be read by tensorflow-datasets ({one_line(error)})"
        ) from error


def _records(versions: Sequence[Path], splits: Sequence[str]) -> _Records:
    import tensorflow_datasets as tfds

    sources, names, features = [], [], None
    for version in versions:
        builder = tfds.builder_from_directory(version)
        features = features or builder.info.features
        # images as files, for our own decoder
        raw = {name: tfds.decode.SkipDecoding() for name in builder.info.features}
        for split in splits:
            # pyrefly: ignore[bad-argument-type]  # the library wraps its methods, which hides their self
            sources.append(builder.as_data_source(split, decoders=raw))
            names.append(f"{version}, {split}")
    return _Records(sources, names, features)


def _fields(records: _Records, fields: Sequence[str]) -> list[tuple]:
    """For each record its source, its row and the fields."""
    rows = []
    for index, source in enumerate(records.sources):
        for row in range(len(source)):
            record = source[row]
            rows.append((index, row, *(_plain(record[field]) for field in fields)))
    return rows


def _plain(value: Any) -> str | int:
    return value.decode() if isinstance(value, bytes) else int(value)


def _record_split(records: _Records, table: _Table) -> Split:
    items = [item[:2] for item in table.items]
    names = [f"{records.names[source]}, record {row}" for source, row in items]
    height, width, _ = records.features["image"].shape
    size = (height, width) if height and width else None
    return Split(
        np.array(table.labels, np.int64),
        names,
        lambda rows: [_image(records, *items[row]) for row in rows],
        size,
    )


def _image(records: _Records, source: int, row: int) -> bytes:
    try:
        return records.sources[source][row]["image"]
    except Exception as error:  # as above
        raise InputError(
            f"dataset: {records.names[source]}, record {row} cannot be read ({one_line(error)})"
        ) from error


def _record_listing(
    where: Path, records: _Records, classes: Sequence[str], train: _Table, test: _Table
) -> Listing:
    return Listing(where, tuple(classes), _record_split(records, train), _record_split(records, test))


def _tfds_official(versions: Sequence[Path], *, field: str | None = None) -> Listing:
    """Labels and split as they are, images in the order of `field`."""
    records = _records(versions, ("train", "test"))
    rows = _fields(records, ["label", *([field] if field else [])])
    tables = []
    for split in range(2):
        chosen = sorted((row for row in rows if row[0] == split), key=lambda row: row[3:])
        tables.append(_Table(chosen, [row[2] for row in chosen]))
    return _record_listing(versions[0], records, records.features["label"].names, *tables)


def _tfds_pooled(versions: Sequence[Path], *, splits: Sequence[str], field: str | None = None) -> Listing:
    """All images of all splits, split at random.

    `field` holds a path that ends in CLASS/FILE; without it the label says the class.
    """
    records = _records(versions, splits)
    names, tree = records.features["label"].names, {}
    for row in _fields(records, ["label", *([field] if field else [])]):
        tree.setdefault(row[3].split("/")[-2] if field else names[row[2]], []).append(row)
    classes = sorted(tree)
    if field:
        tree = {label: sorted(rows, key=lambda row: row[3].split("/")[-1]) for label, rows in tree.items()}
    return _record_listing(versions[0], records, classes, *_random_split(_table(classes, tree)))


def _tfds_omniglot(versions: Sequence[Path]) -> Listing:
    records = _records(versions, ("train", "test"))
    alphabets, tree = records.features["alphabet"].names, {}
    for row in _fields(records, ["alphabet", "alphabet_char_id"]):
        tree.setdefault(f"{alphabets[row[2]]}/character{row[3] + 1:02d}", []).append(row)
    return _record_listing(versions[0], records, sorted(tree), *_last_drawings(tree))


_IMAGENET_PUT = "imagenet/train/WNID/*.JPEG and imagenet/val/WNID/*.JPEG"
_SUBSET = (
    "ImageNet classes: those of --class-list, else numpy's RandomState(1993) picks, "
    "as code of iCaRL, PODNet and BiC does"
)
_R_TFDS = partial(_tfds_pooled, splits=("test",), field="file_name")

NAMED = {
    "cifar10": Named(
        "CIFAR-10: 50,000 + 10,000 photos of 10 classes, 32x32",
        "cifar-10-batches-bin/ (data_batch_1..5.bin, test_batch.bin, batches.meta.txt)",
        partial(
            _cifar,
            folder="cifar-10-batches-bin",
            train=[f"data_batch_{batch}.bin" for batch in range(1, 6)],
            test="test_batch.bin",
            names="batches.meta.txt",
            label_bytes=1,
        ),
        60_000,
        ("cifar10",),
        partial(_tfds_official, field="id"),
    ),
    "cifar100": Named(
        "CIFAR-100 with its fine labels: 50,000 + 10,000 photos of 100 classes, 32x32",
        "cifar-100-binary/ (train.bin, test.bin, fine_label_names.txt)",
        partial(
            _cifar,
            folder="cifar-100-binary",
            train=["train.bin"],
            test="test.bin",
            names="fine_label_names.txt",
            label_bytes=2,
        ),
        60_000,
        ("cifar100",),
        partial(_tfds_official, field="id"),
    ),
    "imagenet_r": Named(
        "ImageNet-R: 30,000 renditions of 200 ImageNet classes; "
        "in the 24,000 + 6,000 split of PILOT if it is there, else random 80/20",
        "imagenet-r/{train,test}/WNID/* (the split of PILOT) or imagenet-r/WNID/* (official)",
        _imagenet_r,
        30_000,
        ("imagenet_r",),
        _R_TFDS,
    ),
    "imagenet_r_hepco": Named(
        "ImageNet-R in the random 80/20 split of HePCo's release, whatever split it lies in",
        "imagenet-r/WNID/* (official) or imagenet-r/{train,test}/WNID/*",
        _imagenet_r_hepco,
        30_000,
        ("imagenet_r",),
        _R_TFDS,
    ),
    "cub200": Named(
        "CUB-200-2011: 11,788 photos of 200 birds; "
        "in the 9,430 + 2,358 split of PILOT if it is there, else random 80/20",
        "cub/{train,test}/CLASS/* (the split of PILOT) or CUB_200_2011/images/CLASS/* (official)",
        _cub200,
        11_788,
        ("caltech_birds2011",),
        partial(_tfds_pooled, splits=("train", "test"), field="image/filename"),
    ),
    "domainnet": Named(
        "DomainNet: 345 classes, its six domains pooled, random 80/20 split",
        f"domainnet/{{{','.join(_DOMAINS)}}}/CLASS/*",
        _domainnet,
        None,
        tuple(f"domainnet/{domain}" for domain in _DOMAINS),
        partial(_tfds_pooled, splits=("train", "test")),
    ),
    "tiny_imagenet": Named(
        "Tiny-ImageNet: 100,000 + 10,000 photos of 200 classes, 64x64; "
        "its validation split is the test split",
        "tiny-imagenet-200/ (train/WNID/images/*, val/images/*, val/val_annotations.txt)",
        _tiny_imagenet,
        110_000,
    ),
    "imagenet100": Named(f"100 {_SUBSET}", _IMAGENET_PUT, partial(_imagenet, count=100), None),
    "imagenet200": Named(f"200 {_SUBSET}", _IMAGENET_PUT, partial(_imagenet, count=200), None),
    "omniglot": Named(
        "Omniglot: 1,623 handwritten characters, 20 drawings each, 105x105; "
        "the last 5 of each character are for testing",
        "images_background/ALPHABET/CHARACTER/*.png and images_evaluation/ALPHABET/CHARACTER/*.png",
        _omniglot,
        32_460,
        ("omniglot",),
        _tfds_omniglot,
        augment=False,
    ),
    "fashion_mnist": Named(
        "Fashion-MNIST: 60,000 + 10,000 grey pictures of 10 kinds of clothing, 28x28",
        "fashion_mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte (or .gz)",
        _fashion_mnist,
        70_000,
        ("fashion_mnist",),
        _tfds_official,
        augment=False,
    ),
}
