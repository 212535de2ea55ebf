"""Decode images once into arrays on disk, the prepared cache, which later runs map into memory.

A prepared data set is a folder of `.npy` files and a `manifest.json`. It is written under
another name and renamed when it is complete, so that a reader sees all of it or nothing.
Its name ends in a key, a hash of everything that decides the pixels: another source file
or geometry gives another folder.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from jaxtyping import Int32, Int64, UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import fcljax
from fcljax.data.files.dataset import TRAIN_ROWS, columns_file, names_file
from fcljax.data.files.images import Decoded, Picture, decode, fits, quiet, size_of
from fcljax.data.geometry import Geometry
from fcljax.errors import InputError, reason
from fcljax.files import folder_for, leftovers, owned, temporary_folder, write_text
from fcljax.terminal import say

# Version of the folder, and of the rules that decide the pixels. It is part of the key:
# data of other versions are prepared again.
FORMAT = 1

_BLOCK = 128  # images in memory at a time
_BYTES = 1 << 24  # bytes of an array in memory at a time, while it is hashed or copied
SUM = "sha256"  # key of a manifest's checksum of its other content

_LONG = 2000  # images from which a progress bar is shown


class UndecodedSplit(NamedTuple):
    """Images of one split before decoding."""

    labels: Int64[np.ndarray, " N"]
    names: Sequence[str]  # [N] for messages: the path or another location
    fetch: Callable[[Sequence[int]], list[Picture]]  # fetch(indices) -> encoded images
    # height and width of all images, if known before decoding
    size: tuple[int, int] | None = None
    # further facts on each image [N], for example its site
    columns: Mapping[str, Sequence[str]] = {}
    # what the data have in place of a label, if the label is -1
    wrong_labels: Mapping[int, str] = {}
    # number of each image in the user's list or table; None: 0 to N-1
    rows: Int64[np.ndarray, " N"] | None = None

    def take(self, indices: np.ndarray) -> "UndecodedSplit":
        """Return these images, in this order."""
        selected = indices.tolist()
        return UndecodedSplit(
            self.labels[indices],
            [self.names[i] for i in selected],
            lambda positions: self.fetch([selected[i] for i in positions]),
            self.size,
            {name: [values[i] for i in selected] for name, values in self.columns.items()},
            {n: self.wrong_labels[i] for n, i in enumerate(selected) if i in self.wrong_labels},
            self.row_numbers()[indices],
        )

    def row_numbers(self) -> Int64[np.ndarray, " N"]:
        """Return the number of each image in the user's data."""
        if self.rows is None:
            return np.arange(len(self.names))
        return self.rows


class Listing(NamedTuple):
    """The images and labels of both splits."""

    where: Path  # the folder that holds the raw data
    class_names: tuple[str, ...]
    train: UndecodedSplit
    test: UndecodedSplit
    notes: tuple[str, ...] = ()  # how the raw data were read, and what was not read
    num_rows: int | None = None  # images that `train.rows` numbers; None: the training images


class Prepared(NamedTuple):
    """A prepared data set; images are mapped, not read."""

    folder: Path
    x_train: UInt8[np.ndarray, "N H W 3"]
    y_train: Int64[np.ndarray, " N"]
    x_test: UInt8[np.ndarray, "M H W 3"]
    y_test: Int64[np.ndarray, " M"]
    # height and width in pixels before squeezing
    size_train: Int32[np.ndarray, "N 2"] | None
    size_test: Int32[np.ndarray, "M 2"] | None
    class_names: tuple[str, ...]
    digest: str
    skipped: tuple[str, ...]  # why each image that is left out was skipped
    without_label: int = 0  # how many of these have no label
    # of `Dataset`, where training images are not all that the user numbers
    train_rows: Int64[np.ndarray, " N"] | None = None
    num_rows: int = 0


class PreparedInfo(NamedTuple):
    """The report of `fcljax data prepare`."""

    folder: Path | None  # None for data that stay in memory
    counts: tuple[int, int]  # training and test images
    bytes: int  # of all arrays
    digest: str  # sha256 of the arrays' content
    skipped: tuple[str, ...]  # why each image that is left out was skipped


