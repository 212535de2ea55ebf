"""Where the time of a round on a CPU goes: the kernels of its programs, as JAX's profiler times them.

A kernel is told by what it is for: the path of its last operation in the network, without the numbers of
blocks, and whether it belongs to the gradient. XLA names this path in the text of the compiled programs,
which it writes into a folder where `XLA_FLAGS` ask for it.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from peers.machine import seconds

CONTROL = re.compile(r"(while|call|conditional|cond)[.\d]*$")  # their time is that of what they call
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*")
PATH = re.compile(r'op_name="([^"]*)"')
LIBRARY = ("ynn", "dot", "convolution", "custom-call")  # what XLA leaves to a library, products above all
STEPS = re.compile(r"jit\(\w*\)|while|body|closed_call|cond|branch_\d+_fun|vmap\(.*\)|[\w,]+->\w+")
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
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds(play)
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    events = [event for plane in planes for line in plane.lines for event in line.events]
    told = [(dict(event.stats), event.duration_ns / 1e9) for event in events]
    found = [
        Event(stats["hlo_module"], str(stats["run_id"]), stats["hlo_op"], taken)
        for stats, taken in told
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
    events: list[Event], programs: Programs
) -> tuple[collections.Counter[tuple[str, str]], collections.Counter[tuple[str, str]]]:
    """The seconds and the number of kernels for each (by whom, purpose). Of programs of one name a run's is
    the one that has all of its kernels."""
    names = collections.defaultdict(set)
    for event in events:
        names[event.program, event.run].add(event.kernel)
    spent, times = collections.Counter(), collections.Counter()
    for event in events:
        mine = names[event.program, event.run]
        of_run = next((p for p in programs[event.program] if mine <= p.keys()), {})
        key = purpose(event.kernel, of_run.get(event.kernel, ""))
        spent[key] += event.seconds
        times[key] += 1
    return spent, times


def purpose(kernel: str, line: str) -> tuple[str, str]:
    """Who computes a kernel, XLA or a library, and what for: the last three parts of its path."""
    by = "library" if kernel.startswith(LIBRARY) else "XLA"
    path = PATH.search(line)
    if not path:
        return by, re.sub(r"[.\d]+$", "", kernel)
    backwards = "transpose(" in path[1]
    parts = [re.sub(r"_\d+$", "", part) for part in re.split(r"/", path[1]) if not STEPS.fullmatch(part)]
    parts = [part for part in parts if "(" not in part]
    return by, "/".join(parts[-3:]) + (", gradient" if backwards else "")
