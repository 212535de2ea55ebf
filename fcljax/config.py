"""The settings of a run: one frozen dataclass per method and adapter, one flat namespace of fields for the
command line and for YAML.

`config.yaml` holds every field of a resolved run and can be given back with `--config`. All values pass
`from_mapping`, wherever they come from, so a wrong one gives the same single line. Ranges stand beside the
fields (`options.py`). A stage of a run takes the dataclass that it reads, not the whole.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import yaml

from fcljax.adapters import ADAPTERS
from fcljax.data.streams import Pool
from fcljax.errors import InputError, Value, choose, nearest
from fcljax.federated.aggregation import AggregationOptions
from fcljax.federated.faults import FaultOptions, parse_faults
from fcljax.files import read_text
from fcljax.methods import METHODS, MethodEntry, find_method
from fcljax.models.convnet import Stem
from fcljax.models.weights.pretrained import Positions
from fcljax.options import check_ranges, fields_of, flag, option, resolved

# improved: what we found to be better than intended, on held-out training images
Fidelity = Literal["intended", "paper", "released", "improved"]
Pipeline = Literal["fppl", "pmae", "pilora", "hepco", "hepco_domainnet"]
Partition = Literal["dirichlet", "iid", "quantity", "shards", "task_dirichlet", "sampled", "private"]
# release: as the pipeline's release has it
Pixels = Literal["checkpoint", "release", "half", "unit", "imagenet", "cifar100"]

# Upper bounds, where a number beyond them would end a run in another way than with a line that names it.
MOST_SIDE = 6324  # images of 40 megapixels or more are refused
MOST_GLYPHS = 10_000  # 3 GB in memory
MOST_ROUNDS = 100_000  # each has its plan in memory
MOST_CLIENTS = 1_000_000  # each has its rows in memory


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Which images, and how they are stored: what all commands that read data share."""

    # a name of `fcljax list`, such as digits or cifar100; npz:PATH, folder:PATH or mix:NAME+NAME
    dataset: str = "digits"
    # folder of raw and prepared data sets; default: $FCLJAX_DATA, else ~/.cache/fcljax
    data_dir: str | None = None
    class_list: str | None = None  # file with a WordNet id per line, for imagenet100 and imagenet200
    skip_corrupt: bool = False  # leave out images that cannot be decoded, and say which
    # side in pixels that training images of many sizes are stored at; default: 256/224 image_size
    store_size: int | None = option(None, most=MOST_SIDE)
    # side in pixels that the network sees; default: the backbone's own
    image_size: int | None = option(None, most=MOST_SIDE)
    # whose release's resizes, crops and flips; default: fppl, or the method's own under `released`
    preprocess: Pipeline | None = None
    glyph_train: int = option(100, most=MOST_GLYPHS)  # training images per class of the data set glyphs
    glyph_test: int = option(20, most=MOST_GLYPHS)  # test images per class of the data set glyphs
    seed: int = option(2023, least=0, most=2**32 - 1)  # of class order, partition, initial values, all draws


