"""The parser of all commands, made of dataclasses of options: it reads what was typed,
prints the help and completes in the shell. Text becomes a value in
`config.typed_value`, as in YAML files."""

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
    """Keep compiled programs as `--compile-cache` says; print a line on stderr if none
    can be kept."""
    from rich.console import Console

    from fcljax.runs import compile_cache
    from fcljax.terminal import say

    compile_cache.keep(folder, lambda line: say(Console(stderr=True), line))


def passed_on(options: ProgramOptions) -> tuple[str, ...]:
    """Return these options as arguments of a command that this one starts."""
    if options.compile_cache:
        return ("--compile-cache", options.compile_cache)
    return ()


METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
HELP_COLUMN = 30  # where the text of an option begins
MOST_COLUMNS = 110  # of the help in a wide terminal


# ---- the parser ------------------------------------------------------------------------


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
    """Return the words, and the typed options as values by field name; of an option
    that is typed twice the last one counts.

    Args:
      groups: title -> options, whose values are the defaults in the help; together one
        flat namespace.
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

        # how many words argcomplete skips: the parser begins behind `fcljax run METHOD`
        os.environ["_ARGCOMPLETE"] = str(1 + len(command))
        argcomplete.autocomplete(parser, always_complete_options=False)
    fields = {field.name: field for group in groups.values() for field in fields_of(type(group))}
    # --batch_size is understood as --batch-size
    spelled = [re.sub("^--[\\w-]+", lambda match: flag(match[0][2:]), word) for word in arguments]
    # known ones only: argparse's error for an unknown option would not name the nearest
    try:
        namespace, rest = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        raise InputError(_misused(error, fields)) from None
    if rest and rest[0].startswith("--"):
        typed = rest[0].partition("=")[0]
        name = typed.removeprefix("--").replace("-", "_")
        defaults = {name: value for group in groups.values() for name, value in vars(group).items()}
        # it may be an option of a choice that was not made; then this says which one
        check_unread(fields, {name: ""}, defaults, (name,))
        known = (flag(name) for name in fields if name != "method")
        raise InputError(f"option: unknown option {typed!r}; {nearest(typed, known)}")
    if rest:
        raise InputError(f"option: unexpected argument {rest[0]!r}; options start with --")
    values = {}
    for name, value in vars(namespace).items():
        if name == "words":
            continue
        if isinstance(value, str) and not value.strip():
            raise InputError(f"{name}: the value is empty; give one, or leave out {flag(name)}")
        # everything but a switch is still text
        if not isinstance(value, bool):
            value = config.typed_value(name, fields[name].type, value)
        values[name] = value
    return getattr(namespace, "words", []), values


def _misused(error: argparse.ArgumentError, fields: Mapping[str, dataclasses.Field]) -> str:
    """Return that an option lacks its value, or that a switch has one."""
    typed = (error.argument_name or "").split("/")[0]
    name = typed.removeprefix("--").replace("-", "_")
    if name in fields and fields[name].type is not bool:
        return f"{name}: {typed} needs a value"
    return f"{name}: {typed} takes no value; choose {typed} or {flag('no_' + name)}"


def parsed(
    options: Value,
    arguments: Sequence[str],
    command: Sequence[str],
    about: str,
    words: Words = NO_WORDS,
) -> tuple[list[str], Value]:
    """Return the words and the options of a command with one group of them, checked.

    Raises:
      InputError: as `parse`, or for a number out of its range.
    """
    typed_words, values = parse({command[-1]: options}, arguments, command, about, words)
    filled = replaced(options, **values)
    check_ranges(filled)
    return typed_words, filled


def typed_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return option -> the value after it, for options that `parse` has not seen yet."""
    values = {}
    for typed, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = typed.partition("=")
        if not name.startswith("--"):
            continue
        if not equals:
            value = following
        name = name.removeprefix("--").replace("-", "_")
        values[name] = value
        # --no-augment gives the option `augment` too
        values[name.removeprefix("no_")] = value
    return values


def chosen_in(arguments: Sequence[str]) -> dict[str, str]:
    """Return what is typed for options that have options of their own."""
    return {name: value for name, value in typed_options(arguments).items() if name in CHOICES}


def completing() -> bool:
    """Check whether a shell asks how the typed words could go on."""
    return "_ARGCOMPLETE" in os.environ


def typed_so_far() -> list[str]:
    """Return the words before the one to complete, without the program's name."""
    from argcomplete.lexers import split_line

    return split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3][1:]


