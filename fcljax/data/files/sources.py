"""Load data sets by name: built-in ones, published ones, and those of users.

Published ones come from official files or tensorflow-datasets. Image files are decoded
once into a cache (`prepared`) and mapped into memory from then on; small and built-in
sets are arrays in memory. Nothing is ever unpickled, a run downloads nothing, and an
error in a user's file is one line that names it.
"""

import gzip
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from rich.console import Console

from fcljax.data.files import download, listings, npz_files, prepared, tfds
from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.data.files.arrays import ARRAYS, fifth_of_classes
from fcljax.data.files.arrow_files import SUFFIXES as TABLES
from fcljax.data.files.class_folders import folder_of_classes
from fcljax.data.files.csv_files import csv_dataset
from fcljax.data.files.dataset import Dataset, Origin, image_names, prepared_columns, with_part_of_training
from fcljax.data.files.list_files import list_of_files
from fcljax.data.files.listings import NAMED
from fcljax.data.files.mixtures import mixed
from fcljax.data.files.names import DATASETS
from fcljax.data.files.prepared import Prepared, PreparedInfo
from fcljax.data.files.raw import Choice, Raw, visible
from fcljax.data.files.tables import table_files
from fcljax.data.files.texts import texts_dataset
from fcljax.data.geometry import Geometry
from fcljax.data.kinds import tree_bytes
from fcljax.data.partition import first_share
from fcljax.data.shifts import SHIFTS, shifted
from fcljax.errors import InputError, nearest
from fcljax.files import check_folder, in_home
from fcljax.terminal import say

TEXTS = "docstrings.json.gz"  # made by experiments/text_data.py
SKLEARN_TABLES = ("wine", "breast_cancer", "digits_table")
_SIDE = 32  # of the built-in images
_TAR = re.compile(r"\.(tar|tgz|tar\.\w+)$")
_SPLIT_SEED = 0  # of the fixed train/test split of `digits`


def hold_out(dataset: Dataset, share: float) -> Dataset:
    """Replace the test images by the last training images of each class, this share of them.

    Choices are made on these, so that none is made on the test images.

    Raises:
      InputError: if the share is too small to hold out an image of every class.
    """
    train_indices = first_share(dataset.y_train, 1 - share)
    # the last images of each class, so that no seed decides which
    held_out = np.setdiff1d(np.arange(len(dataset.y_train)), train_indices)
    if len(np.unique(dataset.y_train[held_out])) < len(np.unique(dataset.y_train)):
        fewest = int(np.unique(dataset.y_train, return_counts=True)[1].min())
        raise InputError(
            f"holdout: {share} of {fewest} training images of a class is not one; nearest: {1 / fewest:.3g}"
        )
    tested = with_part_of_training(dataset, held_out)
    return with_part_of_training(dataset, train_indices)._replace(
        x_test=tested.x_train,
        y_test=tested.y_train,
        size_test=tested.size_train,
        columns_test=tested.columns,
        digest=hashlib.sha256(f"{dataset.digest} without {share}".encode()).hexdigest(),
        origin=Origin(dataset.digest, train_indices, held_out),
    )


class DataOptions(NamedTuple):
    """How a data set is found and read.

    `Geometry` does not apply to `digits`, `glyphs` and `npz:PATH`, whose images stay as they are.
    """

    # the size to which images of many or of large sizes are resized
    geometry: Geometry = Geometry()
    # folder of raw and prepared data, see `data_folder`
    data_dir: str | Path | None = None
    # a text file, a WordNet id per line, for `imagenet100` and `imagenet200`
    class_list: str = ""
    skip_corrupt: bool = False  # leave out examples without a label and images that cannot be decoded
    glyph_train: int = 200  # training images per class of `glyphs`
    glyph_test: int = 50  # test images per class of `glyphs`
    seed: int = 0  # of `glyphs`; all other splits are fixed
    console: Console | None = None  # for progress and notes; None: standard error
    as_arrays: bool = False  # the arrays of `npz:PATH` are no images

    @property
    def folder(self) -> Path:
        """Folder of all data."""
        return data_folder(self.data_dir)

    def say(self, line: str) -> None:
        """Print a note."""
        say(self.console or Console(stderr=True), line)


