"""Run the command `fcljax plan`: what a run needs of a chip that is not here."""

import dataclasses
import json
from typing import Any

from rich.console import Console

from fcljax.commands.running import pop_options, read_alone, settings
from fcljax.errors import InputError, gib
from fcljax.options import check_ranges, option
from fcljax.terminal import add_row, new_table, say


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
    num_classes: int = option(100, least=1)
    """Number of classes of this data set."""
    side: int = option(224, least=1)
    """Side in pixels at which its images are stored."""
    json: bool = False
    """Print one JSON object instead of a table."""


def plan(arguments: list[str]) -> int:
    """Run `fcljax plan METHOD --chip CHIP [options]`; exit code 2 if it does not fit."""
    typed, paths = read_alone(arguments, "plan", {"plan": PlanOptions()})
    options = pop_options(PlanOptions(), typed)
    check_ranges(options)
    if not options.chip:
        raise InputError("chip: none given; choose from: v5e, v5e-16, v6e, v5p, h100, h200")

    import jax

    # before any array is made: otherwise the compilers' plugins look for chips that are
    # not here
    jax.config.update("jax_platforms", "cpu")
    from fcljax.checks import plan as planned
    from fcljax.checks.chips import CHIPS
    from fcljax.errors import choose

    choose("chip", options.chip, CHIPS)
    # a data set of this size that has no images, in place of one that is not here
    stand = None
    if options.images:
        stand = planned.Stand(options.images, options.num_classes, options.side)
    run_settings = settings(arguments[0], typed, paths)
    if options.chips:
        exp, state = planned.many_chips(run_settings, options.chip, options.chips, stand)
        return _show_state(exp, state, options)
    estimate = planned.plan(run_settings, options.chip, stand)
    if options.json:
        print(json.dumps(_plain(estimate), indent=2))
        return 0
    console = Console()
    numbers = ("memory", "operations", "traffic", "of the peak", "time", "steps")
    table = new_table("step", *numbers, right=numbers)
    for part in (*estimate.training, *estimate.evaluation):
        add_row(
            table,
            part.program,
            gib(part.memory),
            f"{part.flops / 1e12:.3g} TFLOP",
            f"{part.traffic / 1e9:.3g} GB",
            f"{part.share(estimate.chip):.0%}",
            f"{1000 * part.step_seconds(estimate.chip):.1f} ms",
            part.steps,
        )
    console.print(table)
    for line in lines(estimate, options.chip):
        say(console, line)
    return 0


def _show_state(exp: Any, state: Any, options: PlanOptions) -> int:
    """Print what the engine holds on each of many chips."""
    # of the first of the method's rounds, in which clients usually train; 0 if it has
    # none
    slots = sum(player.capacity.slots for player in exp.engine.players[:1]) * options.chips
    if options.json:
        print(json.dumps({"state": state._asdict(), "total": state.total, "slots": slots}, indent=2))
        return 0
    console = Console()
    table = new_table("on each chip", "memory", right=("memory",))
    for name, size in state._asdict().items():
        add_row(table, name, f"{size / 2**20:.1f} MiB")
    console.print(table)
    share = f"{options.chips} chips share {exp.sizes.clients} clients, and have {slots} slots"
    say(
        console,
        f"{share}; the engine holds {gib(state.total)} on each, besides network and images",
    )
    return 0


def lines(estimate: Any, name: str) -> list[str]:
    """Return lines that say whether it fits, how long it takes, and with which
    settings."""
    chip = estimate.chip
    chosen = estimate.settings
    share = estimate.memory / chip.memory
    shortest, longest = (_time(factor * estimate.run_seconds) for factor in chip.rates.uncertainty)
    # the reader must know whether the time rests on measurements
    basis = "assumed for it"
    if chip.rates.measured:
        basis = "measured on it"
    text = [
        f"it fits: {gib(estimate.memory)} of {name}'s {gib(chip.memory)} ({share:.0%})",
        f"a round takes about {_time(estimate.round_seconds)}, the run with its evaluations "
        f"{_time(estimate.run_seconds)}: {shortest} to {longest}, by rates {basis}; compilation comes before",
    ]
    if chosen.scale == "fit" and not chosen.rate_factor:
        text.append("before it, the search of --scale fit takes at most half of its training steps")
    options = [f"--lanes {estimate.lanes}", f"--dtype {chosen.dtype}"]
    if chosen.microbatch:
        options.append(f"--microbatch {chosen.microbatch}")
    if chip.devices > 1:
        options.append(f"--devices {chip.devices}")
    return [*text, f"chosen settings: {' '.join(options)}"]


def _plain(estimate: Any) -> dict[str, Any]:
    return {
        "fits": True,
        "memory": estimate.memory,
        "chip": {key: value for key, value in estimate.chip._asdict().items() if key != "rates"},
        "lanes": estimate.lanes,
        "microbatch": estimate.settings.microbatch,
        "dtype": estimate.settings.dtype,
        "round_seconds": estimate.round_seconds,
        "run_seconds": estimate.run_seconds,
        "uncertainty": estimate.chip.rates.uncertainty,
        "training": [figures(part, estimate.chip) for part in estimate.training],
        "evaluation": [figures(part, estimate.chip) for part in estimate.evaluation],
    }


def figures(program: Any, chip: Any) -> dict[str, Any]:
    """Return a program's `Footprint` for JSON, with its expected time on a chip."""
    footprint = {key: value for key, value in program._asdict().items() if key != "kernels"}
    times = {"step_s": program.step_seconds(chip), "round_s": program.round_seconds(chip)}
    return footprint | {"share": program.share(chip)} | times


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
