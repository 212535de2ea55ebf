"""Check labelled images: arrays, `.npz` files, tables and lists pass `checked_images` and
`checked_labels`.

Unambiguous values are converted; wrong ones are reported in one line that names the array.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image

from fcljax.data.files.dataset import Dataset
from fcljax.data.files.images import pixels_of
from fcljax.data.files.prepared import digest_of_arrays
from fcljax.data.kinds import leaves, named_leaves, take
from fcljax.errors import InputError, reason

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
NAME = "arrays"  # of a data set that the caller has in memory

_SHAPES = "[N, H, W, 3], [N, 3, H, W] or [N, H, W]"
_LEVELS = "expected uint8, grey levels 0..255, or float in [0, 1]"
# the largest levels of common cameras and data sets, for advice on how to scale pixels
_WHITES = (1, 15, 16, 31, 63, 127, 255, 1023, 4095, 16383, 65535)


class Labelled(NamedTuple):
    """A data set of the caller's arrays."""

    dataset: Dataset
    labels: np.ndarray
    """The caller's label of each class [C], integers or text."""


def dataset_of_arrays(arrays: Any, class_names: Sequence[str] | None = None) -> Labelled:
    """Make the data set of (x, y) or (x, y, x_test, y_test).

    Without test examples, a random fifth of each class is for testing, the same in all runs.

    Args:
      arrays: images as `checked_images` takes them, and labels as `checked_labels` does.
        They may be anything that numpy reads, such as jax arrays.
      class_names: of the sorted labels; None: the labels themselves.

    Raises:
      InputError: naming the array that does not fit.
    """
    check_count(arrays)
    # shorter where there are no test examples
    names = ("x", "y", "x_test", "y_test")
    named = {name: as_array("data", name, values) for name, values in zip(names, arrays, strict=False)}
    x = checked_images("data", "x", named["x"])
    y = named["y"]
    num_rows = len(x)
    train_rows = np.arange(num_rows)
    if "x_test" in named:
        x_test = checked_images("data", "x_test", named["x_test"])
        y_test = named["y_test"]
    else:
        x, y, x_test, y_test, train_rows = split_off_test(x, y)
    if x.shape[1:] != x_test.shape[1:]:
        raise InputError(f"data: images of x are {sides(x)} but of x_test {sides(x_test)}; make them equal")
    y, y_test, names, labels = numbered((x, y), (x_test, y_test), class_names)
    sha256 = digest_of_arrays(dict(zip(ARRAYS, (x, y, x_test, y_test), strict=True)))
    dataset = Dataset(NAME, x, y, x_test, y_test, class_names=names, digest=sha256)
    return Labelled(with_row_numbers(dataset, train_rows, num_rows), labels)


def check_count(arrays: Any) -> None:
    """Check that a caller's arrays are (x, y) or (x, y, x_test, y_test).

    Raises:
      InputError: for another number of them, and for anything but a list or a tuple.
    """
    if not isinstance(arrays, list | tuple) or len(arrays) not in (2, 4):
        described = type(arrays).__name__
        if isinstance(arrays, list | tuple):
            described = f"{len(arrays)} arrays"
        raise InputError(f"data: {described}; expected (x, y) or (x, y, x_test, y_test)")


class TrainAndTest(NamedTuple):
    """Examples of which a random fifth of each class is for testing."""

    x: Any
    y: np.ndarray
    x_test: Any
    y_test: np.ndarray
    train_rows: Int[np.ndarray, " n"]
    """The numbers of x in all examples."""


def split_off_test(x: Any, y: np.ndarray) -> TrainAndTest:
    """Hold out a random fifth of each class for testing, the same in all runs.

    Args:
      x: arrays [N, ...].
      y: labels as `checked_labels` takes them.

    Raises:
      InputError: for wrong labels, and where no class has three examples.
    """
    (labels,) = checked_splits("data", {"y": y})
    check_lengths("data", "x", leaves(x)[0], "y", labels)
    train, test, _ = fifth_for_testing("data", labels)
    return TrainAndTest(take(x, train), labels[train], take(x, test), labels[test], train)


