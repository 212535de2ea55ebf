"""The tables of papers: what the files of experiments/ say of them, and what our runs say to that. Pure.

A file holds the settings of one or more rows of a table, as `fcljax run METHOD --config FILE` reads them. The
comment at its top tells the rest, a field to a line:

    # FPPL on ImageNet-R, 20 tasks                     the title
    # source: the paper and its table
    # metrics: A_avg A_last forgetting.released        as summary.json names them, with a dot where it nests
    # row: fppl = 74.33+-0.37 70.84+-0.15 -            METHOD [OPTIONS] = the paper's numbers of these metrics
    # row: fedavg --lr 5e-5 = 54.75+-2.60 46.78 -      - where it has none; +- where it says a deviation
    # claim: what the paper says in words              may be left out
    # note: what else is to be known                  may be left out
    # upload: what a client sends
    # seeds: 2023, 2024, 2025                          as many as the paper has runs
    # status: unverified                               or: reproduced, not reproduced
    # cost: not measured
    # run: fcljax run fppl --config experiments/...    the row of the paper's own method

Accuracies and forgetting are in %, metrics that end with _bytes in MiB. A file is named SYSTEM_TABLE.yaml or
SYSTEM_TABLE_COLUMN.yaml.

What counts as met. A number of the paper is met if it lies in the 95 % interval of our mean (Student's t
over two seeds or more; the paper's own deviation has no part in it) or no further from our mean than the
tolerance: 1 point, or 2 % of a number of MiB. A file is `reproduced` if every number of every row is met,
each row run at the paper's scale with at least 3 seeds, or with one where the paper had one; else, if all
rows were run with that many seeds, `not reproduced`. A file of which less was run, or that has no numbers,
stays as it was.

What counts as ordered. Two rows are compared if they stand in one file, or are the same method with the same
options in two files with the same data set and weights. The paper orders them clearly in a metric if its
numbers differ by more than the tolerance and by more than the sum of their deviations. They are ordered alike
here if our means differ in the same direction.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcljax.errors import InputError
from fcljax.results.metrics import over_seeds, paired_difference

MARK = "# metrics: "  # a file whose header has it is one of experiments/
FIELDS = ("source", "metrics", "row", "claim", "note", "upload", "seeds", "status", "cost", "run")
MANY = ("row", "claim", "note")  # of which a header may have several
NEEDED = ("source", "metrics", "row", "upload", "seeds", "status", "cost", "run")
STATUS = ("unverified", "reproduced", "not reproduced")
LEAST_SEEDS = 3  # of a row that is reproduced, where the paper had several runs
POINTS, SHARE = 1.0, 0.02  # the tolerance, in points and of a size
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?:\+-(\d+(?:\.\d+)?))?")


class Number(NamedTuple):
    """What the paper says of a metric: % or MiB, with its deviation if it tells it."""

    mean: float
    deviation: float | None


class Row(NamedTuple):
    """A row: the method, its options as they are typed, and the paper's number of each metric of the file."""

    method: str
    options: tuple[str, ...]
    numbers: tuple[Number | None, ...]

    def words(self) -> str:
        """Method and options as they are typed."""
        return shlex.join((self.method, *self.options))


class Table(NamedTuple):
    """A file of experiments/: its header, and the settings that its rows share."""

    path: str
    title: str
    fields: Mapping[str, str]  # those that come once
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    claims: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]

    @property
    def name(self) -> tuple[str, str, str]:
        """As `name_of`."""
        return name_of(self.path)

    def label(self, row: Row) -> str:
        """A row's name in a table of all files."""
        column = self.name[2]
        return f"{row.words()} [{column}]" if column else row.words()


class Result(NamedTuple):
    """What became of a row: our values of each metric, seed by seed, in the paper's unit, and why there are
    none or fewer than were asked for."""

    table: Table
    row: Row
    values: tuple[tuple[float, ...], ...]
    seeds: int  # with which it was run to the end
    why: str = ""

    @property
    def label(self) -> str:
        """Its name."""
        return self.table.label(self.row)


