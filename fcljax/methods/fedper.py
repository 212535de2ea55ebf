"""FedPer: personal classifiers on a shared network (Arivazhagan et al. 2019, arXiv 1912.00818).

    client    trains what is shared and a classifier of its own, and sends what is shared
    server    averages it

Clients are evaluated as themselves, each with its own classifier.
"""

from fcljax.adapters.lora import LoraOptions
from fcljax.methods.fedavg import NoOptions
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.settings import Preset
from fcljax.types import Method

PRESETS = {"intended": Preset(NoOptions(), adapters=(LoraOptions(lora_pairs="one"),))}


def fedper(options: NoOptions, run: Run) -> Method:
    """FedPer as a method."""
    del options
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), personal=("classifier",))