@dataclasses.dataclass(frozen=True)
class SplitConfig(ImageConfig):
    """Which of the images are trained on."""

    # share of each class's training images that is kept from training and evaluated on, in place of the test
    # images: for choosing settings
    holdout: float = option(0.0, least=0.0, below=1.0)
    verify: bool = False  # compare prepared images with their checksums even if their files look untouched


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Which network, and which pixels it gets."""

    # vit_micro, vit_ti16, vit_s16, vit_b16, resnet_micro, resnet18, resnet34, densenet121 or densenet169;
    # auto: as the checkpoint says, vit_micro without one
    backbone: str = "auto"
    # weights: .safetensors, .npz, .pth, .bin or hf:OWNER/NAME; vit_micro's are packaged, and convolutional
    # networks may start from random values
    checkpoint: str | None = None
    # first layers of a convolutional network without a checkpoint: 7 x 7 and a maximum, or 3 x 3 for small
    # images; default: cifar under 64 pixels, else imagenet
    stem: Stem | None = None
    heads: int | None = None  # attention heads of a checkpoint that does not say; default: width / 64
    # pixel range; default: checkpoint (what the weights expect), or release if not intended
    normalise: Pixels | None = None
    # how position embeddings come to another image size; default: antialiased, and plain, which is what the
    # releases do, under `paper` and `released`
    positions: Positions | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute type of the backbone's matrix products


@dataclasses.dataclass(frozen=True)
class InputConfig(BackboneConfig, SplitConfig):
    """Which network the images go into, and how."""

    # weights of a masked autoencoder's decoder, from `fcljax pretrain-decoder` or a checkpoint that has one;
    # default: as the checkpoint has it, the packaged one for the packaged vit_micro
    decoder: str | None = None
    eval_batch_size: int = 64  # images per evaluation step of a device
    devices: int = 1  # accelerators that share the work: clients' lanes, batches of evaluations and features
    # MiB of device memory for images; more stay on the host; default: half of the device's
    data_budget: int | None = None


@dataclasses.dataclass(frozen=True)
class PartitionConfig(SplitConfig):
    """Which client holds which of the images, and in which task."""

    tasks: int = 5  # number of tasks T
    clients: int = 5  # number of clients K
    # how rows are dealt: dirichlet, iid: all at once; quantity, shards, task_dirichlet: by task; sampled: in
    # every round to new clients, each of which draws classes and rows of the task by itself (HePCo); private:
    # streams of rows that no other client has, in which a task goes to some clients, each with some of its
    # classes (VFCL)
    partition: Partition = "dirichlet"
    # labels that a client owns in a task (quantity), or shards of 1/100 of its rows that it draws (shards)
    classes_per_client: int = 2
    # Dirichlet concentration of dirichlet and task_dirichlet; smaller is less even
    alpha: float = option(0.5, positive=True)
    # the fewest rows a client may get in all or, with task_dirichlet, in a task; else drawn again
    min_rows: int = option(10, least=0)
    # static: clients keep their rows; redrawn: all rows are dealt afresh in every round; independent: so they
    # are for each client by itself, so that clients may share rows; default: static
    population: Literal["static", "redrawn", "independent"] | None = None
    # gamma of sampled clients: the share of a class's rows that one of them draws; default: 0.1
    split_ratio: float | None = option(None, positive=True, most=1.0)
    # the share of a task's classes that a sampled client has (kappa), or one with a private stream; default:
    # 0.6, and 0.5 with private
    category_ratio: float | None = option(None, positive=True, most=1.0)
    # the rows of a sampled client's last class over those of its first; default: 1
    imbalance: float | None = option(None, positive=True, most=1.0)
    # applied; told: sampled clients only say that their classes are uneven; default: applied
    long_tail: Literal["applied", "told"] | None = None
    # private: what tasks clients draw theirs from, each in an order of its own: neighbours in the class
    # order, CIFAR-100's superclasses, or neighbours of one data set of a mixture; default: all clients go
    # through the same tasks
    pool: Pool | None = None
    pool_classes: int | None = option(None, least=1)  # of a task of the pool; default: 5
    pool_most: int | None = option(None, least=1)  # tasks of one data set in the pool; default: all that fit
    # share of the training rows that is used, the first ones of each class; default: 1, PILoRA's presets 0.8
    train_share: float | None = option(None, positive=True, most=1.0)
    # in which order tasks take the classes; python: shuffled as by HePCo's release; default: shuffled
    class_order: Literal["shuffled", "natural", "python"] | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How clients train, and what of the network."""

    adapter: str | None = None  # what trains in the network: `fcljax list` has them; default: the method's
    participation: float = option(1.0, positive=True, most=1.0)  # share of the clients in a round
    rounds: int = option(3, most=MOST_ROUNDS)  # communication rounds per task
    epochs: int = option(5, most=MOST_ROUNDS)  # local epochs per round
    batch_size: int = 32  # rows per local step
    augment: bool | None = None  # random crops and flips; default: as the data set suggests
    lr: float = option(1e-3, positive=True)  # the clients' learning rate
    optimiser: Literal["adam", "sgd"] = "adam"  # the clients', new in every round
    momentum: float | None = option(None, most=1.0)  # of sgd; default: the method's, else 0
    weight_decay: float = 0.0  # times the parameters, added to the gradient
    prox_weight: float = 0.0  # FedProx: pulls clients to what they were sent
    norm_bound: float | None = option(
        None, positive=True
    )  # L2 norm of what a client may change; default: none


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How clients share the machine, and what is kept of a run."""

    lanes: int | None = None  # clients that run at a time; default: chosen by backend
    lane_mode: Literal["loop", "vmap", "unroll"] | None = None  # how lanes run; default: chosen by backend
    eval_every_round: bool = False  # evaluate after every round, not only after every task
    checkpoint_every: int = 1  # rounds between checkpoints; the last round always has one
    keep_checkpoints: int = 2  # how many checkpoints stay on disk


@dataclasses.dataclass(frozen=True)
class RunConfig(EngineConfig, FaultOptions, AggregationOptions, TrainConfig, PartitionConfig, InputConfig):
    """What every method shares. The defaults run on the handwritten digits with the packaged micro ViT and
    need no download."""

    # name of the method: one of the package, or FILE.py, FILE.py:NAME or MODULE:NAME from outside
    method: str = ""
    fidelity: Fidelity = "intended"  # which reading of the paper where paper and release differ
    # report the privacy spent, as epsilon for this delta; needs noise_multiplier and the extra `privacy`
    dp_delta: float | None = option(None, positive=True, most=1.0)


Settings = TypeVar("Settings", bound=ImageConfig)
Presets = Mapping[str, Mapping[str, object]]  # preset name -> values of fields

# what a field is where neither the user nor a preset says
USUAL = {
    "preprocess": "fppl",
    "normalise": "checkpoint",
    "positions": "antialiased",
    "population": "static",
    "train_share": 1.0,
    "class_order": "shuffled",
}
# and with --partition sampled, which alone reads these
SAMPLED: dict[str, Any] = {
    "split_ratio": 0.1,
    "category_ratio": 0.6,
    "imbalance": 1.0,
    "long_tail": "applied",
}
PRIVATE: dict[str, Any] = {"category_ratio": 0.5}  # likewise, of private streams through the same tasks
POOLED: dict[str, Any] = {"pool_classes": 5}  # and of those with a pool

YAML_BYTES, YAML_DEPTH = 1 << 20, 20  # most of a file of settings
MOST_SEEDS = 100  # more at once is rather a seed that was taken for a number of seeds
KINDS = {int: "a whole number", float: "a number", str: "text"}


# ---- the options of a method with an adapter ---------------------------------------------------------------


def option_groups(method: str, adapter: str) -> dict[str, type]:
    """Title -> dataclass of the options of a run: the run's, the method's and the adapter's.

    Raises:
      InputError: for an unknown method or adapter, one that the method cannot work with, or names that
        collide, which only a method from outside the package can have.
    """
    entry = find_method(method)
    check_adapter(method, entry, adapter)
    return _groups(entry, method, adapter)


def check_adapter(method: str, entry: MethodEntry, adapter: str) -> None:
    """Check that a method runs with an adapter.

    Raises:
      InputError: if the adapter is unknown or excluded.
    """
    choose("adapter", adapter, ADAPTERS)
    if adapter in entry.excludes:
        raise InputError(
            f"adapter: {method} cannot work with {adapter!r}: {entry.excludes[adapter]}; nearest: "
            f"{entry.adapter!r}"
        )


def _groups(entry: MethodEntry, method: str, adapter: str) -> dict[str, type]:
    title = Path(method).stem if method not in METHODS else method
    groups = {"run": RunConfig, title: entry.options_with.get(adapter, entry.options)}
    groups[f"adapter {adapter}"] = ADAPTERS[adapter].options
    owner: dict[str, str] = {}
    for group, options in groups.items():
        for field in dataclasses.fields(options):
            if owner.setdefault(field.name, group) != group:
                raise InputError(
                    f"method: {method} and {owner[field.name]} both have an option {field.name!r}; rename one"
                )
    return groups


def check_tables() -> None:
    """Check that no option of any method collides with the run's or an adapter's.

    Raises:
      InputError: naming the first that does.
    """
    for method, entry in METHODS.items():
        for adapter in ADAPTERS:
            _groups(entry, method, adapter)


check_tables()


@functools.cache
def run_class(method: str, adapter: str | None = None) -> type:
    """The dataclass of a run: the shared fields, the method's own and the adapter's, with the method's
    defaults.

    Raises:
      InputError: as `option_groups`.
    """
    entry = find_method(method)
    adapter = adapter or entry.adapter
    bases = tuple(reversed(option_groups(method, adapter).values()))
    known = {field.name: field for base in bases for field in dataclasses.fields(base)}
    own = {name: value for name, value in entry.defaults.items() if name in known}
    own |= {"adapter": adapter, "method": method}
    fields = [
        (name, known[name].type, dataclasses.field(default=value, metadata=known[name].metadata))
        for name, value in own.items()
    ]
    return dataclasses.make_dataclass(
        f"Run_{Path(method).stem}_{adapter}",
        fields,
        bases=bases,
        frozen=True,
        namespace={"__doc__": entry.summary},
    )


def defaults(method: str, adapter: str, group: type[Value]) -> Value:
    """A group of options with the method's own defaults, for the help."""
    return part(group, run_class(method, adapter)())


