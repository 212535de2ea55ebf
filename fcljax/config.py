"""The settings of a run: one frozen dataclass per method, one flat namespace of fields for the command line
and for YAML.

`config.yaml` holds every field of a resolved run and can be given back with `--config`. All values pass
`from_mapping`, wherever they come from, so a wrong one gives the same single line.
"""

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

from fcljax.errors import InputError, choose, nearest
from fcljax.methods import METHODS, resolve_options

Fidelity = Literal["intended", "paper", "released"]
Pipeline = Literal["fppl", "pmae", "pilora", "hepco", "hepco_domainnet"]
Partition = Literal["dirichlet", "iid", "quantity", "shards", "task_dirichlet"]
Pixels = Literal[
    "checkpoint", "release", "half", "unit", "imagenet", "cifar100"
]  # release: as the pipeline's release has it


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """Which images go into which network, and how: what all commands that read data share."""

    dataset: str = (
        "digits"  # a name that `fcljax list` shows, such as digits, cifar100, npz:PATH or folder:PATH
    )
    data_dir: str | None = (
        None  # folder of raw and prepared data sets; default: $FCLJAX_DATA, else ~/.cache/fcljax
    )
    class_list: str | None = None  # file with a WordNet id per line, for imagenet100 and imagenet200
    skip_corrupt: bool = False  # leave out images that cannot be decoded, and say which
    store_size: int | None = (
        None  # side in pixels that training images of many sizes are stored at; default: 256/224 image_size
    )
    backbone: str = (
        "auto"  # vit_micro, vit_ti16, vit_s16 or vit_b16; auto: as the checkpoint says, vit_micro without one
    )
    checkpoint: str | None = (
        None  # weights: .safetensors, .npz, .pth, .bin or hf:OWNER/NAME; vit_micro's are packaged
    )
    heads: int | None = None  # attention heads of a checkpoint that does not say; default: width / 64
    image_size: int | None = None  # side in pixels that the network sees; default: the backbone's own
    preprocess: Pipeline = "fppl"  # whose release's resizes, crops and flips
    normalise: Pixels | None = (
        None  # pixel range; default: checkpoint (what the weights expect), or release if not intended
    )
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute type of the backbone's matrix products
    augment: bool | None = None  # random crops and flips in training; default: as the data set suggests
    eval_batch_size: int = 64  # images per evaluation step
    data_budget: int | None = (
        None  # MiB of device memory for images; more stay on the host; default: half of the device's
    )
    glyph_train: int = 100  # training images per class of the data set glyphs
    glyph_test: int = 20  # test images per class of the data set glyphs
    seed: int = 2023  # of class order, partition, initial values and all draws


@dataclasses.dataclass(frozen=True)
class DealConfig(InputConfig):
    """Which client holds which of the images, and in which task."""

    tasks: int = 5  # number of tasks T
    clients: int = 5  # number of clients K
    # how rows are dealt: dirichlet, iid: all at once; quantity, shards, task_dirichlet: by task
    partition: Partition = "dirichlet"
    # labels that a client owns in a task (quantity), or shards of 1/100 of a task's rows that it draws
    # (shards)
    alpha: int = 2
    beta: float = 0.5  # Dirichlet concentration of dirichlet and task_dirichlet; smaller is less even
    min_rows: int = (
        10  # the fewest rows a client may get in all or, with task_dirichlet, in a task; else drawn again
    )
    population: Literal["static", "redrawn"] = (
        "static"  # clients keep their rows, or rows are dealt afresh in every round
    )
    train_share: float = 1.0  # share of the training rows that is used: the first ones of each class
    class_order: Literal["shuffled", "natural"] = "shuffled"  # in which tasks take the classes


@dataclasses.dataclass(frozen=True)
class RunConfig(DealConfig):
    """What every method shares. The defaults run on the handwritten digits with the packaged micro ViT and
    need no download."""

    participation: float = 1.0  # share of the clients that take part in a round
    rounds: int = 3  # communication rounds per task
    epochs: int = 5  # local epochs per round
    batch_size: int = 32  # rows per local step
    lr: float = 1e-3  # the clients' learning rate
    aggregator: Literal["mean", "uniform", "median", "trimmed_mean"] = "mean"  # how uploads are merged
    fidelity: Fidelity = "intended"  # which reading of the paper where paper and release differ
    lanes: int | None = None  # clients that run at a time; default: chosen by backend
    lane_mode: Literal["loop", "vmap", "unroll"] | None = None  # how lanes run; default: chosen by backend
    devices: int = 1  # accelerators that share the lanes
    eval_every_round: bool = False  # evaluate after every round, not only after every task
    keep_checkpoints: int = 2  # how many checkpoints stay on disk