def with_row_numbers(dataset: Dataset, train_rows: Int[np.ndarray, " n"], num_rows: int) -> Dataset:
    """Number training examples as the user does, who has others among them.

    Args:
      dataset: of both splits.
      train_rows: numbers of the training examples in the user's data.
      num_rows: examples there, those for testing and those without a label included.
    """
    if len(train_rows) == num_rows:
        return dataset
    return dataset._replace(train_rows=train_rows, num_rows=num_rows)


class SplitRows(NamedTuple):
    """Row numbers of both splits, where a fifth of each class is for testing."""

    train: Int[np.ndarray, " n"]
    test: Int[np.ndarray, " m"]
    note: str
    """How many are for testing."""


def fifth_for_testing(where: str, labels: np.ndarray) -> SplitRows:
    """Hold out `fifth_of_classes` of examples that have none for testing.

    Raises:
      InputError: where no class has three examples, since a fifth of fewer is none.
    """
    is_test = fifth_of_classes(labels)
    if not is_test.any():
        raise InputError(f"{where}: no class has three examples, of which one could test; give test examples")
    note = held_out_in_words(int(is_test.sum()), len(labels))
    return SplitRows(np.flatnonzero(~is_test), np.flatnonzero(is_test), note)


def held_out_in_words(test: int, examples: int) -> str:
    """Return how many of all examples are for testing."""
    return f"{test:,} of {examples:,} examples, a fifth of each class, are for testing"


def fifth_of_classes(labels: np.ndarray, seed: int = 0) -> Bool[np.ndarray, " N"]:
    """Mark a random fifth of each class, for testing. It depends on no seed of a run, so
    that all runs share one test set."""
    rng = np.random.RandomState(seed)
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(0.2 * len(members))]] = True
    return is_test


class Numbered(NamedTuple):
    """Labels of two splits as numbers of classes."""

    y: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...]
    labels: np.ndarray
    """The caller's label of each class [C]."""


def numbered(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: Sequence[str] | None = None,
) -> Numbered:
    """Number the sorted labels of the training examples.

    Args:
      train, test: an array [N, ...] of the examples, and labels as `checked_labels` takes them.
      class_names: of the sorted labels; None: the labels themselves.

    Raises:
      InputError: naming the labels that do not fit.
    """
    y, y_test = checked_splits("data", {"y": train[1], "y_test": test[1]})
    check_lengths("data", "x", train[0], "y", y)
    check_lengths("data", "x_test", test[0], "y_test", y_test)
    # classes are the sorted labels of the training examples
    labels, y = np.unique(y, return_inverse=True)
    unknown = np.setdiff1d(y_test, labels)
    if len(unknown) or len(labels) < 2:
        problem = "y has one label"
        if len(unknown):
            problem = f"y_test has the label {unknown[0]!s}, and y has not"
        raise InputError(f"data: {problem}")
    names = tuple(map(str, labels if class_names is None else class_names))
    if len(names) != len(labels):
        raise InputError(f"class_names: {len(names)} names for {len(labels)} classes")
    return Numbered(y.astype(np.int64), np.searchsorted(labels, y_test), names, labels)


def checked_dataset(dataset: Dataset) -> Dataset:
    """Return a data set whose arrays are as `Dataset` has them, with a digest.

    Raises:
      InputError: naming the field that does not fit.
    """
    names = dataset.class_names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"class_names: {names!r:.80}; expected a tuple of text, the name of each label")
    if len(names) < 2:
        raise InputError(f"class_names: {len(names)} classes; two are needed")
    if not isinstance(dataset.name, str) or not dataset.name:
        raise InputError(f"data: the data set's name is {dataset.name!r:.80}; expected text")
    read = ARRAYS if dataset.kind is None else ("y_train", "y_test")
    arrays = {key: as_array("data", key, getattr(dataset, key)) for key in read}
    labels = checked_splits("data", {key: arrays[key] for key in ("y_train", "y_test")})
    checked: dict[str, Any] = {"class_names": tuple(names)}
    for split, y in zip(("train", "test"), labels, strict=True):
        x = getattr(dataset, f"x_{split}")
        if dataset.kind is None:
            x = checked_images("data", f"x_{split}", arrays[f"x_{split}"])
        check_lengths("data", f"x_{split}", leaves(x)[0], f"y_{split}", y)
        _check_class_numbers(f"y_{split}", y, names)
        _check_sizes(f"size_{split}", getattr(dataset, f"size_{split}"), len(y))
        checked |= {f"x_{split}": x, f"y_{split}": y}
    # a class without training examples would be in a task and never be learned
    absent = np.setdiff1d(np.arange(len(names)), checked["y_train"])
    if len(absent):
        raise InputError(f"data: y_train has no example of class {names[absent[0]]!r} (label {absent[0]})")
    checked["columns"] = _checked_columns("columns", dataset.columns, len(checked["y_train"]))
    checked["columns_test"] = _checked_columns("columns_test", dataset.columns_test, len(checked["y_test"]))
    if not dataset.digest:
        checked["digest"] = digest_of_examples(*(checked[key] for key in ARRAYS))
    return dataset._replace(**checked)


