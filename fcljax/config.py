"""The settings of a run: those that all methods share, the method's own and its
adapter's, in one frozen dataclass with one flat namespace of fields for the command
line and for YAML.

`config.yaml` holds every field of a run and can be given back with `--config`. Text
becomes a value in one place (`typed_value`), wherever it comes from, so a wrong one
gives the same single line. A stage of a run takes the dataclass that it reads, not the
whole.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Collection, Mapping
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

# A settings file has a few KB. A larger one is refused before PyYAML reads it, which
# takes seconds a megabyte and 100 times its size in memory.
YAML_BYTES = 1 << 20
# Settings are flat, so any honest file is far from this; PyYAML recurses once a level.
YAML_DEPTH = 20
# `--seeds 2023` is a seed that was mistaken for a number of seeds: no 2,023 runs start
MOST_SEEDS = 100
KINDS = {int: "a whole number", float: "a number", str: "text"}
# How the releases scale pixels and resize position embeddings. The fidelity `paper` takes
# these too, because the papers say nothing about either.
AS_RELEASED = {"normalise": "release", "positions": "plain"}
# --scale fit searches learning rates for the length of training that the user has chosen,
# so it leaves that alone
SCHEDULE = ("rounds", "epochs", "batch_size")
# Examples that a client has of a task in the presets' own experiments: most papers divide
# CIFAR-100 (50,000 images) into 10 tasks over 10 clients.
PAPER_EXAMPLES = 500.0
# A schedule of less than 3 times, and more than a third of, the preset's steps in a task
# keeps the preset's learning rates.
NEAR = 3
# Networks of tables and series start from random values, and hardly train at the rates
# for pretrained networks. Chosen on held-out training examples of digits_table.
FROM_RANDOM = {"full_lr": 1e-3}
# Backbones whose scale is mini where none is typed. `auto` is vit_micro; with a
# checkpoint it is the checkpoint's network, and the scale is the paper's (`_is_micro`).
MICRO = ("auto", "vit_micro", "resnet_micro", *ARRAY_NETS, *TEXT_NETS)


# ---- the options of a method with an adapter -------------------------------------------


def option_groups(
    method: str | MethodEntry, adapter: str, choices: Selected | None = None
) -> dict[str, type]:
    """Return title -> dataclass of the options of a run: the run's, the method's and
    the adapter's.

    Args:
      method: of the run.
      adapter: what trains inside the network.
      choices: what was chosen where options have options of their own; None: as the
        method has them.

    Raises:
      InputError: for an unknown method or adapter, one that the method cannot work
        with, or names that collide, which only a method from outside the package can
        have.
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
    # a method of the user's own is called ./FILE.py:NAME; its file's name makes the
    # heading
    title = called
    if method not in METHODS:
        title = Path(called).stem
    groups = {
        "run": class_with(RunConfig, choices or usual_choices(method)),
        title: entry.options(adapter),
    }
    groups[f"adapter {adapter}"] = find_adapter(adapter).options
    # the namespace is flat: of two options with one name only one could be set
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
    return selected(RunConfig, flat_fields(_reading(find_method(method).presets, fidelity).run))


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
      choices: what was chosen where options have options of their own; None: as the
        preset has them.

    Raises:
      InputError: as `option_groups`.
    """
    # call again with everything spelled out, so that both ways share one entry of the
    # cache
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
    """Return the dataclass of a run: the shared fields, those of its choices, the
    method's own and the adapter's. Its defaults are those of the preset `intended` at
    the scale mini.

    Raises:
      InputError: as `option_groups`.
    """
    if adapter is None or choices is None:
        adapter = adapter or find_method(method).adapter
        return run_class(method, adapter, choices or usual_choices(method))
    # dataclasses order fields from the last base to the first; reversed bases give the
    # run's fields, then the method's, then the adapter's
    bases = tuple(reversed(option_groups(method, adapter, choices).values()))
    declared = {field.name: field for base in bases for field in fields_of(base)}
    fields = []
    for name, default in _values(method, adapter, "intended", "mini", choices).items():
        # declared again, with the preset's value as its default; range and help stay
        field = dataclasses.field(default=default, metadata=declared[name].metadata)
        fields.append((name, declared[name].type, field))
    return dataclasses.make_dataclass(
        f"Run_{Path(name_of(method)).stem}_{adapter}",
        fields,
        bases=bases,
        frozen=True,
        namespace={"__doc__": find_method(method).summary, "source": method},
    )


def _values(
    method: str | MethodEntry,
    adapter: str,
    fidelity: Fidelity,
    scale: Scale,
    choices: Selected,
) -> dict[str, Any]:
    """Return field -> value of a preset at a scale; later sources win over earlier
    ones."""
    groups = option_groups(method, adapter, choices)
    run_options, method_options, adapter_options = groups.values()
    reading = _reading(find_method(method).presets, fidelity)
    # 1. defaults, 2. the preset's values of the run's fields, 3. what is chosen (last, so
    # that an option's table and its name agree even if the preset chooses something else)
    values = {field.name: field.default for field in fields_of(run_options)}
    values |= {name: value for name, value in values_of_preset(reading.run).items() if name in values}
    values |= dict(choices)
    # 4. the preset's options of the method and of its adapter
    adapter_preset = _reading(find_adapter(adapter).presets, fidelity)
    for options in reading.adapters:
        if type(options) is adapter_options:
            adapter_preset = options
    for options in (part(method_options, reading.options), adapter_preset):
        values |= {field.name: getattr(options, field.name) for field in fields_of(type(options))}
    if fidelity in ("paper", "released"):
        values |= AS_RELEASED
    # 5. the scale. fit takes mini's values too (training of the server, say), but
    # searches learning rates from the paper's, and keeps the preset's length of
    # training
    if scale in ("mini", "fit"):
        untouched = set()
        if scale == "fit":
            rates = {field.name for options in groups.values() for field in rate_fields(options)}
            untouched = rates | {*SCHEDULE}
        for name, value in reading.mini.items():
            # mini may name options of an adapter that this run does not have
            if name in values and name not in untouched:
                values[name] = value
    values |= {
        "method": name_of(method),
        "adapter": adapter,
        "fidelity": fidelity,
        "scale": scale,
    }
    values["rate_factor"] = 1.0
    if scale == "fit":
        values["rate_factor"] = 0.0  # 0: the run searches it when it begins
    return values


def flat_fields(run: RunConfig) -> dict[str, Any]:
    """Return the run's fields of a preset: each choice is its name, with its options
    beside it."""
    return flat({field.name: getattr(run, field.name) for field in fields_of(type(run))})


def values_of_preset(run: RunConfig) -> dict[str, Any]:
    """Return the run's fields of a preset, for a run that may choose other things.

    An option of what the preset chooses, such as the momentum of its optimiser, holds
    for any other choice with an option of that name, unless the preset has left it at
    its default.
    """
    values = flat_fields(run)
    usual = class_with(RunConfig, selected(RunConfig, values))
    defaults = {field.name: field.default for field in fields_of(usual)}
    # fields that every run has are always the preset's, those of choices only if it
    # sets them
    shared = RunConfig.__dataclass_fields__
    return {name: value for name, value in values.items() if name in shared or value != defaults[name]}


def rate_fields(options: type) -> list[dataclasses.Field]:
    """Return the fields of a dataclass of settings that are learning rates."""
    return [field for field in fields_of(options) if field.metadata.get("learning_rate")]


def learning_rates(settings: RunConfig) -> dict[str, float]:
    """Return option -> learning rate that is trained with, of clients and server; empty
    where nothing trains, or an optax optimiser brings its own rate."""
    entry = find_method(settings.source or settings.method)
    # with another adapter than its own, a method of closed forms trains the network too
    if (entry.closed_form and settings.adapter == entry.adapter) or has_own_rate(settings):
        return {}
    # before the run has decided, rates are those of the preset
    factor = settings.rate_factor or 1.0
    rates = {field.name: getattr(settings, field.name) for field in rate_fields(type(settings))}
    # None stands for the rate of another option, such as server_lr for lr
    return {name: rate * factor for name, rate in rates.items() if rate is not None}


def _reading(presets: Mapping[str, Value], fidelity: str) -> Value:
    """Return the preset of a fidelity; one that is missing is the intended one."""
    return presets.get(fidelity, presets["intended"])


def part(options: type[Value], config: object) -> Value:
    """Return the part of a run's settings that a dataclass names."""
    return options(**{field.name: getattr(config, field.name) for field in fields_of(options)})


