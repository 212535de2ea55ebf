"""Where the time of a round on a CPU goes: the kernels of its programs, as JAX's profiler times them.

A kernel is named by its purpose: the path of its last operation in the network, without the numbers of
blocks, and whether it belongs to the gradient. XLA names this path in the text of the compiled programs,
which it writes into a folder where `XLA_FLAGS` ask for it.
"""

import collections
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peers.machine import profiled, seconds

CONTROL = re.compile(r"(while|call|conditional|cond)[.\d]*$")  # their time is that of what they call
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*")
PATH = re.compile(r'op_name="([^"]*)"')
LIBRARY = ("ynn", "dot", "convolution", "custom-call")  # what XLA leaves to a library, products above all
STEPS = re.compile(r"while|body|closed_call|cond|branch_\d+_fun|[\w,]+->\w+")
SHOWN = 20

Programs = Mapping[str, list[dict[str, str]]]  # name -> for each program, instruction -> its line


class Event(NamedTuple):
    """One execution of a kernel."""

    program: str
    run: str  # of the program
    kernel: str
    seconds: float


def profile(play: Callable[[], Any], folder: Path) -> str:
    """Markdown: what a call's kernels take together, those of one purpose in one row, the longest first;
    `folder` has the text of its programs."""
    seconds(play)
    events = events_of(play)
    spent, times = by_purpose(events, programs(folder))
    whole = sum(spent.values())
    lines = ["| kernels | for | ms | share | times |", "|---|---|---|---|---|"]
    for (by, purpose), taken in spent.most_common(SHOWN):
        row = f"{by} | {purpose} | {1e3 * taken:.1f} | {taken / whole:.1%} | {times[by, purpose]:,}"
        lines.append(f"| {row} |")
    libraries = sum(taken for (by, _), taken in spent.items() if by == "library")
    lines.append(f"| all | | {1e3 * whole:.1f} | 100 % | {sum(times.values()):,} |")
    return "\n".join([*lines, "", f"Libraries (products above all) take {libraries / whole:.1%}."])


def events_of(play: Callable[[], Any]) -> list[Event]:
    """The kernels of a call that has been compiled."""
    planes = profiled(play)[1].planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    timed = [(dict(event.stats), event.duration_ns / 1e9) for event in events]
    found = [
        Event(stats["hlo_module"], str(stats["run_id"]), stats["hlo_op"], taken)
        for stats, taken in timed
        if "hlo_op" in stats
    ]
    return [event for event in found if not CONTROL.match(event.kernel)]


def programs(folder: Path) -> Programs:
    """The instructions of all programs whose text XLA has written."""
    found = collections.defaultdict(list)
    for file in sorted(folder.glob("*cpu_after_optimizations.txt")):
        text = file.read_text()
        lines = {m[1]: m[0] for m in map(INSTRUCTION.match, text.splitlines()) if m}
        found[text.split(maxsplit=2)[1].rstrip(",")].append(lines)
    return found


def by_purpose(
    events: list[Event], texts: Programs
) -> tuple[collections.Counter[tuple[str, str]], collections.Counter[tuple[str, str]]]:
    """The seconds and the number of kernels for each (by whom, purpose). Where several programs have the name
    of a run's program, the first one that has all of the run's kernels counts."""
    runs = collections.defaultdict(list)
    for event in events:
        runs[event.program, event.run].append(event)
    spent = collections.Counter()
    times = collections.Counter()
    for (program, _), mine in runs.items():
        kernels = {event.kernel for event in mine}
        lines = next((text for text in texts[program] if kernels <= text.keys()), {})
        for event in mine:
            key = purpose(event.kernel, lines.get(event.kernel, ""))
            spent[key] += event.seconds
            times[key] += 1
    return spent, times


def purpose(kernel: str, line: str) -> tuple[str, str]:
    """Who computes a kernel, XLA or a library, and what for: the last three parts of its path."""
    by = "library" if kernel.startswith(LIBRARY) else "XLA"
    path = PATH.search(line)
    if not path:
        return by, re.sub(r"[.\d]+$", "", kernel)
    parts = [part for part in path[1].split("/") if "(" not in part and not STEPS.fullmatch(part)]
    named = "/".join(re.sub(r"_\d+$", "", part) for part in parts[-3:])
    return by, named + (", gradient" if "transpose(" in path[1] else "")
