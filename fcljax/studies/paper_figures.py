"""The figures of papers that are runs: our curves beside the paper's numbers, where it prints some."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fcljax.results import figures
from fcljax.results.run_folder import Summary, read_lines
from fcljax.studies.paper_tables import RowResult, unit_of_metric
from fcljax.studies.papers import Column, FigureEntry, Row, words_of

OVER = ("tasks", "rounds")
"""What x may be besides an option."""


class Line(NamedTuple):
    """A line of a figure, in the unit of its metric."""

    x: tuple[float, ...]
    ours: tuple[float | None, ...]
    """Our mean over the seeds; None where there is none."""
    paper: tuple[float | None, ...]
    """The paper's; None where it prints none."""


def curve_of(figure: FigureEntry | None, summary: Summary, run: Path) -> tuple[float | None, ...]:
    """What a figure over tasks or rounds shows of a run, in %; () for another one.

    Args:
      figure: what it shows.
      summary: of the run.
      run: its directory, whose metrics.jsonl has the rounds.
    """
    if figure is None or figure.x not in OVER:
        return ()
    if figure.x == "rounds":
        return tuple(_percent(line.get("A")) for line in read_lines(run / "metrics.jsonl"))
    if figure.learned:
        matrix = summary["accuracy"]
        return tuple(_percent(row[task - 1]) for task in figure.learned for row in matrix)
    return tuple(map(_percent, summary["A"]))


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def lines(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Line]:
    """Name -> line, of the rows that were run or that the paper has numbers of."""
    found = _over_time(figure, results) if figure.x in OVER else _over_option(figure.x, results)
    drawn = {name: (*line.ours, *line.paper) for name, line in found.items()}
    return {name: line for name, line in found.items() if any(value is not None for value in drawn[name])}


def _over_time(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Line]:
    """A line for each row, or for each row and learned task."""
    names = [f", task {task}" for task in figure.learned] or [""]
    found = {}
    for each in results:
        mean = _mean(each.curves)
        size = len(mean) // len(names)
        for place, name in enumerate(names):
            ours = mean[place * size : (place + 1) * size]
            length = max(len(ours), len(each.row.curve))
            steps = tuple(float(step) for step in range(1, length + 1))
            found[each.label + name] = Line(steps, _padded(ours, length), _padded(each.row.curve, length))
    return found


def _padded(values: Sequence[float | None], length: int) -> tuple[float | None, ...]:
    return (*values, *[None] * (length - len(values)))


def _mean(curves: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """The mean over the seeds, None where one of them has no value."""
    columns = zip(*curves, strict=False)
    return tuple(_mean_of([value for value in each if value is not None], len(each)) for each in columns)


def _mean_of(known: Sequence[float], seeds: int) -> float | None:
    return float(np.mean(known)) if len(known) == seeds else None


def _over_option(option: str, results: Sequence[RowResult]) -> dict[str, Line]:
    """A line for each method and setting besides the option, over its values."""
    points: dict[str, list[tuple[float, float | None, float | None]]] = {}
    for each in results:
        x = _value(each.column, each.row, option)
        if x is not None:
            first = next(iter(each.compared().values()))
            paper = None if first.paper is None else first.paper.mean
            points.setdefault(_name(each.column, each.row, option), []).append((x, first.mean, paper))
    return {name: _line(sorted(each, key=_first)) for name, each in points.items()}


def _first(point: tuple[float, float | None, float | None]) -> float:
    return point[0]


def _line(points: Sequence[tuple[float, float | None, float | None]]) -> Line:
    x, ours, paper = zip(*points, strict=True)
    return Line(x, ours, paper)


def _value(column: Column, row: Row, option: str) -> float | None:
    """A row's value of an option that has numbers."""
    value = {**column.settings, **row.options}.get(option)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _name(column: Column, row: Row, option: str) -> str:
    """A row's method and settings besides the option."""
    own = column.entry.columns[column.name].settings if column.name else {}
    others = {name: value for name, value in {**own, **row.options}.items() if name != option}
    return " ".join([row.method, *words_of(others)])


# ---- drawing -----------------------------------------------------------------------------------------------


def draw_figure(figure: FigureEntry, results: Sequence[RowResult]) -> Figure | None:
    """The figure: our lines with markers, the paper's numbers dashed in the same colour; None if there is
    nothing to draw."""
    found = lines(figure, results)
    if not found:
        return None
    metric = results[0].column.metrics[0]
    y = "Accuracy (%)" if figure.x in OVER else f"{metric} ({unit_of_metric(metric)})"
    drawn = figures.new_figure(9.6, max(4.4, 0.8 + 0.22 * len(found)))
    axes = drawn.add_subplot()
    axes.set(xlabel=f"{figure.x} (dashed: the paper)", ylabel=y)
    for i, (name, line) in enumerate(found.items()):
        style = figures.curve_style(i)
        axes.plot(line.x, _floats(line.ours), label=figures.words(name), **style)
        axes.plot(line.x, _floats(line.paper), **style | {"linestyle": "--", "marker": "", "alpha": 0.6})
    values = sorted({x for line in found.values() for x in line.x})
    if figure.x not in OVER and values[0] > 0 and values[-1] / values[0] >= 20:
        axes.set_xscale("log")
    axes.grid(axis="y", color=figures.GRID, linewidth=0.8)
    figures.open_frame(axes)
    drawn.legend(loc="outside right upper", frameon=False)
    return drawn


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


def as_json(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Any]:
    """The figure's numbers, for table.json."""
    return {"x": figure.x, "lines": {name: line._asdict() for name, line in lines(figure, results).items()}}
