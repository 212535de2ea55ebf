"""FedAvg: clients train and the server averages; nothing acts against forgetting (McMahan
et al. 2017).

`fedavg` runs on FPPL's adapter with FPPL's three parts off (FPPL table III, first row):
one prompt per task, which the untrained gate picks; as in the release, that gate travels
and is counted. `linear`, `joint`, `centralised`, `sequential`, `l2p`,
`dualprompt` and `coda-prompt` are FedAvg on other adapters.
"""

import dataclasses
from typing import Literal

from fcljax.adapters.lora import LoraOptions
from fcljax.adapters.prompts import PromptOptions
from fcljax.methods.fppl import fppl_keys
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss, one_key, two_keys
from fcljax.settings import NoOptions, Preset, RunConfig
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg on FPPL's prompts."""

    local_classes: Literal["current", "all"] = "current"
    """Classes in the clients' cross-entropy."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the loss over a batch."""


_PROMPTS = (PromptOptions(wo_fusion=True, gate_scale="fixed", prompt_upload="current"),)
PRESETS = {
    "intended": Preset(FedAvgOptions(), adapters=_PROMPTS),
    "paper": Preset(FedAvgOptions(local_classes="all", reduction="sum"), adapters=_PROMPTS),
    "released": Preset(FedAvgOptions(), adapters=_PROMPTS),
}
_ONE_PAIR = (LoraOptions(lora_pairs="one"),)
JOINT = {"intended": Preset(NoOptions(), RunConfig(rounds=15), _ONE_PAIR)}
# one client has all examples: of all classes at once, or of task after task
CENTRALISED = {"intended": Preset(NoOptions(), RunConfig(clients=1, partition="iid", rounds=15), _ONE_PAIR)}
SEQUENTIAL = {"intended": Preset(NoOptions(), RunConfig(clients=1, partition="iid"), _ONE_PAIR)}


def fedavg_of_fppl(options: FedAvgOptions, run: Run) -> Method:
    """Compose FedAvg with the losses of FPPL's release."""
    loss = cross_entropy_loss(options.local_classes, options.reduction)
    return federate(run, linear_learner(run, fppl_keys), loss=loss)


def plain(_options: NoOptions, run: Run) -> Method:
    """Compose FedAvg with cross-entropy over the classes of the current task."""
    keys = two_keys
    if run.adapter.plain:  # the classifier alone draws
        keys = one_key
    return federate(run, linear_learner(run, keys), loss=cross_entropy_loss())
