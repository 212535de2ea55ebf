"""FedAvg: clients train and the server averages; nothing acts against forgetting (McMahan
et al. 2017).

`fedavg` runs on FPPL's adapter with FPPL's three parts off (FPPL table III, first row):
one prompt per task, selected by the untrained gate. As in the release, the gate is sent
and counted all the same. `linear`, `joint`, `centralised`, `sequential`, `l2p`,
`dualprompt` and `coda-prompt` are FedAvg on other adapters.
"""

import dataclasses
from typing import Literal

from fcljax.adapters.lora import LoraOptions
from fcljax.adapters.prompts import PromptOptions
from fcljax.methods.fppl import fppl_keys
from fcljax.options import ClassPromptOptions, option
from fcljax.parts.class_names import linear_from_text, named_learner, text_side
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss, one_key, two_keys
from fcljax.settings import NoOptions, Preset, with_changes, with_headtune, with_mini
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg on FPPL's prompts."""

    local_classes: Literal["current", "all"] = "current"
    """Classes in the clients' cross-entropy."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the loss over a batch."""


@dataclasses.dataclass(frozen=True)
class LinearClassifierOptions(ClassPromptOptions):
    """Options of the linear classifier."""

    class_prompts: str = option("none", unset="none")
    """Prompt of a class for CLIP's text tower, with {} in place of its name, or file:PATH.
    The classifier begins as the zero-shot one."""


# FPPL's adapter without its fusion of prompts
_PROMPTS = (PromptOptions(wo_fusion=True, gate_scale="fixed", prompt_upload="current"),)
PRESETS = with_headtune(
    with_mini(
        {
            "intended": Preset(FedAvgOptions(), adapters=_PROMPTS),
            "paper": Preset(FedAvgOptions(local_classes="all", reduction="sum"), adapters=_PROMPTS),
            "released": Preset(FedAvgOptions(), adapters=_PROMPTS),
        },
        lr=3e-3,
    )
)
PLAIN = with_headtune(with_mini({"intended": Preset(NoOptions())}, lr=1e-2))
_LORA = LoraOptions(lora_pairs="one")
_WITH_LORA = with_mini({"intended": Preset(NoOptions(), adapters=(_LORA,))}, lora_lr=1e-3)
LINEAR = with_headtune(with_mini({"intended": Preset(LinearClassifierOptions())}, lr=1e-2))
JOINT = with_changes(_WITH_LORA, rounds=15)
# one client has all examples: of all classes at once, or of task after task
SEQUENTIAL = with_changes(_WITH_LORA, clients=1, partition="iid")
CENTRALISED = with_changes(SEQUENTIAL, rounds=15)


def fedavg_of_fppl(options: FedAvgOptions, run: Run) -> Method:
    """Compose FedAvg with the losses of FPPL's release."""
    loss = cross_entropy_loss(options.local_classes, options.reduction)
    return federate(run, linear_learner(run, fppl_keys), loss=loss)


def linear(options: LinearClassifierOptions, run: Run) -> Method:
    """Compose FedAvg of a classifier, which may begin as CLIP's zero-shot one."""
    if options.class_prompts == "none":
        return plain(NoOptions(), run)
    # refuses a network without a text side
    text_side(run, "linear")
    return federate(run, named_learner(run, linear_from_text()), loss=cross_entropy_loss())


def plain(_options: NoOptions, run: Run) -> Method:
    """Compose FedAvg with cross-entropy over the classes of the current task."""
    keys = two_keys
    # on a frozen network only the classifier draws initial values
    if run.adapter.plain:
        keys = one_key
    return federate(run, linear_learner(run, keys), loss=cross_entropy_loss())
