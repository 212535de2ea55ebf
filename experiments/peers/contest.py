"""The same work by several ways, in turn, and a table of what they took."""

import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from peers.machine import seconds

FRAMEWORKS = {"FedJAX": "fedjax", "pfl-research": "pfl", "Flower": "flwr"}


class Way(NamedTuple):
    """How the work is done: `make` builds a call that does it once."""

    name: str
    make: Callable[[], Callable[[], Any]]


class Workload(NamedTuple):
    """What is done: `samples` rows pass through a network each time, with so many useful FLOPs (0: not
    counted)."""

    name: str
    samples: int
    flops: int
    ways: tuple[Way, ...]


class Row(NamedTuple):
    """What one way took: seconds of every repeat, and of the first call beyond the median of the others."""

    workload: Workload
    way: str
    times: tuple[float, ...]
    compilation: float

    @property
    def rate(self) -> float:
        """Samples per second, by the median."""
        return self.workload.samples / statistics.median(self.times)


def measure(workload: Workload, repeats: int) -> list[Row]:
    """All ways of a workload in turn, `repeats` times, after a call each that compiles."""
    calls = {way.name: way.make() for way in workload.ways}
    first = {name: seconds(call)[0] for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call)[0])
    late = {name: max(0.0, first[name] - statistics.median(spent)) for name, spent in times.items()}
    return [Row(workload, name, tuple(spent), late[name]) for name, spent in times.items()]


def table(rows: Sequence[Row], peak: float) -> str:
    """Markdown; the first way of each workload is what the others are compared with. `peak`: GFLOP/s."""
    lines = [
        "| workload | way | samples/s | range | times fcljax | compilation, s | useful work, of peak |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {}
    for row in rows:
        samples, own = row.workload.samples, base.setdefault(row.workload.name, row.rate)
        slow, fast = samples / max(row.times), samples / min(row.times)
        useful = row.workload.flops * row.rate / samples / peak / 1e9
        share = f"{100 * useful:.0f} %" if row.workload.flops else ""
        lines.append(
            f"| {row.workload.name} | {row.way} | {row.rate:,.0f} | {slow:,.0f} to {fast:,.0f} | "
            f"{row.rate / own:.2f} | {row.compilation:.1f} | {share} |"
        )
    return "\n".join(lines)


def has_torch() -> bool:
    """Is torch installed?"""
    return find_spec("torch") is not None


def left_out() -> list[str]:
    """A line for everything that is not compared with here, and why."""
    lines = [] if has_torch() else ["torch: not installed, its rows are left out"]
    said = {True: "installed, but no loop is written for it here", False: "not installed"}
    return lines + [f"{name}: {said[find_spec(module) is not None]}" for name, module in FRAMEWORKS.items()]
