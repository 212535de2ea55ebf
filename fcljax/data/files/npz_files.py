"""Read data sets that are .npz files: the arrays of both splits, and columns of each example."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fcljax.archives import npz_names, read_npz
from fcljax.data.files.any_arrays import check_alike, checked_examples
from fcljax.data.files.arrays import (
    ARRAYS,
    check_lengths,
    checked_images,
    checked_labels,
    checked_splits,
    digest_of_examples,
    fifth_for_testing,
    rows_with_label,
    sides,
    with_row_numbers,
)
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.prepared import digest_of_arrays
from fcljax.data.files.raw import same_classes
from fcljax.data.kinds import Kind, leaves, take, tree_length
from fcljax.errors import InputError, reason
from fcljax.files import in_home, machine_memory

CLASS_NAMES = "class_names"
# Names of images and labels of a split: ours, which are scikit-learn's too but for a
# capital X, and MedMNIST's; and those of a file without splits, read as training examples.
_KEYS = (("x_{0}", "y_{0}"), ("{0}_images", "{0}_labels"))
_WITHOUT_SPLITS = (("x", "y"), ("images", "labels"))


class _Keys(NamedTuple):
    """The names of a split's arrays."""

    images: str
    labels: str


class _Part(NamedTuple):
    """One split of a file."""

    keys: _Keys
    images: Any
    """Examples [N, ...]; images are uint8 [N, H, W, 3]."""
    labels: np.ndarray
    """[N], as in the file."""
    columns: dict[str, np.ndarray]
    rows: Int[np.ndarray, " N"]
    """The number of each example in the arrays of the file."""
    kind: Kind | None
    """None: images."""

    @property
    def examples(self) -> int:
        """Return the number of examples."""
        return tree_length(self.images)


def npz_dataset(
    name: str, path: Path, skip_missing: bool, say: Callable[[str], None], as_arrays: bool = False
) -> Dataset:
    """Read the data set of a file's training and test arrays.

    Without test arrays those of the validation split are for testing, else a random fifth
    of each class, the same in all runs.

    Args:
      name: of the data set.
      path: of the file.
      skip_missing: leave out examples without a label.
      say: prints a note.
      as_arrays: examples are no images, but numbers of any shape, or texts.

    Raises:
      InputError: naming what is wrong with the file.
    """
    where = f"dataset: {str(path)!r}"
    names = _names(path, "dataset")
    keys = {split: _keys(where, names, split) for split in ("train", "test", "val")}
    splits = {"train": _required(where, names, keys["train"], "train")}
    # a validation split takes the place of a missing test split, and is not read
    # otherwise
    test_split = next((split for split in ("test", "val") if _is_named(names, split)), None)
    if test_split:
        splits[test_split] = _required(where, names, keys[test_split], test_split)
    if test_split == "val":
        say(f"{name}: tested on {splits['val'].images}, because there are no test images")
    optional = [name for name in names if name == CLASS_NAMES or name.endswith(("_train", "_test", "_val"))]
    required = [key for split_keys in splits.values() for key in split_keys]
    arrays = _read(path, [*optional, *required])
    used = {CLASS_NAMES, *required}
    parts = [_part(where, arrays, used, split_keys, split, as_arrays) for split, split_keys in splits.items()]
    num_rows = parts[0].examples
    parts = [_drop_unlabelled(name, where, part, skip_missing, say) for part in parts]
    labels = checked_splits(where, {part.keys.labels: part.labels for part in parts})
    parts = [part._replace(labels=values) for part, values in zip(parts, labels, strict=True)]
    for part in parts:
        first = leaves(part.images)[0]
        check_lengths(where, part.keys.images, first, part.keys.labels, part.labels)
    used |= {
        f"{column}_{split}" for part, split in zip(parts, splits, strict=True) for column in part.columns
    }
    left_out = [key for key in names if key not in used]
    if left_out:
        say(f"{name}: left out: {len(left_out)} arrays ({', '.join(left_out[:6])})")
    if test_split is None:
        train_rows, test_rows, note = fifth_for_testing(where, parts[0].labels)
        say(f"{name}: {note}")
        parts = [_rows(parts[0], train_rows), _rows(parts[0], test_rows)]
    train, test = parts
    dataset = _dataset(name, path, train, test, arrays.get(CLASS_NAMES))
    return with_row_numbers(dataset, train.rows, num_rows)


