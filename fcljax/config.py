"""The settings of a run: those that all methods share, the method's own and its adapter's, in one frozen
dataclass with one flat namespace of fields for the command line and for YAML.

`config.yaml` holds every field of a run and can be given back with `--config`. Text becomes a value in one
place (`typed_value`), wherever it comes from, so a wrong one gives the same single line. A stage of a run
takes the dataclass that it reads, not the whole.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from fcljax.adapters import ADAPTERS, find_adapter
from fcljax.choices import (
    CHOICES,
    OWN,
    Selected,
    check_unread,
    chosen,
    class_with,
    find_kind,
    flat,
    is_optax,
    label_of,
    readers,
    selected,
)
from fcljax.data.files.names import has_arrays
from fcljax.errors import InputError, Value, choose, nearest
from fcljax.files import read_user_text
from fcljax.methods import METHODS, MethodEntry, find_method, name_of
from fcljax.options import check_ranges, check_read, fields_of, flag, replaced
from fcljax.settings import (
    ARRAY_NETS,
    MOST_CLIENTS,
    TEXT_NETS,
    AggregationOptions,
    BackboneConfig,
    EngineConfig,
    Fidelity,
    ImageConfig,
    InputConfig,
    PartitionConfig,
    Pipeline,
    RunConfig,
    Scale,
    SplitConfig,
    TrainConfig,
    is_owned,
)

__all__ = [
    "AggregationOptions",
    "BackboneConfig",
    "EngineConfig",
    "ImageConfig",
    "InputConfig",
    "PartitionConfig",
    "Pipeline",
    "RunConfig",
    "SplitConfig",
    "TrainConfig",
]

Run = TypeVar("Run", bound=PartitionConfig)

# Most of a file of settings
YAML_BYTES = 1 << 20
YAML_DEPTH = 20
MOST_SEEDS = 100  # more at once is rather a seed that was taken for a number of seeds
KINDS = {int: "a whole number", float: "a number", str: "text"}
# the pixels of the papers' releases, which also decide where the papers are silent
AS_RELEASED = {"normalise": "release", "positions": "plain"}
# the length of training, of which --scale fit changes nothing
SCHEDULE = ("rounds", "epochs", "batch_size")
# examples of a client and task for which presets are made: most papers have CIFAR-100, 10 tasks, 10 clients
PAPER_EXAMPLES = 500.0
NEAR = 3  # times as many steps a task, or a third of them: the preset's learning rates still fit
# option -> value for the networks of tables and series, which begin with random values: at the rates of
# pretrained networks they hardly train. Chosen on held-out training examples of digits_table.
FROM_RANDOM = {"full_lr": 1e-3}
# networks that have the scale mini, unless a checkpoint is given; auto is the packaged one
MICRO = ("auto", "vit_micro", "resnet_micro", *ARRAY_NETS, *TEXT_NETS)


# ---- the options of a method with an adapter ---------------------------------------------------------------


def option_groups(
    method: str | MethodEntry, adapter: str, choices: Selected | None = None
) -> dict[str, type]:
    """Return title -> dataclass of the options of a run: the run's, the method's and the adapter's.

    Args:
      method: of the run.
      adapter: what trains inside the network.
      choices: what was chosen where options have options of their own; None: as the method has them.

    Raises:
      InputError: for an unknown method or adapter, one that the method cannot work with, or names that
        collide, which only a method from outside the package can have.
    """
    entry = find_method(method)
    called = name_of(method)
    if entry.adapter not in ADAPTERS:
        near = nearest(entry.adapter, ADAPTERS)
        raise InputError(f"adapter: the entry of {called} has {entry.adapter!r}; {near}")
    choose("adapter", adapter, ADAPTERS)
    if adapter in entry.excludes:
        raise InputError(
            f"adapter: {called} cannot work with {adapter!r}: {entry.excludes[adapter]}; nearest: "
            f"{entry.adapter!r}"
        )
    title = called if method in METHODS else Path(called).stem
    groups = {"run": class_with(RunConfig, choices or usual_choices(method)), title: entry.options(adapter)}
    groups[f"adapter {adapter}"] = find_adapter(adapter).options
    owner: dict[str, str] = {}
    for group, options in groups.items():
        for field in fields_of(options):
            if owner.setdefault(field.name, group) != group:
                raise InputError(
                    f"method: {called} and {owner[field.name]} both have an option {field.name!r}; rename one"
                )
    return groups


def usual_choices(method: str | MethodEntry, fidelity: Fidelity = "intended") -> Selected:
    """Return what a method's preset chooses where options have options of their own."""
    return selected(RunConfig, _flat_run(_reading(find_method(method).presets, fidelity).run))


