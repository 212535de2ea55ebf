"""Find and read official array files: CIFAR's binary batches and MNIST's idx files."""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from fcljax.data.files.prepared import Listing, UndecodedSplit
from fcljax.data.files.raw import Choice, Raw, Scan, content, file_facts, text
from fcljax.errors import InputError, reason

IDX_FILES = "{train,t10k}-{images-idx3,labels-idx1}-ubyte (or .gz)"
DIGITS = tuple("0123456789")
FASHION = (
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


def cifar(
    base: Path, _choice: Choice, *, folder: str, train: Sequence[str], test: str, names: str, label_bytes: int
) -> Raw | None:
    """Find CIFAR's binary version.

    Args:
      folder: its folder below `base`.
      train, test, names: the files of the training images, the test images and the names
        of classes.
      label_bytes: number of labels before each image; the last one is read.
    """
    root = base / folder
    if not root.is_dir():
        return None
    files = [root / file for file in (*train, test, names)]
    for file in files:
        if not file.is_file():
            raise InputError(f"dataset: {str(file)!r} is missing; unpack the archive again")

    def listing() -> Listing:
        classes = tuple(line.strip() for line in text(root / names).splitlines() if line.strip())
        # all files but the names; the last batch is the test set
        batches = [_cifar_batch(file, len(classes), label_bytes) for file in files[:-1]]
        images, labels = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
        test_split = _split(root / test, *batches[-1])
        return Listing(root, classes, _split(root / "training", images, labels), test_split)

    return Raw(root, lambda: _scan(files, listing))


def idx(base: Path, _choice: Choice, *, folders: Sequence[str], classes: tuple[str, ...]) -> Raw | None:
    """Find MNIST's four files, or those of a data set in the same format, packed by gzip or not.

    Args:
      folders: candidates below `base`; the first one that has one of the files is read.
      classes: the names of labels 0, 1, ...
    """
    kinds = ("images-idx3", "labels-idx1")
    stems = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in kinds]
    for root in (base / folder for folder in folders):
        paths = {stem: [file for file in _idx_names(root, stem) if file.is_file()] for stem in stems}
        if any(paths.values()):
            break
    else:
        return None
    for stem, candidates in paths.items():
        if not candidates:
            raise InputError(f"dataset: {str(root / stem)!r} is missing; expected {IDX_FILES}")
    x, y, x_test, y_test = (candidates[0] for candidates in paths.values())
    files = x, y, x_test, y_test

    def listing() -> Listing:
        return Listing(root, classes, _idx(x, y, classes), _idx(x_test, y_test, classes))

    return Raw(root, lambda: _scan(files, listing))


def _idx_names(root: Path, stem: str) -> list[Path]:
    """Return the possible paths of a file: some tools unpack it with a point in its name."""
    pointed = stem.replace("-idx", ".idx")
    return [root / f"{name}{end}" for name in (stem, pointed) for end in ("", ".gz")]


def _scan(files: Sequence[Path], listing: Callable[[], Listing]) -> Scan:
    facts = [tuple(file_facts(file, file.name)) for file in files]
    return Scan(hashlib.sha256(repr(facts).encode()).hexdigest(), listing)


def _split(
    path: Path, images: UInt8[np.ndarray, "N H W C"], labels: Int64[np.ndarray, " N"]
) -> UndecodedSplit:
    names = [f"{path}, image {index}" for index in range(len(labels))]
    size = images.shape[1], images.shape[2]
    return UndecodedSplit(labels, names, lambda indices: [images[i] for i in indices], size)


def _cifar_batch(
    path: Path, classes: int, label_bytes: int
) -> tuple[UInt8[np.ndarray, "N 32 32 3"], Int64[np.ndarray, " N"]]:
    data = np.frombuffer(content(path), np.uint8)
    size = label_bytes + 3072
    if len(data) == 0 or len(data) % size:
        raise InputError(
            f"dataset: {str(path)!r} has {len(data)} bytes, not a multiple of {size}; it is truncated"
        )
    data = data.reshape(-1, size)
    # CIFAR-100 has the coarse label first, then the fine one
    labels = data[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise InputError(
            f"dataset: {str(path)!r} holds label {labels.max()}, but there are names for {classes} classes; "
            "it is damaged"
        )
    return data[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _idx(images: Path, labels: Path, classes: tuple[str, ...]) -> UndecodedSplit:
    x = read_idx(images, 3)
    y = read_idx(labels, 1).astype(np.int64)
    if len(x) != len(y):
        raise InputError(
            f"dataset: {str(images)!r} has {len(x)} images, but {str(labels)!r} {len(y)} labels; "
            "they must match"
        )
    most = len(classes) - 1
    if len(y) == 0 or y.max() > most:
        raise InputError(f"dataset: {str(labels)!r} does not hold labels from 0 to {most}; it is damaged")
    return _split(images, x[..., None], y)


def read_idx(path: Path, dimensions: int) -> UInt8[np.ndarray, "..."]:
    """Read an array of bytes in the idx format of MNIST, packed by gzip or not.

    Raises:
      InputError: for a file of another format, or with less or more content than its header states.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            header = np.frombuffer(stream.read(4 + 4 * dimensions), ">u4")
            shape = tuple(map(int, header[1:]))
            if len(header) != 1 + dimensions or header[0] != 0x800 + dimensions:
                raise ValueError(f"no idx header of {dimensions} dimensions")
            # as Python's integers, which do not overflow: a damaged header may claim
            # anything
            count = int(np.prod(shape, dtype=object))
            if count >= 1 << 31:
                raise ValueError(f"its header promises an array of {shape}")
            # a byte more than promised, to tell a file that is too long
            data = stream.read(count + 1)
            if len(data) != count:
                more = "more" if len(data) > count else "less"
                raise ValueError(f"{more} content than the {shape} that its header promises")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"dataset: {str(path)!r} is damaged or no idx file ({reason(error)})") from error
    return np.frombuffer(data, np.uint8).reshape(shape)
