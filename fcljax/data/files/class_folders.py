"""Read folders of images, with a folder for each class: `folder:PATH`.

Expected are PATH/train/CLASS/* and PATH/test/CLASS/*. `val` or `valid` stands for a
missing test folder, and without folders of splits a random fifth is for testing. Images
may lie in folders below their class. Above the classes there may be a folder for each
site. A note says which folders are classes and which are sites. If that cannot be known,
the folder is refused with both readings.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fcljax.data.files.file_trees import (
    Tree,
    contents,
    folders,
    images,
    in_words,
    is_image,
    path_below,
    scan_of,
)
from fcljax.data.files.raw import (
    SPLIT_NAMES,
    File,
    Raw,
    Scan,
    first_names,
    random_split,
    same_classes,
    table,
    visible,
)
from fcljax.errors import InputError

_SHOWN = 5  # names in a line


class _SplitFolders(NamedTuple):
    """The folders of the splits."""

    train: str
    """Empty: the root itself, whose images are split at random."""
    test: str | None
    unread: tuple[str, ...]
    """Other folders and files of the root."""
    note: str
    """How the splits were chosen, if the names do not show it."""


class _View(NamedTuple):
    """A folder whose folders are classes, or sites with classes in them."""

    inside: str
    files: dict[str, list[File]]
    """Images of each folder, at any depth."""
    direct: dict[str, list[File]]
    """Images of each folder that are in no folder below it."""
    below: dict[str, dict[str, list[File]]]
    """Images of each folder, by the folder below it."""
    other_files: list[str]
    """Files that are not images, and images without a class."""


def folder_of_classes(root: Path) -> Raw:
    """Return the images of a folder as raw data.

    Raises:
      InputError: for missing folders, now or when it is scanned.
    """
    layout = _layout(root)
    return Raw(root, partial(_scan, root, layout))


def _layout(root: Path) -> _SplitFolders:
    if root.is_file():
        raise InputError(f"dataset: {str(root)!r} is a file; unpack it, and give the folder")
    if not root.is_dir():
        raise InputError(
            f"dataset: no such folder: {str(root)!r}; expected train/CLASS/*.png and test/CLASS/*, or CLASS/*"
        )
    names = folders(root)
    splits = {split: [name for name in names if name.lower() in SPLIT_NAMES[split]] for split in SPLIT_NAMES}
    for duplicates in splits.values():
        if len(duplicates) > 1:
            folders_text = " and ".join(duplicates)
            raise InputError(f"dataset: {str(root)!r} has the folders {folders_text}; keep only one of them")
    # a folder named as a split could be a class too, so one alone is refused below
    train, test, validation = (split[0] if split else None for split in splits.values())
    if not (train or test or validation):
        note = "there are no folders train and test: a random fifth of the images is for testing"
        return _SplitFolders("", None, (), note)
    test_folder = test or validation
    if not train or not test_folder:
        missing = root / ("test" if train else "train")
        raise InputError(
            f"dataset: no such folder: {str(missing)!r}; expected train/CLASS/*.png and test/CLASS/* (or "
            "val), or folders of classes alone"
        )
    unread = tuple(entry.name for entry in visible(root) if entry.name not in (train, test_folder))
    note = ""
    if not test:
        note = f"tested on the folder {test_folder!r}, for there is none named test"
    return _SplitFolders(train, test_folder, unread, note)


# ---- sites and classes -----------------------------------------------------------------


def _view(root: Path, inside: str) -> _View:
    """Collect the images below root/inside."""
    all_images: dict[str, list[File]] = {}
    direct: dict[str, list[File]] = {}
    below: dict[str, dict[str, list[File]]] = {}
    other_files: list[str] = []
    for entry in visible(root / inside):
        path = path_below(inside, entry.name)
        if not entry.is_dir():
            other_files.append(path)
            continue
        below_folder = contents(root, path)
        other_files += below_folder.other_files
        all_images[entry.name] = below_folder.images
        direct[entry.name] = [file for file in below_folder.images if "/" not in file.path[len(path) + 1 :]]
        below[entry.name] = {name: [] for name in folders(root / path)}
        for file in below_folder.images:
            name, slash, _ = file.path[len(path) + 1 :].partition("/")
            if slash:
                below[entry.name][name].append(file)
    if not direct:
        raise InputError(
            f"dataset: {str(root / inside)!r} has no class folders; expected {inside or '.'}/CLASS/*.png"
        )
    return _View(inside, all_images, direct, below, other_files)


def _has_sites(root: Path, view: _View) -> bool:
    """Decide whether the folders are sites that contain the folders of classes.

    Raises:
      InputError: if they may as well be classes.
    """
    # A folder with images of its own is a class. The names of the folders below, and how
    # often each occurs, tell the rest.
    shallow = [name for name, files in view.direct.items() if files]
    inner_counts = Counter(
        name for classes in view.below.values() for name, files in classes.items() if files
    )
    if not inner_counts:
        return False
    # no images at the top, and several names below: sites with classes
    if not shallow and len(inner_counts) > 1:
        return True
    # a name below several folders looks like a class that several sites have
    nested = [name for name in view.direct if name not in shallow]
    repeated = [
        name
        for name, count in inner_counts.items()
        if count > 1 and any(name in view.below[folder] for folder in nested)
    ]
    if not shallow or len(repeated) > 1:
        raise InputError(_two_readings(root, view, inner_counts, bool(shallow)))
    return False


def _two_readings(root: Path, view: _View, inner_counts: Counter[str], mixed: bool) -> str:
    tops = first_names(list(view.direct), _SHOWN)
    where = str(root / view.inside)
    inner = first_names(sorted(inner_counts), _SHOWN)
    if mixed:
        return (
            f"dataset: {where!r} may have the classes {tops}, or the sites {tops} with the classes "
            f"{inner}: images lie beside folders of classes; move them into folders"
        )
    name = next(iter(inner_counts))
    return (
        f"dataset: {where!r} may have the classes {tops}, with a folder {name!r} in each, or the sites "
        f"{tops} with the one class {name!r}, which is too few; if these are classes, move the images up "
        "into their folders"
    )


def _tree(root: Path, view: _View, has_sites: bool) -> Tree:
    """Return the images of each class, of all sites; every class must have some."""
    if not has_sites:
        # `images` raises for a folder without images
        return {
            name: files or images(root, path_below(view.inside, name)) for name, files in view.files.items()
        }
    tree_of_sites: Tree = {}
    for site, classes in view.below.items():
        path = path_below(view.inside, site)
        if not classes:
            raise InputError(
                f"dataset: {str(root / path)!r} has no class folders, but the folders beside it are sites"
            )
        for name, files in classes.items():
            tree_of_sites.setdefault(name, []).extend(files or images(root, f"{path}/{name}"))
    return tree_of_sites


# ---- scans -----------------------------------------------------------------------------


def _scan(root: Path, layout: _SplitFolders) -> Scan:
    insides = [layout.train] if layout.test is None else [layout.train, layout.test]
    views = [_view(root, inside) for inside in insides]
    has_sites = _find_sites(root, views)
    trees = [_tree(root, view, sites) for view, sites in zip(views, has_sites, strict=True)]
    classes = sorted(same_classes(str(root), list(trees[0]), list(trees[-1])))
    if layout.test is None:
        train, test = random_split(table(classes, trees[0]))
    else:
        train, test = (table(classes, tree) for tree in trees)
    # position of the site in the path of a file: below the split's folder, if there is
    # one
    depth = 0 if layout.test is None else 1
    columns = [{"site": depth} if sites else {} for sites in has_sites]
    note = _note(root, layout, views, has_sites, classes, (len(train.items), len(test.items)))
    return scan_of(root, classes, train, test, (columns[0], columns[-1]), (note,))


def _find_sites(root: Path, views: list[_View]) -> list[bool]:
    """Decide for each split whether its folders are sites."""
    # If all folders of one split have images, these are classes, and folders of these
    # names are classes in the other split too.
    of_classes = [view for view in views if all(view.direct.values())]
    if of_classes and all(set(view.direct) <= set(of_classes[0].direct) for view in views):
        return [False for _ in views]
    return [_has_sites(root, view) for view in views]


def _note(
    root: Path,
    layout: _SplitFolders,
    views: list[_View],
    has_sites: list[bool],
    classes: list[str],
    counts: tuple[int, int],
) -> str:
    """Describe what was read, and what was not."""
    parts = [f"{counts[0]:,} training and {counts[1]:,} test images of {len(classes)} classes"]
    if layout.note:
        parts.append(layout.note)
    if any(has_sites):
        sites = list(views[has_sites.index(True)].direct)
        shown_classes = first_names(classes, _SHOWN)
        parts.append(f"{len(sites)} sites ({first_names(sites, _SHOWN)}) with the classes {shown_classes}")
    nested = sorted(
        {
            name
            for view in views
            for classes_below in view.below.values()
            for name, files in classes_below.items()
            if files
        }
    )
    if nested and not any(has_sites):
        parts.append(f"images in folders below a class are of that class ({first_names(nested, _SHOWN)})")
    loose = [path for view in views for path in view.other_files if is_image(path)]
    if loose:
        parts.append(f"left out: {len(loose):,} images in no class folder, such as {loose[0]!r}")
    other_files = [path for view in views for path in view.other_files if not is_image(path)]
    if other_files:
        parts.append(f"left out: {in_words(other_files)}")
    if layout.unread:
        parts.append(f"not read: {_unread(root, layout.unread)}")
    return "; ".join(parts)


def _unread(root: Path, names: tuple[str, ...]) -> str:
    """List the root's other folders and files, with their numbers of images."""
    shown = []
    for name in names[:_SHOWN]:
        count = len(contents(root, name).images) if (root / name).is_dir() else 0
        shown.append(f"{name} ({count:,} images)" if count else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"
