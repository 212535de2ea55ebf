"""FedCLM (a baseline of PILoRA's tables): an adapter and a linear classifier trained by FedAvg, class means
at inference.

After the last round of a task every client sends sums of features and numbers of rows of the task's classes
under the final model. Means of old classes are not computed again: nobody has their data any more. With
`classifier` = "linear" this is FedNCM after LoRA was tuned, the reading of that baseline in PILoRA's tables
whose accuracy depends on who holds what, as it does there; `fedncm` itself trains nothing.
"""

import dataclasses
from typing import Literal

from fcljax.methods.fedncm import class_mean_step
from fcljax.parts.classifiers import linear, nearest_mean
from fcljax.parts.federate import Kit, Survey, federate
from fcljax.parts.learner import learner
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedCLMOptions:
    """Options of FedCLM."""

    # the nearest mean, or, as FedNCM has it, mean features of length 1 as weights
    classifier: Literal["nearest", "linear"] = "nearest"


def fedclm(options: FedCLMOptions, kit: Kit) -> Method:
    """FedCLM as a method."""
    width, setting = kit.network.width, kit.setting
    means = nearest_mean(width, setting.classes, options.classifier, inner=linear(width, setting.classes))
    survey = Survey(class_mean_step(setting.task_classes, width), "closing", kit.train.batch_size)
    return federate(
        learner(kit.network, kit.adapter, means), setting, kit.train, kit.terms, surveys=(survey,),
        aggregation=kit.aggregation,
    )  # fmt: skip
