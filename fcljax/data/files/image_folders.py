"""Find and scan data sets that are folders of image files, with a folder for each class."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fcljax.data.files.class_folders import folder_of_classes
from fcljax.data.files.file_trees import Tree, folders, images, pooled, scan_of, tree
from fcljax.data.files.raw import (
    Choice,
    Raw,
    Scan,
    last_drawings,
    random_split,
    same_classes,
    table,
    text,
)
from fcljax.errors import InputError

OFFICE = ("Art", "Clipart", "Product", "Real World")
CORE50_TEST = ("s3", "s7", "s10")  # sessions, of s1 to s11
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
IMAGENET_FILES = "imagenet/train/WNID/*.JPEG and imagenet/val/WNID/*.JPEG"
TINY_FILES = "tiny-imagenet-200/ (train/WNID/images/*, val/images/*, val/val_annotations.txt)"

_SUBSET_SEED = 1993  # of the ImageNet subsets


def split_or_pooled(base: Path, _choice: Choice, *, split: str, official: str) -> Raw | None:
    """Find the published split in `split`, else the official folder, split at random."""
    if _is_split(base / split):
        return folder_of_classes(base / split)
    return _raw_of(base / official, _scan_pooled, [""])


def cars196(base: Path, _choice: Choice) -> Raw | None:
    """Find Stanford Cars, one folder for each model of car."""
    root = base / "stanford_cars"
    return folder_of_classes(root) if _is_split(root) else None


def imagenet_r_hepco(base: Path, _choice: Choice) -> Raw | None:
    """Find ImageNet-R, which is split at random, whatever split its folder has."""
    root = base / "imagenet-r"
    insides = [""]
    if _is_split(root):
        insides = ["train", "test"]
    return _raw_of(root, _scan_pooled, insides, True)


def domains(base: Path, _choice: Choice, *, folder: str, names: Sequence[str]) -> Raw | None:
    """Find all domains of DomainNet or Office-Home, which are pooled and split at random."""
    root = base / folder
    missing = [domain for domain in names if not (root / domain).is_dir()]
    if len(missing) == len(names):
        return None
    # a part of the domains would be another data set
    if missing:
        raise InputError(
            f"dataset: domain {missing[0]!r} is missing in {str(root)!r}; expected {', '.join(names)}"
        )
    return Raw(root, partial(_scan_pooled, root, names))


def eurosat(base: Path, _choice: Choice) -> Raw | None:
    """Find EuroSAT's RGB images, in either of two folders, and split them at random."""
    for name in ("EuroSAT_RGB", "2750"):
        if (base / name).is_dir():
            return _raw_of(base / name, _scan_pooled, [""])
    return None


def core50(base: Path, _choice: Choice) -> Raw | None:
    """Find CORe50's sessions of 50 objects; three sessions are for testing."""
    return _raw_of(base / "core50_128x128", _scan_core50)


def tiny_imagenet(base: Path, _choice: Choice) -> Raw | None:
    """Find Tiny-ImageNet, which is tested on its validation split."""
    return _raw_of(base / "tiny-imagenet-200", _scan_tiny_imagenet)


def imagenet(base: Path, choice: Choice, *, count: int) -> Raw | None:
    """Find a subset of ImageNet's classes, which is tested on its validation split."""
    root = base / "imagenet"
    if not any((root / split).is_dir() for split in ("train", "test", "val")):
        return None
    return Raw(root, partial(_scan_imagenet, root, choice, count))


def omniglot(base: Path, _choice: Choice) -> Raw | None:
    """Find both parts of Omniglot."""
    parts = ("images_background", "images_evaluation")
    # half of Omniglot would be another data set
    present = [part for part in parts if (base / part).is_dir()]
    if len(present) == 1:
        raise InputError(f"dataset: {str(base)!r} has {present[0]} only; expected {' and '.join(parts)}")
    if not present:
        return None
    return _raw_of(base, _scan_omniglot, parts)


def _raw_of(root: Path, scan: Callable[..., Scan], *args: object) -> Raw | None:
    """Return the raw data in a folder, with scan(root, *args); None if there is no folder."""
    if not root.is_dir():
        return None
    return Raw(root, partial(scan, root, *args))


def _is_split(root: Path) -> bool:
    return (root / "train").is_dir() or (root / "test").is_dir()


