"""FedAvg: clients train, the server averages, nothing is done against forgetting (McMahan et al. 2017).

`fedavg` runs on FPPL's adapter with FPPL's three parts off (FPPL table III, first row): one prompt per task,
which the untrained gate picks; as in the release, that gate travels and is counted. `linear`, `joint`, `l2p`,
`dualprompt` and `coda-prompt` are FedAvg on other adapters.
"""

import dataclasses
from typing import Literal

from fcljax.methods import fppl
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss, one_key, three_keys, two_keys
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
    loss = cross_entropy_loss(options.local_classes, options.reduction)
    return federate(run, linear_learner(run, three_keys), loss=loss)


def plain(options: NoOptions, run: Run) -> Method:
    """FedAvg with cross-entropy over the classes of the current task."""
    del options
    keys = one_key if run.adapter.plain else two_keys
    return federate(run, linear_learner(run, keys), loss=cross_entropy_loss())
