"""The command line: `fcljax run METHOD`, `list`, `compare`, `data`, `convert`, `embed`, `pretrain`,
`pretrain-decoder`."""

import dataclasses
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import absl.logging
import tyro
from rich.console import Console
from rich.table import Table

from fcljax import __version__, config
from fcljax.errors import InputError, choose, nearest, one_line
from fcljax.options import fields_of
from fcljax.runs import signals
from fcljax.terminal import add_row, plain, say

USAGE = """usage: fcljax COMMAND ...

  fcljax run METHOD [options]    train and evaluate a method; `fcljax run METHOD --help` lists its options
  fcljax run ./FILE.py [options] the same for a method of your own; also MODULE:NAME
  fcljax check METHOD [options]  does a method, of yours or ours, hold what all must? On tiny data
  fcljax list                    methods, adapters, data sets and backbones, and what does not go together
  fcljax compare RUN_DIR...      tables and a figure over finished runs, and over folders of run --seeds
  fcljax data list               data sets, and whether they are here
  fcljax data prepare NAME       download where possible, decode once, check
  fcljax data show NAME          images, and which client would hold which class
  fcljax convert SRC [DST]       a checkpoint of another library as .safetensors with its provenance
  fcljax embed [options]         frozen features of a data set, as .npz and for the runs to come
  fcljax pretrain [options]      train the packaged micro ViT again, on rendered glyphs
  fcljax pretrain-decoder [options]   a masked autoencoder's decoder for a frozen encoder
  fcljax --version
"""


@dataclasses.dataclass(frozen=True)
class Paths:
    """Where a run's settings come from and where its files go."""

    out: str | None = None  # run directory, a new one; default: runs/METHOD-DATASET-sSEED-TIME
    resume: str | None = None  # run directory to go on with, under the settings it was started with
    config: str | None = None  # YAML file of settings; options on the command line win
    # a run for each of so many seeds from `seed` on, or for each of a list such as 1,2,3; into one folder
    seeds: str | None = None
    # a signal of which the machine warns before it stops a run, as Slurm does with --signal: the round in
    # hand is finished
    stop_signal: Literal["USR1", "USR2", "HUP", "TERM"] | None = None


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `fcljax compare`."""

    out: str | None = (
        None  # PNG file of the figure; default: accuracy.png in the folder that holds the first run
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2. `arguments` are the program's own
    when None."""
    if arguments is None:
        _quiet_threads()
        arguments = sys.argv[1:]
    arguments = list(arguments)
    try:
        with signals.terminable():
            return dispatch(arguments)
    except InputError as error:
        print(f"fcljax: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `head` does: nothing is left to say
        return 141
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        said = one_line(f"cannot read or write{where}: {error.strerror or error}")
        print(f"fcljax: {said}", file=sys.stderr)
    except MemoryError as error:
        print(f"fcljax: {one_line(f'memory: there is not enough of it here: {error}')}", file=sys.stderr)
    except KeyboardInterrupt as stop:
        number = signals.number_of(stop)
        advice = getattr(stop, "advice", "") or "files that were not finished are not there"
        print(f"fcljax: {one_line(f'stopped by {signal.Signals(number).name}; {advice}')}", file=sys.stderr)
        return 128 + number
    return 2


def dispatch(arguments: list[str]) -> int:
    """Find the command and run it.

    Raises:
      InputError: for an unknown command or anything wrong that the command finds.
    """
    commands = {
        "run": run, "check": check, "list": list_, "compare": compare, "data": data, "convert": convert,
        "embed": embed, "pretrain": pretrain, "pretrain-decoder": pretrain_decoder,
    }  # fmt: skip
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    return commands[choose("command", arguments[0], commands)](arguments[1:])


def run(arguments: list[str]) -> int:
    """`fcljax run METHOD [options]`."""
    from fcljax.methods import METHODS, find_method

    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"method: none given; choose from: {', '.join(METHODS)}; or give a file of your own")
    method, arguments = arguments[0], arguments[1:]
    entry = find_method(method)
    given = parse_run(method, arguments, f"fcljax run {method}", entry.summary)
    paths = Paths(**{field.name: given.pop(field.name, None) for field in dataclasses.fields(Paths)})
    resolved = settings(method, given, paths)
    out = paths.resume or paths.out or _new_folder(method, resolved)

    from fcljax.runs import loop
    from fcljax.runs.comparison import compare, results_table
    from fcljax.runs.summary import learned_nothing

    console, resume, failed = Console(), paths.resume is not None, False
    seeds = _seeds(resolved, paths)
    try:
        with signals.warned_by(paths.stop_signal) as stop:
            if seeds:
                from fcljax.runs.seeds import run_seeds

                run_seeds(method, resolved, seeds, out, resume, Console(stderr=True), stop)
                tables, figure = compare([out], Path(out) / "accuracy.png")
            else:
                summary = loop.run(method, resolved, out, resume, stop=stop)
                tables = [results_table([summary])]
                figure = Path(out) / "figures" / "accuracy.png"
                failed = learned_nothing(summary)
    except KeyboardInterrupt as error:
        raise signals.Stopped(signals.number_of(error), _go_on(method, out)) from None
    for table in tables:
        console.print(table)
    say(console, f"run directory: {out}")
    say(console, f"accuracy curve: {figure}")
    if failed:
        say(Console(stderr=True), "fcljax: no upload was valid in any round: the model is as it began")
    return int(failed)


