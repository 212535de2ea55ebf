"""`fcljax compare RUN_DIR...`."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fcljax.commands.arguments import parse
from fcljax.errors import InputError
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `fcljax compare`."""

    out: str | None = (
        None  # PNG file of the figure; default: accuracy.png in the folder that holds the first run
    )


def compare(arguments: list[str]) -> int:
    """`fcljax compare RUN_DIR... [--out PNG]`."""
    from fcljax.runs.comparison import compare as compare_runs

    split = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    given = parse(
        {"compare": CompareOptions()}, arguments[split:], "fcljax compare", "A table and a figure over runs."
    )
    if not arguments[:split]:
        raise InputError("run: no run directory given; usage: fcljax compare RUN_DIR... [--out PNG]")
    out = given.get("out") or Path(arguments[0]).parent / "accuracy.png"
    tables, figure = compare_runs(arguments[:split], out)
    console = Console()
    for table in tables:
        console.print(table)
    say(console, f"accuracy curve: {figure}")
    return 0
