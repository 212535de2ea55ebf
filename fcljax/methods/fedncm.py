"""FedNCM (Legate et al. 2023): a training-free classifier of class means of features.

task start  each client sends, once, the sum of its features and its number of examples
            of each class
            the server's means are those of all examples, whatever the partition
"""

import dataclasses
from typing import Literal

from fcljax.parts.classifiers import nearest_mean
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import learner
from fcljax.parts.reports import class_mean_rule
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedNCMOptions:
    """Options of FedNCM."""

    classifier: Literal["linear", "nearest"] = "linear"
    """Predict by normalised mean features as weights (linear), or by the nearest mean."""


def fedncm(options: FedNCMOptions, run: Run) -> Method:
    """Compose FedNCM; nothing trains."""
    means = nearest_mean(run.network.width, run.sizes.classes, options.classifier)
    model = learner(run.network, run.adapter, means)
    # at the start of a task: nothing trains, so the features will not change
    return federate(run, model, server_rules=(class_mean_rule(run, "task_start"),))
