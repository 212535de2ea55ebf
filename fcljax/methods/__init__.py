"""The methods by name: one table. To add a method, write its file and add its entry.

The table needs none of the code, and so no JAX: a method is loaded when it is asked for.
A method from outside the package is a file or module that holds a `MethodEntry`
(`find_method`).
"""

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcljax.errors import InputError, nearest
from fcljax.options import load
from fcljax.settings import NoOptions, Preset
from fcljax.user_files import guarded, load_file


@dataclasses.dataclass(frozen=True, eq=False)
class MethodEntry:
    """How `fcljax run` makes a method.

    Methods of the package name their presets and function as "MODULE:NAME" of
    `fcljax.methods`; `find_method` loads them.
    """

    summary: str
    """One line for `fcljax list`."""
    presets: Any
    """Fidelity -> `Preset`, or the dataclass of the method's options, whose defaults are
    the one preset; None: the method has no options."""
    build: Any
    """(options, run: `parts.federate.Run`) -> `types.Method`."""
    adapter: str
    """The default adapter, of `adapters.ADAPTERS`."""
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Adapters that cannot work -> why."""
    merges: str = ""
    """Why only the plain mean can merge what clients send; "" if any rule can."""
    joint: bool = False
    """Whether all tasks' classes come at once."""
    one_client: bool = False
    """Whether a single client has all examples, so that there is no federation."""
    elsewhere: Any = None
    """Options of the method on other adapters than its own, where these are fewer."""
    closed_form: bool = False
    """Whether nothing trains on its own adapter, so that there are no learning rates to search."""
    instead: str = ""
    """For a method that reads pixels, the nearest one for data that are no images; "": it
    reads any data."""
    name: str = ""
    """A short name for tables and pages; "": the name of `build`, or of the file."""

    def options(self, adapter: str) -> type:
        """Return the dataclass of the method's options on an adapter."""
        if adapter != self.adapter and self.elsewhere:
            return self.elsewhere
        return type(self.presets["intended"].options)


_MEANS = "it sends sums over examples, which are added up"
_PAIRS = "it merges or calibrates LoRA pairs"
_WHOLE_NETWORK = "its embedding is a whole network"
_FROZEN_CLIP = "CLIP stays frozen, and its text side makes the classifier"
_PROMPTS = ("prompts", "pool", "vpt", "l2p", "dualprompt", "coda")
_SEPARATE_PROMPTS = dict.fromkeys(
    ("prompts", "dualprompt", "coda"),
    "clients keep one model over all tasks, but each task has separate prompts there",
)