def _go_on(method: str, out: str) -> str:
    """What a user can do after a run was stopped."""
    if not (Path(out) / "config.yaml").exists():
        return "the run had not begun, and nothing was written"
    return f"go on with: fcljax run {shlex.quote(method)} --resume {shlex.quote(out)}"


def _seeds(resolved: config.RunConfig, paths: Paths) -> list[int] | None:
    """The seeds of a run over several, new or resumed; None: it is one run."""
    from fcljax.runs.seeds import parse_seeds, stored_seeds

    asked = parse_seeds(paths.seeds, resolved.seed) if paths.seeds else None
    stored = stored_seeds(paths.resume) if paths.resume else None
    if paths.resume and asked and not stored:
        raise InputError(f"seeds: {paths.resume!r} is a run with one seed; leave out --seeds")
    return list(dict.fromkeys((stored or []) + (asked or []))) or None


def check(arguments: list[str]) -> int:
    """`fcljax check METHOD [options]`: the statements that every method must hold; exit code 1 if one does
    not."""
    from fcljax.methods import METHODS, find_method

    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"method: none given; choose from: {', '.join(METHODS)}; or give a file of your own")
    method, arguments = arguments[0], arguments[1:]
    find_method(method)
    given = parse_run(method, arguments, f"fcljax check {method}", "Does the method hold what all must?")
    paths = Paths(**{field.name: given.pop(field.name, None) for field in dataclasses.fields(Paths)})
    for name in ("out", "resume", "seeds", "stop_signal"):
        if getattr(paths, name):
            raise InputError(f"{name}: check makes no run directory; leave out {_flag(name)}")
    resolved = settings(method, {"clients": 4, "batch_size": 4, "epochs": 2, **given}, paths)

    from fcljax.runs import conformance

    statements = conformance.check(method, resolved)
    table = Table("statement", "holds", "found")
    for name, holds, found in statements:
        add_row(table, name, "yes" if holds else "NO", found)
    Console().print(table)
    return 0 if all(statement.holds for statement in statements) else 1


def _new_folder(method: str, resolved: config.RunConfig) -> str:
    # two runs may begin in the same second, and clocks may be set back
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    return f"runs/{_slug(method)}-{_slug(resolved.dataset)}-s{resolved.seed}-{stamp}"


def parse_run(method: str, arguments: list[str], prog: str, description: str) -> dict[str, Any]:
    """The options of a run that were given. Those of the adapter are those of the one that is asked for.

    Raises:
      InputError: as `parse`.
    """
    adapter = adapter_of(method, arguments)
    groups: dict[str, object] = {"files": Paths()}
    for title, group in config.option_groups(method, adapter).items():
        groups[title] = config.defaults(method, adapter, group)
    names = [flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in arguments]
    config.check_known(method, adapter, [*names, *(name.removeprefix("no_") for name in names)], "options")
    return parse(groups, arguments, prog, description)