def part(options: type[Value], config: object) -> Value:
    """The part of a run's settings that a dataclass names."""
    return options(**{field.name: getattr(config, field.name) for field in fields_of(options)})


def resolve(*given: Any) -> RunConfig:
    """Every None that a fidelity preset decides is filled in; checks ranges.

    Call it with the settings alone: they know their method. (Two arguments, a method's name before the
    settings, work until all callers have changed.)

    Raises:
      InputError: naming the field, its value and what is valid.
    """
    config: RunConfig = given[-1]
    check_ranges(config)
    if config.momentum is not None and config.optimiser != "sgd":
        raise InputError(
            f"momentum: only sgd reads it, and optimiser is {config.optimiser!r}; nearest: --optimiser sgd"
        )
    if config.clients > MOST_CLIENTS:
        raise InputError(f"clients: {config.clients} is too large; nearest valid value: {MOST_CLIENTS}")
    if config.malicious >= config.clients:
        raise InputError(
            f"malicious: {config.malicious} of {config.clients} clients; nearest: {config.clients - 1}"
        )
    if config.attack is not None and not config.malicious:
        raise InputError(f"attack: {config.attack!r} needs malicious clients; nearest: --malicious 1")
    parse_faults(config.faults)
    if config.dp_delta is not None and config.noise_multiplier is None:
        raise InputError(
            f"dp_delta: {config.dp_delta} needs --noise-multiplier: without noise nothing is private"
        )
    chosen = preset(config.method, resolved(config.adapter), config.fidelity)
    if config.optimiser != "sgd":
        chosen.pop("momentum", None)
    return settle(config, chosen)


