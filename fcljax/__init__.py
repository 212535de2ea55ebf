"""Federated continual learning in JAX: methods from parts, an engine that simulates
many clients at once.

What a run and a method of one's own need can be imported from here; it is loaded when
it is first used.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Module -> its public names. They are loaded when they are first used (`__getattr__`), so
# that `import fcljax` takes no second for JAX, and `fcljax.config` works without it.
_MODULES = {
    "fcljax.api": ("Result", "run"),
    "fcljax.comparison": ("Comparison", "compare", "run_seeds"),
    "fcljax.data.files.client_json": ("read_clients",),
    "fcljax.data.files.dataset": ("Dataset",),
    "fcljax.data.files.tokenizer_files": ("tokenize",),
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

# modules with names of their own, such as `fcljax.aggregate.krum`
_SUBMODULES = ("aggregate",)

# The same table for editors and type checkers, which do not run `__getattr__`. A test
# compares the two.
if TYPE_CHECKING:  # isort: off
    from fcljax import aggregate as aggregate
    from fcljax.api import Result as Result, run as run
    from fcljax.comparison import Comparison as Comparison, compare as compare, run_seeds as run_seeds
    from fcljax.data.files.client_json import read_clients as read_clients
    from fcljax.data.files.dataset import Dataset as Dataset
    from fcljax.data.files.tokenizer_files import tokenize as tokenize
    from fcljax.errors import InputError as InputError
    from fcljax.methods import MethodEntry as MethodEntry
    from fcljax.models.heads import (
        apply_head as apply_head,
        cross_entropy as cross_entropy,
        distillation as distillation,
        init_head as init_head,
        mask_logits as mask_logits,
    )
    from fcljax.models.own import Backbone as Backbone
    from fcljax.options import option as option
    from fcljax.parts.classifiers import (
        linear as linear,
        nearest_mean as nearest_mean,
        prototypes as prototypes,
    )
    from fcljax.parts.client import (
        ClientEnd as ClientEnd,
        ClientPass as ClientPass,
        ClientRule as ClientRule,
        ClientStep as ClientStep,
        OfEachClient as OfEachClient,
        Replay as Replay,
        Report as Report,
        Training as Training,
    )
    from fcljax.parts.federate import (
        Run as Run,
        ServerState as ServerState,
        federate as federate,
        linear_learner as linear_learner,
    )
    from fcljax.parts.learner import (
        Adapter as Adapter,
        Classifier as Classifier,
        Learner as Learner,
        Loss as Loss,
        Output as Output,
        Params as Params,
        cross_entropy_loss as cross_entropy_loss,
        learner as learner,
        replaced_loss as replaced_loss,
    )
    from fcljax.parts.optimise import optimise as optimise
    from fcljax.parts.proximal import prox as prox
    from fcljax.parts.reports import class_prototypes as class_prototypes, class_sums as class_sums
    from fcljax.parts.server import (
        ServerRound as ServerRound,
        ServerRule as ServerRule,
        ServerUpdate as ServerUpdate,
    )
    from fcljax.parts.simulation import fedavg as fedavg, local_sgd as local_sgd, simulate as simulate
    from fcljax.runs.model import Model as Model
    from fcljax.settings import Preset as Preset, RunConfig as RunConfig
    from fcljax.types import (
        Aggregate as Aggregate,
        Batch as Batch,
        Broadcast as Broadcast,
        ClientContext as ClientContext,
        Method as Method,
        Phase as Phase,
        Program as Program,
        ReplayBatch as ReplayBatch,
        ReplayBuffer as ReplayBuffer,
        Round as Round,
        RoundContext as RoundContext,
        ServerReplay as ServerReplay,
        Sizes as Sizes,
        Task as Task,
        Upload as Upload,
        View as View,
        Weighted as Weighted,
    )

_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted([*_HOME, *_SUBMODULES])


def __getattr__(name: str) -> object:
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f"fcljax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fcljax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
