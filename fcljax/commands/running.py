"""Run the commands `fcljax run METHOD` and `fcljax check METHOD`, with settings from
all that can give them."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.choices import CHOICES, check_no_programs
from fcljax.commands.arguments import (
    ProgramOptions,
    Words,
    completing,
    keep_compiled,
    new_folder,
    parse,
    slug,
    typed_options,
)
from fcljax.errors import InputError, Value
from fcljax.methods import METHODS, find_method
from fcljax.options import deciders, fields_of, flag, option, replaced
from fcljax.runs import signals
from fcljax.settings import HostOptions
from fcljax.terminal import add_row, say

# Options that decide the defaults of others, as all choices do. They are read before the
# parser is made, so that the help shows the values that would run.
DECIDING = ("adapter", "fidelity", "scale", "backbone", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Paths(ProgramOptions):
    """Where a run's settings come from and where its files go."""

    out: str | None = option(None, unset="runs/METHOD-DATASET-sSEED-TIME")
    """New run directory."""
    resume: str | None = option(None, unset="none")
    """Run directory to resume, with the settings it was started with."""
    config: str | None = option(None, unset="none")
    """YAML file of settings; options on the command line override it."""
    seeds: str | None = option(None, unset="the one of --seed")
    """Number of seeds, counted from --seed, or a list such as 1,2,3: one run per seed, in
    one folder."""
    stop_signal: Literal["USR1", "USR2", "HUP", "TERM"] | None = option(None, unset="none")
    """Preemption signal: finish the round, write a checkpoint, exit."""
    track: str | None = option(None, unset="none")
    """Trackers of the run, e.g. tensorboard,wandb,mlflow."""


def run(arguments: list[str]) -> int:
    """Run `fcljax run METHOD [options]`."""
    typed, paths, host_options = _read(arguments)
    from fcljax.runs import hosts

    # settings are resolved here too, although the child reads them again: an error is one
    # line before any process starts
    hosts.check_hosts(host_options)
    resolved = settings(arguments[0], typed, paths)
    if host_options.coordinator is None:
        return _play(resolved, paths, paths.resume or paths.out or _folder(resolved))
    if paths.seeds or (paths.resume and _seeds(resolved, paths)):
        raise InputError("seeds: a run with a coordinator trains one seed; leave out --seeds")
    command = ["-m", "fcljax.worker", "LOG", *arguments]
    return hosts.supervised(command, host_options, lambda out: _advice(arguments[0], out or paths.resume))


def run_as_process(arguments: list[str], log: TextIO) -> int:
    """Run it in the child of a process that has a coordinator; `log` is read by its
    parent."""
    from fcljax.runs import hosts

    typed, paths, host_options = _read(arguments)
    with hosts.joined(host_options, log):
        processes = hosts.Hosts.connected()
        resolved = processes.agree(lambda: settings(arguments[0], typed, paths))
        # without a wish the run takes all devices of all processes
        wanted_devices = typed.get("devices")
        if paths.resume or resolved.devices > 1:
            wanted_devices = resolved.devices
        devices = processes.agree(lambda: processes.devices(wanted_devices))
        resolved = dataclasses.replace(resolved, devices=devices)
        out = processes.from_first(lambda: paths.resume or paths.out or _folder(resolved))
        hosts.report_folder(out, log)
        # a process that resumes beside others that begin would wait for them for ever
        same = {"resume": paths.resume is not None, "stop_signal": paths.stop_signal}
        processes.check_same({"options": same})
        return _play(resolved, paths, out)


def _read(
    arguments: list[str],
    command: str = "run",
    of_command: Mapping[str, object] | None = None,
) -> tuple[dict[str, Any], Paths, HostOptions]:
    """Return the settings that are typed for a run, and the options that are none of
    its settings.

    `of_command` is as of `read_alone`.

    Raises:
      InputError: as `parse`, or if the arguments do not begin with a method.
    """
    besides = {**(of_command or {}), "files": Paths(), "hosts": HostOptions()}
    # no method, no options of its own: the help shows what all methods share
    if not arguments or arguments[0].startswith("-"):
        shared = {"run": config.RunConfig(), **besides}
        parse(
            shared,
            arguments,
            [command],
            "Train and evaluate a method.",
            Words("METHOD", tuple(METHODS)),
        )
        raise InputError(
            f"method: none given; try: fcljax {command} fppl; choose from: {', '.join(METHODS)}; or give a "
            "file of your own"
        )
    typed = parse_run(arguments[0], arguments[1:], command, find_method(arguments[0]).summary, besides)
    return typed, pop_options(Paths(), typed), pop_options(HostOptions(), typed)


