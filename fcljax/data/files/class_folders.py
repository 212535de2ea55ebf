"""`folder:PATH`: folders of images as people have them, a folder for each class.

PATH/train/CLASS/* and PATH/test/CLASS/*; `val` or `valid` stands for a test folder that is not there, and
without folders of splits a random fifth is for testing. Images may lie in folders below their class. Above
the classes there may be a folder for each site. Which folders are classes and which are sites is said; where
that cannot be known, both readings are named and the folder is refused.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fcljax.data.files.file_trees import Tree, contents, folders, images, in_words, is_image, scan_of
from fcljax.data.files.raw import File, Raw, Scan, random_split, same_classes, table, visible
from fcljax.errors import InputError

_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}
_SHOWN = 5  # names in a line


class _SplitFolders(NamedTuple):
    """The folders of the splits."""

    train: str
    """"" : the root itself, whose images are split at random."""
    test: str | None
    unread: tuple[str, ...]
    """Folders and files beside them."""
    note: str
    """How it was read, if that is not plain."""


class _View(NamedTuple):
    """A folder whose folders are classes, or sites with classes in them."""

    inside: str
    files: dict[str, list[File]]
    """Of each folder, the images at any depth."""
    direct: dict[str, list[File]]
    """Of each folder, the images that lie in it."""
    below: dict[str, dict[str, list[File]]]
    """Of each folder, the images of each folder in it."""
    others: list[str]
    """Files that are no images, and images that are in no class."""


def folder_of_classes(root: Path) -> Raw:
    """The images of a folder.

    Raises:
      InputError: for missing folders, here or when it is scanned.
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
    there = folders(root)
    splits = {split: [name for name in there if name.lower() in names] for split, names in _NAMES.items()}
    twice = next((names for names in splits.values() if len(names) > 1), None)
    if twice:
        raise InputError(f"dataset: {str(root)!r} has the folders {' and '.join(twice)}; leave one of them")
    train, test, validation = (names[0] if names else None for names in splits.values())
    if not (train or test or validation):
        note = "there are no folders train and test: a random fifth of the images is for testing"
        return _SplitFolders("", None, (), note)
    tested = test or validation
    if not train or not tested:
        missing = root / ("test" if train else "train")
        raise InputError(
            f"dataset: no such folder: {str(missing)!r}; expected train/CLASS/*.png and test/CLASS/* (or "
            "val), or folders of classes alone"
        )
    unread = tuple(entry.name for entry in visible(root) if entry.name not in (train, tested))
    note = "" if test else f"tested on the folder {tested!r}, for there is none named test"
    return _SplitFolders(train, tested, unread, note)


# ---- sites and classes -------------------------------------------------------------------------------------


def _view(root: Path, inside: str) -> _View:
    """What lies in the folders of root/inside."""
    every: dict[str, list[File]] = {}
    direct: dict[str, list[File]] = {}
    below: dict[str, dict[str, list[File]]] = {}
    others: list[str] = []
    for entry in visible(root / inside):
        path = f"{inside}/{entry.name}" if inside else entry.name
        if not entry.is_dir():
            others.append(path)
            continue
        found = contents(root, path)
        others += found.others
        every[entry.name] = found.images
        direct[entry.name] = [file for file in found.images if "/" not in file.path[len(path) + 1 :]]
        below[entry.name] = {name: [] for name in folders(root / path)}
        for file in found.images:
            name, slash, _ = file.path[len(path) + 1 :].partition("/")
            if slash:
                below[entry.name][name].append(file)
    if not direct:
        raise InputError(
            f"dataset: {str(root / inside)!r} has no class folders; expected {inside or '.'}/CLASS/*.png"
        )
    return _View(inside, every, direct, below, others)


def _has_sites(root: Path, view: _View) -> bool:
    """Whether the folders are sites, with the folders of classes in them.

    Raises:
      InputError: if they may as well be classes.
    """
    shallow = [name for name, files in view.direct.items() if files]
    inner = Counter(name for found in view.below.values() for name, files in found.items() if files)
    if not inner:
        return False
    if not shallow and len(inner) > 1:
        return True
    deep = [name for name in view.direct if name not in shallow]
    shared = [
        name for name, count in inner.items() if count > 1 and any(name in view.below[top] for top in deep)
    ]
    if not shallow or len(shared) > 1:
        raise InputError(_two_readings(root, view, inner, bool(shallow)))
    return False