def adapter_of(method: str, arguments: list[str]) -> str:
    """The adapter of a run: the one that the options name, else that of --config or --resume, else the
    method's.

    Raises:
      InputError: for a file of settings that cannot be read.
    """
    from fcljax.methods import find_method

    last = {}
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        last[name] = value if equals else following
    if "--adapter" in last:
        return last["--adapter"]
    source = Path(last["--resume"]) / "config.yaml" if "--resume" in last else last.get("--config")
    values = config.load_yaml(source) if source and Path(source).is_file() else {}
    return values.get("adapter") or find_method(method).adapter


def settings(method: str, given: dict[str, Any], paths: Paths) -> config.RunConfig:
    """Settings of a run: defaults, then --config's or the resumed run's, then the options that were given.

    Raises:
      InputError: for a wrong value, or a file that belongs to another method.
    """
    source = paths.config
    if paths.resume:
        if paths.out or paths.config:
            raise InputError(
                f"resume: {paths.resume!r} has its own config and folder; leave out --config and --out"
            )
        source = str(Path(paths.resume) / "config.yaml")
        if not Path(source).is_file():
            raise InputError(f"resume: {paths.resume!r} is no run directory: it has no config.yaml")
    values = config.load_yaml(source) if source else {}
    name = values.pop("method", method)
    if name != method:
        raise InputError(
            f"{'resume' if paths.resume else 'config'}: {source!r} is for method {name!r}, not {method!r}"
        )
    return config.resolve(method, config.from_mapping(method, values | given, source or "options"))


def parse(groups: Mapping[str, object], arguments: list[str], prog: str, description: str) -> dict[str, Any]:
    """The options that were given, as values by field name.

    tyro prints the help; values are read here, so that a mistake gives one line and a value means the same on
    the command line and in YAML.

    Args:
      groups: title -> dataclass of options, with its defaults; together they are one flat namespace.
      arguments: what the user typed.
      prog: the command, for the help.
      description: the first line of the help.

    Raises:
      InputError: naming the option, its value and the nearest valid one.
    """
    if {"-h", "--help"} & set(arguments):
        # pyrefly: ignore[invalid-annotation]  # a type that is made while the program runs
        unprefixed = {title: tyro.conf.OmitArgPrefixes[type(group)] for title, group in groups.items()}
        flat = [(re.sub(r"\W", "_", title), unprefixed[title], group) for title, group in groups.items()]
        command = dataclasses.make_dataclass("Command", flat, frozen=True)
        tyro.cli(command, args=["--help"], prog=prog, description=description)
    return read_arguments(_fields(groups), arguments)


def _fields(groups: Mapping[str, object]) -> dict[str, dataclasses.Field]:
    return {field.name: field for group in groups.values() for field in fields_of(type(group))}


def read_arguments(fields: dict[str, dataclasses.Field], arguments: list[str]) -> dict[str, Any]:
    """The values that `arguments` set, by field name; the last one counts.

    Raises:
      InputError: for an unknown option, a missing value or a value of the wrong type.
    """
    values, rest = {}, list(arguments)
    while rest:
        token, *rest = rest
        flag, equals, value = token.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise InputError(f"option: unexpected argument {token!r}; options start with --")
        switch = name if name in fields else name.removeprefix("no_")
        if switch in fields and fields[switch].type is bool:
            if equals:
                raise InputError(
                    f"{switch}: {token!r} takes no value; choose {_flag(switch)} or {_flag('no_' + switch)}"
                )
            values[switch] = switch == name
            continue
        if name not in fields:
            raise InputError(f"option: unknown option {flag!r}; {nearest(flag, map(_flag, fields))}")
        if not equals:
            if not rest:
                raise InputError(f"{name}: {flag} needs a value")
            value, *rest = rest
        values[name] = config.convert(name, fields[name].type, value)
    return values