def read_alone(
    arguments: list[str], command: str, of_command: Mapping[str, object] | None = None
) -> tuple[dict[str, Any], Paths]:
    """Read what `_read` does, for a command that makes no run directory and is one
    process.

    Args:
      arguments: what was typed after the command.
      command: what was typed before.
      of_command: title -> the command's options, of which those that are typed stay
        among the settings.

    Raises:
      InputError: for options that only a run has.
    """
    typed, paths, host_options = _read(arguments, command, of_command)
    for name in ("out", "resume", "seeds", "stop_signal", "track"):
        if getattr(paths, name):
            raise InputError(f"{name}: {command} writes no run directory; leave out {flag(name)}")
    for field in fields_of(HostOptions):
        if getattr(host_options, field.name) is not None:
            raise InputError(f"{field.name}: {command} runs in one process; leave out {flag(field.name)}")
    return typed, paths


def pop_options(options: Value, typed: dict[str, Any]) -> Value:
    """Return the options with what is typed of them, and remove it from `typed`."""
    names = [field.name for field in fields_of(type(options)) if field.name in typed]
    return replaced(options, **{name: typed.pop(name) for name in names})


def _play(resolved: config.RunConfig, paths: Paths, out: str) -> int:
    """Play the run, and print its results."""
    from fcljax.results import page, trackers
    from fcljax.results.comparison import compare, results_table
    from fcljax.runs import hosts, loop
    from fcljax.runs.summary import learned_nothing

    is_first = hosts.Hosts.connected().first  # of the processes: the one that prints
    # a run that has learned nothing has no error, but must not look like a success
    resume = paths.resume is not None
    failed = False
    console = Console(quiet=not is_first)
    seeds = _seeds(resolved, paths)
    track = trackers.parse_trackers(paths.track)
    keep_compiled(paths.compile_cache)
    with (
        signals.advised(lambda: _advice(resolved.method, out)),
        signals.warned_by(paths.stop_signal) as stop,
    ):
        if seeds:
            from fcljax.studies.seeds import run_seeds

            run_seeds(resolved, seeds, out, resume, loop.Observer(stop=stop, track=track))
            figure = Path(out) / "accuracy.png"
            tables, _ = compare([out], figure)
        else:
            summary = loop.run(resolved, out, resume, loop.Observer(stop=stop, track=track))
            tables = []
            if is_first:
                tables = [results_table([summary])]
            figure = Path(out) / "figures" / "accuracy.png"
            failed = learned_nothing(summary)
    for table in tables:
        console.print(table)
    say(console, f"run directory: {out}")
    for name, file in (("accuracy curve", figure), ("report", Path(out) / page.NAME)):
        if file.exists():
            say(console, f"{name}: {file}")
    if failed:
        err = Console(stderr=True, quiet=not is_first)
        say(
            err,
            "fcljax: no round had a valid upload: the model is unchanged since the start",
        )
    return int(failed)


def _advice(method: str, out: str | None) -> str:
    """Return what a user can do after a run was stopped."""
    if out is None or not (Path(out) / "config.yaml").exists():
        return "the run had not started; nothing was written"
    return f"resume with: fcljax run {shlex.quote(method)} --resume {shlex.quote(out)}"


def _seeds(resolved: config.RunConfig, paths: Paths) -> list[int] | None:
    """Return the seeds of a run over several, new or resumed; None: it is one run."""
    from fcljax.studies.seeds import parse_seeds, stored_seeds

    typed: list[int] = []
    stored: list[int] = []
    if paths.seeds:
        typed = parse_seeds(paths.seeds, resolved.seed)
    if paths.resume:
        stored = stored_seeds(paths.resume) or []
        if typed and not stored:
            raise InputError(f"seeds: {paths.resume!r} has one seed; leave out --seeds")
    # a resumed run may get further seeds
    return list(dict.fromkeys(stored + typed)) or None


def check(arguments: list[str]) -> int:
    """Run `fcljax check METHOD [options]`, which tests the invariants that every method
    must satisfy, on random examples of the kind that --dataset and --backbone have; exit
    code 1 if one does not hold."""
    typed, paths = read_alone(arguments, "check")
    # small enough for seconds, and with several steps, batches and clients to tell apart
    resolved = settings(arguments[0], {"clients": 4, "batch_size": 4, "epochs": 2, **typed}, paths)
    keep_compiled(paths.compile_cache)

    from fcljax.checks import conformance, examples

    explanation = config.explain_fidelity(resolved)
    if explanation:
        say(Console(stderr=True), explanation)
    say(Console(stderr=True), f"data: {examples.COUNT} random {examples.kind_of(resolved)}")
    statements = conformance.check(resolved)
    table = Table("statement", "holds", "found")
    for name, holds, finding in statements:
        word = "NO"
        if holds:
            word = "yes"
        add_row(table, name, word, finding)
    Console().print(table)
    return int(not all(statement.holds for statement in statements))


