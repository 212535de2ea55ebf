"""Data sets by name: two built in, published ones from official files or tensorflow-datasets, the user's own.

Images of files are decoded once into a cache (`prepared`) and mapped into memory from then on; small and
built-in sets are arrays in memory. Nothing is ever unpickled, a run downloads nothing, and whatever is wrong
with a user's file is one line that names it.
"""

import hashlib
import os
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image
from rich.console import Console

from fcljax.data.files import download, listings, prepared
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.images import one_line
from fcljax.data.files.listings import NAMED, Raw, same_classes
from fcljax.data.files.mixtures import mixed
from fcljax.data.files.prepared import Prepared, PreparedInfo
from fcljax.data.geometry import Geometry
from fcljax.data.partition import first_share
from fcljax.errors import InputError, nearest
from fcljax.files import check_folder, in_home, machine_memory
from fcljax.terminal import say

_IN_MEMORY = {
    "digits": "scikit-learn's 1,797 scanned handwritten digits, 10 classes, 32x32; comes with the library",
    "glyphs": "rendered letters of rare alphabets, 100 classes, 32x32, as many per class as asked for; "
    "made on the spot",
    "npz:PATH": "arrays x_train, y_train, x_test, y_test in a .npz file, and class_names if there are any; x "
    "uint8 [N, H, W, 3] or [N, H, W]",
}
DATASETS = {
    **_IN_MEMORY,
    "mix:NAME+NAME": "the classes of several of the others beside each other, images in the first one's size",
    "folder:PATH": "train/CLASS/*.png|jpg|jpeg and test/CLASS/... below PATH",
    **{name: named.what for name, named in NAMED.items()},
}

_KEPT = ("digits", "glyphs", "npz", "mix")  # in memory, without a cache
_SIDE = 32  # of the built-in images
_SPLIT_SEED = 0  # of the fixed train/test split of `digits`


def hold_out(dataset: Dataset, share: float) -> Dataset:
    """The data set with its last training images of each class, this share of them, in place of the test
    images: what choices are made on, so that none is made on the test images.

    Raises:
      InputError: if the share is too small to hold out an image of every class.
    """
    kept, size = first_share(dataset.y_train, 1 - share), dataset.size_train
    away = np.setdiff1d(np.arange(len(dataset.y_train)), kept)
    if len(np.unique(dataset.y_train[away])) < len(np.unique(dataset.y_train)):
        fewest = int(np.unique(dataset.y_train, return_counts=True)[1].min())
        raise InputError(
            f"holdout: {share} of {fewest} training images of a class is not one; nearest: {1 / fewest:.3g}"
        )
    return dataset._replace(
        x_train=dataset.x_train[kept],
        y_train=dataset.y_train[kept],
        x_test=dataset.x_train[away],
        y_test=dataset.y_train[away],
        size_train=None if size is None else size[kept],
        size_test=None if size is None else size[away],
        digest=hashlib.sha256(f"{dataset.digest} without {share}".encode()).hexdigest(),
    )


class _Options(NamedTuple):
    geometry: Geometry
    data: Path
    class_list: str | None
    skip_corrupt: bool
    glyph_train: int
    glyph_test: int
    seed: int
    console: Console


def load_dataset(
    name: str,
    *,
    geometry: Geometry = Geometry(),  # noqa: B008
    data_dir: str | Path | None = None,
    class_list: str | None = None,
    skip_corrupt: bool = False,
    glyph_train: int = 200,
    glyph_test: int = 50,
    seed: int = 0,
    verify: bool = False,
    console: Console | None = None,
) -> Dataset:
    """The data set of that name, one of `DATASETS`. Nothing is downloaded.

    Args:
      geometry: how images of many or of large sizes are brought to one. Those of `digits`, `glyphs` and
        `npz:PATH` stay as they are.
      data_dir: folder of raw and prepared data, see `data_folder`.
      class_list: a text file with a WordNet id per line, for `imagenet100` and `imagenet200`.
      skip_corrupt: leave out images that cannot be decoded.
      glyph_train: training images per class of `glyphs`.
      glyph_test: test images per class of `glyphs`.
      seed: of `glyphs`. All other splits are fixed.
      verify: compare prepared images with their checksums even if their files have not been touched.
      console: for the progress of decoding and for notes; standard error when None.

    Raises:
      InputError: for an unknown name, for data that are not there (with what to do about it), and for
        whatever is wrong with a file.
    """
    console = console or Console(stderr=True)
    options = _Options(
        geometry, data_folder(data_dir), class_list, skip_corrupt, glyph_train, glyph_test, seed, console
    )
    return _loaded(name, options, verify)


