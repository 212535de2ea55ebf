"""`fcljax doctor`: what a run would need of this machine, and what to do about what is missing."""

import dataclasses
import json
from itertools import groupby

from rich.console import Console
from rich.table import Table

from fcljax.commands.arguments import Words, parsed
from fcljax.options import option
from fcljax.terminal import add_row, say


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Options of `fcljax doctor`."""

    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of raw and prepared data sets."""
    json: bool = False
    """Print one JSON object in place of tables."""


def doctor(arguments: list[str]) -> int:
    """`fcljax doctor [CHECKPOINT...] [options]`; exit code 1 if no run could start."""
    about = "Check that a run can start on this machine, and print the command for what is missing."
    words = Words("[CHECKPOINT...]")
    checkpoints, options = parsed(DoctorOptions(), arguments, ["doctor"], about, words)

    from fcljax.checks.doctor import examine, healthy

    findings = examine(checkpoints, options.data_dir)
    well = healthy(findings)
    console = Console()
    if options.json:
        print(json.dumps({"healthy": well, "findings": [each._asdict() for each in findings]}, indent=2))
        return 0 if well else 1
    for section, members in groupby(findings, lambda finding: finding.section):
        table = Table("", "", "found", "to do", title=section, title_justify="left", show_header=False)
        for each in members:
            add_row(table, each.name, each.state, each.value, each.advice)
        console.print(table)
    failed = [f"{each.section}: {each.name}" for each in findings if each.state == "failed"]
    say(console, "a run can start: fcljax run fppl" if well else f"no run can start: {', '.join(failed)}")
    return 0 if well else 1