def digest_of_examples(x: Any, y: np.ndarray, x_test: Any, y_test: np.ndarray) -> str:
    """Return the sha256 of all examples and labels."""
    arrays = {"y_train": y, "y_test": y_test}
    for name, examples in (("x_train", x), ("x_test", x_test)):
        arrays |= {place: np.asarray(leaf) for place, leaf in named_leaves(examples, name).items()}
    return digest_of_arrays(arrays)


def _check_class_numbers(key: str, labels: np.ndarray, names: Sequence[str]) -> None:
    """Check that labels are numbers of classes.

    Raises:
      InputError: for text, and for a number that has no name.
    """
    if labels.dtype.kind == "U":
        raise InputError(f"data: {key} is text; a Dataset has integers, which are indices of class_names")
    if len(labels) and labels.max() >= len(names):
        raise InputError(f"data: {key} has the label {labels.max()}, but class_names has {len(names)} names")


def _check_sizes(key: str, sizes: Any, count: int) -> None:
    """Check the original sizes of images, where they are given.

    Raises:
      InputError: for anything but a height and a width for each image.
    """
    if sizes is None:
        return
    array = as_array("data", key, sizes)
    if array.shape != (count, 2) or array.dtype.kind not in "iu" or (array < 1).any():
        raise InputError(
            f"data: {_described(key, array)}; expected height and width of each image, [{count}, 2]"
        )


def _checked_columns(field: str, columns: Any, count: int) -> dict[str, np.ndarray]:
    """Return the columns of a split.

    Raises:
      InputError: for a column that does not have one value for each example.
    """
    if not isinstance(columns, Mapping):
        raise InputError(f"data: {field} is a {type(columns).__name__}; expected name -> array")
    checked = {}
    for name, values in columns.items():
        array = as_array("data", f"{field}[{name!r:.80}]", values)
        if array.shape != (count,) or array.dtype.kind not in "biufU":
            described = _described(f"{field}[{name!r:.80}]", array)
            raise InputError(f"data: {described}; expected a number or text for each example, [{count}]")
        checked[name] = array
    return checked


def as_array(where: str, key: str, values: Any) -> np.ndarray:
    """Convert the caller's values to a numpy array.

    Raises:
      InputError: for masked arrays, whose masks would be lost, and for values of several shapes.
    """
    if is_masked(values):
        raise InputError(
            f"{where}: {key} is a masked array, and masks are not read; leave out what is masked"
        )
    values = _pillow_pixels(where, key, values)
    # numpy raises ValueError for nested lists of different lengths
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InputError(
            f"{where}: {key} is not an array: its values have several shapes ({reason(error)}); "
            f"make them equal"
        ) from None
    # anything: arrays of other libraries convert themselves, and torch's refuses on a GPU
    except Exception as error:
        raise InputError(f"{where}: {key} is not an array that numpy reads ({reason(error)})") from None
    if is_mixed(values, array):
        raise InputError(f"{where}: {key} mixes text with other values; use one type")
    return array


def is_mixed(values: Any, array: np.ndarray) -> bool:
    """Return whether a list has text beside numbers or None, of which numpy makes text."""
    listed = isinstance(values, list | tuple) and array.ndim == 1 and array.dtype.kind == "U"
    return listed and not all(isinstance(value, str) for value in values)


def is_masked(values: Any) -> bool:
    """Return whether values, or some in a list, are masked; numpy drops masks of a list."""
    candidates = [values]
    if isinstance(values, list | tuple):
        candidates += values
    return any(isinstance(value, np.ma.MaskedArray) for value in candidates)