def prepare(
    name: str,
    *,
    geometry: Geometry = Geometry(),  # noqa: B008
    data_dir: str | Path | None = None,
    class_list: str | None = None,
    skip_corrupt: bool = False,
    glyph_train: int = 200,
    glyph_test: int = 50,
    seed: int = 0,
    console: Console | None = None,
    force: bool = False,
) -> PreparedInfo:
    """Make a data set ready for runs: download it if it is not there, decode it, check every byte.

    Args:
      force: decode again, and replace what was prepared. For the others see `load_dataset`.

    Raises:
      InputError: as `load_dataset`, and for a download that fails or is not possible, with the official files
        to put where instead.
    """
    console = console or Console(stderr=True)
    options = _Options(
        geometry, data_folder(data_dir), class_list, skip_corrupt, glyph_train, glyph_test, seed, console
    )
    if _kind(name, options) in _KEPT:
        dataset = _in_memory(name, options)
        arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
        counts = len(dataset.y_train), len(dataset.y_test)
        return PreparedInfo(None, counts, sum(array.nbytes for array in arrays), dataset.digest, ())
    check_folder(options.data, "data_dir")
    return prepared.info(_from_cache(name, options, force=force, full=True, may_download=True))


def data_folder(data_dir: str | Path | None = None) -> Path:
    """The folder of all data: `data_dir`, else the environment's FCLJAX_DATA, else ~/.cache/fcljax.

    Raises:
      InputError: for a home folder that does not exist.
    """
    return in_home(data_dir or os.environ.get("FCLJAX_DATA") or "~/.cache/fcljax", "data_dir")


def known_datasets(data_dir: str | Path | None = None) -> list[tuple[str, str, str]]:
    """Name, description and state of every data set.

    The state is "built in", "prepared", "raw files found", "via tensorflow-datasets" (prepared by it) or "not
    here: " and what to put where.
    """
    folder = data_folder(data_dir)
    return [
        (name, what, _state(name, folder) if name in NAMED else "built in") for name, what in DATASETS.items()
    ]


def _state(name: str, folder: Path) -> str:
    if any(_manifests(folder, name)):
        return "prepared"
    try:
        raw = listings.find(name, folder)
    except InputError as error:
        return f"not here: {str(error).removeprefix('dataset: ')}"
    if raw is None:
        return f"not here: {listings.how_to_get(name, folder)}"
    return "raw files found" if raw.route == "files" else "via tensorflow-datasets"


def _kind(name: str, options: _Options) -> str:
    kind, colon, path = name.partition(":")
    if kind in ("npz", "folder", "mix"):
        if not path:
            what = "NAME+NAME" if kind == "mix" else "PATH"
            raise InputError(f"dataset: {name!r} needs a path: {kind}:{what}")
    elif name not in DATASETS:
        raise InputError(
            f"dataset: unknown name {name!r}; {nearest(kind + ':PATH' if colon else name, DATASETS)}"
        )
    if options.class_list is not None and name not in ("imagenet100", "imagenet200"):
        raise InputError(
            f"class_list: {options.class_list!r} is for imagenet100 and imagenet200; {name!r} takes none"
        )
    return kind


def _loaded(name: str, options: _Options, full: bool = False) -> Dataset:
    if _kind(name, options) in _KEPT:
        return _in_memory(name, options, full)
    return _dataset(name, _from_cache(name, options, full=full))


def _path(name: str) -> Path:
    return in_home(name.partition(":")[2], "dataset")