# ---- values that were given ------------------------------------------------------------


def from_mapping(method: str | MethodEntry, values: dict[str, Any], where: str) -> RunConfig:
    """Return a run's settings from names and values, as YAML or the command line give
    them, checked.

    `adapter` decides which options there are; `fidelity` and `scale` decide which
    values those have that are not given.

    Raises:
      InputError: as `fill` and `resolve`; for values that name another method, or for
        `fidelity: improved` of a method without that preset.
    """
    named = values.get("method", name_of(method))
    called = name_of(method)
    if named != called:
        raise InputError(f"{where}: the settings are for the method {named!r}, not {called!r}")
    # first, since the adapter decides which other names are options
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
    # like the rates that fit searches, the improvements were chosen on held-out images
    if scale == "fit" and "fidelity" not in values and _can_improve(method, values):
        fidelity = "improved"
    # 0 leaves paper or fit to the run, which knows its number of steps once the data are
    # assigned (`with_scale_of_schedule`)
    if "rate_factor" not in values and _is_left_to_run(method, adapter, values):
        values = {**values, "rate_factor": 0.0}
    values = values | {"scale": scale, "fidelity": fidelity}
    # the presets' full_lr is for pretrained networks, and networks of tables have no
    # weights
    if adapter == "full" and scale == "mini" and not has_attention(values):
        values = _rates_from_random(method, values) | values
    usual = preset(method, adapter, fidelity, scale, choices_of(method, values))
    return resolve(fill(usual, _without_unread(usual, values), where))


