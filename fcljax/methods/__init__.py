"""The methods by name: one table, written out. To add one, write its file and add its line."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fcljax.methods import fedavg, fppl, linear
from fcljax.types import Method


class MethodEntry(NamedTuple):
    """How the command line makes a method.

    options: frozen dataclass of the method's own settings; None values are filled from `fidelity`.
    fidelity: preset name -> values of the fields on which paper and release differ.
    build(options, setting, backbone, epochs, batch_size, lr) -> Method.
    """

    summary: str
    options: type
    fidelity: dict[str, dict[str, Any]]
    build: Callable[..., Method]


METHODS: dict[str, MethodEntry] = {
    "fppl": MethodEntry(
        "fused task prompts, unified representation, prototype debias (FPPL)", fppl.FPPLConfig, fppl.FIDELITY, fppl.fppl
    ),
    "fedavg": MethodEntry(
        "FPPL's adapter with its three parts off: plain FedAvg", fedavg.FedAvgConfig, fedavg.FIDELITY, fedavg.fedavg
    ),
    "linear": MethodEntry("FedAvg of a classifier on frozen features", linear.LinearConfig, linear.FIDELITY, linear.linear),
}


def resolve_options(name: str, options: Any, fidelity: str) -> Any:
    """`options` with every None replaced by the value of the fidelity preset."""
    preset = METHODS[name].fidelity[fidelity]
    return dataclasses.replace(options, **{field: value for field, value in preset.items() if getattr(options, field) is None})
