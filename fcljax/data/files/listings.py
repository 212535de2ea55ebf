"""Find named data sets in files or tensorflow-datasets, and say how to get them.

Finding takes three steps of growing cost: `find` checks whether a layout exists,
`Raw.scan` lists its files for their fingerprint, and `Scan.listing` lists the images with
their labels and splits. Nothing is decoded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fcljax.data.files import array_files, image_folders, tfds
from fcljax.data.files.download import OFFICIAL, volume
from fcljax.data.files.prepared import Listing
from fcljax.data.files.raw import Choice, Raw
from fcljax.errors import InputError, reason
from fcljax.files import in_home, read_text

_LIST_BYTES = 1 << 24  # most of a list of classes


class Named(NamedTuple):
    """The files of a data set, which `names.DATASETS` describes."""

    put: str  # the official files, relative to the data folder
    # find(folder, choice): the folder may hold the official files
    find: Callable[[Path, Choice], Raw | None]
    images: int | None  # of the official release, both splits
    tfds: tuple[str, ...] = ()  # its builders in tensorflow-datasets
    # lists the folders that these builders prepared
    tfds_listing: Callable[[Sequence[Path]], Listing] | None = None
    augment: bool = True  # random crops and flips preserve the class
    # name of the column that is the first folder of an image's name, such as domain
    folders: str = ""


def find(name: str, folder: Path, choice: Choice = None) -> Raw | None:
    """Find the raw data of a named set below the data folder.

    Official files come first, then what tensorflow-datasets has prepared. Files are
    looked for in `folder` and in `folder`/name.

    Raises:
      InputError: for an incomplete layout.
    """
    named = NAMED[name]
    for base in (folder, folder / name, folder / name.replace("_", "-")):
        raw = named.find(base, choice)
        if raw is not None:
            return raw
    if named.tfds_listing:
        return tfds.find_builders(folder / tfds.FOLDER, named.tfds, named.tfds_listing)
    return None


def how_to_get(name: str, folder: Path) -> str:
    """Say what to put where or to run, for a missing data set."""
    files = what_to_put(name, folder)
    if name in OFFICIAL:
        return f"{files}, or have it downloaded ({volume(OFFICIAL[name])}): fcljax data prepare {name}"
    return f"{files}, then run: fcljax data prepare {name}"


def what_to_put(name: str, folder: Path) -> str:
    """Say which official files to put where."""
    pickled = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}.get(name)
    for base in (folder, folder / name):
        if pickled and (base / pickled).exists():
            problem = f"{str(base / pickled)!r} holds pickles, which are never loaded"
            return f"{problem}; put the binary version beside it, {NAMED[name].put}"
    return f"put {NAMED[name].put} in {str(folder)!r}"


def class_list(path: str | Path) -> tuple[str, ...]:
    """Read the classes in a text file, the first word of each line, in that order.

    Raises:
      InputError: for a file that cannot be read, names no class or names one twice.
    """
    try:
        lines = read_text(in_home(path, "class_list"), _LIST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"class_list: {str(path)!r} cannot be read ({reason(error)}); "
            "expected a text file, a class per line"
        ) from error
    names = tuple(line.split()[0] for line in lines if line.strip())
    duplicates = [name for index, name in enumerate(names) if name in names[:index]]
    if duplicates or not names:
        problem = f"{duplicates[0]!r} twice" if duplicates else "no class"
        raise InputError(f"class_list: {str(path)!r} names {problem}; expected a class per line")
    return names


_R_TFDS = partial(tfds.from_all_splits, splits=("test",), field="file_name")

NAMED = {
    "cifar10": Named(
        "cifar-10-batches-bin/ (data_batch_1..5.bin, test_batch.bin, batches.meta.txt)",
        partial(
            array_files.cifar,
            folder="cifar-10-batches-bin",
            train=[f"data_batch_{batch}.bin" for batch in range(1, 6)],
            test="test_batch.bin",
            names="batches.meta.txt",
            label_bytes=1,
        ),
        60_000,
        ("cifar10",),
        partial(tfds.official, field="id"),
    ),
    "cifar100": Named(
        "cifar-100-binary/ (train.bin, test.bin, fine_label_names.txt)",
        partial(
            array_files.cifar,
            folder="cifar-100-binary",
            train=["train.bin"],
            test="test.bin",
            names="fine_label_names.txt",
            label_bytes=2,
        ),
        60_000,
        ("cifar100",),
        partial(tfds.official, field="id"),
    ),
    "imagenet_r": Named(
        "imagenet-r/{train,test}/WNID/* (the split of PILOT) or imagenet-r/WNID/* (official)",
        partial(image_folders.split_or_pooled, split="imagenet-r", official="imagenet-r"),
        30_000,
        ("imagenet_r",),
        _R_TFDS,
    ),
    "imagenet_r_hepco": Named(
        "imagenet-r/WNID/* (official) or imagenet-r/{train,test}/WNID/*",
        image_folders.imagenet_r_hepco,
        30_000,
        ("imagenet_r",),
        _R_TFDS,
    ),
    "cub200": Named(
        "cub/{train,test}/CLASS/* (the split of PILOT) or CUB_200_2011/images/CLASS/* (official)",
        partial(image_folders.split_or_pooled, split="cub", official="CUB_200_2011/images"),
        11_788,
        ("caltech_birds2011",),
        partial(tfds.from_all_splits, splits=("train", "test"), field="image/filename"),
    ),
    "cars196": Named(
        "stanford_cars/{train,test}/CLASS/*",
        image_folders.cars196,
        16_185,
        ("cars196",),
        tfds.official,
    ),
    "imagenet_a": Named(
        "imagenet-a/{train,test}/WNID/* (a published split) or imagenet-a/WNID/* (official)",
        partial(image_folders.split_or_pooled, split="imagenet-a", official="imagenet-a"),
        7_500,
        ("imagenet_a",),
        partial(tfds.from_all_splits, splits=("test",), field="file_name"),
    ),
    "domainnet": Named(
        f"domainnet/{{{','.join(image_folders.DOMAINS)}}}/CLASS/*",
        partial(image_folders.domains, folder="domainnet", names=image_folders.DOMAINS),
        None,
        tuple(f"domainnet/{domain}" for domain in image_folders.DOMAINS),
        partial(tfds.from_all_splits, splits=("train", "test")),
        folders="domain",
    ),
    "office_home": Named(
        f"OfficeHomeDataset_10072016/{{{','.join(image_folders.OFFICE)}}}/CLASS/*",
        partial(image_folders.domains, folder="OfficeHomeDataset_10072016", names=image_folders.OFFICE),
        15_588,
        folders="domain",
    ),
    "core50": Named(
        "core50_128x128/s1..s11/o1..o50/*.png",
        image_folders.core50,
        164_866,
        folders="session",
    ),
    "eurosat": Named(
        "EuroSAT_RGB/CLASS/*.jpg (or 2750/CLASS/*.jpg)",
        image_folders.eurosat,
        27_000,
        ("eurosat/rgb",),
        partial(tfds.from_all_splits, splits=("train",)),
    ),
    "tiny_imagenet": Named(
        image_folders.TINY_FILES,
        image_folders.tiny_imagenet,
        110_000,
    ),
    **{
        f"imagenet{count}": Named(
            image_folders.IMAGENET_FILES,
            partial(image_folders.imagenet, count=count),
            None,
        )
        for count in (100, 200)
    },
    "omniglot": Named(
        "images_background/ALPHABET/CHARACTER/*.png and images_evaluation/ALPHABET/CHARACTER/*.png",
        image_folders.omniglot,
        32_460,
        ("omniglot",),
        tfds.omniglot,
        augment=False,
    ),
    "mnist": Named(
        f"mnist/{array_files.IDX_FILES}",
        partial(array_files.idx, folders=("mnist", "MNIST/raw", "MNIST"), classes=array_files.DIGITS),
        70_000,
        ("mnist",),
        tfds.official,
        augment=False,
    ),
    "fashion_mnist": Named(
        f"fashion_mnist/{array_files.IDX_FILES}",
        partial(
            array_files.idx,
            # the files in the data folder itself are taken for these, and never for
            # MNIST's of the same names
            folders=("", "fashion_mnist", "FashionMNIST/raw"),
            classes=array_files.FASHION,
        ),
        70_000,
        ("fashion_mnist",),
        tfds.official,
        augment=False,
    ),
}
