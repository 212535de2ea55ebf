"""Run the command `fcljax watch RUN_DIR`."""

import dataclasses

from rich.console import Console

from fcljax.commands.arguments import Words, parsed
from fcljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Options of `fcljax watch`."""

    every: float = 2.0
    """Seconds between updates, 0.1 to 3600."""
    once: bool = False
    """Print the state once and exit."""


def watch(arguments: list[str]) -> int:
    """Run `fcljax watch RUN_DIR [--every SECONDS] [--once]`; Ctrl-C ends it without a
    message."""
    about = "Follow runs in the terminal, also runs on another machine."
    words = Words("RUN_DIR")
    folders, options = parsed(WatchOptions(), arguments, ["watch"], about, words)
    if not 0.1 <= options.every <= 3600:
        nearest = 3600
        if options.every < 0.1:
            nearest = 0.1
        raise InputError(f"every: {options.every} seconds; nearest valid value: {nearest}")
    if len(folders) != 1:
        raise InputError("run: give one run directory; usage: fcljax watch RUN_DIR [--once]")

    from fcljax.results.watch import watch as watch_runs
    from fcljax.runs import signals

    # Ctrl-C is how this command ends, so it prints no message
    try:
        watch_runs(folders[0], Console(), options.every, options.once, signals.pause)
    except KeyboardInterrupt as stop:
        return 128 + signals.number_of(stop)
    return 0
