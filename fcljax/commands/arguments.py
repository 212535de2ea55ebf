"""The parser of all commands, made of dataclasses of options: it reads what was typed, prints the help and
completes in the shell. Text becomes a value in `config.typed_value`, as in YAML files."""

import argparse
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import textwrap
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fcljax import config
from fcljax.choices import CHOICES, check_unread
from fcljax.errors import InputError, Value, nearest
from fcljax.options import (
    check_ranges,
    fields_of,
    flag,
    help_of,
    is_read,
    option,
    replaced,
    shown_default,
)


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Options of all commands that compile."""

    compile_cache: str | None = option(None, unset="$JAX_COMPILATION_CACHE_DIR or $FCLJAX_COMPILED")
    """Folder in which compiled programs are kept for later runs, or off."""


def keep_compiled(folder: str | None) -> None:
    """Set up what of compiled programs is kept, as `--compile-cache` says; a line on stderr if nothing can
    be."""
    from rich.console import Console

    from fcljax.runs import compile_cache
    from fcljax.terminal import say

    compile_cache.keep(folder, lambda line: say(Console(stderr=True), line))


def passed_on(options: ProgramOptions) -> tuple[str, ...]:
    """The same options as arguments of a command that this one starts."""
    return ("--compile-cache", options.compile_cache) if options.compile_cache else ()


METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


# ---- the parser --------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """What a command takes besides options."""

    usage: str = ""
    """As in `RUN_DIR...`."""
    known: Sequence[str] = ()
    """What the shell offers for them."""
    files: bool = True
    """Whether the shell offers files too."""


NO_WORDS = Words()


def parse(
    groups: Mapping[str, object],
    arguments: Sequence[str],
    command: Sequence[str],
    about: str,
    words: Words = NO_WORDS,
) -> tuple[list[str], dict[str, Any]]:
    """The words and the options that were given, as values by field name; the last one of an option counts.

    Args:
      groups: title -> options, whose values are the defaults in the help; together one flat namespace.
      arguments: what was typed after the command.
      command: what was typed before, such as ("run", "fppl").
      about: the first line of the help.
      words: what else the command takes.

    Raises:
      InputError: naming the option, its value and the nearest valid one.
      SystemExit: after the help, or in a shell that completes.
    """
    parser = _parser(groups, command, about, words)
    if completing():
        import argcomplete

        os.environ["_ARGCOMPLETE"] = str(1 + len(command))  # the words that come before the parser's own
        argcomplete.autocomplete(parser, always_complete_options=False)
    fields = {field.name: field for group in groups.values() for field in fields_of(type(group))}
    spelled = [re.sub("^--[\\w-]+", lambda found: flag(found[0][2:]), word) for word in arguments]
    try:
        given, rest = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        typed = (error.argument_name or "").split("/")[0]
        name = typed.removeprefix("--").replace("-", "_")
        if name in fields and fields[name].type is not bool:
            raise InputError(f"{name}: {typed} needs a value") from None
        raise InputError(f"{name}: {typed} takes no value; choose {typed} or {flag('no_' + name)}") from None
    if rest and rest[0].startswith("--"):
        typed = rest[0].partition("=")[0]
        name = typed.removeprefix("--").replace("-", "_")
        defaults = {name: value for group in groups.values() for name, value in vars(group).items()}
        check_unread(fields, {name: ""}, defaults, (name,))
        known = (flag(name) for name in fields if name != "method")
        raise InputError(f"option: unknown option {typed!r}; {nearest(typed, known)}")
    if rest:
        raise InputError(f"option: unexpected argument {rest[0]!r}; options start with --")
    texts = {name: value for name, value in vars(given).items() if isinstance(value, str)}
    empty = next((name for name, value in texts.items() if not value.strip()), None)
    if empty:
        raise InputError(f"{empty}: the value is empty; give one, or leave out {flag(empty)}")
    values = {
        name: value if isinstance(value, bool) else config.typed_value(name, fields[name].type, value)
        for name, value in vars(given).items()
        if name != "words"
    }
    return getattr(given, "words", []), values


def parsed(
    options: Value, arguments: Sequence[str], command: Sequence[str], about: str, words: Words = NO_WORDS
) -> tuple[list[str], Value]:
    """The words and the options of a command that has one group of them, checked.

    Raises:
      InputError: as `parse`, or for a number out of its range.
    """
    given, values = parse({command[-1]: options}, arguments, command, about, words)
    filled = replaced(options, **values)
    check_ranges(filled)
    return given, filled


def typed_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return option -> the value after it, for options that `parse` has not seen yet."""
    values = {}
    for typed, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = typed.partition("=")
        if name.startswith("--"):
            name = name.removeprefix("--").replace("-", "_")
            values[name] = values[name.removeprefix("no_")] = value if equals else following
    return values