def _two_readings(root: Path, view: _View, inner: Counter[str], mixed: bool) -> str:
    tops = _some(list(view.direct))
    where = str(root / view.inside)
    if mixed:
        return (
            f"dataset: {where!r} may have the classes {tops}, or the sites {tops} with the classes "
            f"{_some(sorted(inner))}: images lie beside folders of classes; move them into folders"
        )
    name = next(iter(inner))
    return (
        f"dataset: {where!r} may have the classes {tops}, with a folder {name!r} in each, or the sites "
        f"{tops} with the one class {name!r}, which is too few; if these are classes, move the images up "
        "into their folders"
    )


def _tree(root: Path, view: _View, sited: bool) -> Tree:
    """The images of each class, of all sites; refused if one has none."""
    if not sited:
        return {
            name: files or images(root, f"{view.inside}/{name}" if view.inside else name)
            for name, files in view.files.items()
        }
    found: Tree = {}
    for site, classes in view.below.items():
        path = f"{view.inside}/{site}" if view.inside else site
        if not classes:
            raise InputError(f"dataset: {str(root / path)!r} has no class folders; its neighbours are sites")
        for name, files in classes.items():
            found.setdefault(name, []).extend(files or images(root, f"{path}/{name}"))
    return found


# ---- scans -------------------------------------------------------------------------------------------------


def _scan(root: Path, layout: _SplitFolders) -> Scan:
    insides = [layout.train] if layout.test is None else [layout.train, layout.test]
    views = [_view(root, inside) for inside in insides]
    sited = _sited(root, views)
    trees = [_tree(root, view, each) for view, each in zip(views, sited, strict=True)]
    classes = sorted(same_classes(str(root), list(trees[0]), list(trees[-1])))
    if layout.test is None:
        train, test = random_split(table(classes, trees[0]))
    else:
        train, test = (table(classes, each) for each in trees)
    # the folder of the site in the path of a file
    depth = 0 if layout.test is None else 1
    columns = [{"site": depth} if each else {} for each in sited]
    note = _note(root, layout, views, sited, classes, (len(train.items), len(test.items)))
    return scan_of(root, classes, train, test, (columns[0], columns[-1]), (note,))


def _sited(root: Path, views: list[_View]) -> list[bool]:
    """Whether the folders of each split are sites. Those of a split that have images, and so are classes, are
    classes in the other split as well."""
    plain = [view for view in views if all(view.direct.values())]
    if plain and all(set(view.direct) <= set(plain[0].direct) for view in views):
        return [False for _ in views]
    return [_has_sites(root, view) for view in views]


def _note(
    root: Path,
    layout: _SplitFolders,
    views: list[_View],
    sited: list[bool],
    classes: list[str],
    counts: tuple[int, int],
) -> str:
    """What was read, and what was not."""
    parts = [f"{counts[0]:,} training and {counts[1]:,} test images of {len(classes)} classes"]
    if layout.note:
        parts.append(layout.note)
    if any(sited):
        sites = list(views[sited.index(True)].direct)
        parts.append(f"{len(sites)} sites ({_some(sites)}) with the classes {_some(classes)}")
    nested = sorted(
        {name for view in views for found in view.below.values() for name, x in found.items() if x}
    )
    if nested and not any(sited):
        parts.append(f"images in folders below a class are of that class ({_some(nested)})")
    loose = [path for view in views for path in view.others if is_image(path)]
    if loose:
        parts.append(f"left out: {len(loose):,} images in no class folder, such as {loose[0]!r}")
    others = [path for view in views for path in view.others if not is_image(path)]
    if others:
        parts.append(f"left out: {in_words(others)}")
    if layout.unread:
        parts.append(f"not read: {_unread(root, layout.unread)}")
    return "; ".join(parts)


def _unread(root: Path, names: tuple[str, ...]) -> str:
    """What lies beside the splits, with the number of images in it."""
    shown = []
    for name in names[:_SHOWN]:
        count = len(contents(root, name).images) if (root / name).is_dir() else 0
        shown.append(f"{name} ({count:,} images)" if count else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
