"""FedAvg: clients train, the server averages, nothing is done against forgetting (McMahan et al. 2017).

By default on FPPL's adapter with its three parts off (FPPL table III, first row): one prompt per task, the
untrained gate picks one of them, the averaged classifier is used as it is. As in the release, the untrained
gate travels with the model and is counted. On `linear` it averages a classifier on frozen features, on LoRA
with all classes at once it is the joint training of PILoRA's tables.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from jaxtyping import PRNGKeyArray

from fcljax.adapters.lora import LoraOptions
from fcljax.adapters.prompts import PromptOptions
from fcljax.methods import fppl
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import CROSS_ENTROPY, Rehearse, Run, ServerStep, Term, federate
from fcljax.parts.learner import Keys, Objective, learner, two_keys
from fcljax.settings import Preset, RunConfig
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg on FPPL's prompts."""

    local_classes: Literal["current", "all"] = "current"
    """Classes in the cross-entropy of the clients."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the loss over a batch."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The method has no options of its own."""


_PROMPTS = (PromptOptions(wo_fusion=True, gate_scale="fixed", prompt_upload="current"),)
PRESETS = {
    "intended": Preset(FedAvgOptions(), adapters=_PROMPTS),
    "paper": Preset(FedAvgOptions(local_classes="all", reduction="sum"), adapters=_PROMPTS),
    "released": Preset(FedAvgOptions(), adapters=_PROMPTS),
}
JOINT = {"intended": Preset(NoOptions(), RunConfig(rounds=15), (LoraOptions(lora_pairs="one"),))}


def fedavg(options: FedAvgOptions, run: Run) -> Method:
    """FedAvg with the losses of FPPL's release."""
    objective = Objective(options.local_classes, options.reduction)
    return averaging(run, objective, fppl.three_keys)


def plain(options: NoOptions, run: Run) -> Method:
    """FedAvg with cross-entropy over the classes of the current task: the baselines `linear`, `joint`, `l2p`,
    `dualprompt` and `coda-prompt`."""
    del options
    return averaging(run, keys=one_key if run.adapter.plain else two_keys)


def averaging(
    run: Run,
    objective: Objective = CROSS_ENTROPY,
    keys: Keys = two_keys,
    terms: tuple[Term, ...] = (),
    steps: tuple[ServerStep, ...] = (),
    rehearse: Rehearse | None = None,
    restores: Callable | None = None,
) -> Method:
    """FedAvg of an adapter and a linear classifier, with terms of the clients' loss, what they read, and what
    the server does besides."""
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    model = learner(run.network, run.adapter, head, keys)
    return federate(
        model,
        run.sizes,
        run.train,
        terms + run.terms,
        steps,
        objective=objective,
        aggregation=run.aggregation,
        rehearse=rehearse,
        restores=restores,
    )


def one_key(key: PRNGKeyArray) -> tuple[jax.Array, jax.Array]:
    """A classifier alone draws from the key itself."""
    return key, key
