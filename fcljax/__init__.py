"""Federated continual learning in JAX: methods from parts, an engine that simulates many clients at once.

What a method of one's own needs can be imported from here; it is loaded when it is first asked for. Two
functions have the names of their modules and are imported from there: `fcljax.parts.federate.federate` and
`fcljax.parts.learner.learner`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "fcljax.data.tasks": ("make_tasks",),
    "fcljax.data.store": ("client_rows",),
    "fcljax.parts.federate": (
        "Collect",
        "Run",
        "Rehearse",
        "Seen",
        "ServerStep",
        "Slots",
        "Survey",
        "Term",
        "Train",
    ),
    "fcljax.federated.aggregation": ("Aggregation", "AggregationOptions", "make_aggregation"),
    "fcljax.federated.rules": ("coordinate_median", "weighted_mean"),
    "fcljax.methods.fppl_robust": ("prototype_mean",),
    "fcljax.methods.pilora_prototypes": ("prototype_reweight",),
    "fcljax.methods.vfcl.conflation": ("conflate",),
    "fcljax.federated.check": ("Example",),
    "fcljax.federated.engine": ("Lanes", "init_clients", "keep_task", "make_engine", "run_round"),
    "fcljax.federated.schedule": ("ClientPartition", "capacities"),
    "fcljax.parts.learner": ("Adapter", "Classifier", "Model", "Objective"),
    "fcljax.methods": ("MethodEntry",),
    "fcljax.parts.classifiers": ("linear", "nearest_mean", "prototypes"),
    "fcljax.models.heads": ("apply_head", "cross_entropy", "distillation", "init_head", "mask_logits"),
    "fcljax.options": ("option",),
    "fcljax.types": (
        "Batch",
        "Broadcast",
        "ClientContext",
        "ReplayBuffer",
        "ReplayBatch",
        "Method",
        "Phase",
        "Program",
        "ServerReplay",
        "Round",
        "Sizes",
        "Task",
        "RoundContext",
        "Upload",
        "View",
        "Weighted",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fcljax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