def list_(arguments: list[str]) -> int:
    """`fcljax list`: what can be named on the command line, and what does not go together."""
    from fcljax.adapters import ADAPTERS
    from fcljax.data.augment import PRESETS
    from fcljax.data.files.sources import DATASETS
    from fcljax.federated.faults import ATTACKS
    from fcljax.methods import METHODS
    from fcljax.models.networks import CONVNETS
    from fcljax.models.vit import VITS
    from fcljax.models.weights.pretrained import PACKAGED

    if arguments:
        raise InputError(f"option: unexpected argument {arguments[0]!r}; list takes none")
    backbones = {
        name: f"{vit.depth} blocks, width {vit.width}, patch {vit.patch}, {vit.image_size} px; "
        + ("weights are packaged" if name in PACKAGED else "needs --checkpoint")
        for name, vit in VITS.items()
    } | {
        name: f"features of width {each.width}, {each.image_size} px; random values without --checkpoint"
        for name, each in CONVNETS.items()
    }
    methods = {name: f"{entry.summary}; adapter {entry.adapter}" for name, entry in METHODS.items()}
    adapters = {name: entry.summary for name, entry in ADAPTERS.items()}
    excluded = {
        f"{name} + {adapter}": why
        for name, entry in METHODS.items()
        for adapter, why in entry.excludes.items()
    }
    merging = {f"{name} + --aggregator": f"{e.merges}: mean alone" for name, e in METHODS.items() if e.merges}
    listed = {
        "method": methods, "adapter": adapters, "data set": DATASETS, "backbone": backbones,
        "pipeline": PRESETS, "attack": ATTACKS, "cannot work": excluded | merging,
    }  # fmt: skip
    table = Table("kind", "name", "what it is")
    for kind, rows in listed.items():
        for name, text in rows.items():
            add_row(table, kind, name, text)
        table.add_section()
    Console().print(table)
    return 0


def data(arguments: list[str]) -> int:
    """`fcljax data list | prepare NAME | show NAME [options]`."""
    commands = {"list": _data_list, "prepare": _data_prepare, "show": _data_show}
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"data: no command given; choose from: {', '.join(commands)}")
    return commands[choose("data", arguments[0], commands)](arguments[1:])


@dataclasses.dataclass(frozen=True)
class DataListOptions:
    """Options of `fcljax data list`."""

    data_dir: str | None = (
        None  # folder of raw and prepared data sets; default: $FCLJAX_DATA, else ~/.cache/fcljax
    )


@dataclasses.dataclass(frozen=True)
class PrepareOptions(config.ImageConfig):
    """Options of `fcljax data prepare`."""

    force: bool = False  # decode again, and replace what was prepared


def _data_list(arguments: list[str]) -> int:
    from fcljax.data.files.sources import data_folder, known_datasets

    given = parse(
        {"data list": DataListOptions()},
        arguments,
        "fcljax data list",
        "Data sets, and whether they are here.",
    )
    title = plain(f"data sets in {data_folder(given.get('data_dir'))}")
    table = Table("name", "what it is", "state", title=title)
    for row in known_datasets(given.get("data_dir")):
        add_row(table, *row)
    Console().print(table)
    return 0


def _data_prepare(arguments: list[str]) -> int:
    from fcljax.data.files.sources import prepare
    from fcljax.runs.inputs import image_options

    name, given = _named(
        arguments, "fcljax data prepare NAME", PrepareOptions, "Make a data set ready for runs."
    )
    options = config.settle(config.fill(PrepareOptions, {**given, "dataset": name}, "options"))
    config.check_ranges(options)
    info = prepare(name, **image_options(options, options.image_size or 224), force=options.force)
    _print_rows(
        [
            ("training images", info.counts[0]), ("test images", info.counts[1]),
            ("bytes", f"{info.bytes:,}"), ("skipped", len(info.skipped)), ("sha256", info.digest),
            ("folder", info.folder or "made in memory by every run"),
        ]
    )  # fmt: skip
    return 0


def _data_show(arguments: list[str]) -> int:
    from fcljax.runs.show import ShowConfig, show

    name, given = _named(
        arguments, "fcljax data show NAME", ShowConfig, "Images, and which client would hold which class."
    )
    options = config.settle(config.fill(ShowConfig, {**given, "dataset": name}, "options"))
    config.check_ranges(options)
    _print_rows(show(options, options.out or "."))
    return 0


def _named(arguments: list[str], prog: str, options: type, description: str) -> tuple[str, dict[str, Any]]:
    """A data set's name and the options after it."""
    wants_help = bool({"-h", "--help"} & set(arguments))
    if not wants_help and (not arguments or arguments[0].startswith("-")):
        raise InputError(f"dataset: no name given; usage: {prog} [options]; `fcljax data list` has the names")
    given = parse({"options": options()}, arguments if wants_help else arguments[1:], prog, description)
    return arguments[0], given


