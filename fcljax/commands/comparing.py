"""`fcljax compare RUN_DIR...`."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fcljax.commands.arguments import parse, words_before
from fcljax.errors import InputError
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `fcljax compare`. The page goes beside the figure: report.html, or the name that `out` has,
    with .html."""

    out: str | None = (
        None  # PNG file of the figure; default: accuracy.png in the folder that holds the first run
    )


def compare(arguments: list[str]) -> int:
    """`fcljax compare RUN_DIR... [--out PNG]`."""
    from fcljax.results import page
    from fcljax.results.comparison import compare as compare_runs

    folders, rest = words_before(arguments)
    given = parse({"compare": CompareOptions()}, rest, "fcljax compare", "A table and a figure over runs.")
    if not folders:
        raise InputError("run: no run directory given; usage: fcljax compare RUN_DIR... [--out PNG]")
    out = given.get("out") or Path(folders[0]).parent / "accuracy.png"
    html = Path(out).with_suffix(".html") if given.get("out") else Path(out).with_name(page.NAME)
    if html == Path(out):
        raise InputError(f"out: {str(out)!r} is for the figure; nearest: {str(html.with_suffix('.png'))!r}")
    tables, figure = compare_runs(folders, out)
    console = Console()
    for table in tables:
        console.print(table)
    say(console, f"accuracy curve: {figure}")
    if page.try_report(folders, html, lambda line: say(Console(stderr=True), line)):
        say(console, f"report: {html}")
    return 0