def _rates_from_random(method: str | MethodEntry, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates for networks that start from random values, except those
    that the method's preset sets at the scale mini."""
    if values.get("optimiser", "adam") not in CHOICES["optimiser"]:
        return {}  # an optimiser of the user's own, with its own rate
    of_mini = find_method(method).presets["intended"].mini
    return {name: rate for name, rate in FROM_RANDOM.items() if name not in of_mini}


def usual_adapter(method: str | MethodEntry, attention: bool = True) -> str:
    """Return the adapter of a run that names none: the method's, or `full` where the
    method's needs attention and the network has none.

    Args:
      method: of the run.
      attention: whether the network has attention, as those of images and text have by
        default.
    """
    entry = find_method(method)
    if attention or not find_adapter(entry.adapter).attention or "full" in entry.excludes:
        return entry.adapter
    return "full"


def has_attention(values: Mapping[str, Any]) -> bool:
    """Check whether the network of these settings may have attention; those of tables
    have none."""
    dataset = str(values.get("dataset"))
    backbone = str(values.get("backbone", "auto"))
    if backbone in (*ARRAY_NETS, *TEXT_NETS):
        return backbone in TEXT_NETS
    return dataset.partition(":")[0] in ("text", "texts") or not has_arrays(dataset, backbone)


def choices_of(method: str | MethodEntry, values: Mapping[str, Any]) -> Selected:
    """Return what values choose, or else the method's preset, where options have
    options of their own."""
    reading = _reading(find_method(method).presets, values.get("fidelity", "intended"))
    return selected(RunConfig, flat_fields(reading.run) | dict(values))


def _without_unread(usual: RunConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the options of choices that were not made.

    Files of earlier versions hold the options of all choices. Those at their usual values
    are dropped.

    Raises:
      InputError: naming the first option that nothing reads and that is not at its usual
        value.
    """
    fields = {field.name for field in fields_of(type(usual))}
    in_preset = values_of_preset(_reading(find_method(usual.source).presets, usual.fidelity).run)
    unread = {name: value for name, value in values.items() if name not in fields and readers(name)}
    changed = {name: value for name, value in unread.items() if value != in_preset.get(name)}
    check_unread(fields, changed, vars(usual) | values)

    def is_old_default(name: str) -> bool:
        # Files of earlier versions have null for defaults that are values today, and for
        # options of other methods: neither says that the user wanted anything.
        if values[name] is not None:
            return False
        return bool(readers(name)) or (name not in fields and bool(methods_with(name)))

    return {name: value for name, value in values.items() if name not in unread and not is_old_default(name)}


def with_values(settings: RunConfig, **values: Any) -> RunConfig:
    """Return settings with other values, among which there may be other choices.

    A choice brings its options with their defaults; options that it does not have are
    dropped.
    """
    changes = flat(values)
    choices = selected(RunConfig, vars(settings) | changes)
    source = settings.source or settings.method
    usual = preset(source, settings.adapter, settings.fidelity, settings.scale, choices)
    merged = dict(vars(usual))
    for name, value in vars(settings).items():
        if name in merged:
            merged[name] = value
    return type(usual)(**(merged | changes))


def _is_left_to_run(method: str | MethodEntry, adapter: str, values: Mapping[str, Any]) -> bool:
    """Check whether the number of steps, which the run alone knows, decides between
    paper and fit."""
    if values.get("scale", "auto") != "auto":
        return False
    if _is_micro(values.get("backbone", "auto"), values.get("checkpoint")):
        return False
    # a user who typed a learning rate wants that one, not a search
    return not {*_fit_values(method, adapter), "fidelity"} & {*values}


@functools.cache
def _fit_values(method: str | MethodEntry, adapter: str) -> Mapping[str, Any]:
    """Return option -> value that `--scale fit` starts from, for every option that it may
    change; learning rates are the paper's."""
    paper = preset(method, adapter, "intended", "paper")
    # nothing given: nothing forbids the improvements that the method has
    fidelity = "intended"
    if _can_improve(method, {}):
        fidelity = "improved"
    fit = preset(method, adapter, fidelity, "fit")
    rates = {field.name for field in rate_fields(type(fit))}
    changed = {name for name, value in vars(fit).items() if value != getattr(paper, name, None)}
    left_alone = {*SCHEDULE, "fidelity", "scale", "rate_factor"}
    # rates come first: at the start they are the paper's, so `changed` does not have them
    names = [field.name for field in fields_of(type(fit)) if field.name in rates]
    names += [name for name in vars(fit) if name in changed]
    return {name: getattr(fit, name) for name in names if name not in left_alone}


def decided_by_fit(settings: RunConfig) -> tuple[str, ...]:
    """Return the options that the run decides when it begins: those that `--scale fit`
    may change and that have the preset's value; none once it has decided."""
    if settings.rate_factor:
        return ()
    source = settings.source or settings.method
    usual = preset_of(settings)
    names = _fit_values(source, settings.adapter)
    undecided = [name for name in names if getattr(settings, name) == getattr(usual, name)]
    return ("scale", "fidelity", "rate_factor", *undecided)


def _can_improve(method: str | MethodEntry, values: Mapping[str, Any]) -> bool:
    """Check whether `--scale fit` takes the preset `improved`: the method has it, and the
    server can work as these values say.

    Args:
      method: of the run.
      values: option -> value, of the options that differ from the preset's.
    """
    presets = find_method(method).presets
    if "improved" not in presets:
        return False
    # Most improvements are HeadTune: classes start at mean features. These are sums over
    # clients, which `parts.server.check_aggregation` refuses under any rule but the mean.
    # It needs the built method; here the same is read off the options, without JAX.
    # A preset's own `uniform` becomes `mean` in its `improved` (`settings.with_headtune`);
    # one that a user asks for stays.
    is_mean_rule = label_of("aggregator", values.get("aggregator", "mean")) == "mean"
    server_optimiser = label_of("server_optimiser", values.get("server_optimiser", "none"))
    is_mean = is_mean_rule and not values.get("clip_norm") and server_optimiser == "none"
    # class prompts set the start of each class, so HeadTune has nothing left to set
    has_prompts = values.get("class_prompts", "none") != "none"
    # HeadTune reads each example once more, and an online stream is seen once
    is_online = values.get("population") == "online"
    return (is_mean and not has_prompts and not is_online) or not presets["improved"].run.headtune


def _changed(settings: RunConfig) -> dict[str, Any]:
    """Return option -> value, of the options that differ from the preset's."""
    # with the preset's choices; `preset_of` has those of the settings
    source = settings.source or settings.method
    plain = vars(preset(source, settings.adapter, settings.fidelity, settings.scale))
    return {name: value for name, value in vars(settings).items() if value != plain.get(name)}


def rates_of_scale(settings: RunConfig, scale: Scale) -> dict[str, float]:
    """Return option -> learning rate of a method's preset at a scale."""
    usual = preset_of(settings, scale=scale)
    return {name: getattr(usual, name) for name in learning_rates(settings)}


def with_scale_of_schedule(settings: RunConfig, examples: float) -> RunConfig:
    """Return settings whose scale is decided, if that was left to the run: fit for a
    schedule far from the preset's, else the scale that they have.

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
    fidelity = settings.fidelity
    # Long schedules only search rates. mini's training of the server and the improvements
    # were chosen for short ones.
    if share > 1:
        start = usual
    else:
        if _can_improve(source, _changed(settings)):
            fidelity = "improved"
        start = preset(source, settings.adapter, fidelity, "fit")
    values = {name: getattr(start, name) for name in _fit_values(source, settings.adapter)}
    return with_values(settings, **values, fidelity=fidelity, scale="fit")


def share_of_schedule(settings: RunConfig, scale: Scale, examples: float) -> float:
    """Return the training steps of a client in a task, divided by those of the method's
    preset at a scale.

    Args:
      settings: resolved.
      scale: of the preset.
      examples: of a client in a task, on average.
    """
    usual = preset_of(settings, scale=scale)
    return steps_of_task(settings, examples) / steps_of_task(usual, PAPER_EXAMPLES)


def steps_of_task(settings: TrainConfig, examples: float) -> float:
    """Return the training steps of a client with so many examples of a task."""
    return settings.rounds * settings.epochs * max(1.0, examples / settings.batch_size)


def _scale(values: Mapping[str, Any]) -> Scale:
    """Return the scale that is typed, or the one that suits the network.

    Raises:
      InputError: for a scale that there is not.
    """
    scale = choose("scale", values.get("scale", "auto"), typing.get_args(Scale))
    if scale != "auto":
        return scale
    if _is_micro(values.get("backbone", "auto"), values.get("checkpoint")):
        return "mini"
    return "paper"


def _is_micro(backbone: str, checkpoint: str | None) -> bool:
    """Check whether a network is one of those that the scale mini is for."""
    return backbone in MICRO and checkpoint in (None, "None")


def explain_scale(config: RunConfig) -> str:
    """Return the scale of a run and its reason, in a line."""
    micro = _is_micro(config.backbone, config.checkpoint)
    if config.scale == "fit":
        reason = "learning rates searched on held-out training examples"
        if config.fidelity == "improved":
            reason += " and --fidelity improved"
        return f"scale: fit, {reason}; see also --scale paper"
    if (config.scale == "mini") != micro:
        return f"scale: {config.scale}, as --scale says"
    if micro:
        reason = "the network is a micro one without a checkpoint"
        return f"scale: mini, because {reason}; see also --scale paper"
    network = config.checkpoint or config.backbone
    return f"scale: paper, because the network is {network}; see also --scale mini"


def explain_fidelity(config: RunConfig) -> str:
    """Return what runs where a method has no preset of the fidelity, in a line; else
    nothing."""
    fidelity = config.fidelity
    entry = find_method(config.source or config.method)
    if fidelity in entry.presets:
        return ""
    adapter = find_adapter(config.adapter)
    # the adapter may have the fidelity though the method has not, unless the method's
    # preset sets the adapter's options itself (`_values`)
    parts = []
    of_method = any(type(options) is adapter.options for options in entry.presets["intended"].adapters)
    if fidelity in adapter.presets and not of_method:
        parts.append(f"the adapter {config.adapter}")
    images = ", ".join(f"{name} {value}" for name, value in AS_RELEASED.items())
    parts.append(f"the images ({images})")
    return (
        f"fidelity: {config.method} has no preset {fidelity!r}: its options are those of intended; "
        f"those of {' and '.join(parts)} are of {fidelity}"
    )


def improvement(config: RunConfig) -> dict[str, Any]:
    """Return option -> value that `--fidelity improved` would change in an intended run.

    It is empty where there is no such preset, where the run's other options forbid it, or
    where the run has another fidelity.
    """
    source = config.source or config.method
    if config.fidelity != "intended" or not _can_improve(source, _changed(config)):
        return {}
    intended = preset_of(config, "intended")
    improved = preset_of(config, "improved")
    names = [field.name for field in fields_of(type(intended)) if field.name != "fidelity"]
    return {
        name: getattr(improved, name) for name in names if getattr(improved, name) != getattr(intended, name)
    }


def check_known(method: str | MethodEntry, adapter: str, values: Mapping[str, Any], where: str) -> None:
    """Refuse options that go only with another adapter or method; `fill` refuses those that
    do not exist.

    Raises:
      InputError: naming the first such option, and the adapter or the methods that have
        it.
    """
    groups = option_groups(method, adapter).values()
    of_run = {field.name for group in groups for field in fields_of(group)}
    for name, value in values.items():
        if name in of_run:
            continue
        adapter_with = _adapter_of(find_method(method), name)
        if adapter_with:
            typed = name
            if where == "options":
                typed = flag(name)
            raise InputError(
                f"{where}: {typed} is an option of the adapter {adapter_with!r}, and this run has "
                f"{adapter!r}; nearest: --adapter {adapter_with}"
            )
        # files of earlier versions have null for options that few methods have today
        if value is None or readers(name):
            continue
        having = methods_with(name)
        if having:
            raise InputError(
                f"{where}: {flag(name)} is an option of {', '.join(having)}, and "
                f"{name_of(method)} has none; leave it out"
            )


def methods_with(name: str) -> list[str]:
    """Return the methods that have an option of their own by this name."""
    having = []
    for method in METHODS:
        entry = find_method(method)
        if any(field.name == name for field in fields_of(entry.options(entry.adapter))):
            having.append(method)
    return having


def _adapter_of(entry: MethodEntry, name: str) -> str | None:
    """Return the adapter that an option goes with, of the package or of the method."""
    for adapter in ADAPTERS:
        groups = (find_adapter(adapter).options, entry.options(adapter))
        if any(field.name == name for group in groups for field in fields_of(group)):
            return adapter
    return None


def resolve(config: RunConfig) -> RunConfig:
    """Return settings that have been checked, with what their partition decides.

    Raises:
      InputError: naming the field, its value and what is valid.
    """
    # imports JAX, which help and lists do without
    from fcljax.federated.faults import parse_faults

    check_ranges(config)
    if config.clients > MOST_CLIENTS:
        raise InputError(f"clients: {config.clients} is too large; nearest valid value: {MOST_CLIENTS}")
    if find_method(config.source).one_client and config.clients > 1:
        called = name_of(config.source)
        raise InputError(f"clients: {called} has one client with all examples; nearest valid value: 1")
    # 1.5 could be a slip for 15 as well as for 0.15
    if config.participation > 1 and config.participation % 1:
        raise InputError(
            f"participation: {config.participation} is neither a fraction nor a number of clients; "
            f"nearest valid value: {round(config.participation)}"
        )
    if config.malicious >= config.clients:
        raise InputError(
            f"malicious: {config.malicious} of {config.clients} clients; nearest: {config.clients - 1}"
        )
    # both raise for options that they cannot read, here rather than in the first round
    parse_faults(config.faults)
    chosen("lr_schedule", config)
    warmup_rounds = getattr(config, "warmup_rounds", 0)
    rounds = config.rounds
    if warmup_rounds >= rounds:
        raise InputError(f"warmup_rounds: {warmup_rounds} of a task's {rounds} rounds; nearest: {rounds - 1}")
    usual = preset_of(config)
    # an optimiser of optax has been given its learning rate: another one would be ignored
    if has_own_rate(config):
        for field in rate_fields(type(config)):
            if getattr(config, field.name) != getattr(usual, field.name):
                raise InputError(f"{field.name}: the optimiser has its own learning rate; leave it out")
    return _one_epoch(partitioned(config, usual), usual)


def has_own_rate(config: TrainConfig) -> bool:
    """Check whether the optimiser of the clients is one of optax, with a learning rate
    of its own."""
    in_memory = config.optimiser == OWN
    return in_memory or is_optax(chosen("optimiser", config))


def _one_epoch(config: RunConfig, usual: RunConfig) -> RunConfig:
    """Return settings whose clients pass over an online stream once.

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
      usual: the preset's values: an option at its usual value was not given, and may be
        one that nothing reads.

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
    # "static" is the default that a settings file holds even where nobody chose it
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
    # a client that exists for one round cannot join, leave or see a stream
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
    """Return the first option by which clients' examples change over time; "" if there
    is none."""
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
    name = _over_time(config)
    if not name and config.tasks_by != "class":
        name = "tasks_by"
    if not name and getattr(config, "blurry", 0.0):
        name = "blurry"
    if name:
        raise InputError(
            f"{name}: {getattr(config, name)!r} has no effect on private streams, which have their own "
            "schedule; nearest: --partition dirichlet"
        )


# the options for how many classes tasks have; `_check_task_sizes` relies on the order
SIZES = ("base_classes", "classes_per_task", "task_sizes")


def _check_task_sizes(config: PartitionConfig) -> None:
    """Check that one option, and no more, says how many classes the tasks have."""
    stated = [name for name in SIZES if getattr(config, name, 0)]
    if "task_sizes" in stated and len(stated) > 1:
        sizes = getattr(config, stated[-1])
        raise InputError(f"{stated[0]}: --task-sizes {sizes!r} has all sizes; leave one of them out")
    pool = label_of("task_pool", getattr(config, "task_pool", "same"))
    if pool != "same" and stated:
        raise InputError(f"{stated[0]}: it has no effect with --task-pool {pool}; leave it out")


def check_given(config: RunConfig, typed: Collection[str]) -> None:
    """Check that something reads every option that was typed, and that no other one
    decides it.

    Raises:
      InputError: naming the first such option.
    """
    check_read(config, config, typed)
    check_unread(vars(config), dict.fromkeys(typed), vars(config), typed)
    if "clients" in typed and is_owned(config.partition):
        raise InputError(
            f"clients: the partition {config.partition!r} decides their number; leave out --clients"
        )
    if "tasks" not in typed:
        return
    # imports numpy, which help and lists do without
    from fcljax.data.owners import says_tasks

    if says_tasks(config.partition):
        raise InputError(f"tasks: {config.partition!r} has a column 'task', which decides; leave it out")
    deciding = "tasks_by"
    if config.tasks_by == "class":
        # base_classes sets the size of the first task alone, and the number stays free
        deciding = next((name for name in SIZES[1:] if getattr(config, name, 0)), "")
    if deciding:
        raise InputError(f"tasks: {deciding} decides their number; leave out --tasks")


def fill(options: Value, values: dict[str, Any], where: str) -> Value:
    """Return options with other values of some fields.

    Raises:
      InputError: for an unknown key (with the nearest known one) or a value of the
        wrong type.
    """
    fields = {field.name: field for field in fields_of(type(options))}
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: unknown key {name!r}; {nearest(name, fields)}")
    return replaced(
        options,
        **{name: _converted(fields[name], value) for name, value in values.items()},
    )


def _converted(field: dataclasses.Field, value: object) -> Any:
    """Return a value from outside as a value of the field."""
    # an object of the user's own, which `choices.chosen` checks
    if field.name in CHOICES and not isinstance(value, str):
        return value
    # files of earlier versions have null where a default stands for none; config.yaml
    # has ""
    if value is None and field.metadata.get("unset"):
        return field.metadata["default"]
    if value == "" == field.metadata.get("default"):
        return value
    return typed_value(field.name, field.type, value)


def typed_value(name: str, type_: Any, value: object) -> Any:
    """Return `value`, which may be a string, as a value of the field's type.

    Raises:
      InputError: naming the field, the value and what is valid.
    """
    # Literal | None is a typing.Union before Python 3.14
    if typing.get_origin(type_) in (types.UnionType, typing.Union):
        parts = typing.get_args(type_)
        if types.NoneType in parts and (value is None or value == "None"):
            return None
        type_ = next(part for part in parts if part is not types.NoneType)
    if typing.get_origin(type_) is Literal:
        return _chosen(name, value, typing.get_args(type_))
    if type_ is bool:
        return choose(name, str(value).lower(), ("true", "false")) == "true"
    wrong = InputError(f"{name}: {value!r} is not {KINDS.get(type_, type_.__name__)}")
    # bool is a subclass of int
    if not isinstance(value, str | int | float | Path) or isinstance(value, bool):
        raise wrong
    # Python reads digits of every script: what looks like one number here could be
    # another to a reader
    if type_ in (int, float) and not str(value).isascii():
        raise wrong
    if type_ is int and not _is_whole(value):
        raise wrong
    if type_ is str and isinstance(value, float):  # 1.50 would become 1.5
        raise InputError(f"{name}: {value!r} is a number, and text is needed; write it in quotes")
    if "\0" in str(value):
        raise InputError(f"{name}: {value!r} contains a NUL character")
    try:
        return type_(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


def _chosen(name: str, value: object, options: tuple) -> Any:
    """Return one of the options. Those such as "file:PATH" stand for any text of their
    form."""
    kind, colon, rest = str(value).partition(":")
    forms = [str(option) for option in options]
    if colon and rest.strip() and any(form.startswith(f"{kind}:") for form in forms):
        return str(value)
    if "," in str(value) and any("," in form for form in forms):
        return str(value)
    return choose(name, value, options)


def _is_whole(value: object) -> bool:
    """Check whether a value is a whole number, or the text of one."""
    return isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())


class _Ambiguous(yaml.YAMLError):
    """A value that versions of YAML read differently."""


class _Plain(yaml.SafeLoader):
    """Safe YAML of settings: every key once, little depth, no aliases, of which a few
    bytes can stand for gigabytes, and no value that YAML 1.1 reads as another than the
    one that is written."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                f"{self.peek_event().start_mark}: aliases are not supported; write the value"
            )
        if self.depth >= YAML_DEPTH:
            raise yaml.YAMLError(f"{self.peek_event().start_mark}: nested more than {YAML_DEPTH} deep")
        self.depth += 1
        # a deep file would exhaust Python's stack in the parser
        node = super().compose_node(parent, index)
        self.depth -= 1
        # after composing, which resolves the tag that says how YAML 1.1 reads the value
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, _ in node.value:
                # YAML lets the last one win without a word
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise yaml.YAMLError(f"{key.start_mark}: {key.value!r} appears twice; remove one")
                keys.add(str(key.value))
        return node


# how a whole number, a number, and true or false are written; YAML 1.1 has further
# forms of each
_WRITTEN = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
}


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Refuse a value that YAML 1.1 reads as another than the one written: 0777 is 511,
    and no is false.

    Raises:
      _Ambiguous: naming the line, what it would become, and how to write it.
    """
    kind = node.tag.rpartition(":")[2]
    text = node.value
    if kind == "timestamp":
        raise _Ambiguous(f"{_line(node)}: {text!r} is a date in YAML; write text in quotes")
    if kind in _WRITTEN and not _WRITTEN[kind].fullmatch(text):
        # the plain loader tells what YAML would have made of it
        value = yaml.load(f"!!{kind} {text!r}", yaml.SafeLoader)
        shown = value
        if isinstance(value, bool):
            shown = str(value).lower()
        raise _Ambiguous(f"{_line(node)}: {text!r} is {shown} in YAML; write {shown}, or text in quotes")


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, safely loaded.

    Raises:
      InputError: for a missing file, broken YAML, a value that YAML reads as another
        than the one that is written, or something that is no mapping.
    """
    text = read_user_text("config", path, YAML_BYTES)
    try:
        values = yaml.load(text, _Plain)
    except _Ambiguous as error:
        raise InputError(f"config: {str(path)!r}: {error}") from None
    # not only YAMLError: yaml's constructors of numbers and dates raise what Python's do
    except Exception as error:
        why = " ".join(str(error).split())
        raise InputError(f"config: {str(path)!r} is not valid YAML: {why}") from None
    if not isinstance(values, dict):
        raise InputError(f"config: {str(path)!r} does not map names to values")
    return values


def to_yaml(config: RunConfig) -> str:
    """Return all fields of a run's settings as YAML, the method first."""
    return yaml.safe_dump({"method": config.method, **plain(config)}, sort_keys=False)


def plain(config: RunConfig) -> dict[str, Any]:
    """Return all fields of a run's settings as plain values; objects of the user's own
    as `choices.OWN`."""
    # `class_with` orders the options of a choice right behind it, as a reader expects;
    # the other fields follow
    order = getattr(config, "order", ())
    names = dict.fromkeys((*order, *(field.name for field in fields_of(type(config)))))
    values = {name: getattr(config, name) for name in names}
    for name in CHOICES:
        if not isinstance(values.get(name, ""), str):
            values[name] = OWN
    return values


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the differences between two mappings of settings as text: 'name (x, not
    y)'."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [f"{name} ({b.get(name)!r}, not {a.get(name)!r})" for name in names]