def chosen_in(arguments: Sequence[str]) -> dict[str, str]:
    """Return what is typed for options that have options of their own."""
    return {name: value for name, value in typed_options(arguments).items() if name in CHOICES}


def completing() -> bool:
    """Whether a shell wants to know how what is typed could go on."""
    return "_ARGCOMPLETE" in os.environ


def typed_so_far() -> list[str]:
    """The words before the one to complete, without the program's name."""
    from argcomplete.lexers import split_line

    return split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3][1:]


class _Help(argparse.HelpFormatter):
    """Help whose lines end between words, so that --an-option stays whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _parser(
    groups: Mapping[str, object], command: Sequence[str], about: str, words: Words
) -> argparse.ArgumentParser:
    prog = shlex.join(["fcljax", *command])
    width = min(shutil.get_terminal_size().columns, 110)
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=" ".join(filter(None, [prog, words.usage, "[options]"])),
        description=_escaped(about),
        formatter_class=lambda prog: _Help(prog, max_help_position=34, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    if words.usage:
        action = parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        action.completer = _completer(lambda: words.known, words.files)  # pyrefly: ignore[missing-attribute]
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        texts = help_of(type(options))
        order = getattr(options, "order", ())  # options of a choice stand behind it
        fields = fields_of(type(options))
        for field in sorted(fields, key=lambda field: order.index(field.name)) if order else fields:
            if field.name != "method":  # which is named before the options
                # what nothing reads is parsed all the same, so that an error can say what would read it
                text = texts.get(field.name, "") if is_read(field, options) else argparse.SUPPRESS
                _add(group, field, getattr(options, field.name), text)
    return parser


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field, default: object, text: str) -> None:
    name = field.name
    switch = field.type is bool
    if text != argparse.SUPPRESS:
        shown = ("on" if default else "off") if switch else shown_default(field, default)
        text = _escaped(f"{text} [default: {shown}]")
    if switch:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        return
    choices = choices_of(field)
    metavar = "{" + ",".join(choices) + "}" if choices else METAVARS[_kind(field)]
    action = group.add_argument(flag(name), dest=name, metavar=metavar, help=text)
    files = _kind(field) in (str, Path) and name not in _NAMED and not choices
    action.completer = _completer(_NAMED.get(name, lambda: choices), files)  # pyrefly: ignore[missing-attribute]


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _kind(field: dataclasses.Field) -> type:
    """The type of an option's value, which may be None besides."""
    parts = [part for part in typing.get_args(field.type) if part is not type(None)]
    return field.type if isinstance(field.type, type) else parts[0] if isinstance(parts[0], type) else str


def choices_of(field: dataclasses.Field) -> tuple[str, ...]:
    """The values of an option that has few."""
    if field.name in CHOICES:
        return tuple(CHOICES[field.name])
    for kind in (field.type, *typing.get_args(field.type)):
        if typing.get_origin(kind) is Literal:
            return tuple(map(str, typing.get_args(kind)))
    return ("true", "false") if bool in typing.get_args(field.type) else ()


# ---- what the shell offers ---------------------------------------------------------------------------------


def datasets() -> list[str]:
    """The names of data sets that are no pattern."""
    from fcljax.data.files.names import DATASETS

    return [name for name in DATASETS if ":" not in name]


def _backbones() -> list[str]:
    from fcljax.models.shapes import CONVNETS, VITS

    return ["auto", *VITS, *CONVNETS]


_NAMED: dict[str, Callable[[], Iterable[str]]] = {
    "adapter": lambda: config.ADAPTERS,
    "backbone": _backbones,
    "dataset": datasets,
    "surrogate": datasets,
}


def _completer(known: Callable[[], Iterable[str]], files: bool) -> Callable[..., list[str]]:
    def complete(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        found = list(known())
        return found + (list(FilesCompleter()(prefix)) if files else [])

    return complete


# ---- what commands share -----------------------------------------------------------------------------------


def print_rows(rows: Sequence[tuple[str, object]]) -> None:
    """A table of names and values."""
    from rich.console import Console
    from rich.table import Table

    from fcljax.terminal import add_row

    table = Table(show_header=False)
    for name, value in rows:
        add_row(table, name, value)
    Console().print(table)


def new_folder(*parts: str) -> str:
    """A folder in runs/ that no other command has: the parts of its name, the time, and a number."""
    # two runs may begin in the same second, and clocks may be set back
    return "runs/" + "-".join([*parts, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(3)])


def slug(text: str) -> str:
    """A data set's name as part of a folder's name."""
    return "".join(c if c.isalnum() else "-" for c in Path(text.partition(":")[2] or text).stem)[:60]
