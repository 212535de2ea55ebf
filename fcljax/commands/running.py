"""`fcljax run METHOD` and `fcljax check METHOD`: a run's settings from all that can give them."""

import dataclasses
import secrets
import shlex
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.commands.arguments import ProgramOptions, keep_compiled, parse, slug
from fcljax.errors import InputError
from fcljax.options import flag
from fcljax.runs import signals
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
    from fcljax.methods import METHODS, find_method

    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            f"method: none given; try: fcljax run fppl; choose from: {', '.join(METHODS)}; or give a file of "
            "your own"
        )
    method, arguments = arguments[0], arguments[1:]
    entry = find_method(method)
    given = parse_run(method, arguments, f"fcljax run {method}", entry.summary)
    paths = Paths(**{field.name: given.pop(field.name, None) for field in dataclasses.fields(Paths)})
    resolved = settings(method, given, paths)
    out = paths.resume or paths.out or _new_folder(method, resolved)
    keep_compiled(paths.compile_cache)

    from fcljax.runs import loop, page, trackers
    from fcljax.runs.comparison import compare, results_table
    from fcljax.runs.summary import learned_nothing

    console, resume, failed = Console(), paths.resume is not None, False
    seeds, track = _seeds(resolved, paths), trackers.parse(paths.track)
    try:
        with signals.warned_by(paths.stop_signal) as stop:
            if seeds:
                from fcljax.runs.seeds import run_seeds

                run_seeds(method, resolved, seeds, out, resume, Console(stderr=True), stop, track)
                tables, figure = compare([out], Path(out) / "accuracy.png")
            else:
                summary = loop.run(method, resolved, out, resume, stop=stop, track=track)
                tables = [results_table([summary])]
                figure = Path(out) / "figures" / "accuracy.png"
                failed = learned_nothing(summary)
    except KeyboardInterrupt as error:
        raise signals.Stopped(signals.number_of(error), _go_on(method, out)) from None
    for table in tables:
        console.print(table)
    say(console, f"run directory: {out}")
    say(console, f"accuracy curve: {figure}")
    say(console, f"report: {Path(out) / page.NAME}")
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
        raise InputError(
            f"method: none given; try: fcljax check fppl; choose from: {', '.join(METHODS)}; or give a file "
            "of your own"
        )
    method, arguments = arguments[0], arguments[1:]
    find_method(method)
    given = parse_run(method, arguments, f"fcljax check {method}", "Does the method hold what all must?")
    paths = Paths(**{field.name: given.pop(field.name, None) for field in dataclasses.fields(Paths)})
    for name in ("out", "resume", "seeds", "stop_signal", "track"):
        if getattr(paths, name):
            raise InputError(f"{name}: check makes no run directory; leave out {flag(name)}")
    resolved = settings(method, {"clients": 4, "batch_size": 4, "epochs": 2, **given}, paths)
    keep_compiled(paths.compile_cache)

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
    return f"runs/{slug(method)}-{slug(resolved.dataset)}-s{resolved.seed}-{stamp}"


def parse_run(method: str, arguments: list[str], prog: str, description: str) -> dict[str, Any]:
    """The options of a run that were given. Those of the adapter are those of the one that is asked for.

    Raises:
      InputError: as `parse`.
    """
    adapter = adapter_of(method, arguments)
    groups: dict[str, object] = {"files": Paths()}
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