METHODS: dict[str, MethodEntry] = {
    "fppl": MethodEntry(
        "fused task prompts, unified representation, prototype debias (FPPL)",
        "fppl:PRESETS",
        "fppl:fppl",
        "prompts",
    ),
    "fedavg": MethodEntry(
        "FPPL's adapter with its three parts off: plain FedAvg",
        "fedavg:PRESETS",
        "fedavg:fedavg_of_fppl",
        "prompts",
    ),
    "linear": MethodEntry(
        "FedAvg of a classifier on frozen features", "fedavg:LINEAR", "fedavg:linear", "linear"
    ),
    "pilora": MethodEntry(
        "prototypes re-weighted on the server, a LoRA pair per task (PILoRA)",
        "pilora:PRESETS",
        "pilora:pilora",
        "lora",
        merges="prototypes are weighted by PILoRA's own rule; with --wo-reweight any rule merges them",
        elsewhere="pilora:PiloraOptions",
    ),
    "fedncm": MethodEntry(
        "class means of frozen features, no training (FedNCM)",
        "fedncm:FedNCMOptions",
        "fedncm:fedncm",
        "linear",
        excludes=dict.fromkeys(
            ("lora", *_PROMPTS, "full"),
            "nothing trains in FedNCM: an adapter would keep its initial values",
        ),
        merges=_MEANS,
        closed_form=True,
    ),
    "zero-shot": MethodEntry(
        "text features of class names classify, no training (CLIP)",
        "zero_shot:ZeroShotOptions",
        "zero_shot:zero_shot",
        "linear",
        excludes=dict.fromkeys(("lora", *_PROMPTS, "full"), _FROZEN_CLIP),
        merges="its clients send nothing",
        closed_form=True,
        instead="linear",
    ),
    "promptfl": MethodEntry(
        "context vectors of CLIP's prompts train and are averaged (CoOp, PromptFL)",
        "promptfl:PRESETS",
        "promptfl:promptfl",
        "linear",
        excludes=dict.fromkeys(("lora", *_PROMPTS, "full"), _FROZEN_CLIP),
        instead="linear",
    ),
    "fedtpg": MethodEntry(
        "a network makes the context vectors of CLIP's prompts from class names (FedTPG)",
        "fedtpg:PRESETS",
        "fedtpg:fedtpg",
        "linear",
        excludes=dict.fromkeys(("lora", *_PROMPTS, "full"), _FROZEN_CLIP),
        instead="linear",
    ),
    "afcl": MethodEntry(
        "ridge regression of frozen features by recursive least squares, exact for every partition (AFCL)",
        "afcl:AFCLOptions",
        "afcl:afcl",
        "linear",
        excludes=dict.fromkeys(
            ("lora", *_PROMPTS, "full"),
            "nothing trains in AFCL: an adapter would keep its initial values",
        ),
        merges=_MEANS,
        closed_form=True,
    ),
    "fedranpac": MethodEntry(
        "ridge regression on a random projection of features, ridge chosen on held-out examples (FedRanPAC)",
        "fedranpac:PRESETS",
        "fedranpac:fedranpac",
        "linear",
        excludes=dict.fromkeys(
            ("prompts", "pool", "dualprompt", "coda"),
            "its features change with the task, and sums of features are kept over all tasks",
        ),
        merges=_MEANS,
        closed_form=True,
    ),
    "stsa": MethodEntry(
        "ridge regression on random features; Gram matrices are sent or estimated from sums (STSA, STSA-E)",
        "stsa:PRESETS",
        "stsa:stsa",
        "linear",
        excludes=dict.fromkeys(
            ("prompts", "pool", "dualprompt", "coda"),
            "its features change with the task, and sums of features are kept over all tasks",
        ),
        merges=_MEANS,
        closed_form=True,
    ),
    "fedran": MethodEntry(
        "ridge regression on random features from the largest directions of Gram matrices (FedRAN)",
        "fedran:FedRANOptions",
        "fedran:fedran",
        "linear",
        excludes=dict.fromkeys(
            ("lora", *_PROMPTS, "full"),
            "nothing trains in FedRAN: an adapter would keep its initial values",
        ),
        merges="it merges the largest directions of what clients send, and sums over examples",
        closed_form=True,
    ),
    "lorm": MethodEntry(
        "LoRA pairs merged in closed form to keep their responses, one factor at a time (LoRM)",
        "lorm:PRESETS",
        "lorm:lorm",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
        merges="it merges what clients send by the responses of their pairs",
    ),
    "regmean": MethodEntry(
        "LoRA's factors and the classifier merged in least squares, as linear layers (RegMean)",
        "regmean:PRESETS",
        "regmean:regmean",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
        merges="it merges what clients send by the responses of their layers",
    ),
    "dolfin": MethodEntry(
        "LoRA pairs orthogonal to earlier tasks' inputs, by gradient projection memory (DOLFIN)",
        "dolfin:PRESETS",
        "dolfin:dolfin",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
        merges="its Gram matrices are sums over examples, which are added up",
    ),
    "fot": MethodEntry(
        "FedAvg of LoRA; updates orthogonal to the inputs of earlier tasks (FOT)",
        "fot:PRESETS",
        "fot:fot",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
        merges="its sketches of inputs are sums over examples, which are added up",
    ),
    "fedknow": MethodEntry(
        "FedAvg; gradients are turned so that they agree with what past tasks left behind (FedKNOW)",
        "fedknow:PRESETS",
        "fedknow:fedknow",
        "lora",
        excludes=dict.fromkeys(
            ("prompts", "dualprompt", "coda"),
            "clients keep knowledge of all tasks, but each task has separate prompts there",
        ),
    ),
    "fed-talora": MethodEntry(
        "one LoRA pair for all tasks; the error of averaging its factors goes to the weights (Fed-TaLoRA)",
        "fed_talora:PRESETS",
        "fed_talora:fed_talora",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
        merges="it merges what clients send so that their updates are averaged",
    ),
    "fedslca": MethodEntry(
        "a slow learner, class Gaussians of all clients, classifier alignment on drawn features (FedSLCA)",
        "fedslca:PRESETS",
        "fedslca:fedslca",
        "full",
        merges="its class statistics are sums over examples, which are added up",
    ),
    "ccvr": MethodEntry(
        "FedAvg; after a task the classifier is retrained on features drawn from class Gaussians (CCVR)",
        "ccvr:PRESETS",
        "ccvr:ccvr",
        "lora",
        merges="its class statistics are sums over examples, which are added up",
    ),
    "fedrecon": MethodEntry(
        "merged class prototypes of an embedding, frozen or trained in the first task (FedRecon)",
        "fedrecon:FedReconOptions",
        "fedrecon:fedrecon",
        "linear",
        excludes=dict.fromkeys(("lora", *_PROMPTS), _WHOLE_NETWORK),
        merges=_MEANS,
        closed_form=True,
    ),
    "fedclm": MethodEntry(
        "FedAvg of LoRA and a classifier, class means at inference",
        "fedclm:PRESETS",
        "fedclm:fedclm",
        "lora",
        merges="its class means are sums over examples, which are added up",
    ),
    "ewc": MethodEntry(
        "FedAvg of LoRA and a classifier with elastic weights", "ewc:PRESETS", "ewc:ewc", "lora"
    ),
    "lwf": MethodEntry("FedAvg of LoRA and a classifier with distillation", "lwf:PRESETS", "lwf:lwf", "lora"),
    "icarl": MethodEntry(
        "FedAvg of LoRA and a classifier with replay", "icarl:PRESETS", "icarl:icarl", "lora"
    ),
    "hepco": MethodEntry(
        "a weighted prompt pool, latent generation and distillation on the server (HePCo)",
        "hepco.hepco:PRESETS",
        "hepco.hepco:hepco",
        "pool",
        merges="its server learns from the clients' models one by one; `uniform` works too",
    ),
    "fedavg-prompt": MethodEntry(
        "HePCo's clients, and a server that only averages",
        "fedavg_prompt:PRESETS",
        "fedavg_prompt:fedavg_prompt",
        "pool",
    ),
    "fedprox": MethodEntry(
        "FedAvg-Prompt with a proximal term toward the global model (FedProx)",
        "fedavg_prompt:FEDPROX",
        "fedavg_prompt:fedavg_prompt",
        "pool",
    ),
    "scaffold": MethodEntry(
        "FedAvg with control variates against client drift (SCAFFOLD)",
        "scaffold:PRESETS",
        "scaffold:scaffold",
        "lora",
        merges="its control variates are sums over examples, which are added up",
    ),
    "feddyn": MethodEntry(
        "FedAvg with dynamic regularisation toward the optimum of all clients (FedDyn)",
        "feddyn:PRESETS",
        "feddyn:feddyn",
        "lora",
    ),
    "fedper": MethodEntry(
        "FedAvg of the adapter; clients keep their classifiers (FedPer)",
        "fedper:PRESETS",
        "fedper:fedper",
        "lora",
        excludes={"linear": "nothing would be shared: the classifier stays with the client"},
    ),
    "fedproto": MethodEntry(
        "FedAvg with features pulled to global class prototypes (FedProto)",
        "fedproto:PRESETS",
        "fedproto:fedproto",
        "lora",
        merges="its prototypes are sums over examples, which are added up",
    ),
    "ditto": MethodEntry(
        "FedAvg and a personal model per client, close to the global one (Ditto)",
        "ditto:PRESETS",
        "ditto:ditto",
        "lora",
        excludes=_SEPARATE_PROMPTS,
    ),
    "fed-cprompt": MethodEntry(
        "prompts close to the global model and far from the last task's (Fed-CPrompt)",
        "fed_cprompt:PRESETS",
        "fed_cprompt:fed_cprompt",
        "pool",
    ),
    "fedavg-ft": MethodEntry(
        "FedAvg of the whole network", "prompted:WHOLE", "fedavg_prompt:fedavg_prompt", "full"
    ),
    "fedlwf-mc": MethodEntry(
        "FedAvg of the whole network, old classes distilled one by one (FedLwF.MC)",
        "fedlwf_mc:PRESETS",
        "fedlwf_mc:fedlwf_mc",
        "full",
    ),
    "cfed": MethodEntry(
        "FedAvg of the whole network, some clients distil on surrogate images (CFeD)",
        "cfed:PRESETS",
        "cfed:cfed",
        "full",
        instead="lwf",
    ),
    "fedweit": MethodEntry(
        "a shared base; per client and task a mask and sparse parameters (FedWeIT)",
        "fedweit.fedweit:PRESETS",
        "fedweit.fedweit:fedweit",
        "full",
        excludes=dict.fromkeys(
            ("linear", *_PROMPTS),
            "it composes a network's own weights, or LoRA's",
        ),
        merges="clients send parts of a base; `uniform` works too, and with --client-sparsity 0 any rule",
    ),
    "target": MethodEntry(
        "FedAvg of the whole network, distillation on images that the server synthesises from noise (TARGET)",
        "target:PRESETS",
        "target:target",
        "full",
        instead="lwf",
    ),
    "c2prompt": MethodEntry(
        "components mixed by class affinity, prompts that pull features to class means (C2Prompt)",
        "c2prompt:PRESETS",
        "c2prompt:c2prompt",
        "coda",
        excludes=dict.fromkeys(
            ("linear", "lora", "prompts", "pool", "vpt", "l2p", "dualprompt", "full"),
            "it mixes CODA-Prompt's components",
        ),
        merges="it mixes components by its own rule; with --wo-cpa and --wo-lcdc any rule merges them",
    ),
    "mfcl": MethodEntry(
        "FedAvg of the whole network, replay of images from a generator at the server (MFCL)",
        "mfcl:PRESETS",
        "mfcl:mfcl",
        "full",
        instead="lwf",
    ),
    "lander": MethodEntry(
        "features pulled to class anchors, distillation on images synthesised from them (LANDER)",
        "lander:PRESETS",
        "lander:lander",
        "full",
        instead="lwf",
    ),
    "glfc": MethodEntry(
        "clients find task changes, weigh examples and replay; a proxy chooses what they distil (GLFC)",
        "glfc.glfc:PRESETS",
        "glfc.glfc:glfc",
        "full",
        instead="icarl",
    ),
    "lga": MethodEntry(
        "GLFC with weights balanced over all tasks and a proxy that looks around its images (LGA)",
        "glfc.lga:PRESETS",
        "glfc.lga:lga",
        "full",
        instead="icarl",
    ),
    "centralized-prompt": MethodEntry(
        "one client with all data: HePCo's upper bound",
        "fedavg_prompt:CENTRALIZED",
        "fedavg_prompt:fedavg_prompt",
        "pool",
        one_client=True,
    ),
    "l2p": MethodEntry("FedAvg of L2P's pool of prompts (FedL2P)", "fedavg:PLAIN", "fedavg:plain", "l2p"),
    "dualprompt": MethodEntry(
        "FedAvg of DualPrompt's prefixes (FedDualP)", "fedavg:PLAIN", "fedavg:plain", "dualprompt"
    ),
    "coda-prompt": MethodEntry(
        "FedAvg of CODA-Prompt's components (FedCODA-P)", "fedavg:PLAIN", "fedavg:plain", "coda"
    ),
    "pmae": MethodEntry(
        "the server trains on images that a masked autoencoder reconstructs (pMAE)",
        "pmae:PRESETS",
        "pmae:pmae",
        "vpt",
        instead="icarl",
    ),
    "l2p-pmae": MethodEntry(
        "pMAE with L2P's prompts (FedL2P+pMAE)",
        "pmae:PRESETS",
        "pmae:pmae",
        "l2p",
        instead="l2p",
    ),
    "dualprompt-pmae": MethodEntry(
        "pMAE with DualPrompt's prefixes (FedDualP+pMAE)",
        "pmae:PRESETS",
        "pmae:pmae",
        "dualprompt",
        instead="dualprompt",
    ),
    "coda-prompt-pmae": MethodEntry(
        "pMAE with CODA-Prompt's components (FedCODA-P+pMAE)",
        "pmae:PRESETS",
        "pmae:pmae",
        "coda",
        instead="coda-prompt",
    ),
    "vfcl": MethodEntry(
        "a Bayesian network, two priors, conflation; clients keep their classifiers (VFCL)",
        "vfcl.vfcl:PRESETS",
        "vfcl.vfcl:vfcl",
        "full",
        merges="Gaussians are multiplied; with --merge average any rule merges means and rhos",
    ),
    "centralised": MethodEntry(
        "one client with all data, all classes at once: an upper bound",
        "fedavg:CENTRALISED",
        "fedavg:plain",
        "lora",
        joint=True,
        one_client=True,
    ),
    "sequential": MethodEntry(
        "one client with all data, task after task: forgetting without a federation",
        "fedavg:SEQUENTIAL",
        "fedavg:plain",
        "lora",
        one_client=True,
    ),
    "ffa-lora": MethodEntry(
        "FedAvg of LoRA's factor B; A is random, frozen and the same for all (FFA-LoRA)",
        "ffa_lora:PRESETS",
        "ffa_lora:ffa_lora",
        "lora",
        excludes=dict.fromkeys(("linear", *_PROMPTS, "full"), _PAIRS),
    ),
    "local": MethodEntry(
        "clients train alone and never communicate: a lower bound",
        "local:PRESETS",
        "local:local",
        "lora",
        excludes=_SEPARATE_PROMPTS,
        merges="its clients send nothing",
    ),
    "joint": MethodEntry(
        "FedAvg of LoRA and a classifier, all classes at once",
        "fedavg:JOINT",
        "fedavg:plain",
        "lora",
        joint=True,
    ),
}

