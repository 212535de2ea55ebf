"""FedCLM (a baseline of PILoRA's tables): FedAvg in training, class means at inference.

    each round  as FedAvg
    task end    each client sends sums of features and numbers of examples of the task's
                classes under the final model; the class means classify

Means of old classes are not computed again, as clients no longer have their data. PILoRA's
tables also have FedNCM, with an accuracy that depends on the partition, so they must have
tuned LoRA first: that is `classifier` = "linear" here. `fedncm` itself trains nothing.
"""

import dataclasses
from typing import Literal

from fcljax.adapters.lora import LoraOptions
from fcljax.parts.classifiers import linear, nearest_mean
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import cross_entropy_loss, learner
from fcljax.parts.reports import class_mean_rule
from fcljax.settings import Preset, with_mini
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedCLMOptions:
    """Options of FedCLM."""

    classifier: Literal["nearest", "linear"] = "nearest"
    """Predict by the nearest mean, or by normalised mean features as weights (linear, as
    FedNCM does)."""


_LORA = LoraOptions(lora_pairs="one")
# mini: at a learning rate of 1e-3 LoRA spoils the features of which the means are taken
PRESETS = with_mini({"intended": Preset(FedCLMOptions(), adapters=(_LORA,))}, lora_lr=1e-4)


def fedclm(options: FedCLMOptions, run: Run) -> Method:
    """Compose FedCLM."""
    width = run.network.width
    classes = run.sizes.classes
    # clients train a linear classifier; the means are for evaluation
    means = nearest_mean(width, classes, options.classifier, inner=linear(width, classes))
    model = learner(run.network, run.adapter, means)
    rule = class_mean_rule(run, "task_end")
    return federate(run, model, loss=cross_entropy_loss(), server_rules=(rule,))
