"""`fcljax run METHOD` and `fcljax check METHOD`: a run's settings from all that can give them."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.commands.arguments import ProgramOptions, keep_compiled, new_folder, parse, slug
from fcljax.errors import InputError
from fcljax.options import flag
from fcljax.runs import hosts, signals
from fcljax.terminal import add_row, say


@dataclasses.dataclass(frozen=True)
class Paths(ProgramOptions):
    """Where a run's settings come from and where its files go."""

    out: str | None = None  # run directory, a new one; default: runs/METHOD-DATASET-sSEED-TIME
    resume: str | None = None  # run directory to go on with, under the settings it was started with
    config: str | None = None  # YAML file of settings; options on the command line win
    # a run for each of so many seeds from `seed` on, or for each of a list such as 1,2,3; into one folder
    seeds: str | None = None
    # a signal of which the machine warns before it stops a run, as Slurm does with --signal: the round in
    # hand is finished
    stop_signal: Literal["USR1", "USR2", "HUP", "TERM"] | None = None
    # trackers that follow the run, such as tensorboard,wandb,mlflow; a resumed run keeps those that it had
    track: str | None = None


def run(arguments: list[str]) -> int:
    """`fcljax run METHOD [options]`."""
    _check_named("run", arguments)
    method, given, paths, host_options = _read(arguments)
    hosts.check(host_options)
    resolved = settings(method, given, paths)
    if host_options.coordinator is None:
        return _play(method, resolved, paths, paths.resume or paths.out or _folder(method, resolved))
    if paths.seeds or (paths.resume and _seeds(resolved, paths)):
        raise InputError("seeds: processes with a coordinator run one seed at a time; leave out --seeds")
    command = ["-m", "fcljax.worker", "LOG", *arguments]
    return hosts.supervised(command, host_options, lambda out: _go_on(method, out or paths.resume))


def join(arguments: list[str], log: TextIO) -> int:
    """The same in the child of a process that has a coordinator; `log` is read by its parent."""
    method, given, paths, host_options = _read(arguments)
    with hosts.joined(host_options, log):
        together = hosts.Hosts.connected()
        resolved = together.agree(lambda: settings(method, given, paths))
        asked = resolved.devices if paths.resume or resolved.devices > 1 else given.get("devices")
        devices = together.agree(lambda: together.devices(asked))
        resolved = dataclasses.replace(resolved, devices=devices)
        out = together.from_first(lambda: paths.resume or paths.out or _folder(method, resolved))
        hosts.report_folder(out, log)
        same = {"resume": paths.resume is not None, "stop_signal": paths.stop_signal}
        together.check_same({"options": same})
        return _play(method, resolved, paths, out)


def _read(arguments: list[str]) -> tuple[str, dict[str, Any], Paths, hosts.HostOptions]:
    """A run's method, the settings that are given, and the options that are none of its settings."""
    from fcljax.methods import find_method

    method = arguments[0]
    given = parse_run(method, arguments[1:], f"fcljax run {method}", find_method(method).summary)
    taken = lambda kind: kind(**{name.name: given.pop(name.name, None) for name in dataclasses.fields(kind)})
    return method, given, taken(Paths), taken(hosts.HostOptions)


def _play(method: str, resolved: config.RunConfig, paths: Paths, out: str) -> int:
    """The run itself, and what is printed at its end."""
    from fcljax.results import page, trackers
    from fcljax.results.comparison import compare, results_table
    from fcljax.runs import loop
    from fcljax.runs.summary import learned_nothing

    first, resume, failed = hosts.Hosts.connected().first, paths.resume is not None, False
    console = Console(quiet=not first)
    seeds, track = _seeds(resolved, paths), trackers.parse(paths.track)
    keep_compiled(paths.compile_cache)
    try:
        with signals.warned_by(paths.stop_signal) as stop:
            if seeds:
                from fcljax.studies.seeds import run_seeds

                run_seeds(method, resolved, seeds, out, resume, Console(stderr=True), stop, track)
                figure = Path(out) / "accuracy.png"
                tables, _ = compare([out], figure)
            else:
                summary = loop.run(resolved, out, resume, loop.Observer(stop=stop, track=track))
                tables = [results_table([summary])] if first else []
                figure = Path(out) / "figures" / "accuracy.png"
                failed = learned_nothing(summary)
    except KeyboardInterrupt as error:
        raise signals.Stopped(signals.number_of(error), _go_on(method, out)) from None
    for table in tables:
        console.print(table)
    say(console, f"run directory: {out}")
    for name, made in (("accuracy curve", figure), ("report", Path(out) / page.NAME)):
        if made.exists():
            say(console, f"{name}: {made}")
    if failed:
        err = Console(stderr=True, quiet=not first)
        say(err, "fcljax: no upload was valid in any round: the model is as it began")
    return int(failed)


