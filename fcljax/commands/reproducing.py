"""`fcljax reproduce SYSTEM TABLE`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fcljax import config
from fcljax.commands.arguments import ProgramOptions, names_before, new_folder, parse, passed_on
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.runs import signals
from fcljax.terminal import say

USAGE = "fcljax reproduce SYSTEM TABLE"


@dataclasses.dataclass(frozen=True)
class ReproduceOptions(ProgramOptions):
    """Options of `fcljax reproduce`."""

    # mini: the same design in minutes on two CPU cores, without downloads, for the order of the rows; paper:
    # the paper's settings, after which status and cost are written into the paper's file
    scale: Literal["mini", "paper"] = "mini"
    # number of seeds of each row; default: 1, and at the paper's scale as many as the paper had
    seeds: int | None = option(None, most=config.MOST_SEEDS)
    out: str | None = None  # folder of the runs and tables, a new one; default: runs/reproduce-...-TIME
    resume: str | None = None  # folder to go on with; the number of seeds may be larger than before
    jobs: int = 1  # runs at a time
    # run this row alone: method and options, such as "pilora --headtune", or with the column in brackets
    row: str | None = None
    experiments: str = "experiments"  # folder with the files of the papers, that of the repository
    dry_run: bool = False  # only list the runs, with --row also their commands


def reproduce(arguments: list[str]) -> int:
    """`fcljax reproduce SYSTEM TABLE [options]`: exit code 1 if a run failed."""
    missing = f"table: none given; usage: {USAGE} [options], such as fppl table3"
    names, rest = names_before(arguments, 2, missing)
    given = parse(
        {"reproduce": ReproduceOptions()},
        rest,
        USAGE,
        "The rows of a paper's table as runs, its numbers beside ours, and whether their order holds.",
    )
    options = config.fill(ReproduceOptions, given, "options")
    config.check_ranges(options)

    from fcljax.studies import papers, sweeps
    from fcljax.studies import reproduce as work

    if options.resume and options.out:
        raise InputError(f"resume: {options.resume!r} has its own folder; leave out --out")
    columns = papers.find(options.experiments, *names)
    plan = work.plan(columns, options.scale, options.seeds, options.row)
    console = Console()
    if options.dry_run:
        console.print(sweeps.plan_table(plan.runs))
        for run in plan.runs if options.row else []:
            say(console, work.command(run))
        return 0
    out = Path(options.resume or options.out or new_folder("reproduce", *names, options.scale))
    ways = sweeps.Ways([None] * options.jobs, options=passed_on(options))
    try:
        outcomes = sweeps.sweep(plan.runs, out, options.resume is not None, ways, Console(stderr=True))
    except KeyboardInterrupt as stop:
        advice = f"go on with: {_command(arguments, out)}" if (out / sweeps.PLAN).exists() else ""
        raise signals.Stopped(signals.number_of(stop), advice) from None
    return _show(plan, outcomes, out, console)


def _show(plan: Any, outcomes: Any, out: Path, console: Console) -> int:
    """Write and show the results."""
    from fcljax.studies import paper_tables as tables
    from fcljax.studies import reproduce as work

    found = work.results(plan, outcomes)
    work.write(plan, found, outcomes, out, lambda line: say(console, line))
    console.print(work.shown(plan, found))
    pairs = tables.orderings(found)
    lines = [*work.notes_of(plan)[1:], *tables.order_lines(pairs), *tables.otherwise(pairs)]
    lines += [f"the paper in words: {claim}" for claim in plan.column.entry.claims]
    if plan.scale == "paper":
        lines += work.update(found, outcomes, plan, _device())
    for line in [*lines, f"table: {out / work.TEXT}"]:
        say(console, line)
    return int(any(each.why for each in found))


def _device() -> str:
    """What the runs of this machine have run on."""
    import jax

    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind}".strip()


def _command(arguments: list[str], out: Path) -> str:
    """The command that goes on with a folder."""
    kept, rest = [], list(arguments)
    while rest:
        word, *rest = rest
        name, equals, _ = word.partition("=")
        if name in ("--out", "--resume"):
            rest = rest if equals else rest[1:]
        else:
            kept.append(word)
    return shlex.join(["fcljax", "reproduce", *kept, "--resume", str(out)])
