"""The numbers of a paper's tables beside ours. Pure; `papers.py` reads the paper's numbers.

When a number is met: it lies in the 95 % interval of our mean (Student's t over two seeds or more; the
paper's own standard deviation has no part in it), or no further from our mean than the tolerance: 1 point, or
2 % of a number of MiB or of parameters. A column is `reproduced` if every number of every row is met, each
row run at the paper's scale with at least 3 seeds, or with one where the paper had one; `not reproduced` if
all rows were run with that many seeds and a number is not met. A column with fewer runs, or without numbers,
has no status.

When two rows are ordered: rows are compared within a column, and across columns if method, options, data set
and weights are the same. The paper orders two rows clearly in a metric if its numbers differ by more than the
tolerance and by more than the sum of their standard deviations. Our runs order them alike if our means differ
in the same direction.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fcljax.results.metrics import over_seeds, paired_difference
from fcljax.studies.papers import Column, Number, Row

MIN_SEEDS = 3  # of a row that is reproduced, where the paper had several runs
# The tolerance, in points and as a share of a size
POINTS = 1.0
SHARE = 0.02


class Compared(NamedTuple):
    """A number of the paper beside ours; None where there is no such number."""

    metric: str
    paper: Number | None
    values: tuple[float, ...]
    """Ours, seed by seed, in the paper's unit."""
    mean: float | None = None
    """Our mean over the seeds."""
    deviation: float | None = None
    """Our population standard deviation."""
    difference: float | None = None
    """Our mean minus the paper's."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of the difference."""

    @property
    def met(self) -> bool:
        """Whether the paper's number is what we have, by the rule above."""
        if self.paper is None or self.difference is None:
            return self.paper is None
        inside = self.interval is not None and self.interval[0] <= 0 <= self.interval[1]
        return inside or abs(self.difference) <= tolerance(self.metric, self.paper.mean) * (1 + 1e-9)


class RowResult(NamedTuple):
    """The outcome of a row."""

    column: Column
    row: Row
    values: tuple[tuple[float, ...], ...]
    """Our values of each metric, seed by seed, in the paper's unit."""
    seeds: int
    """How many runs finished."""
    why: str = ""
    """Why there are fewer runs than were asked for, or none."""
    curves: tuple[tuple[float | None, ...], ...] = ()
    """What the table's figure shows over tasks or rounds, in %, seed by seed."""

    @property
    def label(self) -> str:
        """Its name."""
        return self.column.label(self.row)

    def compared(self) -> dict[str, Compared]:
        """Each metric's number of the paper beside ours."""
        numbers = zip(self.column.metrics, self.row.numbers, self.values, strict=True)
        return {metric: compared(metric, paper, values) for metric, paper, values in numbers}


class Pair(NamedTuple):
    """Two rows that the paper orders clearly in a metric."""

    metric: str
    more: str
    less: str
    paper: float
    """By how much the paper has more in the first."""
    ours: float | None
    """By how much we have more in the first; None if one of them was not run."""

    @property
    def alike(self) -> bool:
        """Whether our runs have the same order."""
        return self.ours is not None and self.ours > 0


# ---- numbers -----------------------------------------------------------------------------------------------


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a summary.json in the paper's unit; None if it is not there or not a number."""
    value: Any = summary
    for name in metric.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) * {"MiB": 2**-20, "10^6": 1e-6, "%": 100.0}[unit_of_metric(metric)]


def unit_of_metric(metric: str) -> str:
    """The unit of a metric in tables."""
    if metric.endswith("scalars"):
        return "10^6"
    return "MiB" if metric.endswith("_bytes") else "%"


def tolerance(metric: str, number: float) -> float:
    """How far from the paper's number ours may be."""
    return POINTS if unit_of_metric(metric) == "%" else SHARE * abs(number)


def compared(metric: str, paper: Number | None, values: Sequence[float]) -> Compared:
    """A number of the paper and our values of it, seed by seed."""
    found = Compared(metric, paper, tuple(values))
    if not values:
        return found
    mean, deviation = over_seeds(values)
    found = found._replace(mean=mean, deviation=deviation)
    if paper is None:
        return found
    interval = paired_difference(values, [paper.mean] * len(values))[1:] if len(values) > 1 else None
    return found._replace(difference=mean - paper.mean, interval=interval)


def status_of(results: Sequence[RowResult]) -> Literal["reproduced", "not reproduced"] | None:
    """The status of a column after runs at the paper's scale; None: too few runs, or no numbers."""
    column = results[0].column
    least = 1 if len(column.seeds) == 1 else MIN_SEEDS
    has_numbers = any(number is not None for row in column.rows for number in row.numbers)
    complete = len(results) == len(column.rows) and all(each.seeds >= least for each in results)
    if not has_numbers or not complete:
        return None
    met = all(number.met for each in results for number in each.compared().values())
    return "reproduced" if met else "not reproduced"


# ---- the order of the rows ---------------------------------------------------------------------------------


def orderings(results: Sequence[RowResult]) -> list[Pair]:
    """All pairs of rows that the paper orders clearly, metric by metric."""
    numbers = [each.compared() for each in results]
    pairs = []
    for i, j in itertools.combinations(range(len(results)), 2):
        if _comparable(results[i], results[j]):
            labels = results[i].label, results[j].label
            found = [_pair(labels, numbers[i][metric], numbers[j][metric]) for metric in numbers[i]]
            pairs += [pair for pair in found if pair]
    return pairs


