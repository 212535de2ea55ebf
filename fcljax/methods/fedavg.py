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

from fcljax.methods import fppl
from fcljax.options import resolved
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import CROSS_ENTROPY, Rehearse, Run, ServerStep, Term, federate
from fcljax.parts.learner import Keys, Objective, learner, two_keys
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


def fedavg(options: FedAvgOptions, run: Run) -> Method:
    """FedAvg with the losses of FPPL's release."""
    objective = Objective(resolved(options.local_classes), resolved(options.reduction))
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
