"""FedCLM (a baseline of PILoRA's tables): an adapter and a linear classifier trained by FedAvg, class means
at inference.

After the last round of a task every client sends sums of features and numbers of rows of the task's classes
under the final model. Means of old classes are not computed again: nobody has their data any more. With
`classifier` = "linear" this is FedNCM after LoRA was tuned, the reading of that baseline in PILoRA's tables
whose accuracy depends on who holds what, as it does there; `fedncm` itself trains nothing.
"""

import dataclasses
from typing import Literal

from fcljax.adapters.lora import LoraOptions
from fcljax.methods.fedncm import class_mean_step
from fcljax.parts.classifiers import linear, nearest_mean
from fcljax.parts.federate import Run, Survey, federate
from fcljax.parts.learner import learner
from fcljax.settings import Preset
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedCLMOptions:
    """Options of FedCLM."""

    classifier: Literal["nearest", "linear"] = "nearest"
    """Classifier: the nearest mean or, as in FedNCM, mean features of length 1 as weights."""


PRESETS = {"intended": Preset(FedCLMOptions(), adapters=(LoraOptions(lora_pairs="one"),))}


def fedclm(options: FedCLMOptions, run: Run) -> Method:
    """FedCLM as a method."""
    width, sizes = run.network.width, run.sizes
    means = nearest_mean(width, sizes.classes, options.classifier, inner=linear(width, sizes.classes))
    survey = Survey(class_mean_step(sizes.task_classes, width), "closing", run.train.batch_size)
    return federate(
        learner(run.network, run.adapter, means),
        sizes,
        run.train,
        run.terms,
        surveys=(survey,),
        aggregation=run.aggregation,
    )