# the name of the entry in a file from outside, where none is given
OUTSIDE = "METHOD"


def find_method(method: str | MethodEntry) -> MethodEntry:
    """Return the loaded entry of a method of the package or from outside.

    A method from outside is FILE.py, FILE.py:NAME, MODULE:NAME or an entry itself.

    A method's file is a program: it is run when it is loaded.

    Raises:
      InputError: for an unknown name, or a file or module that cannot be loaded or holds
        no MethodEntry.
    """
    if isinstance(method, MethodEntry):
        return _loaded(method)
    if method in METHODS:
        return _loaded(METHODS[method])
    return _from_outside(method)


def check_no_code(name: str, where: str, advice: str) -> None:
    """Check that a settings file names a method of the package: any other is a program,
    which reading a file must not run.

    Raises:
      InputError: naming the file and what to do.
    """
    if name not in METHODS and (name.partition(":")[0].endswith(".py") or ":" in name):
        raise InputError(
            f"{where}: the method {name!r} is a program, and a settings file cannot run one; {advice}"
        )


def file_of(method: str | MethodEntry) -> Path | None:
    """Return the file of a method from outside the package; None where there is none."""
    if isinstance(method, MethodEntry) or method in METHODS:
        return None
    place = method.partition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    # a module has a file once it is imported
    source = getattr(sys.modules.get(place), "__file__", None)
    if not source:
        return None
    return Path(source)


