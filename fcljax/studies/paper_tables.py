"""The numbers of a paper's tables beside ours. Pure; `papers.py` reads the paper's
numbers.

When a number is met: it lies in the 95 % interval of our mean (Student's t over two
seeds or more; the paper's own standard deviation has no part in it), or no further from
our mean than the tolerance: 1 point, or 2 % of a number of MiB or of parameters. A
column is `reproduced` if every number of every row is met, each row run at the paper's
scale with at least 3 seeds, or with one where the paper had one; `not reproduced` if
all rows were run with that many seeds and a number is not met. A column with fewer
runs, or without numbers, has no status.

When two rows are ordered: rows are compared within a column, and across columns if
method, options, data set and weights are the same. The paper orders two rows clearly in
a metric if its numbers differ by more than the tolerance and by more than the sum of
their standard deviations. Our runs order them alike if our means differ in the same
direction.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fcljax.results.comparison import over_seeds_text
from fcljax.results.metrics import over_seeds, paired_difference
from fcljax.results.run_folder import value_at
from fcljax.studies.papers import Column, Number, Row

MIN_SEEDS = 3  # of a row that is reproduced, where the paper had several runs
# The tolerance: points of a percentage, and a share of a number of MiB or parameters
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
        """Check whether ours meets the paper's number, by the rule above."""
        if self.paper is None or self.difference is None:
            return self.paper is None
        inside = self.interval is not None and self.interval[0] <= 0 <= self.interval[1]
        # 1e-9: rounding must not decide at the tolerance itself
        return inside or abs(self.difference) <= tolerance(self.metric, self.paper.mean) * (1 + 1e-9)


class RowResult(NamedTuple):
    """The outcome of a row."""

    column: Column
    row: Row
    values: tuple[tuple[float, ...], ...]
    """Our values of each metric, seed by seed, in the paper's unit."""
    seeds: int
    """Number of finished runs."""
    why: str = ""
    """Why there are fewer runs than were asked for, or none."""
    curves: tuple[tuple[float | None, ...], ...] = ()
    """Values of the table's figure over tasks or rounds, in %, per seed."""

    @property
    def label(self) -> str:
        """Return the row's name."""
        return self.column.label(self.row)

    def compared(self) -> dict[str, Compared]:
        """Return each metric's number of the paper beside ours."""
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
        """Check whether our runs have the same order."""
        return self.ours is not None and self.ours > 0


# ---- numbers ---------------------------------------------------------------------------


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of summary.json in the paper's unit; None if it is no number there."""
    # summaries are edited and older ones lack keys: whatever is no number has no value
    value = value_at(dict(summary), metric)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) * {"MiB": 2**-20, "10^6": 1e-6, "%": 100.0}[unit_of_metric(metric)]


def unit_of_metric(metric: str) -> str:
    """Return the unit of a metric in tables."""
    if metric.endswith("scalars"):
        return "10^6"
    if metric.endswith("_bytes"):
        return "MiB"
    return "%"


def tolerance(metric: str, number: float) -> float:
    """Return the allowed distance to the paper's number."""
    if unit_of_metric(metric) == "%":
        return POINTS
    return SHARE * abs(number)


def compared(metric: str, paper: Number | None, values: Sequence[float]) -> Compared:
    """Compare a number of the paper with our values, seed by seed."""
    number = Compared(metric, paper, tuple(values))
    if not values:
        return number
    mean, deviation = over_seeds(values)
    number = number._replace(mean=mean, deviation=deviation)
    if paper is None:
        return number
    # an interval needs two seeds; paired with the paper's mean as a constant, because
    # the paper's runs are not ours to pair
    interval = None
    if len(values) > 1:
        interval = paired_difference(values, [paper.mean] * len(values))[1:]
    return number._replace(difference=mean - paper.mean, interval=interval)


def status_of(
    results: Sequence[RowResult],
) -> Literal["reproduced", "not reproduced"] | None:
    """Return the status of a column after runs at the paper's scale; None: too few
    runs, or no numbers."""
    column = results[0].column
    # what the paper did with one seed cannot ask three of us
    min_seeds = MIN_SEEDS
    if len(column.seeds) == 1:
        min_seeds = 1
    has_numbers = any(number is not None for row in column.rows for number in row.numbers)
    complete = len(results) == len(column.rows) and all(result.seeds >= min_seeds for result in results)
    if not has_numbers or not complete:
        return None
    met = all(number.met for result in results for number in result.compared().values())
    if met:
        return "reproduced"
    return "not reproduced"


# ---- the order of the rows -------------------------------------------------------------


def orderings(results: Sequence[RowResult]) -> list[Pair]:
    """Return all pairs of rows that the paper orders clearly, metric by metric."""
    # before the loop, which visits every row in many pairs
    numbers = [result.compared() for result in results]
    pairs = []
    for i, j in itertools.combinations(range(len(results)), 2):
        if _comparable(results[i], results[j]):
            labels = results[i].label, results[j].label
            for metric in numbers[i]:
                pair = _pair(labels, numbers[i][metric], numbers[j][metric])
                if pair:
                    pairs.append(pair)
    return pairs


def _comparable(row: RowResult, other: RowResult) -> bool:
    """Check whether the order of two rows means something: same column, or the same
    method and options on the same images and weights."""
    if row.column.key == other.column.key:
        return True
    for name in ("dataset", "backbone", "checkpoint"):
        if row.column.settings.get(name) != other.column.settings.get(name):
            return False
    # method and options; the rest of a row are its numbers
    return row.row[:2] == other.row[:2]


