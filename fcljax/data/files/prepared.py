"""The prepared cache: images decoded once into arrays on disk, which later runs map into memory.

A prepared data set is a folder of `.npy` files and a `manifest.json`. It is written beside its place under
another name and renamed when it is whole, so that a reader sees all of it or nothing. Its name ends in a key,
a hash of whatever decides the pixels: change a source file or the geometry and it is another folder.
"""

import contextlib
import errno
import hashlib
import json
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
from fcljax.data.files.images import Decoded, Fit, Picture, decode, fits, quiet, size_of
from fcljax.data.geometry import Geometry
from fcljax.errors import InputError
from fcljax.files import leftovers, owned, temporary_folder, write_text
from fcljax.terminal import say

FORMAT = 1  # of the folder and of the rules that decide the pixels; part of the key

_BLOCK = 128  # images in memory at a time
_BYTES = 1 << 24  # of an array in memory at a time, while it is hashed or copied
_LONG = 2000  # images from which a progress bar is worth its line


class Split(NamedTuple):
    """Images of one split that are still to be decoded."""

    labels: Int64[np.ndarray, " N"]
    names: Sequence[str]  # [N] for messages: the path, or where else the image is
    fetch: Callable[[Sequence[int]], list[Picture]]  # rows to what to decode
    size: tuple[int, int] | None = None  # height and width of every image, where known beforehand


class Listing(NamedTuple):
    """What images with which labels are in which split."""

    where: Path  # the folder that holds the raw data
    class_names: tuple[str, ...]
    train: Split
    test: Split


class Prepared(NamedTuple):
    """A prepared data set; images are mapped, not read."""

    folder: Path
    x_train: UInt8[np.ndarray, "N H W 3"]
    y_train: Int64[np.ndarray, " N"]
    x_test: UInt8[np.ndarray, "M H W 3"]
    y_test: Int64[np.ndarray, " M"]
    size_train: Int32[np.ndarray, "N 2"] | None  # height and width in pixels before squeezing
    size_test: Int32[np.ndarray, "M 2"] | None
    class_names: tuple[str, ...]
    digest: str
    skipped: tuple[str, ...]  # unreadable images that were left out: which, and why


class PreparedInfo(NamedTuple):
    """What `fcljax data prepare` has to report."""

    folder: Path | None  # None for data that is small or is the user's own array file and stays in memory
    counts: tuple[int, int]  # training and test images
    bytes: int  # of all arrays
    digest: str  # sha256 of what the arrays hold
    skipped: tuple[str, ...]  # unreadable images that were left out: which, and why