def name_of(method: str | MethodEntry) -> str:
    """Return a method's name in settings: the name or file as given, or an entry's name."""
    if isinstance(method, str):
        return method
    return method.name or getattr(method.build, "__name__", "own")


def short_name(method: str | MethodEntry) -> str:
    """Return a method's name in tables and on pages: its entry's name, else its file's."""
    if method in METHODS:
        return str(method)
    place, _, attribute = name_of(method).partition(":")
    return find_method(method).name or (Path(place).stem if place.endswith(".py") else attribute or place)


@functools.cache
def _loaded(entry: MethodEntry) -> MethodEntry:
    """Return the entry with its code, and with presets made of a dataclass of options."""
    # entries of the package have text in these fields, others the objects themselves
    presets = load("fcljax.methods", entry.presets)
    build = load("fcljax.methods", entry.build)
    elsewhere = load("fcljax.methods", entry.elsewhere)
    if presets is None:
        presets = NoOptions
    if isinstance(presets, type):
        _check_options(presets)
        presets = {"intended": Preset(presets())}
    if not isinstance(presets, Mapping) or "intended" not in presets:
        raise InputError(
            f"presets: {name_of(entry)} has {type(presets).__name__}; expected the dataclass of its options, "
            "not an instance, or a mapping with 'intended'"
        )
    return dataclasses.replace(entry, presets=presets, build=build, elsewhere=elsewhere)


