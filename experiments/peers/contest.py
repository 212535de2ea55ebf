"""The same work by several ways, in turn, and a table of what they took."""

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from peers.machine import seconds


class Work(NamedTuple):
    """What does the work once, and what reads the CPU seconds so far of the process that does it."""

    call: Callable[[], Any]
    cpu: Callable[[], float] = time.process_time


class Way(NamedTuple):
    """How the work is done."""

    name: str
    make: Callable[[], Work]


def here(make: Callable[[], Callable[[], Any]]) -> Callable[[], Work]:
    """What does the work in this process."""
    return lambda: Work(make())


class Workload(NamedTuple):
    """What is done: `samples` rows pass through a network each time, with so many useful FLOPs (0: not
    counted)."""

    name: str
    samples: int
    flops: int
    ways: tuple[Way, ...]


class Row(NamedTuple):
    """What one way took: seconds and CPU seconds of every repeat, and how much longer the first call took."""

    workload: Workload
    way: str
    times: tuple[float, ...]
    cpu: tuple[float, ...]
    compilation: float

    @property
    def rate(self) -> float:
        """Samples per CPU second, by the median: other processes lengthen the time, not the work."""
        return self.workload.samples / statistics.median(self.cpu)


def measure(workload: Workload, repeats: int) -> list[Row]:
    """All ways of a workload in turn, `repeats` times, after a call each that compiles."""
    calls = {way.name: way.make() for way in workload.ways}
    first = {name: spent(work)[0] for name, work in calls.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, work in calls.items():
            found[name].append(spent(work))
    return [row_of(workload, name, first[name], each) for name, each in found.items()]


def spent(work: Work) -> tuple[float, float]:
    """Seconds and CPU seconds of the work once."""
    before = work.cpu()
    return seconds(work.call)[0], work.cpu() - before


def row_of(workload: Workload, name: str, first: float, found: Sequence[tuple[float, float]]) -> Row:
    """Of (seconds, CPU seconds) of every repeat."""
    times, cpu = zip(*found, strict=True)
    return Row(workload, name, times, cpu, max(0.0, first - statistics.median(times)))


def table(rows: Sequence[Row], peak: float) -> str:
    """Markdown; the first way of each workload is what the others are compared with. `peak`: GFLOP/s."""
    lines = [
        "| workload | way | samples/CPU s | range | times fcljax | s | compilation, s | useful, of peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {}
    for row in rows:
        samples = row.workload.samples
        own = base.setdefault(row.workload.name, row.rate)
        slow = samples / max(row.cpu)
        fast = samples / min(row.cpu)
        useful = row.workload.flops * row.rate / samples / peak / 1e9
        share = f"{100 * useful:.0f} %" if row.workload.flops else ""
        lines.append(
            f"| {row.workload.name} | {row.way} | {row.rate:,.0f} | {slow:,.0f} to {fast:,.0f} | "
            f"{row.rate / own:.2f} | {statistics.median(row.times):.2f} | {row.compilation:.1f} | {share} |"
        )
    return "\n".join(lines)


def has_torch() -> bool:
    """Is torch installed?"""
    return find_spec("torch") is not None


def left_out(environments: bool) -> list[str]:
    """A line for everything that is not compared with here, and why."""
    lines = [] if has_torch() else ["torch: not installed, its rows are left out"]
    if not environments:
        lines.append("FedJAX, pfl-research: --environments FOLDER makes environments for them")
    return [*lines, "Flower: its clients are processes, and no loop is written for it here"]