def load_dataset(name: str, options: DataOptions = DataOptions(), verify: bool = False) -> Dataset:  # noqa: B008
    """Load the data set of that name, one of `DATASETS`. Nothing is downloaded.

    Args:
      verify: compare prepared images with their checksums even if their files have not changed.

    Raises:
      InputError: for an unknown name, for missing data (with advice), and for a fault in a file.
    """
    # for its error: a wrong --data-dir is refused even if the data set is built in
    data_folder(options.data_dir)
    if _is_in_memory(_kind(name, options)):
        return _in_memory(name, options, verify)
    return _dataset(name, _from_cache(name, options, full=verify))


def prepare(name: str, options: DataOptions = DataOptions(), force: bool = False) -> PreparedInfo:  # noqa: B008
    """Make a data set ready for runs: download it if it is missing, decode it, check every byte.

    Args:
      force: decode again, and replace what was prepared.

    Raises:
      InputError: as `load_dataset`, and for a download that fails or is not possible,
        with advice on which official files to put where.
    """
    if _is_in_memory(_kind(name, options)):
        dataset = _in_memory(name, options)
        counts = len(dataset.y_train), len(dataset.y_test)
        size = sum(tree_bytes(getattr(dataset, key)) for key in ARRAYS)
        return PreparedInfo(None, counts, size, dataset.digest, ())
    check_folder(options.folder, "data_dir")
    return prepared.info(_from_cache(name, options, force=force, full=True, may_download=True))


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Return the data folder: `data_dir`, else $FCLJAX_DATA, else ~/.cache/fcljax.

    Raises:
      InputError: for a home folder that does not exist.
    """
    return in_home(data_dir or os.environ.get("FCLJAX_DATA") or "~/.cache/fcljax", "data_dir")


def known_datasets(data_dir: str | Path | None = None) -> list[tuple[str, str, str]]:
    """List name, description and state of every data set.

    The state is "built in", "prepared", "raw files found", "via tensorflow-datasets"
    (prepared by it) or "not here: " and what to put where.
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


def _kind(name: str, options: DataOptions) -> str:
    kind, colon, path = name.partition(":")
    if kind in FORMS:
        if not path:
            raise InputError(f"dataset: {name!r} needs a path: {kind}:{FORMS[kind].word}")
        _check_no_tar(path)
    elif name not in DATASETS:
        hint = nearest(kind + ":PATH" if colon else name, DATASETS)
        if not colon and os.path.exists(name):
            _check_no_tar(name)
            form = "folder" if os.path.isdir(name) else "list"
            hint = f"did you mean {('npz' if name.endswith('.npz') else form) + ':' + name!r}?"
        raise InputError(f"dataset: unknown name {name!r}; {hint}")
    if options.class_list and name not in ("imagenet100", "imagenet200"):
        raise InputError(
            f"class_list: {options.class_list!r} is for imagenet100 and imagenet200; {name!r} takes none"
        )
    return kind


def _check_no_tar(word: str) -> None:
    """Check that a path is neither a tar archive nor a folder of them, as webdataset has.

    Raises:
      InputError: with the way to convert it.
    """
    path = str(in_home(word, "dataset"))
    names = [path]
    if os.path.isdir(path):
        entries = visible(Path(path))
        # an archive beside folders of classes, or beside tables, is no data set of its
        # own
        if any(entry.is_dir() or Path(entry.name).suffix in TABLES for entry in entries):
            return
        names = [entry.path for entry in entries]
    archive = next((name for name in names if _TAR.search(name) and os.path.isfile(name)), None)
    if archive is not None:
        raise InputError(
            f"dataset: {archive!r} is a file; unpack it, for archives such as those of webdataset are not "
            "read, and give the folder (folder:PATH) or a list of images and labels (list:FILE)"
        )


