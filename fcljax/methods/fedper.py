"""FedPer: personal classifiers on a shared network (Arivazhagan et al. 2019, arXiv
1912.00818).

    client    trains what is shared and a classifier of its own, and sends what is shared
    server    averages it

Clients are evaluated as themselves, each with its own classifier.
"""

from fcljax.adapters.lora import LoraOptions
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.settings import NoOptions, Preset, with_mini
from fcljax.types import Method

PRESETS = with_mini(
    {"intended": Preset(NoOptions(), adapters=(LoraOptions(lora_pairs="one"),))}, lr=1e-2, lora_lr=1e-3
)


def fedper(_options: NoOptions, run: Run) -> Method:
    """Compose FedPer."""
    loss = cross_entropy_loss()
    return federate(run, linear_learner(run), loss=loss, personal=("classifier",))
