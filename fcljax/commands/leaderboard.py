"""Run the command `fcljax leaderboard FILE.yaml`."""

import dataclasses
import shlex
from pathlib import Path

from rich.console import Console

from fcljax.commands.arguments import (
    ProgramOptions,
    Words,
    new_folder,
    parsed,
    passed_on,
    slug,
)
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.runs import signals
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class LeaderboardOptions(ProgramOptions):
    """Options of `fcljax leaderboard`."""

    methods: str | None = option(None, unset="all of FILE, in its order")
    """Methods of FILE to run, in this order, e.g. fedncm,fppl."""
    base: str | None = option(None, unset="those of FILE")
    """Options of all runs, which replace FILE's, e.g. alpha=0.05,rounds=5."""
    out: str | None = option(None, unset="runs/leaderboard-FILE-TIME")
    """New folder for the runs and the table."""
    resume: str | None = option(None, unset="none")
    """Folder to resume. Finished trials and runs are not repeated; FILE may name more
    methods."""
    jobs: int = 1
    """Number of runs of a method at a time."""
    dry_run: bool = False
    """Only list the methods."""
    allow_code: bool = False
    """Allow FILE to name programs, FILE.py or MODULE:NAME, as methods, and run them."""


def leaderboard(arguments: list[str]) -> int:
    """Run `fcljax leaderboard FILE.yaml [options]`; exit code 1 if a method lacks
    runs."""
    about = "Compare methods with the same network, data, rounds and search of learning rates."
    words = Words("FILE.yaml")
    files, options = parsed(LeaderboardOptions(), arguments, ["leaderboard"], about, words)
    if len(files) != 1:
        raise InputError(
            "leaderboard: no file given; usage: fcljax leaderboard FILE.yaml [options], such as "
            "experiments/leaderboard_glyphs.yaml"
        )
    if options.resume and options.out:
        raise InputError(f"resume: {options.resume!r} already names the folder; leave out --out")

    from fcljax.studies import leaderboard as work
    from fcljax.studies.sweeps import Ways

    # empty: all methods of the file
    only = [name.strip() for name in (options.methods or "").split(",") if name.strip()]
    entries = work.plan(files[0], only, options.allow_code, _base(options.base or ""))
    console = Console()
    if options.dry_run:
        console.print(work.plan_table(entries))
        return 0
    out = Path(options.resume or options.out or new_folder("leaderboard", slug(files[0])))
    command = _command(files[0], options)
    # printed if a signal ends the work, once there is something to resume
    again = f"{command} --resume {shlex.quote(str(out))}"
    ways = Ways([None] * options.jobs, options=passed_on(options))
    with signals.advised(lambda: f"resume with: {again}" if (out / work.PLAN).exists() else ""):
        rows = work.run(entries, out, options.resume is not None, ways, command, Console(stderr=True))
    for table in work.terminal_tables(rows):
        console.print(table)
    say(console, f"page: {out / work.TEXT}")
    return int(bool(work.missing(rows)))


def _base(text: str) -> dict[str, str]:
    """Parse `--base`: option -> its value as text.

    Raises:
      InputError: for a part that is no NAME=VALUE.
    """
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(f"base: {name!r} is not OPTION=VALUE, such as alpha=0.05")
    # as text, which the options' own types read, as on the command line
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def _command(file: str, options: LeaderboardOptions) -> str:
    """Return the command without its folder."""
    # without --jobs too, which changes no number of the page that names this command
    words = ["fcljax", "leaderboard", file]
    if options.methods:
        words += ["--methods", options.methods]
    if options.base:
        words += ["--base", options.base]
    if options.allow_code:
        words.append("--allow-code")
    return shlex.join(words)