class _Help(argparse.HelpFormatter):
    """Help whose lines end between words, and that shows a switch by its first form."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        # a broken --option could not be copied
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0]
        return super()._format_action_invocation(action)


def _parser(
    groups: Mapping[str, object], command: Sequence[str], about: str, words: Words
) -> argparse.ArgumentParser:
    prog = shlex.join(["fcljax", *command])
    usage = [prog, words.usage, "[options]"]
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    if any(field.type is bool for options in groups.values() for field in fields_of(type(options))):
        about = f"{about} (A switch --NAME is turned off by --no-NAME.)"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=" ".join(filter(None, usage)),
        description=_escaped(about),
        formatter_class=lambda prog: _Help(prog, max_help_position=HELP_COLUMN, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    if words.usage:
        action = parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        complete = _completer(lambda: words.known, words.files)
        action.completer = complete  # pyrefly: ignore[missing-attribute]
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        texts = help_of(type(options))
        for field in _in_order(options):
            text = texts.get(field.name, "")
            # hidden from the help, but parsed, so that an error can say what would read
            # it
            if not is_read(field, options):
                text = argparse.SUPPRESS
            _add(group, field, getattr(options, field.name), text)
    return parser


def _in_order(options: object) -> list[dataclasses.Field]:
    """Return the fields as the help lists them: options of a choice stand behind it."""
    # the method is a word of its own, not an option
    fields = {field.name: field for field in fields_of(type(options)) if field.name != "method"}
    names = (*getattr(options, "order", ()), *fields)
    return [fields[name] for name in dict.fromkeys(names) if name in fields]


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field, default: object, text: str) -> None:
    """Add the argument of a field to a group of a parser."""
    name = field.name
    if field.type is bool:
        state = "off"
        if default:
            state = "on"
        text = _with_default(text, state)
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        return
    choices = choices_of(field)
    metavar = METAVARS.get(_kind(field), "TEXT")
    if choices:
        metavar = "{" + ",".join(choices) + "}"
        # too long for a line of its own: the values follow in the text
        if len(f"  {flag(name)} {metavar}") > 2 * HELP_COLUMN:
            metavar = "NAME"
            text = f"{text} Values: {', '.join(choices)}."
    text = _with_default(text, shown_default(field, default))
    action = group.add_argument(flag(name), dest=name, metavar=metavar, help=text)
    files = _kind(field) in (str, Path) and name not in _NAMED and not choices
    known = _NAMED.get(name, lambda: choices)
    action.completer = _completer(known, files)  # pyrefly: ignore[missing-attribute]


def _with_default(text: str, default: str) -> str:
    """Return the help of an option with its default; help that is hidden stays so."""
    if argparse.SUPPRESS in text:
        return argparse.SUPPRESS
    return _escaped(f"{text} [default: {default}]")


def _escaped(text: str) -> str:
    """Return text in which argparse replaces nothing."""
    return text.replace("%", "%%")


def _kind(field: dataclasses.Field) -> type:
    """Return the type of an option's value, which may be None besides."""
    if isinstance(field.type, type):
        return field.type
    kind = next(part for part in typing.get_args(field.type) if part is not type(None))
    if isinstance(kind, type):
        return kind
    return str  # the words of a Literal


def choices_of(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the values of an option that has few."""
    if field.name in CHOICES:
        return tuple(CHOICES[field.name])
    for kind in (field.type, *typing.get_args(field.type)):
        if typing.get_origin(kind) is Literal:
            return tuple(map(str, typing.get_args(kind)))
    if bool in typing.get_args(field.type):
        return ("true", "false")
    return ()


# ---- what the shell offers -------------------------------------------------------------


def datasets() -> list[str]:
    """Return the names of data sets that are no pattern."""
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
    """Return a function that offers known words, and perhaps files, to the shell."""

    def complete(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        offers = list(known())
        if files:
            offers += FilesCompleter()(prefix)
        return offers

    return complete


# ---- what commands share ---------------------------------------------------------------


def print_rows(rows: Sequence[tuple[str, object]]) -> None:
    """Print a table of names and values."""
    from rich.console import Console
    from rich.table import Table

    from fcljax.terminal import add_row

    table = Table(show_header=False)
    for name, value in rows:
        add_row(table, name, value)
    Console().print(table)


def new_folder(*parts: str) -> str:
    """Return a folder in runs/ that no other command has: the parts of its name, the
    time, and a random number."""
    # the random number: two runs may begin in the same second, and clocks are set back
    return "runs/" + "-".join([*parts, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(3)])


def slug(text: str) -> str:
    """Return a data set's name as part of a folder's name."""
    path = Path(text.partition(":")[2] or text)
    return re.sub(r"[\W_]", "-", path.stem)[:60]