def _pillow_pixels(where: str, key: str, values: Any) -> Any:
    """Return values in which images of Pillow are pixels in RGB.

    numpy would take a palette's entries for grey levels.

    Raises:
      InputError: for an image of more than 8 bits a channel.
    """
    if isinstance(values, list | tuple) and any(isinstance(value, Image.Image) for value in values):
        return [_pillow_pixels(where, f"{key}[{i}]", value) for i, value in enumerate(values)]
    if not isinstance(values, Image.Image):
        return values
    try:
        return pixels_of(values, key)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix('dataset: ')}") from None


def check_lengths(where: str, x: str, images: np.ndarray, y: str, labels: np.ndarray) -> None:
    """Check that there is a label for each image.

    Raises:
      InputError: with both numbers.
    """
    if len(images) != len(labels):
        raise InputError(
            f"{where}: {x} has {len(images)} examples but {y} has {len(labels)}; they must match"
        )


# ---- labels ----------------------------------------------------------------------------


class _Labels(NamedTuple):
    """Labels and the way in which they were written."""

    values: np.ndarray
    """[N], integers or text."""
    kind: str
    """"integers", "text" or "one-hot over C classes"."""


def checked_labels(where: str, key: str, labels: np.ndarray) -> np.ndarray:
    """Return the label of each example [N]: int64 from 0, or text.

    Args:
      where: the field or file, for messages.
      key: of the array in it.
      labels: integers or text of shape [N] or [N, 1], or one-hot [N, C].

    Raises:
      InputError: for anything else, and for missing labels: negative numbers and empty text.
    """
    return _labels(where, key, labels).values


