"""`fcljax data list | prepare | show`."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from fcljax import config
from fcljax.commands.arguments import names_before, parse, print_rows
from fcljax.errors import InputError, choose
from fcljax.terminal import add_row, plain


def data(arguments: list[str]) -> int:
    """`fcljax data list | prepare NAME | show NAME [options]`."""
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"data: no command given; choose from: {', '.join(SUBCOMMANDS)}")
    return SUBCOMMANDS[choose("data", arguments[0], SUBCOMMANDS)](arguments[1:])


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

    about = "Make a data set ready for runs."
    name, options = _named(arguments, "fcljax data prepare NAME", PrepareOptions, about)
    info = prepare(name, image_options(options, options.image_size or 224), force=options.force)
    print_rows(
        [
            ("training images", info.counts[0]),
            ("test images", info.counts[1]),
            ("bytes", f"{info.bytes:,}"),
            ("skipped", len(info.skipped)),
            ("sha256", info.digest),
            ("folder", info.folder or "made in memory by every run"),
        ]
    )
    return 0


def _data_show(arguments: list[str]) -> int:
    from fcljax.checks.show_data import ShowConfig, show

    about = "Images, and which client would hold which class."
    _, options = _named(arguments, "fcljax data show NAME", ShowConfig, about)
    print_rows(show(options, options.out or "."))
    return 0


def _named(arguments: list[str], prog: str, options: type, description: str) -> tuple[str, Any]:
    """A data set's name, and the options after it, filled in and checked."""
    missing = f"dataset: no name given; usage: {prog} [options]; `fcljax data list` has the names"
    names, rest = names_before(arguments, 1, missing)
    given = parse({"options": options()}, rest, prog, description)
    filled = config.settle(config.fill(options, {**given, "dataset": names[0]}, "options"))
    config.check_ranges(filled)
    return names[0], filled


SUBCOMMANDS = {"list": _data_list, "prepare": _data_prepare, "show": _data_show}
