"""Where images come from: two built-in data sets that need no download, `.npz` files and folders of images.

Everything ends up as uint8 arrays in memory, labels 0..C-1. Nothing is ever unpickled, and whatever is wrong with a user's file is
one line that names it.
"""

import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from fcljax.data.augment import short_side
from fcljax.errors import InputError, nearest

DATASETS = {
    "digits": "scikit-learn's 1,797 scanned handwritten digits, 10 classes, 32x32; comes with the library",
    "glyphs": "rendered letters of rare alphabets, 100 classes, 32x32, as many per class as asked for; made on the spot",
    "npz:PATH": "arrays x_train, y_train, x_test, y_test in a .npz file; x uint8 [N, H, W, 3] or [N, H, W]",
    "folder:PATH": "train/CLASS/*.png|jpg|jpeg and test/CLASS/... below PATH",
}

T = TypeVar("T")

_SIDE = 32  # of the built-in images
_SPLIT_SEED = 0  # of the fixed train/test split of `digits`
_SUFFIXES = {".png", ".jpg", ".jpeg"}
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}  # 8 bits or less a channel


class Dataset(NamedTuple):
    """Labelled images, all of one size. Labels are original ones: 0..C-1, before any class order."""

    name: str
    x_train: UInt8[np.ndarray, "N H W 3"]
    y_train: Int64[np.ndarray, " N"]
    x_test: UInt8[np.ndarray, "M H W 3"]
    y_test: Int64[np.ndarray, " M"]
    class_names: tuple[str, ...]
    augment: bool = True  # whether random crops and flips keep the class: not for digits and letters


def load_dataset(
    name: str, *, image_size: int | None = None, glyph_train: int = 200, glyph_test: int = 50, seed: int = 0
) -> Dataset:
    """The data set of that name, one of `DATASETS`.

    Args:
      name: `digits`, `glyphs`, `npz:PATH` or `folder:PATH`.
      image_size: side of the network's input, 224 when None. Only folders heed it: images of different or of larger sizes are
        resized (bicubic) to a short side of 256/224 image_size, as the clean view would do, and centre-cropped to a square.
      glyph_train: training images per class of `glyphs`.
      glyph_test: test images per class of `glyphs`.
      seed: of `glyphs`. The split of `digits` is fixed.

    Raises:
      InputError: for an unknown name and for whatever is wrong with the file or folder.
    """
    kind, colon, path = name.partition(":")
    if kind in ("npz", "folder"):
        if not path:
            raise InputError(f"dataset: {name!r} needs a path: {kind}:PATH")
        path = Path(path).expanduser()
        return _npz(name, path) if kind == "npz" else _folder(name, path, image_size or 224)
    if name == "digits":
        return _digits()
    if name == "glyphs":
        return _glyphs(glyph_train, glyph_test, seed)
    raise InputError(f"dataset: unknown name {name!r}; {nearest(kind + ':PATH' if colon else name, DATASETS)}")


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    source = load_digits()
    labels = source.target.astype(np.int64)
    images = np.stack([_enlarge(np.rint(image * (255 / 16)).astype(np.uint8)) for image in source.images])
    test = _stratified(labels, 0.2, np.random.RandomState(_SPLIT_SEED))
    return Dataset("digits", images[~test], labels[~test], images[test], labels[test], tuple("0123456789"), augment=False)


def _enlarge(gray: UInt8[np.ndarray, "H W"]) -> UInt8[np.ndarray, "S S 3"]:
    return np.asarray(Image.fromarray(gray).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).convert("RGB"))


def _stratified(labels: np.ndarray, share: float, rng: np.random.RandomState) -> np.ndarray:
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(share * len(rows))]] = True
    return chosen


def _glyphs(train: int, test: int, seed: int) -> Dataset:
    from fcljax.data.glyphs import GLYPHS, glyphs

    for field, count in (("glyph_train", train), ("glyph_test", test)):
        if count < 1:
            raise InputError(f"{field}: {count} images per class is too few; choose 1 or more")
    return Dataset("glyphs", *glyphs(train, test, seed), class_names=tuple(GLYPHS), augment=False)


def _npz(name: str, path: Path) -> Dataset:
    if not path.is_file():
        raise InputError(f"dataset: no such file: {str(path)!r}")
    arrays = _read_npz(path)
    x_train, x_test = (_checked_images(path, key, arrays[key]) for key in ("x_train", "x_test"))
    y_train, y_test = (_checked_labels(path, key, arrays[key]) for key in ("y_train", "y_test"))
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y):
            raise InputError(f"dataset: {str(path)!r}: x_{split} has {len(x)} rows but y_{split} has {len(y)}; they must match")
    if x_train.shape[1:] != x_test.shape[1:]:
        sides = f"x_train are {_sides(x_train)} but of x_test {_sides(x_test)}"
        raise InputError(f"dataset: {str(path)!r}: images of {sides}; make them equal")
    classes = _same_classes(str(path), np.unique(y_train).tolist(), np.unique(y_test).tolist())
    y_train, y_test = (np.searchsorted(classes, y) for y in (y_train, y_test))
    return Dataset(name, x_train, y_train, x_test, y_test, tuple(map(str, classes)))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with zipfile.ZipFile(path) as archive:  # np.load would take a .npy or a pickle for what it is not
            present = {member.removesuffix(".npy") for member in archive.namelist()}
        missing = [key for key in keys if key not in present]
        if missing:
            raise InputError(f"dataset: {str(path)!r} has no array {missing[0]!r}; it needs {', '.join(keys)}")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key]) for key in keys}
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise anything in the parsers of zip and npy, and it is the file's fault
        if "Object arrays" in str(error):
            raise InputError(f"dataset: {str(path)!r} holds pickled objects, which are never loaded; save plain arrays") from error
        raise InputError(f"dataset: {str(path)!r} is damaged or not a .npz file ({_one_line(error)})") from error


