"""Run the command `fcljax export RUN_DIR`."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.errors import InputError
from fcljax.options import option
from fcljax.terminal import say

USAGE = "usage: fcljax export RUN_DIR [--out FOLDER] [--network]"


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of `fcljax export`."""

    out: str | None = option(None, unset="RUN_DIR/export")
    """Folder to make."""
    network: bool = False
    """Write the network's parameters too, under timm's names."""


def export(arguments: list[str]) -> int:
    """Run `fcljax export RUN_DIR [--out FOLDER] [--network]`."""
    about = "Write a finished run's adapter and classifier as safetensors, for PEFT and timm."
    words, options = parsed(ExportOptions(), arguments, ["export"], about, Words("RUN_DIR"))
    if len(words) != 1:
        raise InputError(f"export: expected one run directory, found {len(words)}; {USAGE}")
    (run,) = words
    folder = options.out or str(Path(run) / "export")

    # imports JAX, which the help does without
    from fcljax.api import Result

    lines = Result.of(run).export(folder, options.network)
    console = Console()
    for line in lines:
        say(console, line)
    say(console, f"folder: {folder}")
    return 0