def _scan_core50(root: Path) -> Scan:
    sessions = sorted(folders(root), key=_number)
    tests = [session for session in sessions if session in CORE50_TEST]
    if len(tests) < len(CORE50_TEST) or len(sessions) == len(tests):
        raise InputError(f"dataset: {str(root)!r} has the sessions {', '.join(sessions)}; expected s1 to s11")
    train = pooled(root, [session for session in sessions if session not in tests])
    test = pooled(root, tests)
    classes = sorted(same_classes(str(root), list(train), list(test)), key=_number)
    return scan_of(root, classes, table(classes, train), table(classes, test))


def _number(name: str) -> tuple[int, str]:
    return int("".join(filter(str.isdecimal, name))[:18] or 0), name


def _scan_pooled(root: Path, insides: Sequence[str], by_name: bool = False) -> Scan:
    """Scan the files of all folders by class; `by_name` in the order that they would have
    in one folder."""
    tree = pooled(root, insides)
    if by_name:
        for files in tree.values():
            files.sort(key=lambda file: os.path.basename(file.path))
    classes = sorted(tree)
    return scan_of(root, classes, *random_split(table(classes, tree)))


def _scan_tiny_imagenet(root: Path) -> Scan:
    for needed in ("train", "val/images", "val/val_annotations.txt"):
        if not (root / needed).exists():
            raise InputError(f"dataset: {str(root / needed)!r} is missing; expected {TINY_FILES}")
    wnids = folders(root / "train")
    train = {wnid: images(root, f"train/{wnid}/images") for wnid in wnids}
    test: Tree = {wnid: [] for wnid in wnids}
    # validation images lie in one folder; a table has their classes
    label_of = _pairs(root / "val/val_annotations.txt")
    for file in images(root, "val/images"):
        wnid = label_of.get(os.path.basename(file.path))
        if wnid not in test:
            problem = "has no line"
            if wnid is not None:
                problem = f"is of unknown class {wnid!r}"
            raise InputError(
                f"dataset: {str(root / file.path)!r} {problem} in val_annotations.txt; "
                "unpack the archive again"
            )
        test[wnid].append(file)
    # classes are sorted by WordNet id, whatever their names
    return scan_of(root, _words(root, wnids), table(wnids, train), table(wnids, test))


def _pairs(path: Path) -> dict[str, str]:
    """Read the first two columns of a table that is separated by tabs."""
    return dict(line.split("\t")[:2] for line in text(path).splitlines() if "\t" in line)


def _words(root: Path, wnids: list[str]) -> list[str]:
    """Return the names of classes; classes of the same name also have their WordNet ids."""
    words = _pairs(root / "words.txt") if (root / "words.txt").is_file() else {}
    names = [words.get(wnid, wnid).partition(",")[0].strip() for wnid in wnids]
    return [
        name if names.count(name) == 1 else f"{name} ({wnid})"
        for name, wnid in zip(names, wnids, strict=True)
    ]


def _scan_imagenet(root: Path, choice: Choice, count: int) -> Scan:
    splits = ("train", "val")
    for split in splits:
        if not (root / split).is_dir():
            raise InputError(f"dataset: no such folder: {str(root / split)!r}; expected {IMAGENET_FILES}")
    if choice is None:
        wnids = folders(root / "train")
        if len(wnids) != 1000:
            raise InputError(
                f"dataset: {str(root / 'train')!r} has {len(wnids)} class folders, not 1000; "
                "name yours with --class-list"
            )
        # the legacy stream of iCaRL's, PODNet's and BiC's code
        subset = np.random.RandomState(_SUBSET_SEED).permutation(1000)[:count]
        choice = tuple(wnids[index] for index in subset)
    if len(choice) != count:
        raise InputError(f"class_list: {len(choice)} classes are listed; imagenet{count} needs {count}")
    for wnid in choice:
        for split in splits:
            if not (root / split / wnid).is_dir():
                raise InputError(
                    f"class_list: class {wnid!r} is not in {str(root / split)!r}; it must be a folder there"
                )
    train, test = (table(choice, tree(root, split, choice)) for split in splits)
    return scan_of(root, choice, train, test)


def _scan_omniglot(base: Path, parts: Sequence[str]) -> Scan:
    tree_of_characters: Tree = {}
    for part in parts:
        for alphabet in folders(base / part):
            characters = tree(base, f"{part}/{alphabet}")
            tree_of_characters |= {
                f"{alphabet}/{character}": files for character, files in characters.items()
            }
    return scan_of(base, sorted(tree_of_characters), *last_drawings(tree_of_characters))
