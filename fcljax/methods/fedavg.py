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

from fcljax.federate import CROSS_ENTROPY, Kit, ServerStep, Term, federate
from fcljax.learner import Keys, Objective, learner, two_keys
from fcljax.methods import fppl
from fcljax.models.classifiers import linear
from fcljax.models.heads import Head, init_head, init_truncated
from fcljax.options import resolved
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class FedAvgOptions:
    """Fields with default None take the value of the fidelity preset."""

    local_classes: Literal["current", "all"] | None = None  # classes in the client's cross-entropy
    reduction: Literal["mean", "sum"] | None = None  # of the loss over a batch


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The method has no options of its own."""


FIDELITY = {
    name: {field: preset[field] for field in ("local_classes", "reduction")}
    for name, preset in fppl.FIDELITY.items()
}


def fedavg(options: FedAvgOptions, kit: Kit) -> Method:
    """FedAvg with the losses of FPPL's release."""
    objective = Objective(resolved(options.local_classes), resolved(options.reduction))
    return averaging(kit, objective, fppl.three_keys)


def plain(options: NoOptions, kit: Kit) -> Method:
    """FedAvg with cross-entropy over the classes of the current task: the baselines `linear` and `joint`."""
    del options
    return averaging(kit, keys=one_key if kit.adapter.plain else two_keys)


def truncated(options: NoOptions, kit: Kit) -> Method:
    """FedAvg with the first classifier that the releases of L2P and DualPrompt draw (pMAE specification,
    section 6): the baselines `l2p` and `dualprompt`."""
    del options
    return averaging(kit, first=init_truncated)


def averaging(
    kit: Kit, objective: Objective = CROSS_ENTROPY, keys: Keys = two_keys, terms: tuple[Term, ...] = (),
    steps: tuple[ServerStep, ...] = (), first: Callable[..., Head] = init_head,
) -> Method:  # fmt: skip
    """FedAvg of an adapter and a linear classifier, with terms of the clients' loss, and what they read.
    `first` draws the classifier's first values."""
    model = learner(kit.network, kit.adapter, linear(kit.network.width, kit.setting.classes, first), keys)
    return federate(
        model, kit.setting, kit.train, terms + kit.terms, steps, objective=objective,
        aggregation=kit.aggregation,
    )  # fmt: skip


def one_key(key: PRNGKeyArray) -> tuple[jax.Array, jax.Array]:
    """A classifier alone draws from the key itself."""
    return key, key