def _in_memory(name: str, options: _Options, full: bool = False) -> Dataset:
    if name == "digits":
        dataset = _digits()
    elif name == "glyphs":
        dataset = _glyphs(options.glyph_train, options.glyph_test, options.seed)
    elif name.startswith("mix:"):
        sources = name.removeprefix("mix:").split("+")
        return mixed(name, [_loaded(source, options, full) for source in sources])
    else:
        dataset = _npz(name, _path(name))
    arrays = {key: getattr(dataset, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    return dataset._replace(digest=prepared.digest(arrays))


def _dataset(name: str, data: Prepared) -> Dataset:
    return Dataset(
        name,
        data.x_train,
        data.y_train,
        data.x_test,
        data.y_test,
        data.class_names,
        augment=suggests_crops(name),
        size_train=data.size_train,
        size_test=data.size_test,
        digest=data.digest,
    )


def _from_cache(
    name: str, options: _Options, *, force: bool = False, full: bool = False, may_download: bool = False
) -> Prepared:
    choice = listings.class_list(options.class_list) if options.class_list else None
    raw = _find(name, options.data, choice)
    target = None if raw or force else _prepared_without_raw(name, options, choice)
    if raw is None and target is None:
        if not may_download:
            raise InputError(f"dataset: {name!r} is not here; {listings.how_to_get(name, options.data)}")
        _download(name, options)
        raw = _find(name, options.data, choice)
    if raw:
        target, fresh = _built(name, raw, options, choice, force)
        full = full and not fresh
    if target is None:
        raise InputError(f"dataset: what was downloaded is not {name!r} as it is known here")
    data = prepared.open_prepared(target, name, full)
    if data.skipped and not options.skip_corrupt:
        raise InputError(
            f"dataset: {name!r} was prepared without {len(data.skipped)} unreadable images "
            f"(first: {data.skipped[0]}); give --skip-corrupt to use it so, or replace them"
        )
    return data


def _download(name: str, options: _Options) -> None:
    instead = listings.what_to_put(name, options.data)
    if name not in download.OFFICIAL:
        raise InputError(f"dataset: {name!r} is not here and cannot be downloaded; {instead}")
    download.fetch(name, download.OFFICIAL[name], options.data, instead=instead, console=options.console)


def _find(name: str, folder: Path, choice: listings.Choice) -> Raw | None:
    return listings.find(name, folder, choice) if name in NAMED else listings.folder_of_classes(_path(name))


def _built(name: str, raw: Raw, options: _Options, choice: listings.Choice, force: bool) -> tuple[Path, bool]:
    """Where the raw data lie prepared, once they do, and whether that is only since now."""
    kind, _, path = name.partition(":")
    label = f"{kind}-{re.sub(r'[^A-Za-z0-9_]+', '_', Path(path).name)[:40]}" if path else name
    scan = raw.scan()
    target = prepared.place(options.data / "prepared", label, kind, scan.fingerprint, options.geometry)
    fresh = force or not target.exists()
    if fresh:
        say(options.console, f"preparing {name} from {raw.where}, once")
        listing = scan.listing()
        count, official = (
            len(listing.train.names) + len(listing.test.names),
            NAMED[name].images if name in NAMED else None,
        )
        if official and count != official:
            say(options.console, f"note: {name} has {official:,} images, {raw.where} holds {count:,}")
        facts = {
            "name": name,
            "class_list": choice,
            "source": str(raw.where.absolute()),
            "fingerprint": scan.fingerprint,
        }
        prepared.build(
            target,
            listing,
            options.geometry,
            facts=facts,
            skip_corrupt=options.skip_corrupt,
            force=force,
            console=options.console,
        )
    return target, fresh


def _manifests(folder: Path, name: str) -> list[tuple[Path, dict]]:
    found = []
    for target in sorted((folder / "prepared").glob(f"{name}-*")):
        try:
            manifest = prepared.read_manifest(target)
        except (OSError, ValueError):
            continue
        if manifest.get("name") == name:
            found.append((target, manifest))
    return found


def _prepared_without_raw(name: str, options: _Options, choice: listings.Choice) -> Path | None:
    """The prepared data set whose raw data are gone, or were never on this machine."""
    wanted = {"geometry": options.geometry._asdict(), "class_list": list(choice) if choice else None}
    targets = [
        target
        for target, facts in _manifests(options.data, name)
        if {key: facts.get(key) for key in wanted} == wanted
    ]
    if len(targets) > 1:
        names = " and ".join(repr(str(target)) for target in targets)
        raise InputError(
            f"dataset: {name!r} is prepared more than once, and its raw files are gone; remove one of {names}"
        )
    return targets[0] if targets else None


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    labels, grey = np.asarray(target).astype(np.int64), np.asarray(pixels).reshape(-1, 8, 8)
    images = np.stack([_enlarge(np.rint(image * (255 / 16)).astype(np.uint8)) for image in grey])
    test = _stratified(labels, 0.2, np.random.RandomState(_SPLIT_SEED))
    return Dataset(
        "digits", images[~test], labels[~test], images[test], labels[test], tuple("0123456789"), augment=False
    )


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
    arrays = _read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    x_train, x_test = (_checked_images(path, key, arrays[key]) for key in ("x_train", "x_test"))
    y_train, y_test = (_checked_labels(path, key, arrays[key]) for key in ("y_train", "y_test"))
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if len(x) != len(y):
            raise InputError(
                f"dataset: {str(path)!r}: x_{split} has {len(x)} rows but y_{split} has {len(y)}; "
                "they must match"
            )
    if x_train.shape[1:] != x_test.shape[1:]:
        sides = f"x_train are {_sides(x_train)} but of x_test {_sides(x_test)}"
        raise InputError(f"dataset: {str(path)!r}: images of {sides}; make them equal")
    classes = same_classes(str(path), np.unique(y_train).tolist(), np.unique(y_test).tolist())
    y_train, y_test = (np.searchsorted(classes, y) for y in (y_train, y_test))
    names = _class_names(path, arrays.get("class_names"), classes)
    return Dataset(name, x_train, y_train, x_test, y_test, names)


def load_part(name: str, path: str | Path, split: str, class_names: tuple[str, ...] | None = None) -> Dataset:
    """One split alone, of the arrays x_SPLIT and y_SPLIT of a .npz file, and class_names if there are any;
    the other split is one black image.

    Args:
      name: of the data set that it is a part of, which says whether crops keep its classes.
      path: of the file.
      split: "train" or "test".
      class_names: of all classes; None: those of the file, else the numbers up to its largest label.

    Raises:
      InputError: naming what is wrong with the file.
    """
    path = in_home(path, "data")
    if not path.is_file():
        raise InputError(f"data: no such file: {str(path)!r}")
    keys = (f"x_{split}", f"y_{split}")
    arrays = _read_npz(path, keys)
    x, y = _checked_images(path, keys[0], arrays[keys[0]]), _checked_labels(path, keys[1], arrays[keys[1]])
    if len(x) != len(y):
        raise InputError(f"data: {str(path)!r}: {keys[0]} has {len(x)} rows but {keys[1]} has {len(y)}")
    named, most = arrays.get("class_names"), int(y.max())
    if class_names is None:
        count = most + 1 if named is None else max(most + 1, len(named))
        class_names = _class_names(path, named, list(range(count)))
    if most >= len(class_names):
        raise InputError(f"data: {str(path)!r}: {keys[1]} holds label {most} of {len(class_names)} classes")
    black = np.zeros_like(x[:1]), np.zeros(1, np.int64)
    arrays = (x, y, *black) if split == "train" else (*black, x, y)
    digest = prepared.digest(dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    return Dataset(name, *arrays, class_names, suggests_crops(name), digest=digest)


def suggests_crops(name: str) -> bool:
    """Do random crops and flips keep the classes of the data set of this name?"""
    return NAMED[name].augment if name in NAMED else name not in ("digits", "glyphs")


def _class_names(path: Path, names: np.ndarray | None, classes: list[int]) -> tuple[str, ...]:
    """The names of these labels; the labels themselves where the file has none."""
    if names is None:
        return tuple(map(str, classes))
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) <= max(classes):
        raise InputError(
            f"dataset: {str(path)!r}: class_names is {names.dtype} of shape {names.shape}; expected text of "
            f"shape [{max(classes) + 1}] or longer"
        )
    return tuple(str(names[label]) for label in classes)


def _read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:  # np.load would take a .npy or a pickle for what it is not
            for member in archive.namelist():
                if download.leads_out(member):
                    raise InputError(
                        f"dataset: {str(path)!r} holds a file named {member!r}, which leads out of it; "
                        "save it again"
                    )
            size = sum(info.file_size for info in archive.infolist())
            if size > machine_memory() // 2:
                raise InputError(
                    f"dataset: {str(path)!r} would unpack to {size / 2**30:.1f} GiB; the limit is half of "
                    f"the machine's memory, {machine_memory() / 2**31:.1f} GiB"
                )
            present = {member.removesuffix(".npy") for member in archive.namelist()}
        missing = [key for key in keys if key not in present]
        if missing:
            raise InputError(
                f"dataset: {str(path)!r} has no array {missing[0]!r}; it needs {', '.join(keys)}"
            )
        with np.load(path, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key]) for key in (*keys, "class_names") if key in present}
    except InputError:
        raise
    # a damaged file can raise anything in the parsers of zip and npy, and it is the file's fault
    except Exception as error:
        if "Object arrays" in str(error):
            raise InputError(
                f"dataset: {str(path)!r} holds pickled objects, which are never loaded; save plain arrays"
            ) from error
        raise InputError(
            f"dataset: {str(path)!r} is damaged or not a .npz file ({one_line(error)})"
        ) from error


def _checked_images(path: Path, key: str, images: np.ndarray) -> UInt8[np.ndarray, "N H W 3"]:
    if images.dtype != np.uint8:
        raise InputError(
            f"dataset: {str(path)!r}: {key} is {images.dtype}; expected uint8, grey levels 0..255"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise InputError(
            f"dataset: {str(path)!r}: {key} has shape {images.shape}; expected [N, H, W, 3] or [N, H, W]"
        )
    if 0 in images.shape:
        raise InputError(f"dataset: {str(path)!r}: {key} is empty, shape {images.shape}")
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))


def _checked_labels(path: Path, key: str, labels: np.ndarray) -> Int64[np.ndarray, " N"]:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InputError(
            f"dataset: {str(path)!r}: {key} is {labels.dtype} of shape {labels.shape}; "
            "expected integers of shape [N]"
        )
    wrong = labels[(labels < 0) | (labels > np.iinfo(np.int64).max)]
    if len(wrong):
        raise InputError(f"dataset: {str(path)!r}: {key} holds label {wrong[0]}; labels are integers from 0")
    return labels.astype(np.int64)


def _sides(images: np.ndarray) -> str:
    return f"{images.shape[1]}x{images.shape[2]}"