def load_part(
    name: str, path: str | Path, split: str, class_names: tuple[str, ...] | None, augment: bool
) -> Dataset:
    """Read one split of a .npz file, and class_names if it has any; the other split is
    one black image.

    Args:
      name: of the data set that it is a part of.
      path: of the file.
      split: "train" or "test".
      class_names: of all classes; None: those of the file, else the numbers up to its
        largest label.
      augment: whether crops keep the classes.

    Raises:
      InputError: naming what is wrong with the file.
    """
    path = in_home(path, "data")
    where = f"data: {str(path)!r}"
    names = _names(path, "data")
    keys = _required(where, names, _keys(where, names, split), split)
    arrays = _read(path, [*keys, CLASS_NAMES])
    x = checked_images(where, keys.images, arrays[keys.images])
    y = checked_labels(where, keys.labels, arrays[keys.labels])
    check_lengths(where, keys.images, x, keys.labels, y)
    y, class_names = _numbers(path, keys.labels, y, class_names, arrays.get(CLASS_NAMES))
    black = np.zeros_like(x[:1]), np.zeros(1, np.int64)
    arrays_of_splits = (x, y, *black) if split == "train" else (*black, x, y)
    digest = digest_of_arrays(dict(zip(ARRAYS, arrays_of_splits, strict=True)))
    return Dataset(name, *arrays_of_splits, class_names, augment, digest=digest)


