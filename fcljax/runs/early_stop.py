"""Early stop (`--stop-when-flat N`): a task ends when the model no longer improves on
training examples of the task that no client trains on.

A tenth of each class's training examples is held out before they are assigned to
clients, so every client gives its share. After each round the accuracy among all
classes so far is measured on the held-out examples of the current task alone: those of
earlier tasks are gone, as their training examples are. Once N rounds in a row were no
better than the best one, the next round is the task's last, with all that a method does
at the end of a task. Whether a round is the last depends on recorded accuracies only,
so a resumed run ends its tasks where the uninterrupted one does.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fcljax.data.files.dataset import Dataset
from fcljax.data.files.sources import hold_out
from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.runs.inputs import make_splits
from fcljax.runs.records import HELD_OUT
from fcljax.scenario import Scenario, make_scenario
from fcljax.settings import RunConfig

SHARE = 0.1  # of each class's training examples


class HeldOut(NamedTuple):
    """The held-out examples of a run, in place of its test examples."""

    scenario: Scenario
    split: Split | Host


def hold_out_training(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return the data set without the held-out training examples, and one that tests on
    them.

    Raises:
      InputError: if a class has too few examples.
    """
    try:
        validated = hold_out(dataset, SHARE)
    except InputError as error:
        reason = str(error).partition(": ")[2]
        raise InputError(f"stop_when_flat: {reason}") from None
    # other training examples are another data set, for cached features and resumed runs
    digest = hashlib.sha256(f"{dataset.digest} trained without {SHARE}".encode()).hexdigest()
    reduced = validated._replace(
        x_test=dataset.x_test,
        y_test=dataset.y_test,
        size_test=dataset.size_test,
        columns_test=dataset.columns_test,
        digest=digest,
        # the test examples are those of the data set, no training examples
        origin=None,
    )
    return reduced, validated


def held_out_of(settings: RunConfig, dataset: Dataset, validated: Dataset, joint: bool) -> HeldOut:
    """Return the held-out examples of a run.

    Args:
      settings: of the run.
      dataset: what the run trains and tests on.
      validated: the second of `hold_out_training`.
      joint: whether the method has all classes at once.
    """
    # The run's own training examples, to which a partition by owner may have added
    # columns: the scenario must be the run's, but for what it tests on.
    tested = dataset._replace(
        x_test=validated.x_test,
        y_test=validated.y_test,
        size_test=validated.size_test,
        columns_test=validated.columns_test,
    )
    scenario = make_scenario(tested, settings, settings.rounds, joint)
    labels = (scenario.train_label, scenario.test_label)
    _, split = make_splits(tested, labels, settings.data_budget, settings.eval_batch_size)
    return HeldOut(scenario, split)


def is_flat(accuracies: Sequence[float | None], patience: int) -> bool:
    """Check whether the last `patience` accuracies are no better than the best before
    them."""
    # a model with NaN parameters has no accuracy: None becomes NaN
    values = np.nan_to_num(np.array(accuracies, float), nan=-1.0)
    if len(values) <= patience:
        return False
    # argmax takes the first of equal ones, so an equal accuracy is no improvement
    return len(values) - 1 - int(np.argmax(values)) >= patience


def ends_task(settings: RunConfig, lines: Sequence[dict[str, Any]], task: int, round_: int) -> bool:
    """Check whether a round, which is not played yet, is the last one of its task.

    Args:
      settings: of the run.
      lines: of metrics.jsonl so far.
      task: index of the task.
      round_: index of the round in the task.
    """
    if round_ == settings.rounds - 1:
        return True
    if not settings.stop_when_flat:
        return False
    accuracies = [line[HELD_OUT] for line in lines if line["task"] == task]
    return is_flat(accuracies, settings.stop_when_flat)


def check_stop(settings: RunConfig, trains: Callable[[], bool]) -> None:
    """Check that an early stop makes sense in a run.

    Args:
      settings: of the run.
      trains: trains() -> whether clients train by gradients.

    Raises:
      InputError: naming the option beside which it makes none.
    """
    patience = settings.stop_when_flat
    if not patience:
        return
    # The accuracy is flat after patience + 1 rounds at the earliest, one more is played,
    # and that must not be the task's last one anyway.
    most = settings.rounds - 3
    if patience > most:
        nearest = "give at least 4 --rounds"
        if most > 0:
            nearest = f"nearest: {most}"
        raise InputError(
            f"stop_when_flat: {patience} can end no task before its {settings.rounds} rounds; {nearest}"
        )
    if settings.population == "online":
        raise InputError(
            "stop_when_flat: an online stream would lose the examples of later rounds; leave it out"
        )
    if settings.noise_multiplier:
        raise InputError(
            "stop_when_flat: accuracies on held-out examples are not covered by --noise-multiplier; "
            "leave one of them out"
        )
    if not trains():
        raise InputError(f"stop_when_flat: {settings.method} trains nothing over rounds; leave it out")
