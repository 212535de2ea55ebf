"""`fcljax report RUN_DIR...`."""

import dataclasses

from rich.console import Console

from fcljax.commands.arguments import parse
from fcljax.errors import InputError
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Options of `fcljax report`."""

    # the page, .html; default: report.html in the one folder given, else in the one that holds the first
    out: str | None = None


def report(arguments: list[str]) -> int:
    """`fcljax report RUN_DIR... [--out FILE]`."""
    from fcljax.runs import page

    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    given = parse(
        {"report": ReportOptions()}, arguments[split:], "fcljax report", "A page over finished runs."
    )
    if not arguments[:split]:
        raise InputError("run: no run directory given; usage: fcljax report RUN_DIR... [--out FILE]")
    say(Console(), f"report: {page.report(arguments[:split], given.get('out'))}")
    return 0