class Compared(NamedTuple):
    """A number of the paper beside ours: mean and population standard deviation over the seeds, ours minus
    the paper's, and the 95 % interval of that. None: there is no such thing."""

    paper: Number | None
    mean: float | None
    deviation: float | None
    difference: float | None
    interval: tuple[float, float] | None


class Pair(NamedTuple):
    """Two rows that the paper orders clearly: by how much it has more of the metric in the first, and by how
    much we have (None: one of them was not run)."""

    metric: str
    more: str
    less: str
    paper: float
    ours: float | None

    @property
    def alike(self) -> bool:
        """Do our runs have the same order?"""
        return self.ours is not None and self.ours > 0


def name_of(path: str | Path) -> tuple[str, str, str]:
    """(system, table, column) of a file, as its name has them; the column may be empty."""
    system, _, rest = Path(path).stem.partition("_")
    table, _, column = rest.partition("_")
    return system, table, column


# ---- headers -----------------------------------------------------------------------------------------------


def parse(path: str, text: str, settings: Mapping[str, Any]) -> Table:
    """A file of experiments/ from its text and its settings.

    Raises:
      InputError: naming the file, the line and what is wrong with it.
    """
    title, lines = _header(path, text)
    found = {field: [value for name, value in lines if name == field] for field in FIELDS}
    for field, values in found.items():
        if field in NEEDED and not values:
            raise InputError(f"{path}: the header has no line '# {field}: ...'")
        if field not in MANY and len(values) > 1:
            raise InputError(f"{path}: {field}: {len(values)} lines of it; nearest: 1")
    once = {field: values[0] for field, values in found.items() if values and field not in MANY}
    if once["status"] not in STATUS:
        raise InputError(f"{path}: status: {once['status']!r} is none of {', '.join(STATUS)}")
    metrics = tuple(once["metrics"].split())
    rows = tuple(_row(path, line, len(metrics)) for line in found["row"])
    if len({row.words() for row in rows}) < len(rows):
        raise InputError(f"{path}: row: two rows have the same method and options")
    seeds = once["seeds"].replace(" ", "").split(",")
    if not all(seed.isascii() and seed.isdigit() for seed in seeds):
        raise InputError(f"{path}: seeds: {once['seeds']!r} is no list such as 2023, 2024")
    return Table(path, title, once, metrics, rows, tuple(found["claim"]), tuple(map(int, seeds)), settings)


def _header(path: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The title, and (field, value) of the lines after it."""
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    title, *rest = comments or [""]
    lines = []
    for line in rest:
        field, colon, value = line.partition(": ")
        if not colon or field not in FIELDS:
            raise InputError(f"{path}: {line!r} is no line of a header; it has {', '.join(FIELDS)}")
        lines.append((field, value.strip()))
    return title, lines


def _row(path: str, line: str, count: int) -> Row:
    words, _, numbers = line.rpartition(" = ")
    try:
        method, *options = shlex.split(words) or [""]
    except ValueError:  # a quote that does not end
        method, options = "", []
    if not method:
        raise InputError(f"{path}: row: {line!r} is not METHOD [OPTIONS] = NUMBERS")
    read = tuple(_number(path, word) for word in numbers.split())
    if len(read) != count:
        raise InputError(f"{path}: row: {line!r} has {len(read)} numbers of {count} metrics")
    return Row(method, tuple(options), read)


def _number(path: str, word: str) -> Number | None:
    if word == "-":
        return None
    found = NUMBER.fullmatch(word)
    if not found:
        raise InputError(f"{path}: row: {word!r} is no number such as 74.33+-0.37, and not -")
    return Number(float(found[1]), float(found[2]) if found[2] else None)


def with_status(text: str, status: str, cost: str) -> str:
    """A file's text with these two lines in place of its own."""
    new = {"# status: ": status, "# cost: ": cost}
    lines = []
    for line in text.splitlines():
        start = next((start for start in new if line.startswith(start)), None)
        lines.append(start + new[start] if start else line)
    return "\n".join(lines) + "\n"


# ---- numbers -----------------------------------------------------------------------------------------------


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a summary.json in the paper's unit; None if it is not there or not a number."""
    value: Any = summary
    for name in metric.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) / 2**20 if _is_size(metric) else 100 * float(value)