def _in_memory(name: str, options: DataOptions, full: bool = False) -> Dataset:
    if name in BUILT_IN:
        dataset = BUILT_IN[name](options)
    else:
        # `_is_in_memory` has checked that the form loads into memory
        load = FORMS[name.partition(":")[0]].load
        assert load is not None, name
        dataset = load(name, options, full)
    # files and mixtures have a digest already
    if dataset.digest:
        return dataset
    arrays = {key: getattr(dataset, key) for key in ARRAYS}
    return dataset._replace(digest=prepared.digest_of_arrays(arrays))


def _dataset(name: str, data: Prepared) -> Dataset:
    dataset = Dataset(
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
        folder=data.folder,
        train_rows=data.train_rows,
        num_rows=data.num_rows,
    )
    column = NAMED[name].folders if name in NAMED else ""
    if not column:
        columns = prepared_columns(data.folder, "train", len(data.y_train))
        columns_test = prepared_columns(data.folder, "test", len(data.y_test))
        return dataset._replace(columns=columns, columns_test=columns_test)
    return dataset._replace(
        columns={column: _first_folders(dataset, "train")},
        columns_test={column: _first_folders(dataset, "test")},
    )


def _first_folders(dataset: Dataset, split: str) -> np.ndarray:
    """Return the first folder of each image's name: the domain of DomainNet and Office-Home."""
    return np.array([name.partition("/")[0] for name in image_names(dataset, split) or ()])


def _from_cache(
    name: str, options: DataOptions, *, force: bool = False, full: bool = False, may_download: bool = False
) -> Prepared:
    choice = listings.class_list(options.class_list) if options.class_list else None
    raw = _find(name, options.folder, choice)
    # Raw files decide: if they change, so does what is prepared. Where they are gone,
    # data that were prepared with the same geometry and classes will do.
    target = None if raw or force else _prepared_without_raw(name, options, choice)
    if raw is None and target is None:
        if not may_download:
            raise InputError(f"dataset: {name!r} is not here; {listings.how_to_get(name, options.folder)}")
        _download(name, options)
        raw = _find(name, options.folder, choice)
    if raw:
        target, fresh = _prepare_raw(name, raw, options, choice, force)
        # what was decoded just now was hashed while it was written
        full = full and not fresh
    if target is None:
        raise InputError(f"dataset: the downloaded files are not the known version of {name!r}")
    data = prepared.open_prepared(target, name, full)
    if data.skipped and not options.skip_corrupt:
        raise InputError(
            f"dataset: {name!r} was prepared without "
            f"{prepared.skipped_in_words(len(data.skipped), data.without_label)} "
            f"(first: {data.skipped[0]}); give --skip-corrupt to use it so, or replace them"
        )
    return data


def _download(name: str, options: DataOptions) -> None:
    instead = listings.what_to_put(name, options.folder)
    if name not in download.OFFICIAL:
        raise InputError(f"dataset: {name!r} is not here and cannot be downloaded; {instead}")
    download.fetch(name, download.OFFICIAL[name], options.folder, instead=instead, console=options.console)


def _find(name: str, folder: Path, choice: Choice) -> Raw | None:
    if name in NAMED:
        return listings.find(name, folder, choice)
    kind, _, rest = name.partition(":")
    find = FORMS[kind].find
    assert find is not None, name
    return find(rest, folder)


def _find_tfds(builder: str, folder: Path) -> Raw:
    name = f"tfds:{builder}"
    raw = tfds.find_builders(folder / tfds.FOLDER, [builder], tfds.from_own_splits)
    if raw is None:
        raise InputError(
            f"dataset: {name!r} is not in {str(folder / tfds.FOLDER)!r}; prepare {builder!r} there with "
            "tensorflow-datasets and file_format='array_record'"
        )
    return raw