# The least value of whole numbers; the others of a run must be at least 1.
LEAST = {"min_rows": 0, "seed": 0}
MOST = {"seed": 2**32 - 1, "participation": 1.0, "train_share": 1.0}
KINDS = {int: "a whole number", float: "a number", str: "text"}
POSITIVE = (
    "beta", "lr", "server_lr", "temperature", "participation", "train_share", "lora_lr", "backbone_lr", "reweight_temperature", "hardness",
    "distill_temperature", "fisher_limit", "prototype_init",
)  # fmt: skip


@functools.cache
def run_class(method: str) -> type:
    """The dataclass of a method's run: the shared fields and the method's own.

    Raises:
      InputError: for an unknown method.
    """
    choose("method", method, METHODS)
    return dataclasses.make_dataclass(
        f"Run_{method}",
        [],
        bases=(METHODS[method].options, RunConfig),
        frozen=True,
        namespace={"__doc__": METHODS[method].summary},
    )


def method_options(method: str, config: RunConfig) -> Any:
    """The method's own part of a run's settings."""
    options = METHODS[method].options
    return options(**{field.name: getattr(config, field.name) for field in dataclasses.fields(options)})


def resolve(method: str, config: RunConfig) -> RunConfig:
    """Every None that a fidelity preset decides is filled in; checks ranges.

    Raises:
      InputError: naming the field, its value and what is valid.
    """
    check_ranges(config)
    options = resolve_options(method, method_options(method, config), config.fidelity)
    normalise = config.normalise or ("checkpoint" if config.fidelity == "intended" else "release")
    return dataclasses.replace(config, normalise=normalise, **dataclasses.asdict(options))


def check_ranges(config: Any) -> None:
    """Check that the numbers of a dataclass of settings lie where they make sense.

    Raises:
      InputError: naming the field, its value and the nearest valid one.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if type(value) is int and value < LEAST.get(name, 1):
            raise InputError(f"{name}: {value} is too small; nearest valid value: {LEAST.get(name, 1)}")
        if type(value) is float and not (0 <= value < math.inf and (value or name not in POSITIVE)):
            least = "positive" if name in POSITIVE else "0 or more"
            raise InputError(f"{name}: {value} must be finite and {least}, such as {field.default}")
        if name in MOST and value > MOST[name]:
            raise InputError(f"{name}: {value} is too large; nearest valid value: {MOST[name]}")


def from_mapping(method: str, values: dict[str, Any], where: str) -> RunConfig:
    """A run's settings from names and values, as YAML or the command line give them; missing names keep their
    defaults.

    Raises:
      InputError: as `fill`.
    """
    return fill(run_class(method), values, where)


def fill(options: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass of settings from names and values; missing names keep their defaults.

    Raises:
      InputError: for an unknown key (with the nearest known one) or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    return options(**{name: convert(name, fields[name].type, value) for name, value in values.items()})


def convert(name: str, type_: Any, value: Any) -> Any:
    """`value`, which may be a string, as a value of the field's type.

    Raises:
      InputError: naming the field, the value and what is valid.
    """
    if typing.get_origin(type_) in (
        types.UnionType,
        typing.Union,
    ):  # Literal | None is a typing.Union before Python 3.14
        if value is None or value == "None":
            return None
        type_ = next(part for part in typing.get_args(type_) if part is not types.NoneType)
    if typing.get_origin(type_) is Literal:
        return choose(name, value, typing.get_args(type_))
    if type_ is bool:
        return {"true": True, "false": False}[choose(name, str(value).lower(), ("true", "false"))]
    plain = isinstance(value, str | int | float | Path) and not isinstance(value, bool)
    try:
        if not plain or (type_ is int and not _is_whole(value)):
            raise TypeError
        return type_(value)
    except (TypeError, ValueError):
        raise InputError(f"{name}: {value!r} is not {KINDS.get(type_, type_.__name__)}") from None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, safely loaded.

    Raises:
      InputError: for a missing file, broken YAML or something that is no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"config: cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"config: {str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"config: {str(path)!r} does not hold a mapping of names to values")
    return values


def to_yaml(method: str, config: RunConfig) -> str:
    """All fields of a run as YAML, the method first."""
    return yaml.safe_dump({"method": method, **dataclasses.asdict(config)}, sort_keys=False)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Readable differences between two mappings of settings: 'name (x, not y)'."""
    return [
        f"{name} ({b.get(name)!r}, not {a.get(name)!r})" for name in {**a, **b} if a.get(name) != b.get(name)
    ]
