"""Federated continual learning in JAX: methods from parts, an engine that simulates many clients at once.

What a run and a method of one's own need can be imported from here; it is loaded when it is first used.
"""

__version__ = "0.1.0"

_MODULES = {
    "fcljax.api": ("Result", "run"),
    "fcljax.data.files.client_json": ("read_clients",),
    "fcljax.data.files.dataset": ("Dataset",),
    "fcljax.errors": ("InputError",),
    "fcljax.methods": ("MethodEntry",),
    "fcljax.models.heads": ("apply_head", "cross_entropy", "distillation", "init_head", "mask_logits"),
    "fcljax.models.own": ("Backbone",),
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
        "Output",
        "Params",
        "cross_entropy_loss",
        "learner",
        "replaced_loss",
    ),
    "fcljax.parts.optimise": ("optimise",),
    "fcljax.parts.proximal": ("prox",),
    "fcljax.parts.reports": ("class_prototypes", "class_sums"),
    "fcljax.parts.server": ("ServerRound", "ServerRule", "ServerUpdate"),
    "fcljax.parts.simulation": ("fedavg", "local_sgd", "simulate"),
    "fcljax.runs.model": ("Model",),
    "fcljax.settings": ("Preset", "RunConfig"),
    "fcljax.types": (
        "Aggregate",
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


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'fcljax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
