"""FedPer: personal classifiers on a shared network (Arivazhagan et al. 2019, arXiv
1912.00818).

    client    trains the shared adapter and its own classifier, and sends the adapter
    server    averages the adapters

Each client is evaluated with its own classifier.
"""

from fcljax.adapters.lora import LoraOptions
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.settings import NoOptions, Preset, with_mini
from fcljax.types import Method

_LORA = LoraOptions(lora_pairs="one")
PRESETS = with_mini({"intended": Preset(NoOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)


def fedper(_options: NoOptions, run: Run) -> Method:
    """Compose FedPer."""
    loss = cross_entropy_loss()
    # a personal classifier stays in the client's state, over rounds and tasks
    return federate(run, linear_learner(run), loss=loss, personal=("classifier",))