def unit(metric: str) -> str:
    """In which unit a metric stands in tables."""
    return "MiB" if _is_size(metric) else "%"


def _is_size(metric: str) -> bool:
    return metric.endswith("_bytes")


def tolerance(metric: str, number: float) -> float:
    """How far from the paper's number ours may be."""
    return SHARE * abs(number) if _is_size(metric) else POINTS


def compared(paper: Number | None, values: Sequence[float]) -> Compared:
    """A number of the paper and our values of it, seed by seed."""
    if not values:
        return Compared(paper, None, None, None, None)
    mean, deviation = over_seeds(values)
    if paper is None:
        return Compared(None, mean, deviation, None, None)
    interval = None
    if len(values) > 1:
        interval = paired_difference(values, [paper.mean] * len(values))[1:]
    return Compared(paper, mean, deviation, mean - paper.mean, interval)


def met(metric: str, found: Compared) -> bool:
    """Is the paper's number what we have? The rule stands above."""
    if found.paper is None:
        return True
    if found.difference is None:
        return False
    inside = found.interval is not None and found.interval[0] <= 0 <= found.interval[1]
    return inside or abs(found.difference) <= tolerance(metric, found.paper.mean) * (1 + 1e-9)


def status_of(results: Sequence[Result]) -> str | None:
    """The status that all rows of a file, run at the paper's scale, give it; None: it stays as it was."""
    table = results[0].table
    least = 1 if len(table.seeds) == 1 else LEAST_SEEDS
    numbers = [number for row in table.rows for number in row.numbers if number is not None]
    if not numbers or {each.row for each in results} != set(table.rows):
        return None
    if any(each.seeds < least for each in results):
        return None
    every = [
        met(metric, compared(number, values))
        for each in results
        for metric, number, values in zip(table.metrics, each.row.numbers, each.values, strict=True)
    ]
    return "reproduced" if all(every) else "not reproduced"


# ---- the order of the rows ---------------------------------------------------------------------------------


def orderings(results: Sequence[Result]) -> list[Pair]:
    """All pairs of rows that the paper orders clearly, metric by metric."""
    pairs = []
    for first, second in itertools.combinations(results, 2):
        if _comparable(first, second):
            pairs += [pair for metric in first.table.metrics if (pair := _pair(metric, first, second))]
    return pairs


def _comparable(first: Result, second: Result) -> bool:
    if first.table.path == second.table.path:
        return True
    same = ("dataset", "backbone", "checkpoint")
    given = [{name: each.table.settings.get(name) for name in same} for each in (first, second)]
    return given[0] == given[1] and first.row[:2] == second.row[:2]


def _pair(metric: str, first: Result, second: Result) -> Pair | None:
    """The two rows in the paper's order; None if it has none, or not clearly."""
    if metric not in second.table.metrics:
        return None
    ours, theirs = _number_of(metric, first), _number_of(metric, second)
    if ours is None or theirs is None:
        return None
    gap = ours.mean - theirs.mean
    noise = (ours.deviation or 0.0) + (theirs.deviation or 0.0)
    if abs(gap) <= max(noise, tolerance(metric, max(abs(ours.mean), abs(theirs.mean)))):
        return None
    more, less = (first, second) if gap > 0 else (second, first)
    means = [_mean_of(metric, each) for each in (more, less)]
    found = None if means[0] is None or means[1] is None else means[0] - means[1]
    return Pair(metric, more.label, less.label, abs(gap), found)


def _number_of(metric: str, result: Result) -> Number | None:
    return result.row.numbers[result.table.metrics.index(metric)]


def _mean_of(metric: str, result: Result) -> float | None:
    values = result.values[result.table.metrics.index(metric)]
    return over_seeds(values)[0] if values else None


# ---- what is shown -----------------------------------------------------------------------------------------