def place(root: Path, label: str, name: str, fingerprint: str, geometry: Geometry) -> Path:
    """Where prepared data of these facts lie, if any. `label` is for people; all else goes into the key."""
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

    Memory does not grow with the data set. Images that all have one size, with a short side of at most
    `geometry.test`, are stored as they are; others are brought to `geometry.train` and `geometry.test`, see
    `images.fits`.

    Args:
      facts: what the manifest shall say about the source.
      skip_corrupt: leave out what cannot be decoded, and list it in the manifest.
      force: replace what is at `target`.

    Raises:
      InputError: for an image that cannot be decoded, for a class without images, and for a folder that
        cannot be written.
    """
    console = console or Console(stderr=True)
    _check_classes(listing, [listing.train.labels, listing.test.labels], "no")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, console), temporary_folder(target) as folder:
            if force or not target.exists():
                with quiet():
                    _write(folder, listing, geometry, facts, skip_corrupt, console)
                _move(folder, target, force)
    except OSError as error:
        raise InputError(
            f"data_dir: cannot write prepared data to {str(target.parent)!r} ({error.strerror or error}); "
            "choose another with --data-dir or FCLJAX_DATA"
        ) from error


def open_prepared(target: Path, name: str, full: bool = False) -> Prepared:
    """The prepared data set in `target`. Labels and sizes are compared with their checksums; images are too
    if their file's size or time is not the one that was noted, and always with `full`.

    Raises:
      InputError: for a damaged one, with the command that rebuilds it (of the data set `name`).
    """
    try:
        manifest = read_manifest(target)
        arrays = {key: _map(target / f"{key}.npy", facts, full) for key, facts in manifest["arrays"].items()}
        _note_times(target, manifest)
        arrays |= {key: np.array(array) for key, array in arrays.items() if key[0] != "x"}
        classes = len(manifest["class_names"])
        if any(
            len(np.unique(arrays[key])) != classes or arrays[key].max() >= classes
            for key in ("y_train", "y_test")
        ):
            raise ValueError("labels do not fit the class names")
        skipped = tuple(entry["reason"] for entry in manifest["skipped"])
        size_train, size_test = arrays.pop("size_train", None), arrays.pop("size_test", None)
        return Prepared(
            target,
            **arrays,
            size_train=size_train,
            size_test=size_test,
            class_names=tuple(manifest["class_names"]),
            digest=manifest["digest"],
            skipped=skipped,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"dataset: prepared data {str(target)!r} is damaged ({reason}); "
            f"rebuild it with: fcljax data prepare {name} --force"
        ) from error


def read_manifest(target: Path) -> dict[str, Any]:
    """The manifest of a prepared data set.

    Raises:
      OSError, ValueError: if there is none or it is damaged.
    """
    try:
        manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("manifest.json is not of this version")
    return manifest


def info(prepared: Prepared) -> PreparedInfo:
    """What to report about a prepared data set."""
    counts = len(prepared.y_train), len(prepared.y_test)
    size = sum(file.stat().st_size for file in prepared.folder.glob("*.npy"))
    return PreparedInfo(prepared.folder, counts, size, prepared.digest, prepared.skipped)


def digest(arrays: dict[str, np.ndarray]) -> str:
    """sha256 over the arrays, their names, types and shapes."""
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
    rows = max(1, _BYTES // max(1, array[:1].nbytes))
    return (array[start : start + rows] for start in range(0, len(array), rows))


# Writing


@contextlib.contextmanager
def alone(target: Path, console: Console) -> Iterator[None]:
    """One process works on `target`, the others wait. The system lifts the lock when its holder dies."""
    wait = lambda: say(console, f"waiting for another process that prepares {target.name}")
    with owned(target.parent / f".{target.name}.lock", wait) as locked:
        # Where files cannot be locked all processes decode, the first to finish wins, and each removes what
        # is its own.
        for left in leftovers(target) if locked else ():
            shutil.rmtree(left, ignore_errors=True)
        yield


def _move(folder: Path, target: Path, force: bool) -> None:
    if force and target.exists():
        with temporary_folder(target) as old:
            target.rename(old / "old")  # whoever has it mapped keeps it
            os.replace(folder, target)
        return
    try:
        os.replace(folder, target)
    except OSError:
        if not (target / "manifest.json").exists():
            raise  # else another process was faster, and has the same


def _write(
    folder: Path,
    listing: Listing,
    geometry: Geometry,
    facts: Mapping[str, object],
    skip_corrupt: bool,
    console: Console,
) -> None:
    count = len(listing.train.names) + len(listing.test.names)
    with ThreadPoolExecutor() as pool, _progress(console, count) as advance:
        size = _common_size(listing, geometry, pool)
        shapes = (size, size) if size else ((geometry.train,) * 2, (geometry.test,) * 2)
        _check_space(folder, listing, shapes)
        arrays, skipped = {}, []
        for split, images, shape, fit in zip(
            ("train", "test"), listing[2:], shapes, fits(geometry), strict=True
        ):
            attempt = partial(_attempt, fit=None if size else fit, shape=shape, skip_corrupt=skip_corrupt)
            sizes = not size and (split == "train" or geometry.squash)
            facts_of_split, left_out = _write_split(
                folder, split, images, shape, sizes, pool, attempt, advance
            )
            arrays |= facts_of_split
            skipped += left_out
    _check_classes(
        listing, [np.load(folder / f"y_{split}.npy") for split in ("train", "test")], "no readable"
    )
    manifest = {
        "format": FORMAT,
        "library": fcljax.__version__,
        "pillow": PIL.__version__,
        **facts,
        "geometry": geometry._asdict(),
        "stored": "as they are" if size else "resized",
        "counts": {"train": arrays["y_train"]["shape"][0], "test": arrays["y_test"]["shape"][0]},
        "class_names": list(listing.class_names),
        "skipped": skipped,
        "arrays": arrays,
        "digest": _digest({key: entry["sha256"] for key, entry in arrays.items()}),
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    if skipped:
        say(
            console,
            f"{facts['name']}: skipped {len(skipped)} unreadable images, listed in manifest.json; "
            f"{skipped[0]['reason']}",
        )


@contextlib.contextmanager
def _progress(console: Console, count: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("decoding images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=count < _LONG or not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=count)
        yield lambda images: progress.advance(task, images)


def _check_classes(listing: Listing, labels: list[np.ndarray], lack: str) -> None:
    for split, present in zip(("training", "test"), labels, strict=True):
        missing = np.setdiff1d(np.arange(len(listing.class_names)), present)
        if len(missing):
            label = listing.class_names[missing[0]]
            raise InputError(
                f"dataset: {str(listing.where)!r}: class {label!r} has {lack} {split} images; "
                "every class needs some"
            )


def _check_space(folder: Path, listing: Listing, shapes: Sequence[tuple[int, int]]) -> None:
    need = sum(
        len(split.names) * height * width * 3
        for split, (height, width) in zip(listing[2:], shapes, strict=True)
    )
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError(
            f"data_dir: {str(folder.parent)!r} has {free / 1e9:.1f} GB left, "
            f"the prepared images need {need / 1e9:.1f} GB; choose another with --data-dir or FCLJAX_DATA"
        )


def _common_size(listing: Listing, geometry: Geometry, pool: Executor) -> tuple[int, int] | None:
    """The one height and width of all readable images if they are small enough to be stored as they are."""
    common = None
    for split in (listing.train, listing.test):
        for size in [split.size] if split.size else _sizes(split, pool):
            common = common or size
            if size != common or min(size) > geometry.test:
                return None
    return common


def _sizes(split: Split, pool: Executor) -> Iterator[tuple[int, int]]:
    for pictures, names in _fetched(split):
        yield from filter(None, pool.map(_size, pictures, names))


def _size(picture: Picture, name: str) -> tuple[int, int] | None:
    try:
        return size_of(picture, name)
    except (InputError, OSError):
        return None  # decoding will say so


def _fetched(split: Split) -> Iterator[tuple[list[Picture], Sequence[str]]]:
    for start in range(0, len(split.names), _BLOCK):
        rows = range(start, min(start + _BLOCK, len(split.names)))
        yield split.fetch(rows), split.names[rows.start : rows.stop]


def _attempt(
    picture: Picture, name: str, fit: Fit | None, shape: tuple[int, int], skip_corrupt: bool
) -> Decoded | dict[str, str]:
    try:
        decoded = decode(picture, name, fit)
        if decoded.pixels.shape[:2] != shape:
            raise InputError(
                f"dataset: {name!r} has {decoded.width}x{decoded.height} pixels, unlike the others"
            )
        return decoded
    except OSError as error:  # of the file system, not of the image: never skipped
        raise InputError(f"dataset: {name!r} cannot be read ({error.strerror or error})") from error
    except InputError as error:
        if not skip_corrupt:
            raise
        return {"file": name, "reason": str(error).removeprefix("dataset: ")}


def _write_split(
    folder: Path,
    split: str,
    images: Split,
    shape: tuple[int, int],
    keep_sizes: bool,
    pool: Executor,
    attempt: Callable[[Picture, str], Decoded | dict[str, str]],
    advance: Callable[[int], None],
) -> tuple[dict[str, dict], list[dict]]:
    path, sums, skipped, kept, sizes = folder / f"x_{split}.npy", hashlib.sha256(), [], [], []
    _allocate(path, (len(images.names), *shape, 3))
    row = 0
    for pictures, names in _fetched(images):
        results = list(pool.map(attempt, pictures, names))
        good = [result for result in results if isinstance(result, Decoded)]
        skipped += [result for result in results if not isinstance(result, Decoded)]
        pixels = np.stack([result.pixels for result in good]) if good else np.empty((0, *shape, 3), np.uint8)
        # mapped anew, so that it does not fill up memory
        np.load(path, mmap_mode="r+")[len(kept) : len(kept) + len(good)] = pixels
        sums.update(pixels.data)
        kept += [row + index for index, result in enumerate(results) if isinstance(result, Decoded)]
        sizes += [(result.height, result.width) for result in good]
        row += len(results)
        advance(len(results))
    if len(kept) < row:
        _shorten(path, len(kept))
    facts = {f"x_{split}": _facts(path, _finish(sums, np.dtype(np.uint8), (len(kept), *shape, 3)))}
    facts |= _save(folder, f"y_{split}", images.labels[kept])
    return facts | (
        _save(folder, f"size_{split}", np.array(sizes, np.int32).reshape(-1, 2)) if keep_sizes else {}
    ), skipped


def _allocate(path: Path, shape: tuple[int, ...]) -> None:
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    # a full disk is an error here; later, on a mapped page, it would kill the process
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as handle:
            try:
                os.posix_fallocate(handle.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise


def _shorten(path: Path, rows: int) -> None:
    full, part = np.load(path, mmap_mode="r"), path.with_name(f"part_{path.name}")
    target = np.lib.format.open_memmap(part, mode="w+", dtype=full.dtype, shape=(rows, *full.shape[1:]))
    start = 0
    for block in _blocks(full[:rows]):
        target[start : start + len(block)] = block
        start += len(block)
    os.replace(part, path)


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
    touched = path.stat().st_mtime_ns != facts.get("time")
    if (full or touched or not path.name.startswith("x")) and _sha256(array) != facts["sha256"]:
        raise ValueError(f"{path.name} does not match its checksum")
    return array


def _note_times(target: Path, manifest: dict[str, Any]) -> None:
    """Files that were copied have other times; once they are known to be whole, these are noted."""
    times = {key: (target / f"{key}.npy").stat().st_mtime_ns for key in manifest["arrays"]}
    if times == {key: facts.get("time") for key, facts in manifest["arrays"].items()}:
        return
    arrays = {key: {**facts, "time": times[key]} for key, facts in manifest["arrays"].items()}
    with contextlib.suppress(OSError):  # of somebody else: then they are compared every time
        write_text(target / "manifest.json", json.dumps({**manifest, "arrays": arrays}, indent=1))
