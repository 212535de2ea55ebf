"""Run the commands `fcljax data list`, `prepare` and `show`."""

import dataclasses

from rich.console import Console

from fcljax import config
from fcljax.choices import with_options
from fcljax.commands.arguments import (
    Words,
    chosen_in,
    datasets,
    new_folder,
    parse,
    parsed,
    print_rows,
    slug,
)
from fcljax.errors import InputError, Value, choose
from fcljax.options import option, replaced
from fcljax.terminal import add_row, new_table


def data(arguments: list[str]) -> int:
    """Run `fcljax data list | prepare NAME | show NAME [options]`."""
    if not arguments or arguments[0].startswith("-"):
        words = Words(" | ".join(SUBCOMMANDS), tuple(SUBCOMMANDS), False)
        parse({}, arguments, ["data"], "Data sets.", words)
        raise InputError(f"data: no command given; choose from: {', '.join(SUBCOMMANDS)}")
    return SUBCOMMANDS[choose("data", arguments[0], SUBCOMMANDS)](arguments[1:])


@dataclasses.dataclass(frozen=True)
class DataListOptions:
    """Options of `fcljax data list`."""

    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of raw and prepared data sets."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions(config.ImageConfig):
    """Options of `fcljax data prepare`."""

    force: bool = False
    """Decode again and replace the prepared data."""


@dataclasses.dataclass(frozen=True)
class ShowOptions(config.PartitionConfig):
    """Options of `fcljax data show`, beside those of data and partition that it shares
    with `fcljax run`."""

    out: str | None = option(None, unset="runs/data-NAME-TIME")
    """Folder for the two PNG files."""


def _data_list(arguments: list[str]) -> int:
    about = "List data sets and whether this machine has them."
    _, options = parsed(DataListOptions(), arguments, ["data", "list"], about)

    # imported behind the parser, here and in the other commands: help and completion
    # start at once
    from fcljax.data.files.sources import data_folder, known_datasets

    title = f"data sets in {data_folder(options.data_dir)}"
    table = new_table("name", "what it is", "state", title=title)
    for row in known_datasets(options.data_dir):
        add_row(table, *row)
    Console().print(table)
    return 0


def _data_prepare(arguments: list[str]) -> int:
    about = "Download a data set where possible, decode it once and check it."
    options = _named(PrepareOptions(), arguments, "prepare", about)

    from fcljax.data.files.sources import prepare
    from fcljax.runs.inputs import image_options

    info = prepare(
        options.dataset,
        image_options(options, options.image_size or 224),
        force=options.force,
    )
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
    about = "Draw images, and the classes of each client's partition."
    # the partition decides which options there are, so it is read before the parser is
    # made
    usual = with_options(ShowOptions(), chosen_in(arguments))
    options = config.partitioned(_named(usual, arguments, "show", about), usual)

    from fcljax.checks.show_data import show

    print_rows(show(options, options.out or new_folder("data", slug(options.dataset))))
    return 0


def _named(options: Value, arguments: list[str], command: str, about: str) -> Value:
    """Parse a data set's name and the options after it; the name becomes one of them."""
    words = Words("NAME", tuple(datasets()))
    # the data set decides which options are read, and so what the help lists
    if arguments and not arguments[0].startswith("-"):
        options = replaced(options, dataset=arguments[0])
    names, filled = parsed(options, arguments, ["data", command], about, words)
    if len(names) != 1:
        count = "no name"
        if names:
            count = "several names"
        raise InputError(
            f"dataset: {count} given; usage: fcljax data {command} NAME [options]; "
            "`fcljax data list` lists the names"
        )
    return replaced(filled, dataset=names[0])


SUBCOMMANDS = {"list": _data_list, "prepare": _data_prepare, "show": _data_show}
