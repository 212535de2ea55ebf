"""FedNCM (Legate et al. 2023): a training-free classifier of class means of features.

Before a task's first round every client sends the sum of its features and the number of its rows for each
class of the task, once; the server's means are those of all rows together, whoever holds them.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array

from fcljax.parts.classifiers import add_classes, nearest_mean
from fcljax.parts.federate import Kit, ServerStep, Survey, federate
from fcljax.parts.learner import Learner, Model, learner
from fcljax.parts.reports import class_sums
from fcljax.types import Aggregate, Method, Turn


@dataclasses.dataclass(frozen=True)
class FedNCMOptions:
    """Options of FedNCM."""

    # mean features of length 1 as weights, or the nearest mean
    classifier: Literal["linear", "nearest"] = "linear"


def fedncm(options: FedNCMOptions, kit: Kit) -> Method:
    """FedNCM as a method; nothing trains."""
    width, setting = kit.network.width, kit.setting
    model = learner(kit.network, kit.adapter, nearest_mean(width, setting.classes, options.classifier))
    survey = Survey(class_mean_step(setting.task_classes, width), "opening", kit.train.batch_size)
    return federate(model, setting, None, kit.terms, surveys=(survey,), aggregation=kit.aggregation)


def class_mean_step(classes: int, width: int) -> ServerStep:
    """Sums of the task's classes [Ct] go up and are added to a `nearest_mean` classifier's; each class is of
    one task, which is surveyed once."""

    def step(turn: Turn, learner: Learner, params: Model, state: tuple, aggregate: Aggregate, key: Array):
        del learner, key
        sums = add_classes(params.classifier.sums, aggregate.sum["class_sums"], turn.task)
        return params._replace(classifier=params.classifier._replace(sums=sums)), state, {}

    return ServerStep("class_means", step, collects=(class_sums(classes, width),))