def checked_splits(where: str, labels: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return `checked_labels` of the splits of one data set, by name; all must write
    labels in the same way.

    Raises:
      InputError: as `checked_labels`, and for integers in one split and text or one-hot
        labels in another.
    """
    labels_of = {key: _labels(where, key, key_labels) for key, key_labels in labels.items()}
    if len({key_labels.kind for key_labels in labels_of.values()}) > 1:
        descriptions = [
            f"{_described(key, labels[key])}, {key_labels.kind}" for key, key_labels in labels_of.items()
        ]
        hints = [key for key, key_labels in labels_of.items() if key_labels.kind.startswith("one-hot")]
        hint = ""
        if hints:
            hint = f"; nearest: {hints[0]}.argmax(-1)"
        raise InputError(f"{where}: {', but '.join(descriptions)}; write the labels of both in one way{hint}")
    return [key_labels.values for key_labels in labels_of.values()]


def missing_labels(labels: np.ndarray) -> Bool[np.ndarray, " N"]:
    """Mark the examples without a label, whose label is a negative number or empty text.

    Args:
      labels: integers or text of shape [N] or [N, 1]; of other arrays none is marked.
    """
    flat = _flat(labels)
    if flat.ndim != 1 or flat.dtype.kind not in "iuU":
        return np.zeros(len(labels), bool)
    if flat.dtype.kind == "U":
        return np.char.strip(flat) == ""
    return (flat < 0) | (flat > np.iinfo(np.int64).max)


def rows_with_label(
    labels: np.ndarray, place: Callable[[int], str], skip_missing: bool
) -> tuple[Int[np.ndarray, " n"], str]:
    """Return the row numbers of a file's examples with a label, and a note on the others.

    Args:
      labels: as `missing_labels` takes them.
      place: returns where an example is, for messages.
      skip_missing: whether the user allows examples without a label.

    Raises:
      InputError: naming the first example without one, where the user does not; for labels
        that are all -1 or 1.
    """
    missing = missing_labels(labels)
    if not missing.any():
        return np.arange(len(labels)), ""
    first = place(int(np.argmax(missing)))
    # two classes, of which --skip-corrupt would leave one
    if set(np.unique(labels).tolist()) == {-1, 1}:
        raise InputError(f"{first} has the label -1; write the classes -1 and 1 as 0 and 1")
    count = f"{missing.sum():,} of {len(labels):,} examples"
    if skip_missing:
        return np.flatnonzero(~missing), f"skipped {count}, without a label"
    raise InputError(f"{first} has no label; {count} have none: leave them out with --skip-corrupt")


def _flat(labels: np.ndarray) -> np.ndarray:
    """Return labels [N, 1] as [N]."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return labels[:, 0]
    return labels


def _labels(where: str, key: str, labels: np.ndarray) -> _Labels:
    flat = _plain(where, key, _flat(labels))
    # only exact one-hot rows: probabilities or several labels have no one class
    if flat.ndim == 2 and flat.shape[1] > 1 and _is_one_hot(flat):
        return _Labels(flat.argmax(-1).astype(np.int64), f"one-hot over {flat.shape[1]} classes")
    if flat.ndim != 1 or flat.dtype.kind not in "iuU":
        raise InputError(
            f"{where}: {_described(key, labels)}; expected integers or text of shape [N], or one-hot "
            f"[N, C]{_label_hint(key, flat)}"
        )
    missing = np.flatnonzero(missing_labels(flat))
    if len(missing):
        others = ""
        if len(missing) > 1:
            others = f" and {len(missing) - 1} more"
        raise InputError(
            f"{where}: {key} holds label {flat[missing[0]]!s} (example {missing[0]}{others}); labels are "
            f"integers from 0 or text{_missing_hint(key, flat)}"
        )
    if flat.dtype.kind == "U":
        return _Labels(flat, "text")
    return _Labels(flat.astype(np.int64), "integers")


def _described(key: str, labels: np.ndarray) -> str:
    return f"{key} is {labels.dtype} of shape {labels.shape}"


def _plain(where: str, key: str, labels: np.ndarray) -> np.ndarray:
    """Convert bytes, numpy's strings and Python objects to text or integers if possible."""
    if labels.dtype.kind == "T":
        return labels.astype(str)
    if labels.dtype.kind == "S":
        try:
            return np.char.decode(labels, "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: {key} holds text that is not UTF-8 ({reason(error)})") from None
    if labels.dtype.kind != "O" or labels.ndim != 1:
        return labels
    missing = [i for i, value in enumerate(labels) if _is_null(value)]
    if missing:
        raise InputError(
            f"{where}: {key} holds label {labels[missing[0]]!s} (example {missing[0]}); leave out examples "
            "without a label"
        )
    # pandas has text, and integers beside missing values, as Python objects
    for kinds, dtype in (((str,), str), ((int, np.integer), np.int64)):
        if all(isinstance(value, kinds) and not isinstance(value, bool) for value in labels):
            try:
                return labels.astype(dtype)
            except OverflowError:
                return labels
    return labels


def _is_null(value: object) -> bool:
    """Check whether a value is None, NaN or pandas' value for either."""
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _is_one_hot(labels: np.ndarray) -> bool:
    """Check whether each row [C] has a single 1 among zeros."""
    if labels.dtype.kind not in "biuf" or not len(labels):
        return False
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(-1) == 1).all())


def _label_hint(key: str, labels: np.ndarray) -> str:
    """Return advice on labels of another type or shape."""
    if labels.ndim == 2 and labels.shape[0] == 1:
        return f"; nearest: {key}[0]"
    number = labels.dtype.kind in "biuf"
    if labels.ndim == 2 and number and len(labels) and (labels.sum(-1) > 1).any() and labels.max() == 1:
        row = int(np.argmax(labels.sum(-1) > 1))
        return f"; example {row} has several labels, and one is needed"
    if labels.ndim == 2 and labels.dtype.kind == "f" and np.allclose(labels.sum(-1), 1):
        return f"; nearest: {key}.argmax(-1)"
    if labels.ndim == 1 and labels.dtype.kind in "bf" and len(labels) and (labels == np.rint(labels)).all():
        return f"; nearest: {key}.astype(int)"
    return ""


def _missing_hint(key: str, labels: np.ndarray) -> str:
    if labels.dtype.kind != "U" and set(np.unique(labels).tolist()) == {-1, 1}:
        return f"; nearest: ({key} > 0).astype(int)"
    return "; leave out examples without a label"


# ---- images ----------------------------------------------------------------------------


