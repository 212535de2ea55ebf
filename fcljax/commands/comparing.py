"""Run the command `fcljax compare RUN_DIR...`."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `fcljax compare`. The page goes beside the figure: report.html, or the
    name that `out` has, with .html. Another file of that name is left alone."""

    out: str | None = option(None, unset="accuracy.png in the folder that holds the first run")
    """File of the figure: .png, .pdf or .svg."""


def warn_of_changes(folders: list[str]) -> None:
    """Print a line about each file of the runs that is not as its run wrote it."""
    from fcljax.results.run_folder import changed_files, run_folders

    for folder in folders:
        for run in run_folders(folder):
            for line in changed_files(run):
                say(Console(stderr=True), line)


def compare(arguments: list[str]) -> int:
    """Run `fcljax compare RUN_DIR... [--out FIGURE]`."""
    about = "Compare finished runs: tables, a figure and an HTML report."
    words = Words("RUN_DIR...")
    folders, options = parsed(CompareOptions(), arguments, ["compare"], about, words)
    if not folders:
        raise InputError("run: no run directory given; usage: fcljax compare RUN_DIR... [--out FIGURE]")

    from fcljax.results import figures, page
    from fcljax.results.comparison import compare as compare_runs

    if options.out:
        out = Path(options.out)
        html = out.with_suffix(".html")
    else:
        out = Path(folders[0]).parent / "accuracy.png"
        html = out.with_name(page.NAME)
    # --out report.html: the figure's format would be wrong, and the report overwrite it
    if html == out:
        raise InputError(
            f"out: {str(out)!r} is the report's name, and --out names the figure; "
            f"nearest: {str(html.with_suffix('.png'))!r}"
        )
    figures.check_format(out)
    # a report of ours may be replaced, a page that the user has written may not
    if html.exists() and not page.is_page(html):
        raise InputError(
            f"out: {str(html)!r} is another file, and the report would replace it; give another --out"
        )
    tables, figure = compare_runs(folders, out)
    console = Console()
    warn_of_changes(folders)
    for table in tables:
        console.print(table)
    say(console, f"accuracy curve: {figure}")
    if page.try_report(folders, html, lambda line: say(Console(stderr=True), line)):
        say(console, f"report: {html}")
    return 0
