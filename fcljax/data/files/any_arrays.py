"""Check examples that are not images: arrays of any shape, pytrees of them, and texts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.arrays import (
    NAME,
    Labelled,
    as_array,
    check_count,
    digest_of_examples,
    numbered,
    split_off_test,
    with_row_numbers,
)
from fcljax.data.files.dataset import Dataset
from fcljax.data.kinds import ArrayData, Kind, TextData, leaves, named_leaves, with_leaves
from fcljax.errors import InputError

_INT32 = np.iinfo(np.int32)


class StoredExamples(NamedTuple):
    """Checked examples of one split."""

    input: Any
    """Arrays [N, ...] in types of at most 32 bits."""
    kind: Kind


def checked_examples(where: str, key: str, values: Any) -> StoredExamples:
    """Return examples as they are stored: numbers in 32 bits, texts as tokens.

    Args:
      where: the field or file, for messages.
      key: of the values in it.
      values: an array [N, ...], a dict or tuple of such arrays, or a list of texts.

    Raises:
      InputError: naming the array that has no numbers, a NaN, or another number of examples.
    """
    arrays = named_leaves(values, key)
    if not arrays:
        raise InputError(f"{where}: {key} has no arrays")
    arrays = {name: as_array(where, name, leaf) for name, leaf in arrays.items()}
    name, *further_names = arrays
    # one column of text is text; text beside other arrays would be a category without a
    # code
    is_text = arrays[name].ndim == 1 and arrays[name].dtype.kind in "UT"
    if is_text and not further_names:
        tokens = TextData()
        return StoredExamples(tokens.encode(arrays[name].tolist()), tokens)
    checked = [_checked_numbers(where, name, array) for name, array in arrays.items()]
    count = len(checked[0])
    for further_name, array in zip(further_names, checked[1:], strict=True):
        if len(array) != count:
            raise InputError(
                f"{where}: {name} has {count} examples and {further_name} {len(array)}; they must match"
            )
    return StoredExamples(with_leaves(values, checked), ArrayData())


def dataset_of_any_arrays(
    arrays: Any, name: str = NAME, class_names: Sequence[str] | None = None
) -> Labelled:
    """Make the data set of (x, y) or (x, y, x_test, y_test), where x are not images.

    Without test examples, a random fifth of each class is for testing, the same in all runs.

    Args:
      arrays: examples as `checked_examples` takes them, and labels as `checked_labels` does.
      name: of the data set.
      class_names: of the sorted labels; None: the labels themselves.

    Raises:
      InputError: naming the array that does not fit.
    """
    check_count(arrays)
    x, kind = checked_examples("data", "x", arrays[0])
    y = as_array("data", "y", arrays[1])
    num_rows = len(leaves(x)[0])
    train_rows = np.arange(num_rows)
    if len(arrays) == 4:
        x_test = checked_examples("data", "x_test", arrays[2]).input
        y_test = as_array("data", "y_test", arrays[3])
        check_alike("data", "x", x, "x_test", x_test)
    else:
        x, y, x_test, y_test, train_rows = split_off_test(x, y)
    train = (leaves(x)[0], y)
    test = (leaves(x_test)[0], y_test)
    y, y_test, names, labels = numbered(train, test, class_names)
    digest = digest_of_examples(x, y, x_test, y_test)
    dataset = Dataset(name, x, y, x_test, y_test, names, augment=False, digest=digest, kind=kind)
    return Labelled(with_row_numbers(dataset, train_rows, num_rows), labels)


def check_alike(where: str, name: str, x: Any, test_name: str, x_test: Any) -> None:
    """Check that the examples of both splits have one structure, one shape and one type.

    Raises:
      InputError: with both.
    """
    if named_leaves(x).keys() != named_leaves(x_test).keys():
        raise InputError(f"{where}: {name} and {test_name} are of different structures; make them equal")
    for train, test in zip(leaves(x), leaves(x_test), strict=True):
        if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
            raise InputError(
                f"{where}: an example of {name} is {train.dtype} {list(train.shape[1:])} and of "
                f"{test_name} {test.dtype} {list(test.shape[1:])}; make them equal"
            )


def _checked_numbers(where: str, key: str, array: np.ndarray) -> np.ndarray:
    """Return an array of numbers [N, ...] in a type of at most 32 bits.

    Raises:
      InputError: for anything but numbers, for none at all, and for values that no
        classifier can read.
    """
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        hint = "numbers; nearest: write categories as one-hot columns"
        if array.dtype.kind in "UT":
            hint = "numbers, or of one text for each example"
        raise InputError(
            f"{where}: {key} is {array.dtype} of shape {array.shape}; expected an array of {hint}"
        )
    if array.ndim == 0 or 0 in array.shape:
        raise InputError(
            f"{where}: {key} has shape {array.shape}; expected [N, ...] with at least one number"
        )
    # one number for each example is a table of one column
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype.kind in "iu":
        if array.dtype.itemsize < 4:
            return np.ascontiguousarray(array)
        if array.min() < _INT32.min or array.max() > _INT32.max:
            raise InputError(f"{where}: {key} has integers beyond 32 bits; nearest: {key}.astype('float32')")
        return np.ascontiguousarray(array, np.int32)
    if array.dtype.kind == "b":
        return np.ascontiguousarray(array)
    # numbers beyond float32 become infinite without a warning, and are reported below
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    wrong = ~np.isfinite(array)
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        raise InputError(
            f"{where}: {key} has {wrong.sum():,} values that are NaN or infinite in 32 bits, the first at "
            f"{place}; leave these examples out, or fill them in"
        )
    return array
