"""Compute the metrics of federated continual learning, each with one definition, as
fractions in [0, 1].

All of them read the accuracy matrix a: a[t, i] is the accuracy on the test images of
task i after training on task t. Above the diagonal there is nothing: NaN, None, or a
ragged list. The first rows of an unfinished run are a matrix too; T is the number of
rows given. A missing value on or below the diagonal (a task without test images) is
left out of every mean.

If all classes seen so far compete in the predictions, these are Class-IL accuracies; if
only the classes of the image's own task compete, Task-IL accuracies.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from fcljax.errors import InputError

Matrix = np.ndarray | Sequence


def confusion_matrix(
    label: Integer[np.ndarray, " N"],
    prediction: Integer[np.ndarray, " N"],
    num_classes: int,
) -> Int[np.ndarray, "C C+1"]:
    """Count [true class, predicted class] of N examples; the last column has those
    without a prediction.

    Args:
      label: in 0..num_classes-1.
      prediction: in 0..num_classes-1, or -1: none.
      num_classes: C.

    Raises:
      InputError: a class id outside these ranges.
    """
    for field, ids, lowest in (("label", label, 0), ("prediction", prediction, -1)):
        wrong = ids[(ids < lowest) | (ids >= num_classes)]
        if wrong.size:
            raise InputError(f"{field}: class {wrong[0]} is outside {lowest}..{num_classes - 1}")
    # pairs of classes as one number; the remainder brings -1 to the last column
    columns = num_classes + 1
    pair = label.astype(np.int64) * columns + prediction % columns
    return np.bincount(pair, minlength=num_classes * columns).reshape(num_classes, columns)


def unpredicted(confusion: Integer[np.ndarray, "C columns"]) -> int:
    """Count the examples without a prediction; 0 for [C, C] counts, which older
    checkpoints have."""
    # the columns behind those of the classes: one, or in older checkpoints none
    return int(confusion[:, len(confusion) :].sum())


def per_class_accuracy(
    confusion: Integer[np.ndarray, "C C+1"],
) -> Float[np.ndarray, " C"]:
    """Return the fraction of each class's examples with a right prediction; NaN for a
    class without examples."""
    return _ratio(np.diagonal(confusion), confusion.sum(1))


def task_accuracy(
    confusion: Integer[np.ndarray, "C C+1"], tasks: Sequence | np.ndarray
) -> Float[np.ndarray, " t"]:
    """Return the row a[t, :t+1] of the accuracy matrix.

    Args:
      confusion: counts over the test examples of all seen classes.
      tasks: the class ids of each task seen so far; negative ids are padding.

    Returns:
      Right predictions over examples, per task; NaN for a task without examples.
    """
    classes = [np.asarray(task)[np.asarray(task) >= 0] for task in tasks]
    right = np.diagonal(confusion)
    examples = confusion.sum(1)
    return _ratio(
        np.array([right[ids].sum() for ids in classes]), np.array([examples[ids].sum() for ids in classes])
    )


def task_confusion(
    confusion: Integer[np.ndarray, "C C+1"], tasks: Sequence | np.ndarray
) -> list[list] | None:
    """Return shares [true task, predicted task] of the examples of each task, [T, T];
    None for a task without examples. Examples without a prediction are in no column.

    Returns:
      None where tasks share classes, so that a class does not say the task.
    """
    member = np.zeros((len(tasks), len(confusion)), int)
    for t, classes in enumerate(tasks):
        member[t, np.asarray(classes)[np.asarray(classes) >= 0]] = 1
    # a class of two tasks would count in both columns
    if (member.sum(0) > 1).any():
        return None
    counts = member @ confusion[:, : len(confusion)] @ member.T
    return without_nan(_ratio(counts, (member @ confusion.sum(1))[:, None]))


def client_accuracy(
    confusion: Integer[np.ndarray, "C C+1"], class_counts: Integer[np.ndarray, "K C"]
) -> Float[np.ndarray, " K"]:
    """Compute the accuracy of the global model under each client's own label
    distribution.

    Args:
      confusion: counts over the test examples of all seen classes; a class without any
        counts as not seen.
      class_counts: training examples of each client and class.

    Returns:
      The mean of the per-class accuracies weighted by the client's examples of the seen
      classes; NaN for a client without such examples.
    """
    accuracy = per_class_accuracy(confusion)
    # classes of later tasks have no accuracy yet and must not count as 0
    seen = ~np.isnan(accuracy)
    counts = class_counts[:, seen]
    return _ratio(counts @ accuracy[seen], counts.sum(1))


def worst(values: Sequence[float | None], share: float = 0.1) -> float | None:
    """Return the mean of the lowest values, a share of all and one at least; None
    without values."""
    # a client that has learned nothing has no accuracy, and does not count as the worst
    ordered = sorted(value for value in values if value is not None)
    lowest = ordered[: max(1, math.ceil(share * len(ordered)))]
    if lowest:
        return sum(lowest) / len(lowest)
    return None


class Calibration(NamedTuple):
    """Confidence beside accuracy, in bins of equal width of the predicted class's
    probability."""

    ece: float
    """expected calibration error; NaN if there are no examples"""
    examples: Integer[np.ndarray, " bins"]
    """how many each bin has"""
    confidence: Float[np.ndarray, " bins"]
    """mean over a bin's examples; NaN where it has none"""
    accuracy: Float[np.ndarray, " bins"]
    """mean over a bin's examples; NaN where it has none"""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, None for NaN."""
        return {
            "ece": without_nan(self.ece),
            "examples": self.examples.tolist(),
            "confidence": without_nan(self.confidence),
            "accuracy": without_nan(self.accuracy),
        }


def calibration(
    right: Bool[np.ndarray, " N"], confidence: Float[np.ndarray, " N"], bins: int = 15
) -> Calibration:
    """Compute the expected calibration error: sum over bins of |accuracy - confidence|,
    weighted by their share of the examples (Guo et al. 2017, equation 3, with its 15
    bins).

    Args:
      right: is the predicted class the label?
      confidence: the predicted class's probability, in [0, 1]; a bin includes its upper
        edge. An example without a prediction has NaN and is in no bin.
      bins: of equal width.
    """
    has_prediction = ~np.isnan(confidence)
    right = right[has_prediction]
    confidence = confidence[has_prediction]
    # ceil - 1: a bin includes its upper edge, so a confidence of 1 is in the last one
    bin_of = np.clip(np.ceil(confidence.astype(float) * bins).astype(int) - 1, 0, bins - 1)
    examples = np.bincount(bin_of, minlength=bins)
    mean_confidence, accuracy = (
        _ratio(np.bincount(bin_of, value.astype(float), bins), examples) for value in (confidence, right)
    )
    gap = np.abs(np.nan_to_num(accuracy - mean_confidence))
    ece = float("nan")
    if len(right):
        ece = float(np.sum(examples * gap) / len(right))
    return Calibration(ece, examples, mean_confidence, accuracy)


def average_accuracy(matrix: Matrix) -> Float[np.ndarray, " T"]:
    """Compute A_t = 1/(t+1) sum_{i<=t} a[t, i]: the plain mean over seen tasks of any
    size (VFCL eq. 22)."""
    return np.array([_mean(row[: t + 1]) for t, row in enumerate(_lower(matrix))])


def A_avg(matrix: Matrix) -> float:
    """Compute the average incremental accuracy: the mean over t of A_t (A-bar in FPPL,
    Avg in PILoRA)."""
    return _mean(average_accuracy(matrix))


def A_last(matrix: Matrix) -> float:
    """Return A_T, the average accuracy after the last task given; NaN for an empty
    matrix."""
    accuracy = average_accuracy(matrix)
    if accuracy.size:
        return float(accuracy[-1])
    return float("nan")


class ByImage(NamedTuple):
    """Class-IL accuracies over images after each task, by the names of HePCo's
    release."""

    acc: Float[np.ndarray, " T"]
    """over the test images of all seen tasks"""
    plastic: Float[np.ndarray, " T"]
    """of the task itself"""
    lastacc: Float[np.ndarray, " T"]
    """of all tasks before it; NaN after the first"""


def by_image(matrix: Matrix, images: Sequence[int] | np.ndarray) -> ByImage:
    """Compute accuracies over images, in which larger tasks count more.

    Args:
      matrix: the accuracy matrix.
      images: how many test images each task has.
    """
    a = _lower(matrix)
    images = np.asarray(images, float)[: len(a)]
    right = np.nan_to_num(a) * images
    seen = np.tri(len(a)) * images
    # k = 0: with the task itself; k = -1: the tasks before it
    acc, lastacc = (_ratio(np.tril(right, k).sum(1), np.tril(seen, k).sum(1)) for k in (0, -1))
    return ByImage(acc, np.diagonal(a).copy(), lastacc)


def drop(matrix: Matrix, images: Sequence[int] | np.ndarray) -> float:
    """Compute F_N of HePCo: by how much the accuracy over the images of all earlier
    tasks falls when a task is learned, averaged over the tasks after the first; 0 for a
    single task."""
    accuracies = by_image(matrix, images)
    if len(accuracies.acc) < 2:
        return 0.0
    # after a task, minus before it: over the same images
    return _mean(accuracies.acc[:-1] - accuracies.lastacc[1:])


def forgetting(matrix: Matrix) -> dict[str, float | None]:
    """Compute forgetting by the three definitions in use; all are None for a single task.

    paper: 1/(T-1) sum_{i<T} (max_{t<T} a[t, i] - a[T, i]); negative when old tasks
      improve (FPPL, PILoRA; VFCL eq. 23).
    released: 1/T sum_{i<=T} (max_{t<=T} a[t, i] - a[T, i]); never negative, the last
      task adds 0 (FPPL's released script).
    diagonal: 1/(T-1) sum_{i<T} (a[i, i] - a[T, i]): the loss since a task was learned,
      which is the negative backward transfer.
    """
    a = _lower(matrix)
    if len(a) < 2:
        return {"paper": None, "released": None, "diagonal": None}
    final = a[-1]
    # fmax leaves out NaN, above the diagonal and of tasks without test images
    best_before = np.fmax.reduce(a[:-1, :-1], axis=0)
    return {
        "paper": _mean(best_before - final[:-1]),
        "released": _mean(np.fmax.reduce(a, axis=0) - final),
        "diagonal": _mean(np.diagonal(a)[:-1] - final[:-1]),
    }


def backward_transfer(matrix: Matrix) -> float | None:
    """Compute 1/(T-1) sum_{i<T} (a[T, i] - a[i, i]) (Lopez-Paz and Ranzato 2017, eq.
    3); None for a single task."""
    loss = forgetting(matrix)["diagonal"]
    if loss is None:
        return None
    # + 0.0 turns -0.0 into 0.0
    return -loss + 0.0


def summarize(matrix: Matrix) -> dict:
    """Return what a run reports, ready for JSON: accuracy, A, A_avg, A_last, forgetting,
    backward_transfer."""
    return {
        "accuracy": to_json(matrix),
        "A": average_accuracy(matrix).tolist(),
        "A_avg": A_avg(matrix),
        "A_last": A_last(matrix),
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
    }


def over_seeds(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return (mean, population standard deviation) over seeds: ddof = 0, as the papers
    report it."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std())


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Return (mean, low, high) of ours minus theirs, value by value, with Student's
    confidence interval of the mean.

    Raises:
      InputError: for fewer than two pairs, which have no interval.
    """
    difference = np.asarray(ours, float) - np.asarray(theirs, float)
    count = len(difference)
    if count < 2:
        raise InputError(f"seeds: {count} pairs of runs have no confidence interval; nearest: 2")
    # scipy takes a fifth of the time of `fcljax compare`, and only several seeds need it
    from scipy.special import stdtrit

    half = stdtrit(count - 1, (1 + level) / 2) * difference.std(ddof=1) / np.sqrt(count)
    mean = float(difference.mean())
    return mean, mean - float(half), mean + float(half)


def to_json(matrix: Matrix) -> list[list[float | None]]:
    """Return the accuracy matrix as square nested lists, None above the diagonal and
    where a value is missing."""
    return without_nan(_lower(matrix))


def without_nan(values: float | np.ndarray) -> Any:
    """Return plain numbers in nested lists for JSON, None for NaN."""
    if isinstance(values, np.ndarray):
        return [without_nan(value) for value in values]
    if np.isnan(values):
        return None
    return float(values)


def _lower(matrix: Matrix) -> np.ndarray:
    """Return [T, T] float64 with NaN above the diagonal, without the (empty) last rows
    of tasks not trained yet."""
    rows = [np.array(row, dtype=float)[: t + 1] for t, row in enumerate(matrix)]
    # a run that is not finished may have empty rows for the tasks to come
    while rows and np.isnan(rows[-1]).all():
        rows.pop()
    square = np.full((len(rows), len(rows)), np.nan)
    for t, row in enumerate(rows):
        if len(row) < t + 1:
            raise InputError(
                f"accuracy: row {t} has {len(row)} values; it needs one for each of the {t + 1} tasks seen"
            )
        square[t, : t + 1] = row
    return square


def _mean(values: np.ndarray) -> float:
    # tasks without test images are left out, not counted as 0
    valid = values[~np.isnan(values)]
    if valid.size:
        return float(valid.mean())
    return float("nan")


def _ratio(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    # the maximum avoids a warning where the ratio is NaN anyway
    return np.where(total > 0, part / np.maximum(total, 1), np.nan)


def nearest_class_mean(
    train: Float[np.ndarray, "N D"],
    train_label: Int[np.ndarray, " N"],
    test: Float[np.ndarray, "M D"],
    test_label: Int[np.ndarray, " M"],
) -> float:
    """Return the share of test features that are nearest (Euclidean) to the mean
    training feature of their own class."""
    classes = np.unique(train_label)
    means = np.stack([train[train_label == label].mean(0, dtype=np.float64) for label in classes])
    # float64: |m|^2 - 2 m.x cancels, and the constant |x|^2 is left out
    distance = (means**2).sum(-1) - 2 * test.astype(np.float64) @ means.T
    return float(np.mean(classes[np.argmin(distance, -1)] == test_label))