def check_partition(config: PartitionConfig) -> None:
    """Check that settings of sampled clients and of private streams come with them, and that nobody redraws
    what they fix or fixes what they redraw.

    Raises:
      InputError: naming the first that does not.
    """
    reads = _reads(config)
    for name in (*SAMPLED, *POOLED, "pool", "pool_most"):
        if getattr(config, name) is None or name in reads:
            continue
        if config.partition == "private" and name not in ("split_ratio", "imbalance", "long_tail"):
            raise InputError(f"{name}: nothing reads it where pool is {config.pool!r}")
        owner = "sampled" if name in SAMPLED else "private"
        raise InputError(f"{name}: only {owner} clients have it, and partition is {config.partition!r}")
    if config.pool_most is not None and config.pool != "sources":
        raise InputError(f"pool_most: it counts the tasks of each source, and pool is {config.pool!r}")
    fixed = {"sampled": "redrawn", "private": "static"}.get(config.partition)
    if fixed and config.population not in (None, fixed):
        raise InputError(
            f"population: {config.partition} clients are {fixed}, not {config.population!r}; nearest: "
            f"{fixed!r}"
        )


def _reads(config: PartitionConfig) -> dict[str, Any]:
    """Fields that this partition alone reads, and their values where nothing is asked for."""
    if config.partition == "sampled":
        return SAMPLED
    if config.partition == "private":
        return {"pool": None} | (PRIVATE if config.pool is None else POOLED | {"pool_most": None})
    return {}


def preset(method: str, adapter: str, fidelity: Fidelity) -> dict[str, Any]:
    """The values of all fields that a fidelity preset decides.

    Raises:
      InputError: for an unknown method.
    """
    as_released = fidelity in ("paper", "released")
    pixels = {"normalise": "release", "positions": "plain"} if as_released else {}
    tables = ADAPTERS[adapter].fidelity, find_method(method).fidelity
    return pixels | preset_of(tables[0], fidelity) | preset_of(tables[1], fidelity)


