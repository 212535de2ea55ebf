"""Use some of a data set's classes (`--classes`), as if it had no others."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fcljax.data.files.dataset import Dataset, with_part_of_training
from fcljax.data.kinds import take
from fcljax.errors import InputError, nearest
from fcljax.options import whole_number


def with_classes(dataset: Dataset, text: str) -> Dataset:
    """Return the data set with these classes alone, numbered from 0 in their old order.

    Args:
      dataset: with all classes.
      text: the classes, as `chosen_classes` reads them.

    Raises:
      InputError: as `chosen_classes`, or for a class without training or test examples.
    """
    classes = chosen_classes(text, dataset.class_names)
    if len(classes) == len(dataset.class_names):
        return dataset
    for split, labels in (("training", dataset.y_train), ("test", dataset.y_test)):
        absent = np.setdiff1d(classes, labels)
        if len(absent):
            raise InputError(f"classes: class {dataset.class_names[absent[0]]!r} has no {split} examples")
    train = np.flatnonzero(np.isin(dataset.y_train, classes))
    test = np.flatnonzero(np.isin(dataset.y_test, classes))
    names = tuple(dataset.class_names[label] for label in classes)
    sources = None
    if dataset.sources is not None:
        sources = tuple(dataset.sources[label] for label in classes)
    size_test = None
    if dataset.size_test is not None:
        size_test = dataset.size_test[test]
    part = with_part_of_training(dataset, train)
    return part._replace(
        # the classes are sorted, so a label's place among them is its new number
        y_train=np.searchsorted(classes, part.y_train),
        x_test=take(dataset.x_test, test),
        y_test=np.searchsorted(classes, dataset.y_test[test]),
        class_names=names,
        size_test=size_test,
        columns_test={name: values[test] for name, values in dataset.columns_test.items()},
        sources=sources,
        numbers=tuple(classes.tolist()),
        digest=hashlib.sha256(f"{dataset.digest} of classes {classes.tolist()}".encode()).hexdigest(),
    )


def chosen_classes(text: str, class_names: Sequence[str]) -> Int[np.ndarray, " C"]:
    """Return the sorted original labels of classes that a user names, such as "0-9,12" or
    "cat,dog".

    Raises:
      InputError: for a class that does not exist or is named twice, and for a range that
        has none.
    """
    labels: list[int] = []
    for word in text.split(","):
        for label in _labels(word.strip(), class_names):
            if label in labels:
                raise InputError(f"classes: class {class_names[label]!r} appears twice")
            labels.append(label)
    return np.array(sorted(labels), np.int64)


def _labels(word: str, class_names: Sequence[str]) -> Sequence[int]:
    """Return the labels of a name, of a number, or of a range of numbers.

    Raises:
      InputError: for any other word.
    """
    # a name wins over a number of the same digits, as in --class-order
    if word in class_names:
        return [class_names.index(word)]
    start, dash, end = word.partition("-")
    first = whole_number(start)
    last = whole_number(end) if dash else first
    if first is None or last is None:
        raise InputError(f"classes: no class {word!r}; {nearest(word, class_names)}")
    highest = len(class_names) - 1
    if first > last or last > highest:
        near = f"{min(first, last, highest)}-{min(max(first, last), highest)}" if dash else str(highest)
        raise InputError(f"classes: {word!r} of classes 0 to {highest}; nearest: {near!r}")
    return range(first, last + 1)