@functools.cache
def preset(
    method: str | MethodEntry,
    adapter: str | None = None,
    fidelity: Fidelity = "intended",
    scale: Scale = "mini",
    choices: Selected | None = None,
) -> RunConfig:
    """Return a run's settings as a fidelity preset has them, at a scale.

    Args:
      method: of the run.
      adapter: the method's if None.
      fidelity: the reading of the paper.
      scale: paper or mini; the default is that of the default network.
      choices: what was chosen where options have options of their own; None: as the preset has them.

    Raises:
      InputError: as `option_groups`.
    """
    if adapter is None or choices is None:
        adapter = adapter or find_method(method).adapter
        return preset(method, adapter, fidelity, scale, choices or usual_choices(method, fidelity))
    kind = run_class(method, adapter, choices)
    return kind(**_values(method, adapter, fidelity, scale, choices))


def preset_of(settings: RunConfig, fidelity: Fidelity | None = None, scale: Scale | None = None) -> RunConfig:
    """Return what the preset of a run has, with the run's adapter and choices.

    Args:
      settings: of the run.
      fidelity: the reading of the paper; None: that of the run.
      scale: paper, mini or fit; None: that of the run.
    """
    return preset(
        settings.source or settings.method,
        settings.adapter,
        fidelity or settings.fidelity,
        scale or settings.scale,
        selected(RunConfig, vars(settings)),
    )


@functools.cache
def run_class(method: str | MethodEntry, adapter: str | None = None, choices: Selected | None = None) -> type:
    """Return the dataclass of a run: the shared fields, those of its choices, the method's own and the
    adapter's. Its defaults are those of the preset `intended` at the scale mini.

    Raises:
      InputError: as `option_groups`.
    """
    if adapter is None or choices is None:
        adapter = adapter or find_method(method).adapter
        return run_class(method, adapter, choices or usual_choices(method))
    bases = tuple(reversed(option_groups(method, adapter, choices).values()))
    known = {field.name: field for base in bases for field in fields_of(base)}
    fields = [
        (name, known[name].type, dataclasses.field(default=value, metadata=known[name].metadata))
        for name, value in _values(method, adapter, "intended", "mini", choices).items()
    ]
    return dataclasses.make_dataclass(
        f"Run_{Path(name_of(method)).stem}_{adapter}",
        fields,
        bases=bases,
        frozen=True,
        namespace={"__doc__": find_method(method).summary, "source": method},
    )


def _values(
    method: str | MethodEntry, adapter: str, fidelity: Fidelity, scale: Scale, choices: Selected
) -> dict[str, Any]:
    """Return field -> value of a preset at a scale."""
    run, own, of_adapter = option_groups(method, adapter, choices).values()
    reading = _reading(find_method(method).presets, fidelity)
    fallback = _reading(find_adapter(adapter).presets, fidelity)
    adapted = next((each for each in reading.adapters if type(each) is of_adapter), fallback)
    values = {field.name: field.default for field in fields_of(run)}
    values |= {name: value for name, value in _stated(reading.run).items() if name in values}
    values |= dict(choices)
    for each in (part(own, reading.options), adapted):
        values |= {field.name: getattr(each, field.name) for field in fields_of(type(each))}
    pixels = AS_RELEASED if fidelity in ("paper", "released") else {}
    scaled = {}
    if scale in ("mini", "fit"):
        scaled = {name: value for name, value in reading.mini.items() if name in values}
    if scale == "fit":
        rates = {field.name for each in (run, own, of_adapter) for field in rate_fields(each)}
        scaled = {name: value for name, value in scaled.items() if name not in {*rates, *SCHEDULE}}
    named = {"method": name_of(method), "adapter": adapter, "fidelity": fidelity, "scale": scale}
    factor = {"rate_factor": 0.0 if scale == "fit" else 1.0}
    return values | pixels | scaled | named | factor


