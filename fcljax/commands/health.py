"""Run the command `fcljax doctor`: what a run needs of this machine, and how to get
what is missing."""

import dataclasses
import json
from itertools import groupby

from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.options import option
from fcljax.terminal import add_row, new_table, say


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Options of `fcljax doctor`."""

    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of raw and prepared data sets."""
    json: bool = False
    """Print one JSON object in place of tables."""


def doctor(arguments: list[str]) -> int:
    """Run `fcljax doctor [CHECKPOINT...] [options]`; exit code 1 if no run could
    start."""
    about = "Check that a run can start on this machine, and print the command for what is missing."
    words = Words("[CHECKPOINT...]")
    checkpoints, options = parsed(DoctorOptions(), arguments, ["doctor"], about, words)

    from fcljax.checks.doctor import examine, healthy

    findings = examine(checkpoints, options.data_dir)
    is_healthy = healthy(findings)
    exit_code = 1
    if is_healthy:
        exit_code = 0
    console = Console()
    # for scripts: one object on standard output, and nothing else
    if options.json:
        values = [finding._asdict() for finding in findings]
        print(json.dumps({"healthy": is_healthy, "findings": values}, indent=2))
        return exit_code
    for section, members in groupby(findings, lambda finding: finding.section):
        # new_table needs names for the columns; the section's title is header enough
        table = new_table("", "", "found", "to do", title=section)
        table.show_header = False
        for finding in members:
            add_row(table, finding.name, finding.state, finding.value, finding.advice)
        console.print(table)
    if is_healthy:
        say(console, "a run can start: fcljax run fppl")
    else:
        failed = [f"{finding.section}: {finding.name}" for finding in findings if finding.state == "failed"]
        say(console, f"a run cannot start: {', '.join(failed)}")
    return exit_code
