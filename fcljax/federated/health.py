"""Warnings about training that went wrong, from the metrics of its rounds: `run`,
`simulate`, the page and `watch` show the same lines."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# share of the examples in steps whose loss was NaN or infinite
NOT_FINITE = "loss_not_finite"
# cross-entropy of training batches, among the classes that compete
CROSS_ENTROPY = "train_cross_entropy"
# share of training batches' examples that are predicted correctly, among the same classes
ACCURACY = "train_accuracy"
# L2 norm of a step's gradient, where the loss has several terms
GRADIENT_NORM = "gradient_norm"
# prefix of a term's name: the norm of its gradient over the sum of all terms' norms
SHARE = "gradient_share_"
CLASSES = "classes_seen"  # of the tasks so far
NEAR_GUESSING = 1.1  # most cross-entropy over that of a uniform guess that is no divergence

Line = Mapping[str, Any]  # of metrics.jsonl, or of a simulation's history


def training_warnings(lines: Sequence[Line]) -> list[str]:
    """Return warnings about rounds in which no valid upload arrived, whose loss was not
    finite, or after which the model was worse than a guess.

    Args:
      lines: of the rounds, in their order. A round has `participants`, `rejected` and, if
        clients train, `loss`; those of a run also have `task` and `round`, from 0 on.
        Other keys may be missing.
    """
    return [*_no_upload(lines), *_not_finite(lines), *_worse_than_guessing(lines)]


def without_upload(lines: Sequence[Line]) -> list[int]:
    """Return the indices of rounds without a valid upload, in which nothing was learned."""
    return [i for i, line in enumerate(lines) if _rejected_all(line)]


def _rejected_all(line: Line) -> bool:
    participants = line.get("participants") or 0
    # without participants nothing was rejected: 0 >= 0 would count the round
    return (line.get("rejected") or 0) >= participants > 0


def _no_upload(lines: Sequence[Line]) -> list[str]:
    empty = without_upload(lines)
    if not empty:
        return []
    untrained = ""
    if len(empty) == len(lines):
        untrained = "; the model is unchanged since the start"
    return [
        f"warning: no upload was valid in {len(empty)} of {len(lines)} rounds, first in "
        f"{_place(lines, empty[0])}{untrained}"
    ]


def _not_finite(lines: Sequence[Line]) -> list[str]:
    """Warn about losses that are not finite; gradients and uploads may still be finite."""
    # a round without any valid upload is reported above
    rounds = [i for i, line in enumerate(lines) if not _rejected_all(line) and _share_not_finite(line) > 0]
    if not rounds:
        return []
    largest_share = max(_share_not_finite(lines[i]) for i in rounds)
    return [
        f"warning: the clients' loss was NaN or infinite in {len(rounds)} of {len(lines)} rounds, first in "
        f"{_place(lines, rounds[0])}, for up to {100 * largest_share:.3g} % of the examples: the loss "
        f"divides by 0, takes the logarithm of a number that is not positive, or the learning rate is too "
        f"large"
    ]


def _share_not_finite(line: Line) -> float:
    """Return the share of the examples in steps whose loss was not finite."""
    share = line.get(NOT_FINITE)
    if share is not None:
        return share
    if "loss" not in line or not line.get("participants"):
        return 0.0
    # steps of some methods do not report the share; a mean loss that is not finite then
    # counts as all examples
    loss = line["loss"]
    if loss is not None and math.isfinite(loss):
        return 0.0
    return 1.0


def _worse_than_guessing(lines: Sequence[Line]) -> list[str]:
    """Warn of tasks that end with a cross-entropy above that of a uniform guess."""
    # the last line of each task replaces the earlier ones
    last_line = {line["task"]: line for line in lines if "task" in line}
    worse = [line for line in last_line.values() if above_guessing(line)]
    if not worse:
        return []
    # the worst task is reported, if there is one among those that diverged
    diverged_first = [line for line in worse if not _is_accurate(line)] or worse
    line = max(diverged_first, key=_over_guessing)
    measurement = (
        f"at the end of {len(worse)} of {len(last_line)} tasks the clients' cross-entropy is worse than "
        f"guessing; in task {line['task'] + 1} it is {line[CROSS_ENTROPY]:.3g}, and guessing among "
        f"{line[CLASSES]} classes gives {math.log(line[CLASSES]):.3g}"
    )
    # softmax over distances to prototypes can be nearly uniform where the nearest one is
    # right, so a loss near a guess' is no divergence
    if _over_guessing(line) < NEAR_GUESSING:
        return [f"warning: {measurement}: the predicted probabilities are nearly uniform"]
    if _is_accurate(line):
        return [
            f"warning: {measurement}: {100 * line[ACCURACY]:.3g} % of the predictions are right, but the "
            f"wrong ones are too confident"
        ]
    return [f"warning: training diverged: {measurement}; lower the learning rates (--lr and the adapter's)"]


def _over_guessing(line: Line) -> float:
    """Return a round's cross-entropy over that of a uniform guess."""
    return line[CROSS_ENTROPY] / math.log(line[CLASSES])


def _is_accurate(line: Line) -> bool:
    """Check whether more predictions are right than halfway from guessing to all of them."""
    accuracy = line.get(ACCURACY)
    return accuracy is not None and accuracy > (1 + 1 / line[CLASSES]) / 2


def above_guessing(line: Line) -> bool:
    """Check whether a round's cross-entropy is above that of a uniform guess."""
    loss = line.get(CROSS_ENTROPY)
    classes = line.get(CLASSES)
    return loss is not None and classes is not None and classes > 1 and loss > math.log(classes)


def diverged(first_loss: float, last_loss: float | None) -> list[str]:
    """Warn if a user's loss, which may be negative, has more than doubled.

    Args:
      first_loss: of the model that training began with. NaN: there is no warning.
      last_loss: of the last round. None, or not finite: `training_warnings` warns of it.
    """
    if last_loss is None or not math.isfinite(last_loss):
        return []
    # first_loss + |first_loss|, since a user's loss may be negative
    if not last_loss > first_loss + abs(first_loss):
        return []
    return [
        f"warning: training diverged: the clients' loss in the last round, {last_loss:.4g}, is more than "
        f"twice that of the initial model, {first_loss:.4g}; lower the learning rate"
    ]


def _place(lines: Sequence[Line], index: int) -> str:
    line = lines[index]
    if "task" not in line:
        return f"round {index + 1}"
    return f"task {line['task'] + 1}, round {line['round'] + 1}"