def _flat_run(run: RunConfig) -> dict[str, Any]:
    """Return all that a preset has of the run's fields, its choices as their names beside their options."""
    return flat({field.name: getattr(run, field.name) for field in fields_of(type(run))})


def _stated(run: RunConfig) -> dict[str, Any]:
    """Return what a preset says of the run's fields. An option of what it chooses holds for another choice
    with an option of that name, unless the preset has left it at its default."""
    written = _flat_run(run)
    defaults = {
        field.name: field.default for field in fields_of(class_with(RunConfig, selected(RunConfig, written)))
    }
    return {
        name: value
        for name, value in written.items()
        if name in RunConfig.__dataclass_fields__ or value != defaults[name]
    }


def rate_fields(options: type) -> list[dataclasses.Field]:
    """The fields of a dataclass of settings that are learning rates."""
    return [field for field in fields_of(options) if field.metadata.get("learning_rate")]


def learning_rates(settings: RunConfig) -> dict[str, float]:
    """Option -> learning rate that is trained with, of clients and server; none where nothing trains."""
    entry = find_method(settings.source or settings.method)
    if (entry.closed_form and settings.adapter == entry.adapter) or has_own_rate(settings):
        return {}
    factor = settings.rate_factor or 1.0
    rates = {field.name: getattr(settings, field.name) for field in rate_fields(type(settings))}
    return {name: rate * factor for name, rate in rates.items() if rate is not None}


def _reading(presets: Mapping[str, Value], fidelity: str) -> Value:
    return presets.get(fidelity, presets["intended"])


def part(options: type[Value], config: object) -> Value:
    """The part of a run's settings that a dataclass names."""
    return options(**{field.name: getattr(config, field.name) for field in fields_of(options)})


# ---- values that were given --------------------------------------------------------------------------------


def from_mapping(method: str | MethodEntry, values: dict[str, Any], where: str) -> RunConfig:
    """A run's settings from names and values, as YAML or the command line give them, checked.

    `adapter` decides which options there are; `fidelity` and `scale` decide which values those have that are
    not given.

    Raises:
      InputError: as `fill` and `resolve`, if the values name another method, or ask for what is better than
        the paper where nothing is known to be.
    """
    named = values.get("method", name_of(method))
    called = name_of(method)
    if named != called:
        raise InputError(f"{where}: the settings are for the method {named!r}, not {called!r}")
    adapter = values.get("adapter") or usual_adapter(method, has_attention(values))
    values = flat(values)
    check_known(method, adapter, values, where)
    fidelity = choose("fidelity", values.get("fidelity", "intended"), typing.get_args(Fidelity))
    if fidelity == "improved" and fidelity not in find_method(method).presets:
        having = ", ".join(name for name in METHODS if fidelity in find_method(name).presets)
        raise InputError(
            f"fidelity: {called} has no preset {fidelity!r}, which {having} have; nearest: 'intended'"
        )
    scale = _scale(values)
    if scale == "fit" and "fidelity" not in values and "improved" in find_method(method).presets:
        fidelity = "improved"
    if "rate_factor" not in values and _is_left_to_run(method, adapter, values):
        values = {**values, "rate_factor": 0.0}
    values = values | {"scale": scale, "fidelity": fidelity}
    if adapter == "full" and scale == "mini" and not has_attention(values):
        values = _rates_from_random(method, values) | values
    usual = preset(method, adapter, fidelity, scale, chosen_by(method, values))
    return resolve(fill(usual, _read_values(usual, values), where))


