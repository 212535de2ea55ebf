"""FedAvg-Prompt (HePCo's first baseline): HePCo's clients, and a server that only averages.

With one client that has all examples it is the centralised prompting of HePCo's table 1;
with `prox_weight` it is FedProx on prompts.
"""

from fcljax.methods.prompted import CLIENT
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.settings import NoOptions, with_changes, with_headtune
from fcljax.types import Method

PRESETS = with_headtune(CLIENT)
FEDPROX = with_headtune(with_changes(CLIENT, prox_weight=0.01))
# 20 epochs are those of CODA-Prompt on CIFAR-100; HePCo does not state its own
CENTRALIZED = with_changes(CLIENT, partition="iid", aggregator="mean", clients=1, rounds=1, epochs=20)


def fedavg_prompt(_options: NoOptions, run: Run) -> Method:
    """Compose FedAvg-Prompt."""
    return federate(run, linear_learner(run), loss=cross_entropy_loss())