def _folder(resolved: config.RunConfig) -> str:
    return new_folder(slug(resolved.method), slug(resolved.dataset), f"s{resolved.seed}")


def parse_run(
    method: str,
    arguments: Sequence[str],
    command: str,
    about: str,
    besides: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return the options of a run that were typed.

    Its choices and its adapter decide which options there are; its fidelity preset, its
    scale and its file of settings decide the defaults that the help shows.

    Args:
      method: of the run.
      arguments: what was typed after it.
      command: what was typed before it.
      about: the first line of the help.
      besides: title -> further options of the command; None: those of `fcljax run`.

    Raises:
      InputError: as `parse`, or for a file of settings that cannot be read.
    """
    typed = typed_options(arguments)
    source = typed.get("config")
    if "resume" in typed:
        source = Path(typed["resume"]) / "config.yaml"
    values = {}
    if source and Path(source).is_file():
        values = config.load_yaml(source)
    deciding = {name: typed[name] for name in (*DECIDING, *CHOICES) if name in typed}
    if completing():
        # the last word may be the beginning of a name, which is no choice yet
        deciding = {name: value for name, value in deciding.items() if value in CHOICES.get(name, (value,))}
    # a network of tables has no attention, and another adapter than the method's
    attention = config.has_attention(values | typed)
    adapter = deciding.get("adapter") or values.get("adapter") or config.usual_adapter(method, attention)
    if not attention:
        deciding["adapter"] = adapter
    choices = config.choices_of(method, values | deciding)
    groups = config.option_groups(method, adapter, choices)
    # only help resolves the settings now: errors in them come later, from what was parsed
    if {"-h", "--help"} & set(arguments):
        reading = set().union(*map(deciders, groups.values()))
        deciding |= {name: typed[name] for name in reading if name in typed}
        values = deciding | {name: value for name, value in values.items() if name not in typed}
        shown = config.from_mapping(method, values, str(source or "options"))
    else:
        shown = config.preset(method, adapter, choices=choices)
    if besides is None:
        besides = {"files": Paths(), "hosts": HostOptions()}
    of_command = {field.name for options in besides.values() for field in fields_of(type(options))}
    of_run = {name: value for name, value in typed.items() if name not in of_command}
    config.check_known(method, adapter, of_run, "options")
    run, *others = ((title, config.part(kind, shown)) for title, kind in groups.items())
    shown_besides = {title: _with_deciders(options, typed) for title, options in besides.items()}
    # the method's options first: they are what a reader looks for
    parts = dict([*others, run, *shown_besides.items()])
    return parse(parts, arguments, [command, method], about)[1]


def _with_deciders(options: Value, typed: Mapping[str, str]) -> Value:
    """Return options with what is typed for those that decide whether others are read."""
    return replaced(
        options,
        **{name: typed[name] for name in deciders(type(options)) if name in typed},
    )


def settings(method: str, typed: dict[str, Any], paths: Paths) -> config.RunConfig:
    """Return the settings of a run: defaults, then --config's or the resumed run's,
    then what is typed.

    Raises:
      InputError: for a wrong value, or a file that belongs to another method.
    """
    source = paths.config
    if paths.resume:
        if paths.out or paths.config:
            raise InputError(
                f"resume: {paths.resume!r} already has a config and a folder; leave out --config and --out"
            )
        source = str(Path(paths.resume) / "config.yaml")
        if not Path(source).is_file():
            raise InputError(f"resume: {paths.resume!r} is not a run directory: it has no config.yaml")
    values = {}
    if source:
        values = config.load_yaml(source)
    if paths.resume:
        from fcljax.runs.resume import stored_settings

        values = stored_settings(values, typed.get("devices"))
    check_no_programs(values, typed, str(source))
    name = values.get("method", method)
    if name != method:
        typed_as = "config"
        if paths.resume:
            typed_as = "resume"
        raise InputError(f"{typed_as}: {source!r} has settings of method {name!r}, not of {method!r}")
    # a file's values are fixed: with another --scale they would belong to the old one
    of_mini = find_method(method).presets["intended"].mini
    fixed = [option for option in of_mini if option in values]
    if fixed and not paths.resume and typed.get("scale", "auto") not in ("auto", values.get("scale")):
        raise InputError(f"scale: {source!r} has its own {', '.join(fixed)}; leave out --scale")
    resolved = config.from_mapping(method, values | typed, source or "options")
    config.check_given(resolved, typed)
    if typed.get("population", resolved.population) != resolved.population:
        raise InputError(
            f"population: {resolved.partition} clients are {resolved.population}, not "
            f"{typed['population']!r}; nearest: {resolved.population!r}"
        )
    return resolved
