"""FedNCM (Legate et al. 2023): a training-free classifier of class means of features.

Before a task's first round every client sends the sum of its features and the number of its rows for each
class of the task, once; the server's means are those of all rows together, whoever holds them.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array

from fcljax.parts.classifiers import add_classes, nearest_mean
from fcljax.parts.federate import Run, ServerStep, Survey, federate
from fcljax.parts.learner import Learner, Model, learner
from fcljax.parts.reports import class_sums
from fcljax.types import Aggregate, Method, RoundContext


@dataclasses.dataclass(frozen=True)
class FedNCMOptions:
    """Options of FedNCM."""

    classifier: Literal["linear", "nearest"] = "linear"
    """Classifier: mean features of length 1 as weights, or the nearest mean."""


def fedncm(options: FedNCMOptions, run: Run) -> Method:
    """FedNCM as a method; nothing trains."""
    width, sizes = run.network.width, run.sizes
    model = learner(run.network, run.adapter, nearest_mean(width, sizes.classes, options.classifier))
    survey = Survey(class_mean_step(sizes.task_classes, width), "opening", run.train.batch_size)
    return federate(model, sizes, None, run.terms, surveys=(survey,), aggregation=run.aggregation)


def class_mean_step(classes: int, width: int) -> ServerStep:
    """Sums of the task's classes [Ct] go up and are added to a `nearest_mean` classifier's; each class is of
    one task, which is surveyed once."""

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        state: tuple,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner, key
        sums = add_classes(params.classifier.sums, aggregate.sum["class_sums"], round_context.task)
        return params._replace(classifier=params.classifier._replace(sums=sums)), state, {}

    return ServerStep("class_means", step, collects=(class_sums(classes, width),))
