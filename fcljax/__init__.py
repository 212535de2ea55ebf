"""Federated continual learning in JAX: methods from parts, an engine that simulates many clients at once.

Everything that a method of one's own needs can be imported from here; it is loaded when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "fcljax.data.tasks": ("make_tasks",),
    "fcljax.data.store": ("client_indices",),
    "fcljax.federated.aggregation": ("Aggregation", "AggregationOptions", "make_aggregation"),
    "fcljax.federated.check": ("Example",),
    "fcljax.federated.engine": (
        "Lanes",
        "RoundInputs",
        "init_clients",
        "keep_task",
        "make_engine",
        "run_round",
    ),
    "fcljax.federated.rules": ("coordinate_median", "weighted_mean"),
    "fcljax.federated.schedule": ("ClientPartition", "capacities"),
    "fcljax.methods": ("MethodEntry",),
    "fcljax.methods.fppl": ("prototype_mean",),
    "fcljax.methods.pilora": ("prototype_reweight",),
    "fcljax.methods.vfcl.conflation": ("conflate_sums", "precision_terms"),
    "fcljax.models.heads": ("apply_head", "cross_entropy", "distillation", "init_head", "mask_logits"),
    "fcljax.options": ("option",),
    "fcljax.parts.classifiers": ("linear", "nearest_mean", "prototypes"),
    "fcljax.parts.client": (
        "ClientEnd",
        "ClientPass",
        "ClientRule",
        "ClientStep",
        "OfEachClient",
        "Replay",
        "Report",
        "Training",
    ),
    "fcljax.parts.federate": ("Run", "ServerState", "federate", "linear_learner"),
    "fcljax.parts.learner": (
        "Adapter",
        "Classifier",
        "Learner",
        "Loss",
        "Params",
        "cross_entropy_loss",
        "learner",
        "replaced_loss",
    ),
    "fcljax.parts.optimise": ("optimise",),
    "fcljax.parts.reports": ("class_prototypes", "class_sums"),
    "fcljax.parts.server": ("ServerRound", "ServerRule", "ServerUpdate"),
    "fcljax.types": (
        "Batch",
        "Broadcast",
        "ClientContext",
        "Method",
        "Phase",
        "Program",
        "ReplayBatch",
        "ReplayBuffer",
        "Round",
        "RoundContext",
        "ServerReplay",
        "Sizes",
        "Task",
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