def settle(config: Settings, preset: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Settings without a None that stands for a default: those of the preset, then the usual ones.

    The command line gives None where a preset may decide. A command that knows no method has no preset.

    Raises:
      InputError: as `check_partition`.
    """
    if isinstance(config, PartitionConfig):
        check_partition(config)
    usual, preset = dict(USUAL), dict(preset)
    if isinstance(config, PartitionConfig):
        reads = _reads(config)
        usual |= reads
        sampled = config.partition == "sampled"  # of whom alone a preset speaks
        preset = {name: value for name, value in preset.items() if sampled or name not in SAMPLED}
        if sampled:
            usual["population"] = "redrawn"
            preset.pop("population", None)
    chosen = {
        name: value
        for name, value in (usual | preset).items()
        if hasattr(config, name) and getattr(config, name) is None
    }
    return dataclasses.replace(config, **chosen)


def preset_of(table: Presets, fidelity: Fidelity) -> dict[str, object]:
    """The fields that a preset decides: `improved` has those of `intended` where it does not say."""
    return dict(table.get(fidelity, table.get("intended", {}) if fidelity == "improved" else {}))


def from_mapping(method: str, values: dict[str, Any], where: str) -> RunConfig:
    """A run's settings from names and values, as YAML or the command line give them.

    Missing names keep their defaults; `adapter` decides which options there are.

    Raises:
      InputError: as `fill`.
    """
    named = values.get("method", method)
    if named != method:
        raise InputError(f"{where}: the settings are for the method {named!r}, not {method!r}")
    adapter = values.get("adapter") or find_method(method).adapter
    check_known(method, adapter, values, where)
    return fill(run_class(method, adapter), values, where)


def check_known(method: str, adapter: str, names: Iterable[str], where: str) -> None:
    """Tell options that only go with another adapter apart from those that do not exist.

    Raises:
      InputError: naming the first such option and the adapter that it goes with.
    """
    groups = option_groups(method, adapter).values()
    known = {field.name for group in groups for field in dataclasses.fields(group)}
    for name in names:
        other = None if name in known else _adapter_of(find_method(method), name)
        if other:
            typed = flag(name) if where == "options" else name
            raise InputError(
                f"{where}: {typed} goes with the adapter {other!r}, and this run has {adapter!r}; nearest: "
                f"--adapter {other}"
            )


def _adapter_of(entry: MethodEntry, name: str) -> str | None:
    """The adapter that an option goes with, of the package or of the method."""
    for adapter, known in ADAPTERS.items():
        groups = (known.options, entry.options_with.get(adapter, entry.options))
        if any(field.name == name for group in groups for field in dataclasses.fields(group)):
            return adapter
    return None


def fill(options: type[Value], values: dict[str, Any], where: str) -> Value:
    """A dataclass of settings from names and values; missing names keep their defaults.

    Raises:
      InputError: for an unknown key (with the nearest known one) or a value of the wrong type.
    """
    fields = {field.name: field for field in fields_of(options)}
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    return options(**{name: convert(name, fields[name].type, value) for name, value in values.items()})


def convert(name: str, type_: Any, value: object) -> Any:
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
        # Python reads digits of every script: what looks like one number here could be another to a reader
        other_digits = type_ in (int, float) and not str(value).isascii()
        if not plain or other_digits or (type_ is int and not _is_whole(value)):
            raise TypeError
        if "\0" in str(value):
            raise InputError(f"{name}: {value!r} holds a NUL character, which no name may")
        return type_(value)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: {value!r} is not {KINDS.get(type_, type_.__name__)}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())


class _Plain(yaml.SafeLoader):
    """Safe YAML of settings: no aliases, of which a few bytes can stand for gigabytes, and little depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"{self.peek_event().start_mark}: aliases are not read; write the value")
        if self.depth >= YAML_DEPTH:
            raise yaml.YAMLError(f"{self.peek_event().start_mark}: nested more than {YAML_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, safely loaded.

    Raises:
      InputError: for a missing file, broken YAML or something that is no mapping.
    """
    try:
        text = read_text(path, YAML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"config: cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        values = yaml.load(text, _Plain)
    except Exception as error:  # yaml's constructors of numbers and dates raise what Python's do
        why = " ".join(str(error).split())
        raise InputError(f"config: {str(path)!r} is not valid YAML: {why}") from None
    if not isinstance(values, dict):
        raise InputError(f"config: {str(path)!r} does not hold a mapping of names to values")
    return values


def to_yaml(*given: Any) -> str:
    """All fields of a run's settings as YAML, the method first. (As in `resolve`, a method's name may come
    before the settings until all callers have changed.)"""
    config: RunConfig = given[-1]
    return yaml.safe_dump({"method": config.method, **dataclasses.asdict(config)}, sort_keys=False)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Readable differences between two mappings of settings: 'name (x, not y)'."""
    return [
        f"{name} ({b.get(name)!r}, not {a.get(name)!r})" for name in {**a, **b} if a.get(name) != b.get(name)
    ]