def checked_images(where: str, key: str, images: np.ndarray) -> UInt8[np.ndarray, "N H W 3"]:
    """Convert images to grey levels, channels last.

    Args:
      where: the field or file, for messages.
      key: of the array in it.
      images: uint8, float in [0, 1], or bool; [N, H, W], or with 1 or 3 channels last or
        first. If both are possible, channels are last.

    Raises:
      InputError: with the way to convert them.
    """
    # channels first, as in torch; where both readings are possible, channels are last
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        hint = _shape_hint(images.shape)
        if images.ndim == 2:
            hint += "; for a table of numbers: backbone mlp"
        raise InputError(f"{where}: {key} has shape {images.shape}; expected {_SHAPES}{hint}")
    if 0 in images.shape:
        raise InputError(f"{where}: {key} is empty, shape {images.shape}")
    if images.dtype != np.uint8:
        images = _grey_levels(where, key, images)
    # grey images get three equal channels, since all networks read RGB
    return np.ascontiguousarray(np.broadcast_to(images, (*images.shape[:3], 3)))


def checked_image(where: str, key: str, image: np.ndarray) -> UInt8[np.ndarray, "H W 3"]:
    """Convert one image to grey levels, channels last; otherwise as `checked_images`.

    Args:
      where: the file and the position in it, for messages.
      key: name of the image.
      image: [H, W], [H, W, C] or [C, H, W] with 1 or 3 channels.

    Raises:
      InputError: for anything else.
    """
    channels = image.ndim == 3 and (image.shape[-1] in (1, 3) or image.shape[0] in (1, 3))
    if image.ndim != 2 and not channels:
        raise InputError(
            f"{where}: {key} has shape {image.shape}; expected [H, W, 3], [3, H, W] or [H, W]"
            f"{_shape_hint((1, *image.shape))}"
        )
    return checked_images(where, key, image[None])[0]


def _shape_hint(shape: tuple[int, ...]) -> str:
    """Return advice on images of another shape."""
    if len(shape) == 4 and 4 in (shape[-1], shape[1]):
        opaque = "x[:, :3]"
        if shape[-1] == 4:
            opaque = "x[..., :3]"
        return f"; transparency is not read, nearest: {opaque}"
    # a table with an image per row, as scikit-learn has them
    if len(shape) == 2:
        for channels, form in ((1, "-1, {0}, {0}"), (3, "-1, 3, {0}, {0}")):
            side = round((shape[1] / channels) ** 0.5)
            if side > 1 and channels * side * side == shape[1]:
                order = ""
                if channels == 3:
                    order = ", if channels come first"
                return f"; nearest: x.reshape({form.format(side)}){order}"
    return ""


def _grey_levels(where: str, key: str, images: np.ndarray) -> np.ndarray:
    """Convert pixels in [0, 1] to 0..255."""
    if images.dtype.kind == "b":
        return images.astype(np.uint8) * np.uint8(255)
    # jax's bfloat16 is of kind "V" to numpy, not a float
    if images.dtype.name == "bfloat16":
        images = images.astype(np.float32)
    if images.dtype.kind not in "iuf":
        raise InputError(f"{where}: {key} is {images.dtype}; {_LEVELS}; nearest: an array of numbers")
    wrong = images.size - int(np.isfinite(images).sum())
    if wrong:
        raise InputError(
            f"{where}: {key} has {wrong:,} values that are NaN or infinite; {_LEVELS}; leave these images out"
        )
    low = float(images.min())
    high = float(images.max())
    if images.dtype.kind == "f" and low >= 0 and high <= 1:
        return np.rint(images * np.float32(255)).astype(np.uint8)
    problem = f"is {images.dtype}"
    if images.dtype.kind == "f":
        problem = f"has values from {low:g} to {high:g}"
    raise InputError(f"{where}: {key} {problem}; {_LEVELS}; nearest: {_level_hint(images.dtype, low, high)}")


def _level_hint(dtype: np.dtype, low: float, high: float) -> str:
    """Return advice on how to convert pixels without loss."""
    # the smallest usual white that no pixel exceeds
    white = next((white for white in _WHITES if high <= white), None)
    if low < 0 or white is None:
        return "(x - x.min()) / (x.max() - x.min())"
    if white == 255 and dtype.kind != "f":
        return "x.astype('uint8')"
    if white == 1:
        return "x.astype(bool), if 1 is white"
    return f"x / {white}, if {white} is white"


def sides(images: np.ndarray) -> str:
    """Return height and width of images, for messages."""
    return f"{images.shape[1]}x{images.shape[2]}"