def place(root: Path, label: str, name: str, fingerprint: str, geometry: Geometry) -> Path:
    """Return the folder of prepared data with these properties.

    `label` is for people; all others decide the key.
    """
    facts = json.dumps([FORMAT, name, fingerprint, list(geometry)])
    return root / f"{label}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def build(
    target: Path,
    listing: Listing,
    geometry: Geometry,
    *,
    facts: Mapping[str, object],
    skip_corrupt: bool = False,
    force: bool = False,
    console: Console | None = None,
) -> None:
    """Decode everything into `target`, unless another process has done so in the meantime.

    Memory does not grow with the data set. Images that all have one size, with a short
    side of at most `geometry.test`, are stored as they are; others are brought to
    `geometry.train` and `geometry.test`, see `images.fits`.

    Args:
      facts: the manifest's entries on the source, its name included.
      skip_corrupt: leave out images that cannot be decoded, and list them in the manifest.
      force: replace the folder at `target`.

    Raises:
      InputError: for an image that cannot be decoded or has no label, for a class without
        images, and for a folder that cannot be written. Nothing is left behind then.
    """
    console = console or Console(stderr=True)
    if not skip_corrupt:
        _check_labels(listing)
    _check_classes(listing, [listing.train.labels, listing.test.labels], "no")
    try:
        with (
            folder_for(target.parent),
            one_process(target, console, remove_on_error=True),
            temporary_folder(target) as folder,
        ):
            # under the lock: another process may have prepared it while this one waited
            if force or not target.exists():
                with quiet():
                    manifest = _write(folder, listing, geometry, skip_corrupt, console)
                write_manifest(folder, {**manifest, **facts})
                if skipped := manifest["skipped"]:
                    count = skipped_in_words(len(skipped), manifest["without_label"])
                    listed = f"skipped {count}, listed in manifest.json"
                    say(console, f"{facts['name']}: {listed}; {skipped[0]['reason']}")
                _move(folder, target, force)
    except OSError as error:
        raise InputError(
            f"data_dir: cannot write prepared data to {str(target.parent)!r} ({error.strerror or error}); "
            "choose another with --data-dir or FCLJAX_DATA"
        ) from error


def open_prepared(target: Path, name: str, full: bool = False) -> Prepared:
    """Open the prepared data set in `target`, and check it.

    The manifest, labels, sizes, columns and names are compared with their checksums, and
    images if `full` or if their file's time has changed.

    Raises:
      InputError: for damaged data, with the command that rebuilds the data set `name`.
    """
    try:
        manifest = read_manifest(target)
        _check_texts(target, manifest)
        arrays = {key: _map(target / f"{key}.npy", facts, full) for key, facts in manifest["arrays"].items()}
        _note_times(target, manifest)
        # labels and sizes are small and read often, so they are not mapped
        arrays |= {key: np.array(array) for key, array in arrays.items() if key[0] != "x"}
        classes = len(manifest["class_names"])
        sizes = {split: arrays.pop(f"size_{split}", None) for split in ("train", "test")}
        train_rows = arrays.pop(TRAIN_ROWS, None)
        num_rows = 0
        if train_rows is not None:
            num_rows = manifest["num_rows"]
        for labels in (arrays["y_train"], arrays["y_test"]):
            if len(np.unique(labels)) != classes or labels.max() >= classes:
                raise ValueError("labels do not fit the class names")
        return Prepared(
            target,
            **arrays,
            size_train=sizes["train"],
            size_test=sizes["test"],
            class_names=tuple(manifest["class_names"]),
            digest=manifest["digest"],
            skipped=tuple(entry["reason"] for entry in manifest["skipped"]),
            without_label=manifest.get("without_label", 0),
            train_rows=train_rows,
            num_rows=num_rows,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"dataset: prepared data {str(target)!r} is damaged ({reason(error)}); "
            f"rebuild it with: fcljax data prepare {name} --force"
        ) from error


