"""FedAvg on FPPL's adapter with its three parts off (FPPL table III, first row; McMahan et al. 2017).

One prompt per task, the untrained gate picks one of them, the averaged classifier is used as it is; no
prototypes are sent. As in the release, the untrained gate travels with the model and is counted.
"""

import dataclasses
from typing import Literal

from fcljax.methods.fppl import FIDELITY as FPPL_FIDELITY
from fcljax.methods.fppl import FPPLConfig, fppl
from fcljax.types import Backbone, Method, Setting


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
    """Fields with default None take the value of the fidelity preset."""

    prompt_length: int = 20  # tokens per block
    prompt_blocks: int = 5  # blocks 0..4
    local_classes: Literal["current", "all"] | None = (
        None  # classes that compete in the client's cross-entropy
    )
    reduction: Literal["mean", "sum"] | None = None  # of the loss over a batch


FIDELITY = {
    name: {field: preset[field] for field in ("local_classes", "reduction")}
    for name, preset in FPPL_FIDELITY.items()
}


def fedavg(
    config: FedAvgConfig, setting: Setting, backbone: Backbone, epochs: int, batch_size: int, lr: float
) -> Method:
    """FPPL without unified representation, fusion and debias, sending no prototypes."""
    shared = dataclasses.asdict(config) | dict(gate_scale="fixed", prompt_upload="current")
    return fppl(
        FPPLConfig(wo_unified=True, wo_fusion=True, wo_debias=True, **shared),
        setting,
        backbone,
        epochs,
        batch_size,
        lr,
    )
