"""The methods by name: one table, written out. To add one, write its file and add its line.

A method from outside the package is a file or module that holds a `MethodEntry` (`find_method`).
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from fcljax.errors import InputError, nearest
from fcljax.methods import (
    cfed,
    ewc,
    fed_cprompt,
    fedavg,
    fedavg_prompt,
    fedclm,
    fedlwf_mc,
    fedncm,
    fedrecon,
    fppl,
    icarl,
    lwf,
    pilora,
    pmae,
)
from fcljax.methods.fedweit import fedweit
from fcljax.methods.glfc import glfc, lga
from fcljax.methods.hepco import hepco
from fcljax.methods.target import target
from fcljax.methods.vfcl import vfcl
from fcljax.parts.federate import Run
from fcljax.types import Method

Loaded = TypeVar("Loaded")


class MethodEntry(NamedTuple):
    """How the command line makes a method.

    options: frozen dataclass of the method's own settings; None values are filled from `fidelity`.
    build(options, kit) -> Method
    adapter: the default one, of `adapters.ADAPTERS`
    fidelity: preset name -> values of the fields, its own and the adapter's, on which paper and release
      differ
    defaults: values of a run's or an adapter's fields that suit the method
    options_with: adapter -> a subclass of `options` with more options, which act on that adapter alone
    excludes: adapters that cannot work -> why
    merges: why only the plain mean can merge what its clients send; "" if any rule can
    joint: do all tasks' classes come at once?
    """

    summary: str
    options: type
    build: Callable[[Any, Run], Method]
    adapter: str
    fidelity: Mapping[str, Mapping[str, object]] = {}
    defaults: Mapping[str, object] = {}
    options_with: Mapping[str, type] = {}
    excludes: Mapping[str, str] = {}
    merges: str = ""
    joint: bool = False


# what the LoRA baselines of PILoRA's tables share: one pair goes on training through all tasks
_ONE_PAIR = {"lora_pairs": "one"}
# how TARGET's release trains the baselines that are taken from it (specification C0); EWC has no weight decay
_SGD = _ONE_PAIR | {"optimiser": "sgd", "lr": 0.01, "lora_lr": 0.01}
_DECAY = _SGD | {"weight_decay": 5e-4}
_MOMENTUM = dict.fromkeys(("intended", "paper", "released"), {"momentum": 0.9})

# HePCo's clients exist for one round, and are averaged whatever they have
_SAMPLED = {"partition": "sampled", "aggregator": "uniform"}
# one client that has everything is no sampled one
_ALONE = {
    preset: {field: value for field, value in fields.items() if field != "long_tail"}
    for preset, fields in hepco.CLIENT.items()
}
_WHOLE = {"full_lr": 5e-5, "lr": 5e-5}  # of methods that train the whole network (HePCo, section 5)

# GLFC's and LGA's clients are averaged whatever they have
_COMPENSATED = _ONE_PAIR | {"aggregator": "uniform", "full_lr": 3e-4, "lr": 1e-3}

METHODS: dict[str, MethodEntry] = {
    "fppl": MethodEntry(
        "fused task prompts, unified representation, prototype debias (FPPL)",
        fppl.FPPLOptions,
        fppl.fppl,
        "prompts",
        fppl.FIDELITY,
    ),
    "fedavg": MethodEntry(
        "FPPL's adapter with its three parts off: plain FedAvg",
        fedavg.FedAvgOptions,
        fedavg.fedavg,
        "prompts",
        fedavg.FIDELITY,
        {"wo_fusion": True, "gate_scale": "fixed", "prompt_upload": "current"},
    ),
    "linear": MethodEntry(
        "FedAvg of a classifier on frozen features", fedavg.NoOptions, fedavg.plain, "linear"
    ),
    "pilora": MethodEntry(
        "prototypes re-weighted on the server, a LoRA pair per task (PILoRA)",
        pilora.PiloraOptions,
        pilora.pilora,
        "lora",
        pilora.FIDELITY,
        {"lr": 0.1, "weight_decay": 1e-5},
        {"lora": pilora.PiloraLoraOptions},
        merges="prototypes are weighted by PILoRA's own rule; with --wo-reweight any rule merges them",
    ),
    "fedncm": MethodEntry(
        "class means of frozen features, no training (FedNCM)",
        fedncm.FedNCMOptions,
        fedncm.fedncm,
        "linear",
        excludes=dict.fromkeys(
            ("lora", "prompts", "pool", "vpt", "l2p", "dualprompt", "coda", "full"),
            "nothing trains in FedNCM: an adapter would stay at its first values",
        ),
        merges="it sends sums over rows, which are added up",
    ),
    "fedrecon": MethodEntry(
        "merged class prototypes of an embedding that is frozen, or trained in the first task (FedRecon)",
        fedrecon.FedReconOptions,
        fedrecon.fedrecon,
        "linear",
        excludes=dict.fromkeys(
            ("lora", "prompts", "pool", "vpt", "l2p", "dualprompt", "coda"),
            "its embedding is a whole network",
        ),
        merges="it sends sums over rows, which are added up",
    ),
    "fedclm": MethodEntry(
        "FedAvg of LoRA and a classifier, class means at inference",
        fedclm.FedCLMOptions,
        fedclm.fedclm,
        "lora",
        defaults=_ONE_PAIR,
        merges="its class means are sums over rows, which are added up",
    ),
    "ewc": MethodEntry(
        "FedAvg of LoRA and a classifier with elastic weights",
        ewc.EWCOptions,
        ewc.ewc,
        "lora",
        _MOMENTUM,
        _SGD,
    ),
    "lwf": MethodEntry(
        "FedAvg of LoRA and a classifier with distillation",
        lwf.LwFOptions,
        lwf.lwf,
        "lora",
        _MOMENTUM,
        _DECAY,
    ),
    "icarl": MethodEntry(
        "FedAvg of LoRA and a classifier with rehearsal",
        icarl.ICaRLOptions,
        icarl.icarl,
        "lora",
        _MOMENTUM,
        _DECAY,
    ),
    "hepco": MethodEntry(
        "a weighted prompt pool, latent generation and distillation on the server (HePCo)",
        hepco.HepcoOptions,
        hepco.hepco,
        "pool",
        hepco.FIDELITY,
        _SAMPLED,
        merges="its server learns from the clients' models one by one; `uniform` works too",
    ),
    "fedavg-prompt": MethodEntry(
        "HePCo's clients, and a server that only averages",
        hepco.PromptedOptions,
        fedavg_prompt.fedavg_prompt,
        "pool",
        hepco.CLIENT,
        _SAMPLED,
    ),
    "fedprox": MethodEntry(
        "FedAvg-Prompt whose clients are kept near what they were sent (FedProx)",
        hepco.PromptedOptions,
        fedavg_prompt.fedavg_prompt,
        "pool",
        hepco.CLIENT,
        _SAMPLED | {"prox_weight": 0.01},
    ),
    "fed-cprompt": MethodEntry(
        "prompts near the newest global model and far from the last task's (Fed-CPrompt)",
        fed_cprompt.CPromptOptions,
        fed_cprompt.fed_cprompt,
        "pool",
        hepco.CLIENT,
        _SAMPLED,
    ),
    "fedavg-ft": MethodEntry(
        "FedAvg of the whole network",
        hepco.PromptedOptions,
        fedavg_prompt.fedavg_prompt,
        "full",
        hepco.CLIENT,
        _SAMPLED | _WHOLE,
    ),
    "fedlwf-mc": MethodEntry(
        "FedAvg of the whole network, old classes distilled one by one (FedLwF.MC)",
        hepco.PromptedOptions,
        fedlwf_mc.fedlwf_mc,
        "full",
        hepco.CLIENT,
        _SAMPLED | _WHOLE,
    ),
    "cfed": MethodEntry(
        "FedAvg of the whole network, some clients distil on images of another data set (CFeD)",
        cfed.CFeDOptions,
        cfed.cfed,
        "full",
        hepco.CLIENT,
        _SAMPLED | _WHOLE,
    ),
    "fedweit": MethodEntry(
        "a base that travels, and for each task a mask and sparse parameters of a client's own (FedWeIT)",
        fedweit.FedWeITOptions,
        fedweit.fedweit,
        "full",
        fedweit.FIDELITY,
        _ONE_PAIR | {"aggregator": "uniform", "lr": 0.01, "full_lr": 1e-3 / 3, "lora_lr": 1e-3},
        excludes=dict.fromkeys(
            ("linear", "prompts", "pool", "vpt", "l2p", "dualprompt", "coda"),
            "it composes a network's own weights, or LoRA's",
        ),
        merges="clients send parts of a base; `uniform` works too, and with --unsent 0 any rule",
    ),
    "target": MethodEntry(
        "FedAvg of the whole network, distillation on images that the server makes of noise (TARGET)",
        target.TargetOptions,
        target.target,
        "full",
        target.FIDELITY,
        _SAMPLED | _WHOLE,
    ),
    "glfc": MethodEntry(
        "clients find task changes, weigh rows and rehearse; a proxy chooses what they distil (GLFC)",
        glfc.GLFCOptions,
        glfc.glfc,
        "full",
        glfc.FIDELITY,
        _COMPENSATED,
    ),
    "lga": MethodEntry(
        "GLFC with weights balanced over all tasks and a proxy that looks around its images (LGA)",
        lga.LGAOptions,
        lga.lga,
        "full",
        lga.FIDELITY,
        _COMPENSATED,
    ),
    "centralized-prompt": MethodEntry(
        "one client that has everything: HePCo's upper bound",
        hepco.PromptedOptions,
        fedavg_prompt.fedavg_prompt,
        "pool",
        _ALONE,
        {"partition": "iid", "clients": 1, "rounds": 1, "epochs": 20},
    ),
    "l2p": MethodEntry("FedAvg of L2P's pool of prompts (FedL2P)", fedavg.NoOptions, fedavg.plain, "l2p"),
    "dualprompt": MethodEntry(
        "FedAvg of DualPrompt's prefixes (FedDualP)", fedavg.NoOptions, fedavg.plain, "dualprompt"
    ),
    "coda-prompt": MethodEntry(
        "FedAvg of CODA-Prompt's components (FedCODA-P)", fedavg.NoOptions, fedavg.plain, "coda"
    ),
    "pmae": MethodEntry(
        "the server trains on images that a masked autoencoder rebuilds (pMAE)",
        pmae.PmaeOptions,
        pmae.pmae,
        "vpt",
        pmae.FIDELITY,
    ),
    "l2p-pmae": MethodEntry(
        "pMAE with L2P's prompts (FedL2P+pMAE)", pmae.PmaeOptions, pmae.pmae, "l2p", pmae.FIDELITY
    ),
    "dualprompt-pmae": MethodEntry(
        "pMAE with DualPrompt's prefixes (FedDualP+pMAE)",
        pmae.PmaeOptions,
        pmae.pmae,
        "dualprompt",
        pmae.FIDELITY,
    ),
    "coda-prompt-pmae": MethodEntry(
        "pMAE with CODA-Prompt's components (FedCODA-P+pMAE)",
        pmae.PmaeOptions,
        pmae.pmae,
        "coda",
        pmae.FIDELITY,
    ),
    "vfcl": MethodEntry(
        "a Bayesian network, two priors, conflation; clients keep their classifiers (VFCL)",
        vfcl.VFCLOptions,
        vfcl.vfcl,
        "full",
        vfcl.FIDELITY,
        {"full_lr": 0.01, "lr": 0.01, "optimiser": "sgd", "rounds": 10},
        merges="Gaussians are multiplied; with --merge average any rule merges means and rhos",
    ),
    "joint": MethodEntry(
        "FedAvg of LoRA and a classifier, all classes at once",
        fedavg.NoOptions,
        fedavg.plain,
        "lora",
        defaults=_ONE_PAIR | {"rounds": 15},
        joint=True,
    ),
}

OUTSIDE = "METHOD"  # the name of the entry in a file from outside, where none is given


def find_method(name: str) -> MethodEntry:
    """The entry of a method of the package, or of one from outside: FILE.py, FILE.py:NAME or MODULE:NAME.

    A method's file is a program: it is run when it is loaded.

    Raises:
      InputError: for an unknown name, or a file or module that cannot be loaded or holds no MethodEntry.
    """
    return METHODS[name] if name in METHODS else _from_outside(name)


@functools.cache
def _from_outside(name: str) -> MethodEntry:
    place, _, attribute = name.partition(":")
    if not (place.endswith(".py") or attribute):
        raise InputError(f"method: unknown value {name!r}; {nearest(name, METHODS)}")
    module = (
        _load_file(place) if place.endswith(".py") else _load(name, lambda: importlib.import_module(place))
    )
    entry = getattr(module, attribute or OUTSIDE, None)
    if not isinstance(entry, MethodEntry):
        raise InputError(f"method: {name!r} has no MethodEntry by the name {attribute or OUTSIDE}")
    return entry


def _load_file(place: str) -> ModuleType:
    if not Path(place).is_file():
        raise InputError(f"method: no file {place!r}")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise InputError(f"method: {place!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    _load(place, functools.partial(spec.loader.exec_module, module))
    return module


def _load(name: str, load: Callable[[], Loaded]) -> Loaded:
    try:
        return load()
    except Exception as error:  # whatever a stranger's file raises while it is loaded
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"method: {name!r} cannot be loaded: {said}") from error