def read_manifest(target: Path) -> dict[str, Any]:
    """Read the manifest of a prepared data set, and check its checksum, which first versions lack.

    Raises:
      OSError, ValueError: if it is missing or damaged.
    """
    try:
        manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("manifest.json is not of this version")
    try:
        intact = SUM not in manifest or manifest[SUM] == _sum_of_manifest(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"manifest.json: {reason(error)}") from None
    if not intact:
        raise ValueError("manifest.json does not match its checksum")
    return manifest


def write_manifest(target: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a prepared data set, with its checksum."""
    signed = {**manifest, SUM: _sum_of_manifest(manifest)}
    write_text(target / "manifest.json", json.dumps(signed, indent=1))


def _sum_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest without the times of files, which copies change."""
    arrays = {
        key: {name: value for name, value in facts.items() if name != "time"}
        for key, facts in manifest["arrays"].items()
    }
    content = {name: value for name, value in manifest.items() if name != SUM} | {"arrays": arrays}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def info(prepared: Prepared) -> PreparedInfo:
    """Return the report on a prepared data set."""
    counts = len(prepared.y_train), len(prepared.y_test)
    size = sum(file.stat().st_size for file in prepared.folder.glob("*.npy"))
    return PreparedInfo(prepared.folder, counts, size, prepared.digest, prepared.skipped)


def digest_of_arrays(arrays: dict[str, np.ndarray]) -> str:
    """Return the sha256 of the arrays, their names, types and shapes."""
    return _digest({key: _sha256(array) for key, array in arrays.items()})


def _digest(sums: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{key} {sums[key]}\n" for key in sorted(sums)).encode()).hexdigest()


def _sha256(array: np.ndarray) -> str:
    sums = hashlib.sha256()
    for block in _blocks(array):
        sums.update(np.ascontiguousarray(block).data)
    return _finish(sums, array.dtype, array.shape)


def _finish(sums: Any, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    sums.update(f"{dtype.str} {tuple(map(int, shape))}".encode())
    return sums.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    length = max(1, _BYTES // max(1, array[:1].nbytes))
    return (array[start : start + length] for start in range(0, len(array), length))


# ---- writing ---------------------------------------------------------------------------


class _Work(NamedTuple):
    """How all images of a data set are decoded."""

    folder: Path
    geometry: Geometry
    # height and width of all images, if they are stored as they are
    size: tuple[int, int] | None
    skip_corrupt: bool
    pool: Executor
    advance: Callable[[int], None]  # advances the progress bar by so many images


@contextlib.contextmanager
def one_process(target: Path, console: Console, remove_on_error: bool = False) -> Iterator[None]:
    """Hold the lock of `target`, for which other processes wait.

    The system lifts the lock when its holder dies; its file stays, unless `remove_on_error`.
    """

    def wait() -> None:
        say(console, f"waiting for another process that prepares {target.name}")

    with owned(target.parent / f".{target.name}.lock", wait, remove_on_error) as locked:
        # On file systems without locks all processes decode. The first to finish wins,
        # and each removes its own leftovers.
        for folder in leftovers(target) if locked else ():
            shutil.rmtree(folder, ignore_errors=True)
        yield


def _move(folder: Path, target: Path, force: bool) -> None:
    if force and target.exists():
        # A folder cannot replace one that is not empty, so the old one moves away first.
        # Processes that have mapped its files can go on: they keep the files alive.
        with temporary_folder(target) as old:
            target.rename(old / "old")
            os.replace(folder, target)
        return
    # without locks another process may have been faster, with the same result
    try:
        os.replace(folder, target)
    except OSError:
        if not (target / "manifest.json").exists():
            raise


def _write(
    folder: Path, listing: Listing, geometry: Geometry, skip_corrupt: bool, console: Console
) -> dict[str, Any]:
    """Write all arrays to `folder`, and return their manifest."""
    num_rows = listing.num_rows
    if num_rows is None:
        num_rows = len(listing.train.names)
    # without --skip-corrupt, `build` has refused images without a label
    listing, unlabelled = _drop_unlabelled(listing)
    count = len(listing.train.names) + len(listing.test.names)
    with ThreadPoolExecutor() as pool, _progress(console, count) as advance:
        size = _common_size(listing, geometry, pool)
        work = _Work(folder, geometry, size, skip_corrupt, pool, advance)
        _check_space(work, listing)
        train, unreadable = _write_split(work, "train", listing.train)
        test, unreadable_test = _write_split(work, "test", listing.test)
    unreadable += unreadable_test
    unreadable_names = {entry["file"] for entry in unreadable}
    texts = _write_names(folder, listing, unreadable_names)
    labels = [np.load(folder / f"y_{split}.npy") for split in ("train", "test")]
    _check_classes(listing, labels, "no readable")
    arrays = train | test
    # of the examples alone, however they are numbered
    digest = _digest({key: entry["sha256"] for key, entry in arrays.items()})
    rows = listing.train.row_numbers()[_decoded(listing.train, unreadable_names)]
    if len(rows) < num_rows:
        arrays |= _save(folder, TRAIN_ROWS, rows)
    return {
        "format": FORMAT,
        "library": fcljax.__version__,
        "pillow": PIL.__version__,
        "geometry": geometry._asdict(),
        "stored": "as they are" if size else "resized",
        "counts": {"train": len(labels[0]), "test": len(labels[1])},
        "class_names": list(listing.class_names),
        "skipped": unreadable + unlabelled,
        "without_label": len(unlabelled),
        "arrays": arrays,
        "texts": texts,
        "digest": digest,
        "num_rows": num_rows,
    }


def skipped_in_words(skipped: int, unlabelled: int) -> str:
    """Say how many images were skipped, and why."""
    unreadable = skipped - unlabelled
    parts = []
    if unreadable:
        parts.append(f"{unreadable} unreadable images")
    if unlabelled:
        parts.append(f"{unlabelled} without a label")
    return " and ".join(parts)


def _check_labels(listing: Listing) -> None:
    """Check that every image has a label.

    Raises:
      InputError: naming the first image without one.
    """
    for images in (listing.train, listing.test):
        missing = np.flatnonzero(images.labels < 0)
        if len(missing):
            raise InputError(
                f"dataset: {_no_label(images, int(missing[0]))}; {len(missing):,} of {len(images.labels):,} "
                "images have no label: leave them out with --skip-corrupt"
            )


def _no_label(images: UndecodedSplit, index: int) -> str:
    problem = "has no label"
    if index in images.wrong_labels:
        problem = f"has the label {images.wrong_labels[index]}"
    return f"{images.names[index]!r} {problem}; labels are whole numbers from 0, or text"


def _drop_unlabelled(listing: Listing) -> tuple[Listing, list[dict[str, str]]]:
    """Return the listing of labelled images, and the manifest's entries on the others."""
    splits = []
    skipped = []
    for images in (listing.train, listing.test):
        missing = np.flatnonzero(images.labels < 0)
        skipped += [{"file": images.names[i], "reason": _no_label(images, i)} for i in missing.tolist()]
        splits.append(images.take(np.flatnonzero(images.labels >= 0)) if len(missing) else images)
    train, test = splits
    return listing._replace(train=train, test=test), skipped


def _write_names(folder: Path, listing: Listing, skipped: set[str]) -> dict[str, str]:
    """Write the names and columns of the images that were decoded.

    Names are relative to the folder of the raw data. Returns the sha256 of each file, by its name.
    """
    checksums = {}
    for split, images in (("train", listing.train), ("test", listing.test)):
        decoded = _decoded(images, skipped)
        names = [images.names[i].removeprefix(f"{listing.where}/") for i in decoded]
        texts = {names_file(folder, split): json.dumps(names)}
        columns = {name: [values[i] for i in decoded] for name, values in images.columns.items()}
        if columns:
            texts[columns_file(folder, split)] = json.dumps(columns)
        for path, text in texts.items():
            write_text(path, text)
            checksums[path.name] = hashlib.sha256(text.encode()).hexdigest()
    return checksums


def _decoded(images: UndecodedSplit, skipped: set[str]) -> list[int]:
    """Return the indices of the images that were decoded."""
    return [i for i, name in enumerate(images.names) if name not in skipped]


@contextlib.contextmanager
def _progress(console: Console, count: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("decoding images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = count < _LONG or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=count)
        yield partial(progress.advance, task)


def _check_classes(listing: Listing, labels: list[np.ndarray], lack: str) -> None:
    """Check that both splits have every class; `lack` is "no" or "no readable"."""
    for split, present in zip(("training", "test"), labels, strict=True):
        missing = np.setdiff1d(np.arange(len(listing.class_names)), present)
        if len(missing):
            label = listing.class_names[missing[0]]
            raise InputError(
                f"dataset: {str(listing.where)!r}: class {label!r} has {lack} {split} images; "
                "every class needs some"
            )


def _shape(work: _Work, split: str) -> tuple[int, int]:
    """Return the height and width in which the images of a split are stored."""
    side = work.geometry.train if split == "train" else work.geometry.test
    return work.size or (side, side)


def _check_space(work: _Work, listing: Listing) -> None:
    # the pixels: labels, sizes and names are small beside them
    need = sum(
        3 * len(images.names) * math.prod(_shape(work, split))
        for split, images in (("train", listing.train), ("test", listing.test))
    )
    free = shutil.disk_usage(work.folder).free
    if need > free:
        raise InputError(
            f"data_dir: {str(work.folder.parent)!r} has {free / 1e9:.1f} GB left, "
            f"the prepared images need {need / 1e9:.1f} GB; choose another with --data-dir or FCLJAX_DATA"
        )


def _common_size(listing: Listing, geometry: Geometry, pool: Executor) -> tuple[int, int] | None:
    """Return the height and width of all readable images, if they are the same and small
    enough to store."""
    common = None
    for split in (listing.train, listing.test):
        for size in [split.size] if split.size else _sizes(split, pool):
            common = common or size
            if size != common or min(size) > geometry.test:
                return None
    return common


def _sizes(split: UndecodedSplit, pool: Executor) -> Iterator[tuple[int, int]]:
    for pictures, names in _blocks_of(split):
        yield from filter(None, pool.map(_size, pictures, names))


def _size(picture: Picture, name: str) -> tuple[int, int] | None:
    try:
        return size_of(picture, name)
    # decoding will report it, or skip the image
    except (InputError, OSError):
        return None


def _blocks_of(split: UndecodedSplit) -> Iterator[tuple[list[Picture], Sequence[str]]]:
    for start in range(0, len(split.names), _BLOCK):
        indices = range(start, min(start + _BLOCK, len(split.names)))
        yield split.fetch(indices), split.names[indices.start : indices.stop]


def _decode(work: _Work, split: str, picture: Picture, name: str) -> Decoded | dict[str, str]:
    """Decode an image as it is stored, or return the manifest's entry on why it is skipped."""
    fit = None if work.size else fits(work.geometry)[split == "test"]
    try:
        decoded = decode(picture, name, fit)
        if decoded.pixels.shape[:2] != _shape(work, split):
            raise InputError(
                f"dataset: {name!r} has {decoded.width}x{decoded.height} pixels, unlike the others"
            )
        return decoded
    except OSError as error:
        # a fault of the disk, not of the image: with --skip-corrupt half of the data
        # set could be missing
        raise InputError(f"dataset: {name!r} cannot be read ({error.strerror or error})") from error
    except InputError as error:
        if not work.skip_corrupt:
            raise
        return {"file": name, "reason": str(error).removeprefix("dataset: ")}


def _write_split(work: _Work, split: str, images: UndecodedSplit) -> tuple[dict[str, dict], list[dict]]:
    """Write the arrays of a split; return their manifest entries and the skipped images."""
    shape = _shape(work, split)
    path = work.folder / f"x_{split}.npy"
    checksum = hashlib.sha256()
    decoded = []  # indices of images
    sizes = []
    skipped = []
    processed = 0
    _allocate(path, (len(images.names), *shape, 3))
    for pictures, names in _blocks_of(images):
        results = list(work.pool.map(partial(_decode, work, split), pictures, names))
        block = [x for x in results if isinstance(x, Decoded)]
        pixels = np.stack([x.pixels for x in block]) if block else np.empty((0, *shape, 3), np.uint8)
        # mapped anew for each block: pages of a mapping that stays open count as memory
        np.load(path, mmap_mode="r+")[len(decoded) : len(decoded) + len(block)] = pixels
        checksum.update(pixels.data)
        skipped += [x for x in results if not isinstance(x, Decoded)]
        decoded += [processed + i for i, x in enumerate(results) if isinstance(x, Decoded)]
        sizes += [(x.height, x.width) for x in block]
        processed += len(results)
        work.advance(len(results))
    if len(decoded) < processed:
        _shorten(path, len(decoded))
    facts = {f"x_{split}": _facts(path, _finish(checksum, np.dtype(np.uint8), (len(decoded), *shape, 3)))}
    facts |= _save(work.folder, f"y_{split}", images.labels[decoded])
    # where images were squeezed, crops need their shapes before (`Geometry`)
    if not work.size and (split == "train" or work.geometry.squash):
        facts |= _save(work.folder, f"size_{split}", np.array(sizes, np.int32).reshape(-1, 2))
    return facts, skipped


def _allocate(path: Path, shape: tuple[int, ...]) -> None:
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    # The file may be sparse. A full disk is an error here; later, on a mapped page, it
    # would kill the process (SIGBUS).
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as handle:
            try:
                os.posix_fallocate(handle.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise


def _shorten(path: Path, length: int) -> None:
    array = np.load(path, mmap_mode="r")
    shortened = path.with_name(f"part_{path.name}")
    shape = (length, *array.shape[1:])
    target = np.lib.format.open_memmap(shortened, mode="w+", dtype=array.dtype, shape=shape)
    start = 0
    for block in _blocks(array[:length]):
        target[start : start + len(block)] = block
        start += len(block)
    os.replace(shortened, path)


def _save(folder: Path, key: str, array: np.ndarray) -> dict[str, dict]:
    np.save(folder / f"{key}.npy", array, allow_pickle=False)
    return {key: _facts(folder / f"{key}.npy", _sha256(array))}


def _facts(path: Path, sha256: str) -> dict:
    array = np.load(path, mmap_mode="r")
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.str,
        "bytes": path.stat().st_size,
        "time": path.stat().st_mtime_ns,
        "sha256": sha256,
    }


def _map(path: Path, facts: dict, full: bool) -> np.ndarray:
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {facts['bytes']}")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != facts["shape"] or array.dtype.str != facts["dtype"]:
        raise ValueError(f"{path.name} holds {array.dtype} of shape {array.shape}")
    # hashing all images would take minutes at every start, so an unchanged file is
    # trusted
    changed = path.stat().st_mtime_ns != facts.get("time")
    is_image = path.name.startswith("x")
    if (full or changed or not is_image) and _sha256(array) != facts["sha256"]:
        raise ValueError(f"{path.name} does not match its checksum")
    return array


def _check_texts(target: Path, manifest: dict[str, Any]) -> None:
    """Check names and columns against their checksums, which manifests of the first versions lack.

    Raises:
      OSError, ValueError: for a file that has changed or is new.
    """
    for name, sha256 in manifest.get("texts", {}).items():
        if hashlib.sha256((target / name).read_bytes()).hexdigest() != sha256:
            raise ValueError(f"{name} does not match its checksum")
    if "texts" not in manifest:
        return
    for path in target.glob("columns_*.json"):
        if path.name not in manifest["texts"]:
            raise ValueError(f"{path.name} does not belong to the prepared data set")


def _note_times(target: Path, manifest: dict[str, Any]) -> None:
    """Note the times of copied files, once their content has been checked."""
    times = {key: (target / f"{key}.npy").stat().st_mtime_ns for key in manifest["arrays"]}
    if times == {key: facts.get("time") for key, facts in manifest["arrays"].items()}:
        return
    arrays = {key: {**facts, "time": times[key]} for key, facts in manifest["arrays"].items()}
    # in a folder that cannot be written, they are checked at every start
    with contextlib.suppress(OSError):
        write_manifest(target, {**manifest, "arrays": arrays})