def _rates_from_random(method: str | MethodEntry, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates of networks with random values that the method has none of its own for."""
    if values.get("optimiser", "adam") not in CHOICES["optimiser"]:
        return {}  # an optimiser of the user's own, with its own rate
    of_mini = find_method(method).presets["intended"].mini
    return {name: rate for name, rate in FROM_RANDOM.items() if name not in of_mini}


def usual_adapter(method: str | MethodEntry, attention: bool = True) -> str:
    """Return the adapter of a run that names none: the method's, or `full` where that needs attention.

    Args:
      method: of the run.
      attention: whether the network has attention, as those of images and text have by default.
    """
    entry = find_method(method)
    if attention or not find_adapter(entry.adapter).attention or "full" in entry.excludes:
        return entry.adapter
    return "full"


def has_attention(values: Mapping[str, Any]) -> bool:
    """Check whether the network of these settings may have attention; those of tables have none."""
    dataset, backbone = str(values.get("dataset")), str(values.get("backbone", "auto"))
    if backbone in (*ARRAY_NETS, *TEXT_NETS):
        return backbone in TEXT_NETS
    return dataset == "text" or not has_arrays(dataset, backbone)


def chosen_by(method: str | MethodEntry, values: Mapping[str, Any]) -> Selected:
    """Return what is chosen by values that were given, or else by the method's preset."""
    reading = _reading(find_method(method).presets, values.get("fidelity", "intended"))
    return selected(RunConfig, _flat_run(reading.run) | dict(values))


def _read_values(usual: RunConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without options of what is not chosen.

    Files of earlier versions have the options of all choices. They are left out where they are as usual.

    Raises:
      InputError: naming the first that nothing reads and that is not as usual.
    """
    known = {field.name for field in fields_of(type(usual))}
    stated = _stated(_reading(find_method(usual.source).presets, usual.fidelity).run)
    of_others = {name: value for name, value in values.items() if name not in known and readers(name)}
    changed = {name: value for name, value in of_others.items() if value != stated.get(name)}
    check_unread(known, changed, vars(usual) | values)
    return {
        name: value
        for name, value in values.items()
        if name not in of_others and not (value is None and readers(name))
    }


def with_values(settings: RunConfig, **values: Any) -> RunConfig:
    """Return settings with other values, among which there may be other choices."""
    given = flat(values)
    before = vars(settings)
    source = settings.source or settings.method
    choices = selected(RunConfig, before | given)
    usual = preset(source, settings.adapter, settings.fidelity, settings.scale, choices)
    merged = vars(usual) | {name: value for name, value in before.items() if name in vars(usual)} | given
    return type(usual)(**merged)


def _is_left_to_run(method: str | MethodEntry, adapter: str, values: Mapping[str, Any]) -> bool:
    """Whether the number of steps, which only the run knows, decides between the scales paper and fit."""
    micro = _is_micro(values.get("backbone", "auto"), values.get("checkpoint"))
    asked = values.get("scale", "auto") == "auto"
    return asked and not micro and not {*_fit_values(method, adapter), "fidelity"} & {*values}


@functools.cache
def _fit_values(method: str | MethodEntry, adapter: str) -> Mapping[str, Any]:
    """Option -> value that `--scale fit` starts from, of all that it may change; learning rates are the
    paper's."""
    paper = preset(method, adapter, "intended", "paper")
    fidelity = "improved" if "improved" in find_method(method).presets else "intended"
    fit = preset(method, adapter, fidelity, "fit")
    rates = {field.name for field in rate_fields(type(fit))}
    changed = {name: value for name, value in vars(fit).items() if value != getattr(paper, name, None)}
    kept = {*SCHEDULE, "fidelity", "scale", "rate_factor"}
    return {name: getattr(fit, name) for name in (*rates, *changed) if name not in kept}


def decided_by_fit(settings: RunConfig) -> tuple[str, ...]:
    """The options that the run decides when it begins: those that `--scale fit` may change and that are as
    the preset has them; none where it has decided."""
    if settings.rate_factor:
        return ()
    source = settings.source or settings.method
    usual = preset_of(settings)
    names = _fit_values(source, settings.adapter)
    open_ = [name for name in names if getattr(settings, name) == getattr(usual, name)]
    return ("scale", "fidelity", "rate_factor", *open_)


def rates_of_scale(settings: RunConfig, scale: Scale) -> dict[str, float]:
    """Option -> learning rate of a method's preset at a scale."""
    usual = preset_of(settings, scale=scale)
    return {name: getattr(usual, name) for name in learning_rates(settings)}


def with_scale_of_schedule(settings: RunConfig, examples: float) -> RunConfig:
    """Settings whose scale is decided, where the run decides it: fit for a schedule that is far from the
    preset's, else the one that they have.

    Args:
      settings: resolved.
      examples: of a client in a task, on average.
    """
    if settings.rate_factor or settings.scale == "fit":
        return settings
    source = settings.source or settings.method
    usual = preset_of(settings)
    share = share_of_schedule(settings, settings.scale, examples)
    if 1 / NEAR < share < NEAR or not learning_rates(settings):
        return dataclasses.replace(settings, rate_factor=1.0)
    values = dict(_fit_values(source, settings.adapter))
    if share > 1:  # mini's server training is for short schedules
        values = {name: getattr(usual, name) for name in values}
    fidelity = "improved" if "improved" in find_method(source).presets and share < 1 else settings.fidelity
    return with_values(settings, **values, fidelity=fidelity, scale="fit")


def share_of_schedule(settings: RunConfig, scale: Scale, examples: float) -> float:
    """Return the training steps of a client in a task, over those of the method's preset at a scale.

    Args:
      settings: resolved.
      scale: of the preset.
      examples: of a client in a task, on average.
    """
    usual = preset_of(settings, scale=scale)
    return steps_of_task(settings, examples) / steps_of_task(usual, PAPER_EXAMPLES)


def steps_of_task(settings: TrainConfig, examples: float) -> float:
    """Training steps of a client with so many examples of a task."""
    return settings.rounds * settings.epochs * max(1.0, examples / settings.batch_size)


def _scale(values: Mapping[str, Any]) -> Scale:
    """The scale that is asked for, or the one that suits the network.

    Raises:
      InputError: for a scale that there is not.
    """
    asked = choose("scale", values.get("scale", "auto"), typing.get_args(Scale))
    if asked != "auto":
        return asked
    return "mini" if _is_micro(values.get("backbone", "auto"), values.get("checkpoint")) else "paper"


def _is_micro(backbone: str, checkpoint: str | None) -> bool:
    return backbone in MICRO and checkpoint in (None, "None")


def explain_scale(config: RunConfig) -> str:
    """The scale of a run and its reason, in a line."""
    micro = _is_micro(config.backbone, config.checkpoint)
    if config.scale == "fit":
        besides = " and --fidelity improved" if config.fidelity == "improved" else ""
        chosen = f"learning rates searched on held-out training images{besides}"
        return f"scale: fit, {chosen}; see also --scale paper"
    if (config.scale == "mini") != micro:
        return f"scale: {config.scale}, as --scale says"
    if micro:
        return "scale: mini, because the network is a micro one without a checkpoint; see also --scale paper"
    network = config.checkpoint or config.backbone
    return f"scale: paper, because the network is {network}; see also --scale mini"


def explain_fidelity(config: RunConfig) -> str:
    """What runs where a method has no preset of the fidelity that is asked for, in a line; else nothing."""
    source = config.source or config.method
    fidelity = config.fidelity
    entry = find_method(source)
    usual = find_adapter(config.adapter)
    if fidelity in entry.presets:
        return ""
    own = any(type(each) is usual.options for each in entry.presets["intended"].adapters)
    parts = [f"the adapter {config.adapter}"] if fidelity in usual.presets and not own else []
    parts.append(f"the images ({', '.join(f'{name} {value}' for name, value in AS_RELEASED.items())})")
    return (
        f"fidelity: {config.method} has no preset {fidelity!r}: its options are those of intended; those of "
        f"{' and '.join(parts)} are of {fidelity}"
    )


def improvement(config: RunConfig) -> dict[str, Any]:
    """Option -> value, for what `--fidelity improved` changes of a run as intended; empty where there is no
    such preset, or another fidelity was chosen."""
    source = config.source or config.method
    if config.fidelity != "intended" or "improved" not in find_method(source).presets:
        return {}
    now, better = (preset_of(config, fidelity) for fidelity in ("intended", "improved"))
    return {
        field.name: getattr(better, field.name)
        for field in fields_of(type(now))
        if field.name != "fidelity" and getattr(better, field.name) != getattr(now, field.name)
    }


def check_known(method: str | MethodEntry, adapter: str, names: Iterable[str], where: str) -> None:
    """Tell options that only go with another adapter apart from those that do not exist.

    Raises:
      InputError: naming the first such option and the adapter that it goes with.
    """
    groups = option_groups(method, adapter).values()
    known = {field.name for group in groups for field in fields_of(group)}
    for name in names:
        other = None if name in known else _adapter_of(find_method(method), name)
        if other:
            typed = flag(name) if where == "options" else name
            raise InputError(
                f"{where}: {typed} is an option of the adapter {other!r}, and this run has {adapter!r}; "
                f"nearest: --adapter {other}"
            )


def _adapter_of(entry: MethodEntry, name: str) -> str | None:
    """The adapter that an option goes with, of the package or of the method."""
    for adapter in ADAPTERS:
        groups = (find_adapter(adapter).options, entry.options(adapter))
        if any(field.name == name for group in groups for field in fields_of(group)):
            return adapter
    return None


def resolve(config: RunConfig) -> RunConfig:
    """Settings that have been checked, with what their partition decides.

    Raises:
      InputError: naming the field, its value and what is valid.
    """
    from fcljax.federated.faults import parse_faults

    check_ranges(config)
    if config.clients > MOST_CLIENTS:
        raise InputError(f"clients: {config.clients} is too large; nearest valid value: {MOST_CLIENTS}")
    if find_method(config.source).one_client and config.clients > 1:
        called = name_of(config.source)
        raise InputError(f"clients: {called} has one client with all examples; nearest valid value: 1")
    if config.participation > 1 and config.participation % 1:
        raise InputError(
            f"participation: {config.participation} is neither a fraction nor a number of clients; "
            f"nearest valid value: {round(config.participation)}"
        )
    if config.malicious >= config.clients:
        raise InputError(
            f"malicious: {config.malicious} of {config.clients} clients; nearest: {config.clients - 1}"
        )
    parse_faults(config.faults)
    chosen("lr_schedule", config)  # which checks its own options
    warmup_rounds = getattr(config, "warmup_rounds", 0)
    rounds = config.rounds
    if warmup_rounds >= rounds:
        raise InputError(f"warmup_rounds: {warmup_rounds} of a task's {rounds} rounds; nearest: {rounds - 1}")
    usual = preset_of(config)
    if has_own_rate(config):
        for field in rate_fields(type(config)):
            if getattr(config, field.name) != getattr(usual, field.name):
                raise InputError(f"{field.name}: the optimiser has its own learning rate; leave it out")
    return _one_epoch(partitioned(config, usual), usual)


def has_own_rate(config: TrainConfig) -> bool:
    """Check whether the optimiser of the clients is one of optax, with a learning rate of its own."""
    in_memory = config.optimiser == OWN
    return in_memory or is_optax(chosen("optimiser", config))


def _one_epoch(config: RunConfig, usual: RunConfig) -> RunConfig:
    """Settings whose clients pass over an online stream once.

    Raises:
      InputError: for a number of epochs that was given.
    """
    if config.population != "online" or config.epochs == 1:
        return config
    if config.epochs != usual.epochs:
        raise InputError(f"epochs: {config.epochs}: an online stream is seen once; nearest: --epochs 1")
    return dataclasses.replace(config, epochs=1)


def partitioned(config: Run, usual: Run) -> Run:
    """Return settings whose population is the one that their partition needs.

    Args:
      config: the settings.
      usual: the values that pass though nothing reads them, because nobody gave them.

    Raises:
      InputError: naming the first option that was given and that nothing reads.
    """
    check_read(config, usual)
    needed = getattr(find_kind("partition", config.partition), "population", "")
    _check_persistent(config, needed or config.population)
    _check_private(config)
    _check_task_sizes(config)
    if not needed or config.population == "online":
        return config
    if config.population not in (needed, usual.population, "static"):
        raise InputError(
            f"population: {config.partition} clients are {needed}, not {config.population!r}; nearest: "
            f"{needed!r}"
        )
    return dataclasses.replace(config, population=needed)


def _check_persistent(config: PartitionConfig, population: str) -> None:
    """Check that clients that come and go, and online streams, are clients that persist.

    Raises:
      InputError: naming the option that needs them.
    """
    name = _over_time(config)
    if name and population in ("redrawn", "independent"):
        fleeting = "sampled" if config.partition == "sampled" else population
        raise InputError(
            f"{name}: {getattr(config, name)!r} needs clients that persist, and {fleeting} ones are new "
            "in every round; leave one of them out"
        )
    if config.population == "online" and config.move_on < 1 and config.stay_behind == "keep":
        raise InputError(
            "stay_behind: clients of an online stream see no example again; nearest: --stay-behind leave"
        )


def _over_time(config: PartitionConfig) -> str:
    """Return the first option by which clients' examples change over time; "" if there is none."""
    changing = {
        "new_clients": config.new_clients > 0,
        "move_on": config.move_on < 1,
        "population": config.population == "online",
    }
    return next((name for name, changes in changing.items() if changes), "")


def _check_private(config: PartitionConfig) -> None:
    """Check that private streams, which have their own schedule, get no other.

    Raises:
      InputError: naming the option that gives one.
    """
    if config.partition != "private":
        return
    by_example = "tasks_by" if config.tasks_by != "class" else "blurry"
    given = getattr(config, by_example, 0.0)
    name = _over_time(config) or (by_example if given else "")
    if name:
        raise InputError(
            f"{name}: {getattr(config, name)!r} has no effect on private streams, which have their own "
            "schedule; nearest: --partition dirichlet"
        )


SIZES = ("base_classes", "classes_per_task", "task_sizes")  # the options for how many classes tasks have


def _check_task_sizes(config: PartitionConfig) -> None:
    """Check that one option, and no more, says how many classes the tasks have."""
    given = [name for name in SIZES if getattr(config, name, 0)]
    if "task_sizes" in given and len(given) > 1:
        raise InputError(
            f"{given[0]}: --task-sizes {getattr(config, given[-1])!r} has all sizes; leave one of them out"
        )
    pool = label_of("task_pool", getattr(config, "task_pool", "same"))
    if pool != "same" and given:
        raise InputError(f"{given[0]}: it has no effect with --task-pool {pool}; leave it out")


def check_given(config: RunConfig, given: Collection[str]) -> None:
    """Check that something reads every option that was given, and that no other one decides it.

    Raises:
      InputError: naming the first such option.
    """
    check_read(config, config, given)
    check_unread(vars(config), dict.fromkeys(given), vars(config), given)
    if "clients" in given and is_owned(config.partition):
        raise InputError(
            f"clients: the partition {config.partition!r} decides their number; leave out --clients"
        )
    decides = next((name for name in SIZES[1:] if getattr(config, name, 0)), "")
    decides = decides if config.tasks_by == "class" else "tasks_by"
    from fcljax.data.owners import says_tasks  # imports JAX, which help and lists do without

    if "tasks" in given and says_tasks(config.partition):
        raise InputError(f"tasks: {config.partition!r} has a column 'task', which decides; leave it out")
    if "tasks" in given and decides:
        raise InputError(f"tasks: {decides} decides their number; leave out --tasks")


def fill(options: Value, values: dict[str, Any], where: str) -> Value:
    """Options with other values of some fields.

    Raises:
      InputError: for an unknown key (with the nearest known one) or a value of the wrong type.
    """
    fields = {field.name: field for field in fields_of(type(options))}
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    given = {name: _converted(fields[name], value) for name, value in values.items()}
    return replaced(options, **given)


def _converted(field: dataclasses.Field, value: object) -> Any:
    if field.name in CHOICES and not isinstance(value, str):
        return value
    null = value is None and field.metadata.get("unset")  # files of earlier versions have null there
    unset = null or value == "" == field.metadata.get("default")  # as config.yaml has it
    return field.metadata["default"] if unset else typed_value(field.name, field.type, value)


def typed_value(name: str, type_: Any, value: object) -> Any:
    """`value`, which may be a string, as a value of the field's type.

    Raises:
      InputError: naming the field, the value and what is valid.
    """
    if typing.get_origin(type_) in (
        types.UnionType,
        typing.Union,
    ):  # Literal | None is a typing.Union before Python 3.14
        if types.NoneType in typing.get_args(type_) and (value is None or value == "None"):
            return None
        type_ = next(part for part in typing.get_args(type_) if part is not types.NoneType)
    if typing.get_origin(type_) is Literal:
        return _chosen(name, value, typing.get_args(type_))
    if type_ is bool:
        return {"true": True, "false": False}[choose(name, str(value).lower(), ("true", "false"))]
    plain = isinstance(value, str | int | float | Path) and not isinstance(value, bool)
    try:
        # Python reads digits of every script: what looks like one number here could be another to a reader
        other_digits = type_ in (int, float) and not str(value).isascii()
        if not plain or other_digits or (type_ is int and not _is_whole(value)):
            raise TypeError
        if type_ is str and isinstance(value, float):  # 1.50 would become 1.5
            raise InputError(f"{name}: {value!r} is a number, and text is needed; write it in quotes")
        if "\0" in str(value):
            raise InputError(f"{name}: {value!r} contains a NUL character")
        return type_(value)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: {value!r} is not {KINDS.get(type_, type_.__name__)}") from None


def _chosen(name: str, value: object, options: tuple) -> Any:
    """One of the options. Those such as "file:PATH" and "NAME,NAME" stand for any text of their form."""
    kind, colon, rest = str(value).partition(":")
    forms = [str(option) for option in options]
    if colon and rest.strip() and any(form.startswith(f"{kind}:") for form in forms):
        return str(value)
    if "," in str(value) and any("," in form for form in forms):
        return str(value)
    return choose(name, value, options)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())


class _Ambiguous(yaml.YAMLError):
    """A value that versions of YAML read differently."""


class _Plain(yaml.SafeLoader):
    """Safe YAML of settings: every key once, little depth, no aliases, of which a few bytes can stand for
    gigabytes, and no value that YAML 1.1 reads as another than the one that is written."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                f"{self.peek_event().start_mark}: aliases are not supported; write the value"
            )
        if self.depth >= YAML_DEPTH:
            raise yaml.YAMLError(f"{self.peek_event().start_mark}: nested more than {YAML_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
        if isinstance(node, yaml.MappingNode):
            found: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in found:
                    raise yaml.YAMLError(f"{key.start_mark}: {key.value!r} appears twice; remove one")
                found.add(str(key.value))
        return node


# how a whole number, a number, and true or false are written; YAML 1.1 has further forms of each
_WRITTEN = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
}


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Refuse a value that YAML 1.1 reads as another than the one written: 0777 is 511, and no is false.

    Raises:
      _Ambiguous: naming the line, what it would become, and how to write it.
    """
    kind = node.tag.rpartition(":")[2]
    text = node.value
    if kind == "timestamp":
        raise _Ambiguous(f"{_line(node)}: {text!r} is a date in YAML; write text in quotes")
    if kind in _WRITTEN and not _WRITTEN[kind].fullmatch(text):
        value = yaml.load(f"!!{kind} {text!r}", yaml.SafeLoader)
        shown = str(value).lower() if isinstance(value, bool) else value
        raise _Ambiguous(f"{_line(node)}: {text!r} is {shown} in YAML; write {shown}, or text in quotes")


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, safely loaded.

    Raises:
      InputError: for a missing file, broken YAML, a value that YAML reads as another than the one that is
        written, or something that is no mapping.
    """
    text = read_user_text("config", path, YAML_BYTES)
    try:
        values = yaml.load(text, _Plain)
    except _Ambiguous as error:
        raise InputError(f"config: {str(path)!r}: {error}") from None
    except Exception as error:  # yaml's constructors of numbers and dates raise what Python's do
        why = " ".join(str(error).split())
        raise InputError(f"config: {str(path)!r} is not valid YAML: {why}") from None
    if not isinstance(values, dict):
        raise InputError(f"config: {str(path)!r} does not map names to values")
    return values


def to_yaml(config: RunConfig) -> str:
    """All fields of a run's settings as YAML, the method first."""
    return yaml.safe_dump({"method": config.method, **plain(config)}, sort_keys=False)


def plain(config: RunConfig) -> dict[str, Any]:
    """Return all fields of a run's settings as plain values; objects of the user's own as `choices.OWN`."""
    order = getattr(config, "order", ())  # options of a choice stand behind it
    names = dict.fromkeys((*order, *(field.name for field in fields_of(type(config)))))
    values = {name: getattr(config, name) for name in names}
    return {
        name: value if name not in CHOICES or isinstance(value, str) else OWN
        for name, value in values.items()
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Readable differences between two mappings of settings: 'name (x, not y)'."""
    return [
        f"{name} ({b.get(name)!r}, not {a.get(name)!r})" for name in {**a, **b} if a.get(name) != b.get(name)
    ]