def _comparable(first: RowResult, second: RowResult) -> bool:
    if first.column.key == second.column.key:
        return True
    same = ("dataset", "backbone", "checkpoint")
    given = [{name: each.column.settings.get(name) for name in same} for each in (first, second)]
    return given[0] == given[1] and first.row[:2] == second.row[:2]


def _pair(labels: tuple[str, str], first: Compared, second: Compared) -> Pair | None:
    """Two rows in the paper's order; None if it has none, or not clearly."""
    if first.paper is None or second.paper is None:
        return None
    gap = first.paper.mean - second.paper.mean
    noise = (first.paper.deviation or 0.0) + (second.paper.deviation or 0.0)
    largest = max(abs(first.paper.mean), abs(second.paper.mean))
    if abs(gap) <= max(noise, tolerance(first.metric, largest)):
        return None
    ours = None if first.mean is None or second.mean is None else first.mean - second.mean
    if gap > 0:
        return Pair(first.metric, labels[0], labels[1], gap, ours)
    return Pair(first.metric, labels[1], labels[0], -gap, None if ours is None else -ours)


# ---- what is shown -----------------------------------------------------------------------------------------

HEAD = ("row", "metric", "paper", "ours", "seeds", "ours - paper", "95 % interval", "note")


def lines(results: Sequence[RowResult]) -> list[tuple[str, ...]]:
    """The cells of the table: its head, and a line for each row and metric. The column of notes is left out
    if there are none."""
    cells: list[tuple[str, ...]] = [HEAD]
    for result in results:
        for place, number in enumerate(result.compared().values()):
            cells.append((result.label, *_cells(number), "" if place else result.why))
    return cells if any(each.why for each in results) else [line[:-1] for line in cells]


def _cells(found: Compared) -> tuple[str, ...]:
    """The cells of a metric."""
    no_difference = found.difference is None or math.isnan(found.difference)
    return (
        f"{found.metric} ({unit_of_metric(found.metric)})",
        _paper(found.paper),
        _ours(found),
        str(len(found.values)),
        "-" if no_difference else f"{found.difference:+.2f}",
        "-" if found.interval is None else f"{found.interval[0]:+.2f} to {found.interval[1]:+.2f}",
    )


def _paper(number: Number | None) -> str:
    if number is None:
        return "-"
    return f"{number.mean:g}" if number.deviation is None else f"{number.mean:.2f} ± {number.deviation:.2f}"


def _ours(found: Compared) -> str:
    if found.mean is None:
        return "-"
    return f"{found.mean:.2f}" if len(found.values) == 1 else f"{found.mean:.2f} ± {found.deviation:.2f}"


def order_lines(pairs: Sequence[Pair]) -> list[str]:
    """Sentences about the order of the rows."""
    if not pairs:
        return ["The paper orders no two rows by a clear gap."]
    known = [pair for pair in pairs if pair.ours is not None]
    by_metric = {pair.metric: [each for each in known if each.metric == pair.metric] for pair in known}
    alike = _alike(known)
    said = [
        f"Of {len(known)} pairs of rows that the paper orders by a clear gap {alike} are ordered alike here."
    ]
    if len(by_metric) > 1:
        parts = [f"{metric} {_alike(mine)} of {len(mine)}" for metric, mine in by_metric.items()]
        said.append(f"By metric: {', '.join(parts)}.")
    if len(known) < len(pairs):
        said.append(f"Of {len(pairs) - len(known)} further pairs a row was not run.")
    return said


def _alike(pairs: Sequence[Pair]) -> int:
    return sum(pair.alike for pair in pairs)


def otherwise(pairs: Iterable[Pair]) -> list[str]:
    """A line for each pair that our runs order the other way."""
    return [
        f"{pair.metric}: {pair.more} above {pair.less} by {pair.paper:.2f} in the paper, {pair.ours:.2f} here"
        for pair in pairs
        if pair.ours is not None and not pair.alike
    ]


def markdown(title: str, notes: Sequence[str], results: Sequence[RowResult], claims: Sequence[str]) -> str:
    """All of it as Markdown."""
    pairs = orderings(results)
    parts = [f"# {title}", *notes, markdown_table(lines(results)), _escaped(" ".join(order_lines(pairs)))]
    for said, items in (("Ordered the other way:", otherwise(pairs)), ("The paper in words:", claims)):
        if items:
            parts += [said, "\n".join(f"- {_escaped(item)}" for item in items)]
    return "\n\n".join(parts) + "\n"


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its first row the head."""
    head, *body = [f"| {' | '.join(map(_escaped, row))} |" for row in cells]
    return "\n".join([head, f"|{'---|' * len(cells[0])}", *body])


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([|`*_<\[\\])", r"\\\1", text)


def as_json(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """The rows as table.json holds them."""
    return [
        {
            "column": each.column.name,
            "method": each.row.method,
            "options": each.row.options,
            "label": each.label,
            "seeds": each.seeds,
            "why": each.why,
            "metrics": {metric: _plain(number) for metric, number in each.compared().items()},
        }
        for each in results
    ]


def _plain(found: Compared) -> dict[str, Any]:
    numbers = {name: value for name, value in found._asdict().items() if name != "metric"}
    known = found.paper is not None and bool(found.values)
    return numbers | {
        "paper": found.paper and found.paper._asdict(),
        "unit": unit_of_metric(found.metric),
        "met": found.met if known else None,
    }
