"""Options as they are typed: read into values, with one line for a mistake; and a table of what was done."""

import dataclasses
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.errors import InputError, nearest
from fcljax.options import fields_of, flag
from fcljax.terminal import add_row, say


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """What all commands that compile have."""

    # folder of compiled programs, which later runs need not compile again, or off; default: as
    # JAX_COMPILATION_CACHE_DIR or FCLJAX_COMPILED say, else compiled/ in $FCLJAX_DATA or ~/.cache/fcljax
    compile_cache: str | None = None


def keep_compiled(option: str | None) -> None:
    """Set up what of compiled programs is kept, as `--compile-cache` says; a line on stderr if nothing can
    be."""
    from fcljax.runs import compile_cache

    compile_cache.keep(option, lambda line: say(Console(stderr=True), line))


def passed_on(options: ProgramOptions) -> tuple[str, ...]:
    """The same options as arguments of a command that this one starts."""
    return ("--compile-cache", options.compile_cache) if options.compile_cache else ()


# Given as an option, it asks a command which options it has. No command line can hold a NUL.
ASK = "--which\0"


class Asked(Exception):
    """The answer to ASK: `fields`, the options by field name."""

    def __init__(self, fields: dict[str, dataclasses.Field]):
        super().__init__("options were asked for")
        self.fields = fields


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
      Asked: if ASK is among the arguments.
    """
    if ASK in arguments:
        raise Asked(_fields(groups))
    if {"-h", "--help"} & set(arguments):
        # pyrefly: ignore[invalid-annotation]  # a type that is made while the program runs
        unprefixed = {title: tyro.conf.OmitArgPrefixes[type(group)] for title, group in groups.items()}
        flat = [(re.sub(r"\W", "_", title), unprefixed[title], group) for title, group in groups.items()]
        command = dataclasses.make_dataclass("Command", flat, frozen=True)
        tyro.cli(command, args=["--help"], prog=prog, description=description)
    return read_arguments(_fields(groups), arguments)


def read_arguments(fields: dict[str, dataclasses.Field], arguments: list[str]) -> dict[str, Any]:
    """The values that `arguments` set, by field name; the last one counts.

    Raises:
      InputError: for an unknown option, a missing value or a value of the wrong type.
    """
    values, rest = {}, list(arguments)
    while rest:
        token, *rest = rest
        typed, equals, value = token.partition("=")
        name = typed.removeprefix("--").replace("-", "_")
        if not typed.startswith("--"):
            raise InputError(f"option: unexpected argument {token!r}; options start with --")
        switch = name if name in fields else name.removeprefix("no_")
        if switch in fields and fields[switch].type is bool:
            if equals:
                raise InputError(
                    f"{switch}: {token!r} takes no value; choose {flag(switch)} or {flag('no_' + switch)}"
                )
            values[switch] = switch == name
            continue
        if name not in fields:
            raise InputError(f"option: unknown option {typed!r}; {nearest(typed, map(flag, fields))}")
        if not equals:
            if not rest:
                raise InputError(f"{name}: {typed} needs a value")
            value, *rest = rest
        values[name] = config.convert(name, fields[name].type, value)
    return values


def _fields(groups: Mapping[str, object]) -> dict[str, dataclasses.Field]:
    fields = {field.name: field for group in groups.values() for field in fields_of(type(group))}
    return {name: field for name, field in fields.items() if name != "method"}  # named before the options


def print_rows(rows: Sequence[tuple[str, object]]) -> None:
    """A table of names and values."""
    table = Table(show_header=False)
    for name, value in rows:
        add_row(table, name, value)
    Console().print(table)


def words_before(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What was typed before the first option, such as files, and the rest."""
    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    return list(arguments[:split]), list(arguments[split:])


def names_before(arguments: list[str], count: int, missing: str) -> tuple[list[str], list[str]]:
    """The `count` names that a command begins with, and the rest; if help is asked for, no names and all.

    Raises:
      InputError: with the text `missing`, if there are fewer.
    """
    if {"-h", "--help"} & set(arguments):
        return [], arguments
    if len(words_before(arguments)[0]) < count:
        raise InputError(missing)
    return arguments[:count], arguments[count:]


def new_folder(*parts: str) -> str:
    """A folder in runs/ that no other command has: the parts of its name, the time, and a number."""
    # two runs may begin in the same second, and clocks may be set back
    return "runs/" + "-".join([*parts, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(3)])


def slug(text: str) -> str:
    """A data set's name as part of a folder's name."""
    return "".join(c if c.isalnum() else "-" for c in Path(text.partition(":")[2] or text).stem)[:60]
