"""Run the command `fcljax reproduce SYSTEM TABLE`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fcljax import config
from fcljax.commands.arguments import ProgramOptions, Words, new_folder, parsed, passed_on
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.runs import signals
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class ReproduceOptions(ProgramOptions):
    """Options of `fcljax reproduce`."""

    scale: Literal["mini", "paper"] = "mini"
    """mini: the same design in minutes on two CPU cores, without downloads, to check the
    order of the rows. paper: the paper's scale, which also writes status and cost into
    the paper's file in --experiments."""
    seeds: int | None = option(None, most=config.MOST_SEEDS, unset="1; paper: as many as the paper had")
    """Number of seeds per row, counted from the first seed of its column."""
    out: str | None = option(None, unset="runs/reproduce-...-TIME")
    """New folder for the runs and tables."""
    resume: str | None = option(None, unset="none")
    """Folder to resume; the number of seeds may grow."""
    jobs: int = 1
    """Number of runs at a time."""
    row: str | None = option(None, unset="all")
    """The only row to run: method and options, e.g. "pilora --headtune". In a table with
    columns, add the column's name in brackets."""
    experiments: str | None = option(None, unset="those of the package")
    """Folder with the papers' files, such as your own (docs/reproducing.md)."""
    dry_run: bool = False
    """Only list the runs; with --row also print their commands."""


def reproduce(arguments: list[str]) -> int:
    """Run `fcljax reproduce SYSTEM TABLE [options]`; exit code 1 if a run failed."""
    about = "Run the rows of a paper's table, compare its numbers with ours, and check their order."
    words = Words("SYSTEM TABLE", files=False)
    names, options = parsed(ReproduceOptions(), arguments, ["reproduce"], about, words)
    if len(names) != 2:
        raise InputError(
            "table: none given; usage: fcljax reproduce SYSTEM TABLE [options], such as fppl table3"
        )

    from fcljax.studies import papers, sweeps
    from fcljax.studies import reproduce as work

    if options.resume and options.out:
        raise InputError(f"resume: {options.resume!r} already has a folder; leave out --out")
    columns = papers.find_columns(options.experiments or papers.FOLDER, *names)
    plan = work.plan(columns, options.scale, options.seeds, options.row)
    console = Console()
    # commands of one row are for copying; those of a whole table would be hundreds
    if options.dry_run:
        console.print(sweeps.plan_table(plan.runs))
        for run in plan.runs if options.row else []:
            say(console, work.command(run))
        return 0
    out = Path(options.resume or options.out or new_folder("reproduce", *names, options.scale))
    ways = sweeps.Ways([None] * options.jobs, options=passed_on(options))
    with signals.advised(lambda: sweeps.advice(out, _command(arguments, out))):
        outcomes = sweeps.sweep(plan.runs, out, options.resume is not None, ways, Console(stderr=True))
    return _show(plan, outcomes, out, console, options.experiments is not None)


def _show(
    plan: Any,
    outcomes: Any,
    out: Path,
    console: Console,
    write_files: bool,
) -> int:
    """Write and show the results; `write_files`: status and cost into the papers' files
    too."""
    from fcljax.studies import paper_tables as tables
    from fcljax.studies import reproduce as work

    rows = work.results(plan, outcomes, out)
    work.write(plan, rows, outcomes, out, lambda line: say(console, line))
    console.print(work.terminal_table(plan, rows))
    # the paper's order of its rows, beside ours
    pairs = tables.orderings(rows)
    # the first note names the paper and explains the columns: table.md has it
    lines = [
        *work.notes_of(plan)[1:],
        *tables.order_lines(pairs),
        *tables.otherwise(pairs),
    ]
    lines += [f"the paper's claim: {claim}" for claim in plan.column.entry.claims]
    # runs at mini scale say nothing about the paper's numbers
    if plan.scale == "paper":
        lines += work.record_paper_runs(rows, outcomes, plan, _device(), write_files)
    for line in [*lines, f"table: {out / work.TEXT}"]:
        say(console, line)
    return int(any(row.why for row in rows))


def _device() -> str:
    """Name the device of this machine on which runs are made."""
    import jax

    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind}".strip()


def _command(arguments: list[str], out: Path) -> str:
    """Return the command that resumes a folder: the same without --out and --resume,
    which may stand as one word or two."""
    # --out FOLDER are two words, --out=FOLDER is one
    words = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, _ = word.partition("=")
        if name not in ("--out", "--resume"):
            words.append(word)
        elif not equals:
            remaining = remaining[1:]
    return shlex.join(["fcljax", "reproduce", *words, "--resume", str(out)])