def convert(arguments: list[str]) -> int:
    """`fcljax convert SRC [DST] [options]`."""
    from fcljax.models.weights.pretrained import ConvertOptions
    from fcljax.models.weights.pretrained import convert as write

    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    files, usage = arguments[:split], "fcljax convert SRC [DST]"
    given = parse(
        {"convert": ConvertOptions()},
        arguments[split:],
        usage,
        "A checkpoint as .safetensors with its provenance.",
    )
    if not 1 <= len(files) <= 2:
        raise InputError(f"convert: {len(files)} files given; usage: {usage} [options]")
    options = config.fill(ConvertOptions, given, "options")
    config.check_ranges(options)
    _print_rows(write(files[0], files[1] if len(files) == 2 else None, options))
    return 0


def embed(arguments: list[str]) -> int:
    """`fcljax embed [options]`."""
    from fcljax.runs.embed import EmbedConfig
    from fcljax.runs.embed import embed as write

    given = parse({"embed": EmbedConfig()}, arguments, "fcljax embed", "Frozen features of a data set.")
    options = config.settle(config.fill(EmbedConfig, given, "options"))
    config.check_ranges(options)
    backbone = (
        Path(options.checkpoint or "vit_micro").stem if options.backbone == "auto" else options.backbone
    )
    summary = write(options, options.out or f"{_slug(options.dataset)}-{_slug(backbone)}.npz")
    _print_rows(list(summary.items()))
    return 0


def _print_rows(rows: Sequence[tuple[str, object]]) -> None:
    table = Table(show_header=False)
    for name, value in rows:
        add_row(table, name, value)
    Console().print(table)


def compare(arguments: list[str]) -> int:
    """`fcljax compare RUN_DIR... [--out PNG]`."""
    from fcljax.runs.comparison import compare as compare_runs

    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    given = parse(
        {"compare": CompareOptions()}, arguments[split:], "fcljax compare", "A table and a figure over runs."
    )
    if not arguments[:split]:
        raise InputError("run: no run directory given; usage: fcljax compare RUN_DIR... [--out PNG]")
    out = given.get("out") or Path(arguments[0]).parent / "accuracy.png"
    tables, figure = compare_runs(arguments[:split], out)
    console = Console()
    for table in tables:
        console.print(table)
    say(console, f"accuracy curve: {figure}")
    return 0


def pretrain(arguments: list[str]) -> int:
    """`fcljax pretrain [options]`."""
    from fcljax.runs.pretrain import PretrainConfig
    from fcljax.runs.pretrain import pretrain as train

    given = parse(
        {"pretrain": PretrainConfig()}, arguments, "fcljax pretrain", "Train the packaged micro ViT again."
    )
    summary = train(config.fill(PretrainConfig, given, "options"))
    for name, value in summary.items():
        print(f"{name}: {value}")
    return 0


def pretrain_decoder(arguments: list[str]) -> int:
    """`fcljax pretrain-decoder [options]`."""
    from fcljax.runs.pretrain_decoder import PretrainDecoderConfig
    from fcljax.runs.pretrain_decoder import pretrain_decoder as train

    given = parse(
        {"pretrain-decoder": PretrainDecoderConfig()},
        arguments,
        "fcljax pretrain-decoder",
        "A masked autoencoder's decoder for a frozen encoder.",
    )
    options = config.fill(PretrainDecoderConfig, given, "options")
    try:
        _print_rows(list(train(options).items()))
    except KeyboardInterrupt as error:
        begun = Path(options.out).with_suffix(".checkpoints").exists()
        advice = "go on with the same command and --resume" if begun else ""
        raise signals.Stopped(signals.number_of(error), advice) from None
    return 0


def _quiet_threads() -> None:
    """When a checkpoint cannot be written, Orbax logs tracebacks and TensorStore prints another, from their
    threads and even after the error has reached us as one line. Only that line is for the user. This changes
    the process, so only the program itself does it."""
    hook = sys.unraisablehook
    absl.logging.set_verbosity(absl.logging.FATAL)
    sys.unraisablehook = lambda error: None if "Event loop is closed" in str(error.exc_value) else hook(error)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _slug(text: str) -> str:
    """A data set's name as part of a folder's name."""
    return "".join(c if c.isalnum() else "-" for c in Path(text.partition(":")[2] or text).stem)[:60]