def _check_options(options: type) -> None:
    """Check that a class of options is a dataclass whose defaults are plain values.

    Raises:
      InputError: naming the user's file, the class and the field.
    """
    place = getattr(sys.modules.get(options.__module__), "__file__", None) or options.__module__
    where = f"presets: {Path(place).name}: {options.__name__}"
    if not dataclasses.is_dataclass(options):
        raise InputError(f"{where} is not a dataclass; write @dataclasses.dataclass(frozen=True) above it")
    for field in dataclasses.fields(options):
        # a factory makes lists and dictionaries, which the command line cannot read
        if field.default is dataclasses.MISSING:
            what = "no default"
            if field.default_factory is not dataclasses.MISSING:
                what = "a default_factory"
            raise InputError(f"{where}.{field.name} has {what}; an option is a number, text or True or False")


# cached, so that a user's file runs once however often its method is asked for
@functools.cache
def _from_outside(name: str) -> MethodEntry:
    place, _, attribute = name.partition(":")
    if place.endswith(".py"):
        module = load_file("method", place)
    elif attribute:
        module = guarded("method", name, functools.partial(importlib.import_module, place))
    else:
        raise InputError(f"method: unknown value {name!r}; {nearest(name, METHODS)}")
    entry = getattr(module, attribute or OUTSIDE, None)
    if not isinstance(entry, MethodEntry):
        raise InputError(f"method: {name!r} has no MethodEntry by the name {attribute or OUTSIDE}")
    return _loaded(entry)
