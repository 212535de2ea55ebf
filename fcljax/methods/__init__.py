"""The methods by name: one table, written out. To add one, write its file and add its line."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fcljax.methods import ewc, fedavg, fedclm, fedncm, finetune, fppl, icarl, linear, lwf, pilora
from fcljax.types import Method


class MethodEntry(NamedTuple):
    """How the command line makes a method.

    options: frozen dataclass of the method's own settings; None values are filled from `fidelity`.
    fidelity: preset name -> values of the fields on which paper and release differ.
    build(options, setting, backbone, epochs, batch_size, lr) -> Method.
    joint: do all tasks' classes come at once?
    """

    summary: str
    options: type
    fidelity: dict[str, dict[str, Any]]
    build: Callable[..., Method]
    joint: bool = False


METHODS: dict[str, MethodEntry] = {
    "fppl": MethodEntry(
        "fused task prompts, unified representation, prototype debias (FPPL)",
        fppl.FPPLConfig,
        fppl.FIDELITY,
        fppl.fppl,
    ),
    "fedavg": MethodEntry(
        "FPPL's adapter with its three parts off: plain FedAvg",
        fedavg.FedAvgConfig,
        fedavg.FIDELITY,
        fedavg.fedavg,
    ),
    "linear": MethodEntry(
        "FedAvg of a classifier on frozen features", linear.LinearConfig, linear.FIDELITY, linear.linear
    ),
    "pilora": MethodEntry(
        "prototypes re-weighted on the server, a LoRA pair per task (PILoRA)",
        pilora.PiloraConfig,
        pilora.FIDELITY,
        pilora.pilora,
    ),
    "fedncm": MethodEntry(
        "class means of frozen features, no training (FedNCM)",
        fedncm.FedNCMConfig,
        fedncm.FIDELITY,
        fedncm.fedncm,
    ),
    "fedclm": MethodEntry(
        "FedAvg of LoRA and a classifier, nearest class mean at inference",
        finetune.FinetuneConfig,
        finetune.FIDELITY,
        fedclm.fedclm,
    ),
    "ewc": MethodEntry(
        "FedAvg of LoRA and a classifier with elastic weights", ewc.EWCConfig, finetune.FIDELITY, ewc.ewc
    ),
    "lwf": MethodEntry(
        "FedAvg of LoRA and a classifier with distillation", lwf.LwFConfig, finetune.FIDELITY, lwf.lwf
    ),
    "icarl": MethodEntry(
        "FedAvg of LoRA and a classifier with rehearsal", icarl.ICaRLConfig, finetune.FIDELITY, icarl.icarl
    ),
    "joint": MethodEntry(
        "FedAvg of LoRA and a classifier, all classes at once",
        finetune.FinetuneConfig,
        finetune.FIDELITY,
        finetune.finetune,
        joint=True,
    ),
}


def resolve_options(name: str, options: Any, fidelity: str) -> Any:
    """`options` with every None replaced by the value of the fidelity preset."""
    preset = METHODS[name].fidelity[fidelity]
    return dataclasses.replace(
        options, **{field: value for field, value in preset.items() if getattr(options, field) is None}
    )
