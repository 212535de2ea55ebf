"""`fcljax plan`: what a run would need of a chip that is not here."""

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from fcljax.commands.running import read_alone, settings, taken
from fcljax.errors import InputError, gib
from fcljax.options import check_ranges, option
from fcljax.terminal import add_row, say

IN_PRACTICE = (
    "in practice expect 2.5 times as long: FPPL's rounds took that on an H200 (docs/accelerators.md)"
)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `fcljax plan`."""

    chip: str = option("", unset="none")
    """Chip: v5e, v5e-16 (four hosts), v6e, v5p, h100 or h200."""
    chips: int = option(0, least=0, unset="those of --chip")
    """Number of chips that share the clients. With it the plan computes from shapes what
    the engine holds on each chip, and compiles nothing."""
    images: int = option(0, least=0, unset="the data set's")
    """Number of training images, for a data set that this machine does not have."""
    classes: int = option(100, least=1)
    """Number of classes of this data set."""
    side: int = option(224, least=1)
    """Side in pixels at which its images are stored."""
    json: bool = False
    """Print one JSON object instead of a table."""


def plan(arguments: list[str]) -> int:
    """`fcljax plan METHOD --chip CHIP [options]`; exit code 2 if it does not fit."""
    given, paths = read_alone(arguments, "plan", {"plan": PlanOptions()})
    options = taken(PlanOptions(), given)
    check_ranges(options)
    if not options.chip:
        raise InputError("chip: none given; choose from: v5e, v5e-16, v6e, v5p, h100, h200")

    import jax

    jax.config.update("jax_platforms", "cpu")  # the compilers' plugins look for chips that are not here
    from fcljax.checks import plan as planned
    from fcljax.checks.chips import CHIPS
    from fcljax.errors import choose

    choose("chip", options.chip, CHIPS)
    stand = planned.Stand(options.images, options.classes, options.side) if options.images else None
    wanted = settings(arguments[0], given, paths)
    if options.chips:
        exp, state = planned.many_chips(wanted, options.chip, options.chips, stand)
        return _show_state(exp, state, options)
    found = planned.plan(wanted, options.chip, stand)
    if options.json:
        print(json.dumps(_plain(found), indent=2))
        return 0
    console = Console()
    table = Table("step", "memory", "bound by", "share of peak", "at least", "steps")
    for each in (*found.training, *found.evaluation):
        share = each.share(found.chip)
        add_row(
            table,
            each.program,
            gib(each.memory),
            "memory traffic" if share < 1 else "operations",
            f"{share:.0%}" if each.traffic else "unknown",
            f"{1000 * each.least_seconds(found.chip) / max(1, each.steps):.1f} ms",
            str(each.steps),
        )
    console.print(table)
    for line in lines(found, options.chip):
        say(console, line)
    return 0


def _show_state(exp: Any, state: Any, options: PlanOptions) -> int:
    """Print what the engine holds on each of many chips."""
    slots = sum(player.capacity.slots for player in exp.engine.players[:1]) * options.chips
    if options.json:
        print(json.dumps({"state": state._asdict(), "total": state.total, "slots": slots}, indent=2))
        return 0
    console = Console()
    table = Table("on each chip", "memory")
    for name, size in state._asdict().items():
        add_row(table, name, f"{size / 2**20:.1f} MiB")
    console.print(table)
    share = f"{options.chips} chips share {exp.sizes.clients} clients, and have {slots} slots"
    say(console, f"{share}; the engine holds {gib(state.total)} on each, besides network and images")
    return 0


def lines(found: Any, name: str) -> list[str]:
    """Does it fit, how long does it take at best, which settings."""
    share = found.memory / found.chip.memory
    chosen = found.settings
    fits = f"it fits: {gib(found.memory)} of {name}'s {gib(found.chip.memory)} ({share:.0%})"
    best = [f"--lanes {found.lanes}", f"--dtype {chosen.dtype}"]
    best += [f"--microbatch {chosen.microbatch}"] if chosen.microbatch else []
    best += [f"--devices {found.chip.devices}"] if found.chip.devices > 1 else []
    time = f"a round takes at least {_time(found.round_seconds)}, the run {_time(found.run_seconds)}"
    searching = chosen.scale == "fit" and not chosen.rate_factor
    added = ["before it, the search of --scale fit takes at most half of its training steps"] * searching
    said = [fits, f"{time} with its evaluations", f"chosen settings: {' '.join(best)}"]
    return said[:2] + added + [IN_PRACTICE] * (found.chip.kind == "gpu") + said[2:]


def _plain(found: Any) -> dict[str, Any]:
    return {
        "fits": True,
        "memory": found.memory,
        "chip": found.chip._asdict(),
        "lanes": found.lanes,
        "microbatch": found.settings.microbatch,
        "dtype": found.settings.dtype,
        "round_seconds": found.round_seconds,
        "run_seconds": found.run_seconds,
        "training": [each._asdict() | {"share": each.share(found.chip)} for each in found.training],
        "evaluation": [each._asdict() | {"share": each.share(found.chip)} for each in found.evaluation],
    }


def _time(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds < 120
        else f"{seconds / 60:.3g} min"
        if seconds < 7200
        else f"{seconds / 3600:.3g} h"
    )