def _checked_images(path: Path, key: str, images: np.ndarray) -> UInt8[np.ndarray, "N H W 3"]:
    if images.dtype != np.uint8:
        raise InputError(f"dataset: {str(path)!r}: {key} is {images.dtype}; expected uint8, grey levels 0..255")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise InputError(f"dataset: {str(path)!r}: {key} has shape {images.shape}; expected [N, H, W, 3] or [N, H, W]")
    if 0 in images.shape:
        raise InputError(f"dataset: {str(path)!r}: {key} is empty, shape {images.shape}")
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))


def _checked_labels(path: Path, key: str, labels: np.ndarray) -> Int64[np.ndarray, " N"]:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InputError(f"dataset: {str(path)!r}: {key} is {labels.dtype} of shape {labels.shape}; expected integers of shape [N]")
    wrong = labels[(labels < 0) | (labels > np.iinfo(np.int64).max)]
    if len(wrong):
        raise InputError(f"dataset: {str(path)!r}: {key} holds label {wrong[0]}; labels are integers from 0")
    return labels.astype(np.int64)


def _same_classes(where: str, train: list, test: list) -> list:
    for has, lacks, extra in (("test", "train", set(test) - set(train)), ("train", "test", set(train) - set(test))):
        if extra:
            raise InputError(f"dataset: {where!r}: class {min(extra)!r} is in {has} but not in {lacks}; both need every class")
    return train


def _sides(images: np.ndarray) -> str:
    return f"{images.shape[1]}x{images.shape[2]}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _folder(name: str, path: Path, image_size: int) -> Dataset:
    train, test = (_class_folders(path, split) for split in ("train", "test"))
    classes = _same_classes(str(path), sorted(train), sorted(test))
    files = [[file for label in classes for file in split[label]] for split in (train, test)]
    read = _reader(files[0] + files[1], short_side(image_size))
    x_train, x_test = (_decode(split, read) for split in files)
    y_train, y_test = (np.repeat(np.arange(len(classes)), [len(split[label]) for label in classes]) for split in (train, test))
    return Dataset(name, x_train, y_train, x_test, y_test, tuple(classes))


def _class_folders(path: Path, split: str) -> dict[str, list[Path]]:
    if not (path / split).is_dir():
        raise InputError(f"dataset: no such folder: {str(path / split)!r}; expected train/CLASS/*.png|jpg|jpeg and test/CLASS/...")
    # Hidden entries are what file managers and notebooks leave behind.
    folders = {entry.name: entry for entry in (path / split).iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if not folders:
        raise InputError(f"dataset: {str(path / split)!r} has no class folders; expected {split}/CLASS/*.png|jpg|jpeg")
    return {label: _image_files(folder) for label, folder in folders.items()}


def _image_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES and not file.name.startswith("."))
    if not files:
        raise InputError(f"dataset: {str(folder)!r} has no images; expected files named *.png, *.jpg or *.jpeg")
    return files


def _reader(files: Sequence[Path], side: int) -> Callable[[Image.Image], np.ndarray]:
    # Images of one size, if not larger than needed, stay as they are; CIFAR in PNGs keeps its 32 pixels.
    sizes = {_open(file, lambda image: image.size) for file in files}
    if len(sizes) == 1 and min(sizes.pop()) <= side:
        return _rgb
    return partial(_square, side=side)


def _decode(files: Sequence[Path], read: Callable[[Image.Image], np.ndarray]) -> UInt8[np.ndarray, "N H W 3"]:
    images = np.empty((len(files), *_open(files[0], read).shape), np.uint8)

    def fill(row: int) -> None:
        images[row] = _open(files[row], read)

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter lock
        for _ in pool.map(fill, range(len(files))):
            pass
    return images


def _open(file: Path, read: Callable[[Image.Image], T]) -> T:
    try:
        with Image.open(file) as image:
            if image.mode not in _MODES:
                raise InputError(f"dataset: {str(file)!r} has pixels of mode {image.mode!r}; convert it to 8 bits per channel")
            return read(image)
    except InputError:
        raise
    except Exception as error:  # a damaged image can raise anything in Pillow's decoders, and it is the file's fault
        raise InputError(f"dataset: {str(file)!r} is not a readable image ({_one_line(error)})") from error


def _rgb(image: Image.Image) -> UInt8[np.ndarray, "H W 3"]:
    return np.asarray(_without_alpha(image).convert("RGB"))


def _square(image: Image.Image, side: int) -> UInt8[np.ndarray, "S S 3"]:
    # Cropping through `box` is resize-then-crop without the long side in memory, which a sliver of an image would fill.
    left, top, edge = (max(image.width - image.height, 0) / 2, max(image.height - image.width, 0) / 2, min(image.size))
    box = (left, top, left + edge, top + edge)
    return np.asarray(_without_alpha(image).convert("RGB").resize((side, side), Image.Resampling.BICUBIC, box=box))


def _without_alpha(image: Image.Image) -> Image.Image:
    # Pillow warns about palettes with transparent entries unless they pass through RGBA.
    return image.convert("RGBA") if "transparency" in image.info else image
