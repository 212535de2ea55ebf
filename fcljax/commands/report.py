"""`fcljax report RUN_DIR...`."""

import dataclasses

from rich.console import Console

from fcljax.commands.arguments import parse, words_before
from fcljax.errors import InputError
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Options of `fcljax report`."""

    # the page, .html; default: report.html in the one folder given, else in the one that holds the first
    out: str | None = None


def report(arguments: list[str]) -> int:
    """`fcljax report RUN_DIR... [--out FILE]`."""
    from fcljax.results import page

    folders, rest = words_before(arguments)
    given = parse({"report": ReportOptions()}, rest, "fcljax report", "A page over finished runs.")
    if not folders:
        raise InputError("run: no run directory given; usage: fcljax report RUN_DIR... [--out FILE]")
    say(Console(), f"report: {page.report(folders, given.get('out'))}")
    return 0
