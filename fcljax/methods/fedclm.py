"""FedCLM (a baseline of PILoRA's tables): FedAvg in training, class means at inference.

    each round  as FedAvg
    task end    each client sends sums of features and numbers of examples of the task's classes under the
                final model; the class means classify

Means of old classes are not computed again, since nobody has their data any more. With
`classifier` = "linear" this is FedNCM after LoRA was tuned, the reading of that baseline
in PILoRA's tables whose accuracy depends on the partition, as it does there; `fedncm`
itself trains nothing.
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


# at a rate of 1e-3 LoRA spoils the features of a real network, of which there are means
PRESETS = with_mini(
    {"intended": Preset(FedCLMOptions(), adapters=(LoraOptions(lora_pairs="one"),))}, lora_lr=1e-4
)


def fedclm(options: FedCLMOptions, run: Run) -> Method:
    """Compose FedCLM."""
    width = run.network.width
    classes = run.sizes.classes
    # the linear classifier trains, the means predict
    means = nearest_mean(width, classes, options.classifier, inner=linear(width, classes))
    model = learner(run.network, run.adapter, means)
    rule = class_mean_rule(run, "task_end")
    return federate(run, model, loss=cross_entropy_loss(), server_rules=(rule,))
