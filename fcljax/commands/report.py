"""Run the command `fcljax report RUN_DIR...`."""

import dataclasses

from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.commands.comparing import warn_of_changes
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Options of `fcljax report`."""

    out: str | None = option(
        None,
        unset="report.html in the one folder given, else in the one that holds the first",
    )
    """HTML file of the report."""


def report(arguments: list[str]) -> int:
    """Run `fcljax report RUN_DIR... [--out FILE]`."""
    about = "Write a self-contained HTML report of finished runs."
    words = Words("RUN_DIR...")
    folders, options = parsed(ReportOptions(), arguments, ["report"], about, words)
    if not folders:
        raise InputError("run: no run directory given; usage: fcljax report RUN_DIR... [--out FILE]")

    from fcljax.results import page

    # before the report, which shows the numbers as they are now
    warn_of_changes(folders)
    say(Console(), f"report: {page.report(folders, options.out)}")
    return 0