def _numbers(
    path: Path,
    key: str,
    labels: np.ndarray,
    class_names: tuple[str, ...] | None,
    names_in_file: np.ndarray | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number labels by the names of all classes; return both."""
    text = labels.dtype.kind == "U"
    if class_names is None and text and names_in_file is None:
        raise InputError(
            f"data: {str(path)!r}: {key} is text, and there are no class_names that give its indices"
        )
    largest = 0 if text else int(labels.max())
    if class_names is None:
        count = largest + 1 if names_in_file is None else max(largest + 1, len(names_in_file))
        class_names = _class_names(path, names_in_file, list(range(count)))
    if text:
        number = {name: label for label, name in enumerate(class_names)}
        unknown = [label for label in np.unique(labels).tolist() if label not in number]
        if unknown:
            raise InputError(f"data: {str(path)!r}: {key} holds {unknown[0]!r}, which is not a class")
        return np.array([number[label] for label in labels.tolist()], np.int64), class_names
    if largest >= len(class_names):
        raise InputError(f"data: {str(path)!r}: {key} holds label {largest} of {len(class_names)} classes")
    return labels, class_names


def _part(
    where: str,
    arrays: dict[str, np.ndarray],
    used: set[str],
    keys: _Keys,
    split: str,
    as_arrays: bool = False,
) -> _Part:
    """Return a split with images as grey levels, or numbers as they are, and labels as in
    the file."""
    kind = None
    if as_arrays:
        images, kind = checked_examples(where, keys.images, arrays[keys.images])
    else:
        images = checked_images(where, keys.images, arrays[keys.images])
    count = tree_length(images)
    end = f"_{split}"
    columns = {
        key.removesuffix(end): _column(where, key, values, count, split)
        for key, values in arrays.items()
        if key.endswith(end) and key not in used
    }
    return _Part(keys, images, arrays[keys.labels], columns, np.arange(count), kind)


def _column(where: str, key: str, values: np.ndarray, examples: int, split: str) -> np.ndarray:
    """Check a column, the array NAME_SPLIT with a value for each example of a split.

    Raises:
      InputError: for another shape or type.
    """
    if values.shape != (examples,) or values.dtype.kind not in "iuU":
        raise InputError(
            f"{where}: {key} is {values.dtype} of shape {values.shape}; expected integers or text of shape "
            f"[{examples}], one for each {'training' if split == 'train' else split} example"
        )
    return values


def _drop_unlabelled(
    name: str, where: str, part: _Part, skip_missing: bool, say: Callable[[str], None]
) -> _Part:
    """Drop the examples of a split that have no label.

    Raises:
      InputError: naming the first of them, where the user does not allow it.
    """
    # another number of labels than of examples: `check_lengths` reports it, with both
    # numbers
    if part.labels.shape[:1] != (part.examples,):
        return part

    def place(row: int) -> str:
        number = f" ({part.labels[row]})" if part.labels.dtype.kind in "iu" else ""
        return f"{where}: {part.keys.labels}: example {row}{number}"

    index, note = rows_with_label(part.labels, place, skip_missing)
    if not note:
        return part
    say(f"{name}: {note} in {part.keys.labels}")
    return _rows(part, index)


def _rows(part: _Part, index: Int[np.ndarray, " n"]) -> _Part:
    """Return these examples of a split."""
    columns = {column: values[index] for column, values in part.columns.items()}
    images = take(part.images, index)
    return _Part(part.keys, images, part.labels[index], columns, part.rows[index], part.kind)


def _dataset(name: str, path: Path, train: _Part, test: _Part, names_in_file: np.ndarray | None) -> Dataset:
    """Make the data set of two splits, numbering classes in the order of their labels."""
    if train.kind is not None:
        check_alike(f"dataset: {str(path)!r}", train.keys.images, train.images, test.keys.images, test.images)
    elif train.images.shape[1:] != test.images.shape[1:]:
        shapes = (
            f"{train.keys.images} are {sides(train.images)} but of {test.keys.images} {sides(test.images)}"
        )
        raise InputError(f"dataset: {str(path)!r}: images of {shapes}; make them equal")
    classes = same_classes(str(path), np.unique(train.labels).tolist(), np.unique(test.labels).tolist())
    names = _class_names(path, names_in_file, classes)
    if train.labels.dtype.kind == "U":
        classes = list(names)
    # names of classes may come in another order than that of text, which searchsorted
    # needs
    order = np.argsort(classes)
    y_train, y_test = (
        order[np.searchsorted(classes, part.labels, sorter=order)].astype(np.int64) for part in (train, test)
    )
    arrays = train.images, y_train, test.images, y_test
    dataset = Dataset(name, *arrays, names, columns=train.columns, columns_test=test.columns, kind=train.kind)
    if train.kind is None:
        return dataset
    return dataset._replace(augment=False, digest=digest_of_examples(*arrays))


def _class_names(path: Path, names: np.ndarray | None, classes: list) -> tuple[str, ...]:
    """Return the names of these labels: those in the file, else the labels."""
    if names is None:
        return tuple(map(str, classes))
    where = f"dataset: {str(path)!r}: {CLASS_NAMES}"
    if names.ndim != 1 or names.dtype.kind != "U":
        raise InputError(f"{where} is {names.dtype} of shape {names.shape}; expected text of shape [C]")
    if isinstance(classes[0], str):
        if sorted(names.tolist()) != classes:
            unlike = sorted(set(names.tolist()) ^ set(classes)) or ["a name twice"]
            raise InputError(f"{where} are not the labels, which are text; {unlike[0]!r} is in one of them")
        return tuple(names.tolist())
    if len(names) <= max(classes):
        raise InputError(
            f"{where} is {names.dtype} of shape {names.shape}; expected text of shape [{max(classes) + 1}] "
            "or longer"
        )
    return tuple(str(names[label]) for label in classes)


# ---- names and arrays ------------------------------------------------------------------


def _names(path: Path, field: str) -> list[str]:
    if not path.is_file():
        raise InputError(f"{field}: no such file: {str(path)!r}")
    try:
        return npz_names(path)
    # anything: zipfile raises errors of many kinds on a damaged file
    except Exception as error:
        raise InputError(f"dataset: {str(path)!r} is damaged or not a .npz file ({reason(error)})") from error


def _keys(where: str, names: Sequence[str], split: str) -> _Keys | None:
    """Find the arrays of a split, whatever their capitals; None unless both exist."""
    for forms in (*_KEYS, *(_WITHOUT_SPLITS if split == "train" else ())):
        matches = [[name for name in names if name.lower() == form.format(split)] for form in forms]
        for duplicates in matches:
            if len(duplicates) > 1:
                raise InputError(f"{where} has the arrays {' and '.join(duplicates)}; leave out one of them")
        if all(matches):
            return _Keys(*(keys[0] for keys in matches))
    return None


def _is_named(names: Sequence[str], split: str) -> bool:
    """Check whether a file has examples or labels of a split."""
    lower = {name.lower() for name in names}
    return any(form.format(split) in lower for forms in _KEYS for form in forms)


def _required(where: str, names: Sequence[str], keys: _Keys | None, split: str) -> _Keys:
    if keys:
        return keys
    expected = [form.format(split) for form in _KEYS[0]]
    missing = next((key for key in expected if key not in names), expected[0])
    contents = f"it has: {', '.join(names[:8])}" if names else "it is empty"
    raise InputError(f"{where} has no array {missing!r}; it needs {' and '.join(expected)}; {contents}")


def _read(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the arrays of these names that exist."""
    try:
        return read_npz(path, machine_memory() // 2, names)
    # anything: a damaged file meets the parsers of zip and npy
    except Exception as error:
        if "Object arrays" in str(error):
            raise InputError(
                f"dataset: {str(path)!r} holds pickled objects, which are never loaded; save plain arrays"
            ) from error
        raise InputError(f"dataset: {str(path)!r} is damaged or not a .npz file ({reason(error)})") from error
