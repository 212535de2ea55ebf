"""`fcljax watch RUN_DIR`."""

import dataclasses

from rich.console import Console

from fcljax.commands.arguments import names_before, parse
from fcljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Options of `fcljax watch`."""

    every: float = 2.0  # seconds between two looks, 0.1 to 3600
    once: bool = False  # look once, and end


def watch(arguments: list[str]) -> int:
    """`fcljax watch RUN_DIR [--every SECONDS] [--once]`; Ctrl-C ends it quietly."""
    from fcljax.results.watch import watch as watch_runs
    from fcljax.runs import signals

    missing = "run: no run directory given; usage: fcljax watch RUN_DIR [--once]"
    folders, rest = names_before(arguments, 1, missing)
    given = parse({"watch": WatchOptions()}, rest, "fcljax watch RUN_DIR", "Follow runs in the terminal.")
    options = WatchOptions(**given)
    if not 0.1 <= options.every <= 3600:  # false for NaN too
        nearest = 0.1 if options.every < 0.1 else 3600
        raise InputError(f"every: {options.every} seconds; nearest valid value: {nearest}")
    try:
        watch_runs(folders[0], Console(), options.every, options.once)
    except KeyboardInterrupt as stop:
        return 128 + signals.number_of(stop)
    return 0