def _pair(labels: tuple[str, str], left: Compared, right: Compared) -> Pair | None:
    """Return two rows in the paper's order; None if it has none, or not clearly."""
    if left.paper is None or right.paper is None:
        return None
    gap = left.paper.mean - right.paper.mean
    # a gap that the paper's own spread could explain is no claim to check; a paper that
    # prints no deviation is taken at its word
    noise = (left.paper.deviation or 0.0) + (right.paper.deviation or 0.0)
    largest = max(abs(left.paper.mean), abs(right.paper.mean))
    if abs(gap) <= max(noise, tolerance(left.metric, largest)):
        return None
    if gap < 0:
        labels = labels[1], labels[0]
        left, right = right, left
    ours = None
    if left.mean is not None and right.mean is not None:
        ours = left.mean - right.mean
    return Pair(left.metric, *labels, abs(gap), ours)


# ---- text ------------------------------------------------------------------------------

HEAD = ("row", "metric", "paper", "ours", "seeds", "ours - paper", "95 % interval", "note")


def lines(results: Sequence[RowResult]) -> list[tuple[str, ...]]:
    """Return the cells of the table: its head, and a line for each row and metric. The
    column of notes is left out if there are none."""
    cells: list[tuple[str, ...]] = [HEAD]
    for result in results:
        for i, number in enumerate(result.compared().values()):
            # the reason once per row, in the line of its first metric
            cells.append((result.label, *_cells(number), "" if i else result.why))
    if any(result.why for result in results):
        return cells
    return [line[:-1] for line in cells]


def _cells(number: Compared) -> tuple[str, ...]:
    """Return the cells of a metric."""
    no_difference = number.difference is None or math.isnan(number.difference)
    return (
        f"{number.metric} ({unit_of_metric(number.metric)})",
        _paper(number.paper),
        over_seeds_text(number.values, 2) if number.values else "-",
        str(len(number.values)),
        "-" if no_difference else f"{number.difference:+.2f}",
        "-" if number.interval is None else f"{number.interval[0]:+.2f} to {number.interval[1]:+.2f}",
    )


def _paper(number: Number | None) -> str:
    if number is None:
        return "-"
    if number.deviation is None:
        return f"{number.mean:g}"
    return f"{number.mean:.2f}±{number.deviation:.2f}"


def order_lines(pairs: Sequence[Pair]) -> list[str]:
    """Describe in sentences how our runs order the rows."""
    if not pairs:
        return ["The paper orders no two rows by a clear gap."]
    compared_pairs = [pair for pair in pairs if pair.ours is not None]
    by_metric: dict[str, list[Pair]] = {}
    for pair in compared_pairs:
        by_metric.setdefault(pair.metric, []).append(pair)
    sentences = [
        f"Of {len(compared_pairs)} pairs of rows that the paper orders by a clear gap "
        f"{_alike(compared_pairs)} have the same order here."
    ]
    if len(by_metric) > 1:
        parts = [f"{metric} {_alike(group)} of {len(group)}" for metric, group in by_metric.items()]
        sentences.append(f"By metric: {', '.join(parts)}.")
    if len(compared_pairs) < len(pairs):
        missing = len(pairs) - len(compared_pairs)
        sentences.append(f"In {missing} further pair{'' if missing == 1 else 's'} a row was not run.")
    return sentences


def _alike(pairs: Sequence[Pair]) -> int:
    """Count the pairs that our runs order as the paper does."""
    return sum(pair.alike for pair in pairs)


def otherwise(pairs: Iterable[Pair]) -> list[str]:
    """Return a line for each pair that our runs order the other way."""
    return [
        f"{pair.metric}: {pair.more} above {pair.less} by {pair.paper:.2f} in the paper, {pair.ours:.2f} here"
        for pair in pairs
        if pair.ours is not None and not pair.alike
    ]


def markdown(
    title: str,
    notes: Sequence[str],
    results: Sequence[RowResult],
    claims: Sequence[str],
) -> str:
    """Return title, notes, table and order as Markdown."""
    pairs = orderings(results)
    parts = [f"# {title}", *notes, markdown_table(lines(results)), _escaped(" ".join(order_lines(pairs)))]
    for heading, items in (
        ("Pairs in the opposite order:", otherwise(pairs)),
        ("The paper's claims:", claims),
    ):
        if items:
            parts += [heading, "\n".join(f"- {_escaped(item)}" for item in items)]
    return "\n\n".join(parts) + "\n"


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *body = [f"| {' | '.join(map(_escaped, row))} |" for row in cells]
    return "\n".join([head, f"|{'---|' * len(cells[0])}", *body])


def _escaped(text: str) -> str:
    """Escape text so that Markdown shows it as it is."""
    return re.sub(r"([|`*_<\[\\])", r"\\\1", text)


def as_json(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """Return the rows as table.json holds them."""
    return [
        {
            "column": result.column.name,
            "method": result.row.method,
            "options": result.row.options,
            "label": result.label,
            "seeds": result.seeds,
            "why": result.why,
            "metrics": {metric: _plain(number) for metric, number in result.compared().items()},
        }
        for result in results
    ]


def _plain(number: Compared) -> dict[str, Any]:
    numbers = {name: value for name, value in number._asdict().items() if name != "metric"}
    # `met` is true without a paper's number: in the file that would read as a success
    is_compared = number.paper is not None and bool(number.values)
    return numbers | {
        "paper": number.paper and number.paper._asdict(),
        "unit": unit_of_metric(number.metric),
        "met": number.met if is_compared else None,
    }
