"""Draw the figures of papers: our curves beside the paper's numbers, where it prints
some."""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fcljax.results import figures
from fcljax.results.comparison import percent
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


def curve_of(
    figure: FigureEntry | None,
    summary: Summary,
    run: Path,
) -> tuple[float | None, ...]:
    """Return a run's values over tasks or rounds, in %; () for a figure over an option.

    Args:
      figure: what it shows.
      summary: of the run.
      run: its directory, whose metrics.jsonl has the rounds.
    """
    if figure is None or figure.x not in OVER:
        return ()
    if figure.x == "rounds":
        return tuple(percent(line.get("A")) for line in read_lines(run / "metrics.jsonl"))
    if figure.learned:
        matrix = summary["accuracy"]
        # task by task, one curve after the other; `_over_time` takes them apart
        return tuple(percent(row[task - 1]) for task in figure.learned for row in matrix)
    return tuple(map(percent, summary["A"]))


def lines(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Line]:
    """Return the lines of rows that were run or that have the paper's numbers, by name."""
    by_name = _over_time(figure, results) if figure.x in OVER else _over_option(figure.x, results)
    return {
        name: line
        for name, line in by_name.items()
        if any(value is not None for value in (*line.ours, *line.paper))
    }


def _over_time(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Line]:
    """Return a line for each row, or for each row and learned task."""
    suffixes = [f", task {task}" for task in figure.learned] or [""]
    by_name = {}
    for result in results:
        mean = _mean(result.curves)
        # the paper may print more or fewer steps than we have played
        paper = result.row.curve
        # curve_of puts the curves of the learned tasks one after the other
        size = len(mean) // len(suffixes)
        for i, suffix in enumerate(suffixes):
            ours = mean[i * size : (i + 1) * size]
            length = max(len(ours), len(paper))
            steps = tuple(float(step) for step in range(1, length + 1))
            by_name[result.label + suffix] = Line(steps, _padded(ours, length), _padded(paper, length))
    return by_name


def _padded(values: Sequence[float | None], length: int) -> tuple[float | None, ...]:
    return (*values, *[None] * (length - len(values)))


def _mean(curves: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """Return the mean over the seeds, None where one of them has no value."""
    return tuple(
        None if None in values else float(np.mean(np.array(values, float)))
        for values in zip(*curves, strict=False)
    )


def _over_option(option: str, results: Sequence[RowResult]) -> dict[str, Line]:
    """Return a line over the option's values for each method and its settings besides
    the option."""
    points: dict[str, list[tuple[float, float | None, float | None]]] = {}
    for result in results:
        x = _value(result.column, result.row, option)
        # rows without a number on this axis have no point
        if x is not None:
            number = next(iter(result.compared().values()))
            paper = None
            if number.paper:
                paper = number.paper.mean
            name = _name(result.column, result.row, option)
            points.setdefault(name, []).append((x, number.mean, paper))
    ordered = {name: sorted(line, key=operator.itemgetter(0)) for name, line in points.items()}
    return {name: Line(*zip(*line, strict=True)) for name, line in ordered.items()}


def _value(column: Column, row: Row, option: str) -> float | None:
    """Return a row's value of an option that has numbers; None for any other."""
    value = {**column.settings, **row.options}.get(option)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _name(column: Column, row: Row, option: str) -> str:
    """Return a row's method and its settings besides the option."""
    varied = {}
    if column.name:
        varied = column.entry.columns[column.name].settings
    settings = {**varied, **row.options}
    # what varies along the axis is no part of the name
    settings.pop(option, None)
    return " ".join([row.method, *words_of(settings)])


# ---- drawing ---------------------------------------------------------------------------


def draw_figure(figure: FigureEntry, results: Sequence[RowResult]) -> Figure | None:
    """Draw our lines with markers and the paper's numbers dashed in the same colour;
    None if there is nothing to draw."""
    by_name = lines(figure, results)
    if not by_name:
        return None
    metric = results[0].column.metrics[0]
    ylabel = "Accuracy (%)"
    if figure.x not in OVER:
        ylabel = f"{metric} ({unit_of_metric(metric)})"
    drawing = figures.new_figure(*figures.beside_legend(4.4, len(by_name)))
    axes = drawing.add_subplot()
    axes.set(xlabel=f"{figure.x} (dashed: the paper)", ylabel=ylabel)
    for i, (name, line) in enumerate(by_name.items()):
        style = figures.curve_style(i)
        # as floats, None is a gap in the line
        axes.plot(line.x, np.array(line.ours, float), label=figures.words(name), **style)
        axes.plot(
            line.x, np.array(line.paper, float), **style | {"linestyle": "--", "marker": "", "alpha": 0.6}
        )
    values = sorted({x for line in by_name.values() for x in line.x})
    # options such as learning rates are chosen on a logarithmic scale
    if figure.x not in OVER and values[0] > 0 and values[-1] / values[0] >= 20:
        axes.set_xscale("log")
    axes.grid(axis="y", color=figures.GRID, linewidth=0.8)
    figures.open_frame(axes)
    drawing.legend(loc="outside right upper", frameon=False)
    return drawing


def as_json(figure: FigureEntry, results: Sequence[RowResult]) -> dict[str, Any]:
    """Return the figure's numbers, for table.json."""
    return {"x": figure.x, "lines": {name: line._asdict() for name, line in lines(figure, results).items()}}