def _prepare_raw(name: str, raw: Raw, options: DataOptions, choice: Choice, force: bool) -> tuple[Path, bool]:
    """Prepare raw data if needed; return the folder, and whether it is new."""
    kind, _, path = name.partition(":")
    label = name
    if path:
        label = f"{kind}-{re.sub(r'[^A-Za-z0-9_]+', '_', Path(path).name)[:40]}"
    scan = raw.scan()
    target = prepared.place(options.folder / "prepared", label, kind, scan.fingerprint, options.geometry)
    fresh = force or not target.exists()
    if fresh:
        options.say(f"preparing {name} from {raw.where}, once")
        listing = scan.listing()
        for note in listing.notes:
            options.say(f"{name}: {note}")
        count = len(listing.train.names) + len(listing.test.names)
        # a part of a release is a data set too, but the user should know
        official = NAMED[name].images if name in NAMED else None
        if official and count != official:
            options.say(f"note: {name} has {official:,} images, {raw.where} holds {count:,}")
        facts = {
            "name": name,
            "class_list": choice,
            "source": str(raw.where.absolute()),
            "fingerprint": scan.fingerprint,
            "notes": listing.notes,
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
    manifests = []
    for target in sorted((folder / "prepared").glob(f"{name}-*")):
        try:
            manifest = prepared.read_manifest(target)
        except (OSError, ValueError):
            continue
        if manifest.get("name") == name:
            manifests.append((target, manifest))
    return manifests


def _prepared_without_raw(name: str, options: DataOptions, choice: Choice) -> Path | None:
    """Find the prepared data set whose raw data are gone, or were never on this machine."""
    expected = {"geometry": options.geometry._asdict(), "class_list": list(choice) if choice else None}
    # another geometry or class list would be other data
    targets = [
        target
        for target, facts in _manifests(options.folder, name)
        if {key: facts.get(key) for key in expected} == expected
    ]
    if len(targets) > 1:
        names = " and ".join(repr(str(target)) for target in targets)
        raise InputError(
            f"dataset: {name!r} is prepared more than once, and its raw files are gone; remove one of {names}"
        )
    return targets[0] if targets else None


def _digits() -> Dataset:
    # the library's file: importing scikit-learn would take a tenth of a short run's time
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None  # a requirement of this package
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    labels = rows[:, -1].astype(np.int64)
    grey = rows[:, :-1].reshape(-1, 8, 8)
    # the scans have 17 grey levels
    images = _enlarge(np.rint(grey * (255 / 16)).astype(np.uint8))
    # fixed for all seeds, so that runs share one test set
    test = fifth_of_classes(labels, _SPLIT_SEED)
    return Dataset(
        "digits", images[~test], labels[~test], images[test], labels[test], tuple("0123456789"), augment=False
    )


def _sklearn_table(name: str) -> Dataset:
    """Return a table of scikit-learn; a fixed random fifth is for testing."""
    from sklearn import datasets

    loaded: Any = getattr(datasets, f"load_{name.removesuffix('_table')}")()
    class_names = tuple(map(str, loaded.target_names))
    return dataset_of_any_arrays((loaded.data, loaded.target), name, class_names).dataset


def _text() -> Dataset:
    """Return the packaged docstrings, of which a fifth is for testing, the same for all seeds."""
    file = resources.files("fcljax") / "assets" / TEXTS
    content = json.loads(gzip.decompress(file.read_bytes()))
    texts = [text for texts in content["texts"].values() for text in texts]
    labels = np.repeat(list(content["texts"]), [len(texts) for texts in content["texts"].values()])
    return dataset_of_any_arrays((texts, labels), "text").dataset


def _shifted_digits() -> Dataset:
    digits = _digits()
    names = list(SHIFTS)
    return digits._replace(
        name="shifted_digits",
        x_train=shifted(digits.x_train),
        y_train=np.repeat(digits.y_train, len(names)),
        x_test=shifted(digits.x_test),
        y_test=np.repeat(digits.y_test, len(names)),
        columns={"domain": np.tile(names, len(digits.y_train))},
        columns_test={"domain": np.tile(names, len(digits.y_test))},
    )


def _enlarge(grey: UInt8[np.ndarray, "N H W"]) -> UInt8[np.ndarray, "N S S 3"]:
    size = (_SIDE, _SIDE)
    bicubic = Image.Resampling.BICUBIC
    enlarged = np.stack([np.asarray(Image.fromarray(image).resize(size, bicubic)) for image in grey])
    return np.repeat(enlarged[..., None], 3, axis=-1)


def _glyphs(options: DataOptions) -> Dataset:
    from fcljax.data.glyphs import GLYPHS, glyphs

    for field in ("glyph_train", "glyph_test"):
        count = getattr(options, field)
        if count < 1:
            raise InputError(f"{field}: {count} images per class is too few; choose 1 or more")
    arrays = glyphs(options.glyph_train, options.glyph_test, options.seed)
    return Dataset("glyphs", *arrays, class_names=tuple(GLYPHS), augment=False)


def load_part(name: str, path: str | Path, split: str, class_names: tuple[str, ...] | None = None) -> Dataset:
    """Read one split of a .npz file, and class_names if it has any; the other split is
    one black image.

    Args:
      name: of the whole data set, which decides whether crops preserve its classes.
      path: of the file.
      split: "train" or "test".
      class_names: of all classes; None: those of the file, else the numbers up to its
        largest label.

    Raises:
      InputError: naming what is wrong with the file.
    """
    return npz_files.load_part(name, path, split, class_names, suggests_crops(name))


def suggests_crops(name: str) -> bool:
    """Check whether random crops and flips preserve the classes of the data set of this name."""
    if name in NAMED:
        return NAMED[name].augment
    return name not in BUILT_IN


def _load_npz(name: str, options: DataOptions, _full: bool) -> Dataset:
    path = in_home(name.removeprefix("npz:"), "dataset")
    return npz_files.npz_dataset(name, path, options.skip_corrupt, options.say, options.as_arrays)


def _load_csv(name: str, options: DataOptions, _full: bool) -> Dataset:
    return csv_dataset(name, options.say, options.skip_corrupt)


def _load_texts(name: str, options: DataOptions, _full: bool) -> Dataset:
    return texts_dataset(name, options.say, options.skip_corrupt)


def _load_mixture(name: str, options: DataOptions, full: bool) -> Dataset:
    sources = name.removeprefix("mix:").split("+")
    return mixed(name, [load_dataset(source, options, full) for source in sources])


def _find_folder(path: str, _data_folder: Path) -> Raw:
    return folder_of_classes(in_home(path, "dataset"))


def _find_list(path: str, _data_folder: Path) -> Raw:
    return list_of_files(path)


def _find_tables(name: str, _data_folder: Path) -> Raw:
    return table_files(name)


BUILT_IN: dict[str, Callable[[DataOptions], Dataset]] = {
    "digits": lambda _options: _digits(),
    "shifted_digits": lambda _options: _shifted_digits(),
    "glyphs": _glyphs,
    "text": lambda _options: _text(),
    **{name: lambda _options, name=name: _sklearn_table(name) for name in SKLEARN_TABLES},
}


class Form(NamedTuple):
    """A form in which data sets of the user's come: FORM:WORD."""

    word: str
    """Placeholder of the text after the colon, for messages."""
    load: Callable[[str, DataOptions, bool], Dataset] | None = None
    """load(name, options, full) -> a data set in memory."""
    find: Callable[[str, Path], Raw] | None = None
    """find(word, data folder) -> raw data, which are decoded once into the cache."""


FORMS = {
    "npz": Form("PATH", load=_load_npz),
    "csv": Form("FILE", load=_load_csv),
    "texts": Form("PATH", load=_load_texts),
    "folder": Form("PATH", find=_find_folder),
    "list": Form("FILE", find=_find_list),
    "hf": Form("OWNER/NAME", find=_find_tables),
    "tfds": Form("NAME", find=_find_tfds),
    "mix": Form("NAME+NAME", load=_load_mixture),
}


def _is_in_memory(kind: str) -> bool:
    """Return whether data sets of this kind stay in memory, without a cache."""
    return kind in BUILT_IN or (kind in FORMS and FORMS[kind].load is not None)