HEAD = ("row", "metric", "paper", "ours", "seeds", "ours - paper", "95 % interval", "note")


def lines(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table: its head, and a line for each row and metric. Without the column of notes if
    there are none."""
    cells = [HEAD, *_cells(results)]
    return cells if any(each.why for each in results) else [line[:-1] for line in cells]


def _cells(results: Iterable[Result]) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for result in results:
        metrics = zip(result.table.metrics, result.row.numbers, result.values, strict=True)
        for place, (metric, number, values) in enumerate(metrics):
            found = compared(number, values)
            told = (
                result.label,
                f"{metric} ({unit(metric)})",
                _paper(number),
                _ours(found, len(values)),
                str(len(values)),
                _signed(found.difference),
                _interval(found.interval),
                result.why if place == 0 else "",
            )
            cells.append(told)
    return cells


def _paper(number: Number | None) -> str:
    if number is None:
        return "-"
    return f"{number.mean:g}" if number.deviation is None else f"{number.mean:.2f} ± {number.deviation:.2f}"


def _ours(found: Compared, count: int) -> str:
    if found.mean is None:
        return "-"
    return f"{found.mean:.2f}" if count == 1 else f"{found.mean:.2f} ± {found.deviation:.2f}"


def _signed(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:+.2f}"


def _interval(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:+.2f} to {found[1]:+.2f}"


def order_lines(pairs: Sequence[Pair]) -> list[str]:
    """What is to be said of the order of the rows."""
    known = [pair for pair in pairs if pair.ours is not None]
    if not pairs:
        return ["The paper orders no two rows by a clear gap."]
    alike = sum(pair.alike for pair in known)
    told = [
        f"Of {len(known)} pairs of rows that the paper orders by a clear gap {alike} are ordered alike here."
    ]
    metrics = dict.fromkeys(pair.metric for pair in known)
    if len(metrics) > 1:
        told.append(f"By metric: {', '.join(_alike(metric, known) for metric in metrics)}.")
    if len(known) < len(pairs):
        told.append(f"Of {len(pairs) - len(known)} further pairs a row was not run.")
    return told


def _alike(metric: str, pairs: Sequence[Pair]) -> str:
    mine = [pair for pair in pairs if pair.metric == metric]
    return f"{metric} {sum(pair.alike for pair in mine)} of {len(mine)}"


def otherwise(pairs: Iterable[Pair]) -> list[str]:
    """The pairs that our runs order in another way, a line each."""
    return [
        f"{pair.metric}: {pair.more} above {pair.less} by {pair.paper:.2f} in the paper, {pair.ours:.2f} here"
        for pair in pairs
        if pair.ours is not None and not pair.alike
    ]


def markdown(title: str, notes: Sequence[str], results: Sequence[Result], claims: Sequence[str]) -> str:
    """All of it as Markdown."""
    pairs = orderings(results)
    parts = [f"# {title}", *notes, _grid(lines(results)), _cell(" ".join(order_lines(pairs)))]
    different = otherwise(pairs)
    if different:
        parts += ["Ordered in another way:", "\n".join(f"- {_cell(line)}" for line in different)]
    if claims:
        parts += ["The paper in words:", "\n".join(f"- {_cell(claim)}" for claim in claims)]
    return "\n\n".join(parts) + "\n"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])


def _cell(text: str) -> str:
    """Text of which Markdown makes nothing else."""
    return re.sub(r"([|`*_<\[\\])", r"\\\1", text)


def plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The rows as table.json holds them."""
    return [
        {
            "file": Path(each.table.path).name,
            "method": each.row.method,
            "options": list(each.row.options),
            "label": each.label,
            "seeds": each.seeds,
            "why": each.why,
            "metrics": {
                metric: compared(number, values)._asdict()
                | {
                    "paper": number and number._asdict(),
                    "unit": unit(metric),
                    "values": values,
                    "met": None if number is None or not values else met(metric, compared(number, values)),
                }
                for metric, number, values in zip(
                    each.table.metrics, each.row.numbers, each.values, strict=True
                )
            },
        }
        for each in results
    ]