def _go_on(method: str, out: str | None) -> str:
    """What a user can do after a run was stopped."""
    if out is None or not (Path(out) / "config.yaml").exists():
        return "the run had not begun, and nothing was written"
    return f"go on with: fcljax run {shlex.quote(method)} --resume {shlex.quote(out)}"


def _seeds(resolved: config.RunConfig, paths: Paths) -> list[int] | None:
    """The seeds of a run over several, new or resumed; None: it is one run."""
    from fcljax.studies.seeds import parse_seeds, stored_seeds

    asked = parse_seeds(paths.seeds, resolved.seed) if paths.seeds else None
    stored = stored_seeds(paths.resume) if paths.resume else None
    if paths.resume and asked and not stored:
        raise InputError(f"seeds: {paths.resume!r} is a run with one seed; leave out --seeds")
    return list(dict.fromkeys((stored or []) + (asked or []))) or None


def check(arguments: list[str]) -> int:
    """`fcljax check METHOD [options]`: the statements that every method must hold; exit code 1 if one does
    not."""
    from fcljax.methods import find_method

    _check_named("check", arguments)
    method, arguments = arguments[0], arguments[1:]
    find_method(method)
    given = parse_run(method, arguments, f"fcljax check {method}", "Does the method hold what all must?")
    paths = Paths(**{field.name: given.pop(field.name, None) for field in dataclasses.fields(Paths)})
    for name in ("out", "resume", "seeds", "stop_signal", "track"):
        if getattr(paths, name):
            raise InputError(f"{name}: check makes no run directory; leave out {flag(name)}")
    for field in dataclasses.fields(hosts.HostOptions):
        if given.pop(field.name, None) is not None:
            raise InputError(f"{field.name}: check is one process; leave out {flag(field.name)}")
    resolved = settings(method, {"clients": 4, "batch_size": 4, "epochs": 2, **given}, paths)
    keep_compiled(paths.compile_cache)

    from fcljax.checks import conformance

    statements = conformance.check(resolved)
    table = Table("statement", "holds", "found")
    for name, holds, found in statements:
        add_row(table, name, "yes" if holds else "NO", found)
    Console().print(table)
    return 0 if all(statement.holds for statement in statements) else 1


def _check_named(command: str, arguments: list[str]) -> None:
    """Raise InputError, naming the methods there are, unless the arguments begin with one."""
    from fcljax.methods import METHODS

    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            f"method: none given; try: fcljax {command} fppl; choose from: {', '.join(METHODS)}; or give a "
            "file of your own"
        )


def _folder(method: str, resolved: config.RunConfig) -> str:
    return new_folder(slug(method), slug(resolved.dataset), f"s{resolved.seed}")


def parse_run(method: str, arguments: list[str], prog: str, description: str) -> dict[str, Any]:
    """The options of a run that were given. Those of the adapter are those of the one that is asked for.

    Raises:
      InputError: as `parse`.
    """
    adapter = adapter_of(method, arguments)
    groups: dict[str, object] = {"files": Paths(), "hosts": hosts.HostOptions()}
    for title, group in config.option_groups(method, adapter).items():
        groups[title] = config.defaults(method, adapter, group)
    names = [typed.partition("=")[0].removeprefix("--").replace("-", "_") for typed in arguments]
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
    for typed, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = typed.partition("=")
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
