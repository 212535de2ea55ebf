"""Draw figures of finished runs, and save them.

Figures are matplotlib's own objects, never pyplot, so nothing global is touched. A file
is written to a temporary name in its folder and then renamed, so a reader never finds
half a file.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Num, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from fcljax.errors import InputError, one_line
from fcljax.files import atomic
from fcljax.results.run_folder import Number

# Okabe and Ito's colours, which are distinct under the common colour blindnesses; without
# their yellow, which is too faint on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX<>p"
LINES = ("-", "--", ":", "-.")
INK = "#333333"
GRID = "#DDDDDD"
MAX_NUMBERED_TASKS = 12  # larger matrices get a colour bar instead of numbers
MAX_NAME = 80  # characters of a run's name in a legend
INSIDE = 6  # most names of a legend that curves leave room for
# beyond this bubbles overlap, and a heat map reads better
MAX_BUBBLE_CLASSES = 40

# format -> what a file must not say of when and with what it was made
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}

Series = Mapping[str, Sequence | np.ndarray]


def check_format(path: str | Path) -> str:
    """Return the format of a figure's file.

    Raises:
      InputError: for a name that ends otherwise.
    """
    path = Path(path)
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        choices = ", ".join(f".{name}" for name in FORMATS)
        nearest = str(path.with_suffix(".png"))
        raise InputError(f"out: {str(path)!r} is not a figure's name ({choices}); nearest: {nearest!r}")
    return form


def save(path: str | Path, figure: Figure) -> Path:
    """Write a figure in the format that its name ends with; the same figure gives the
    same bytes.

    Raises:
      InputError: as `check_format`.
    """
    path = Path(path)
    form = check_format(path)
    settings = {"svg.hashsalt": "fcljax"}  # or the ids of an SVG are random
    with atomic(path) as temporary, warnings.catch_warnings(), matplotlib.rc_context(settings):
        # matplotlib warns of each letter that its font lacks, such as in a user's class
        # name
        warnings.filterwarnings("ignore", message="Glyph")
        # and of a place for the legend that it took a second to find, as on a busy machine
        warnings.filterwarnings("ignore", message="Creating legend")
        figure.savefig(temporary, format=form, metadata=FORMATS[form])
    return path


def accuracy_curve(
    runs: Series,
    spread: Series | None = None,
    legend: bool = True,
) -> Figure:
    """Draw A_t over tasks, one line per run.

    A run of a single task, such as training on all classes at once, is a level beside
    runs of several.

    Args:
      runs: name -> A [T], fractions; lengths may differ.
      spread: name -> half width [T] of a band around the line of that name.
      legend: whether to add one. Line i has the gid `curve c{i}`, its band `band c{i}`.
    """
    size = (7.2, 4.4)
    at_side = legend and len(runs) > INSIDE
    if at_side:
        size = beside_legend(4.4, len(runs))
    figure = new_figure(*size)
    axes = figure.add_subplot()
    longest = max((len(values) for values in runs.values()), default=0)
    for i, (name, values) in enumerate(runs.items()):
        # one point among curves would say that the run knows only the first task
        percent = 100 * np.asarray(values, float)
        if len(percent) == 1 < longest:
            axes.axhline(percent[0], label=words(name), gid=f"curve c{i}", **level_style(i))
            continue
        tasks = np.arange(1, len(percent) + 1)
        (line,) = axes.plot(tasks, percent, label=words(name), gid=f"curve c{i}", **curve_style(i))
        if spread and name in spread:
            half = 100 * np.asarray(spread[name], float)
            # no accuracy lies outside of 0 to 100, whatever the deviation
            low = np.clip(percent - half, 0, 100)
            high = np.clip(percent + half, 0, 100)
            band = {"alpha": 0.18, "linewidth": 0, "gid": f"band c{i}"}
            axes.fill_between(tasks, low, high, color=line.get_color(), **band)
    axes.set(xlabel="Tasks learned", ylabel="Average accuracy $A_t$ (%)", xlim=(0.6, max(longest, 1) + 0.4))
    axes.set_xticks(_ticks(longest))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    open_frame(axes)
    if at_side:
        figure.legend(loc="outside right upper", frameon=False)
    elif runs and legend:
        axes.legend(frameon=False)
    return figure


def beside_legend(height: float, names: int) -> tuple[float, float]:
    """Return width and height in inches of a figure with a legend at its side: at least
    `height`, and high enough for so many names."""
    return 9.6, max(height, 0.4 + 0.215 * names)


def curve_style(i: int) -> dict[str, Any]:
    """Return the style of the line of run i; 20 runs differ without their colours too."""
    return {
        "color": PALETTE[i % len(PALETTE)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i // len(PALETTE) % len(LINES)],
        "linewidth": 1.8,
        "markersize": 6.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def level_style(i: int) -> dict[str, Any]:
    """Return the style of a horizontal line for run i, in the colour of its curve."""
    return {
        "color": PALETTE[i % len(PALETTE)],
        "linestyle": LINES[1 + i // len(PALETTE) % 3],
        "linewidth": 1.4,
    }


def scatter(
    points: Mapping[str, tuple[Number, Number]],
    xlabel: str,
    ylabel: str,
    legend: bool = False,
    levels: Mapping[str, Number] = MappingProxyType({}),
) -> Figure:
    """Draw a marker for each name. x is on a logarithmic axis, so only points with x >
    0 are drawn.

    Args:
      points: name -> (x, y). Point i has the gid `point p{i}`.
      xlabel: what x is.
      ylabel: what y is.
      legend: whether the figure names the points; it then grows with their number.
      levels: name -> y of a horizontal line, for what has no x.
    """
    size = (7.2, 3.6)
    if legend:
        size = beside_legend(3.6, len(points) + len(levels))
    figure = new_figure(*size)
    axes = figure.add_subplot()
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.8)
    open_frame(axes)
    for i, (name, (x, y)) in enumerate(points.items()):
        if x > 0:  # which a logarithmic axis has
            style = curve_style(i) | {"linestyle": "none"}
            axes.plot([x], [y], gid=f"point p{i}", label=words(name), **style)
    for i, (name, y) in enumerate(levels.items(), len(points)):
        axes.axhline(y, label=words(name), **level_style(i))
    if legend and (points or levels):
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def accuracy_matrix(matrix: Sequence | np.ndarray) -> Figure:
    """Draw the accuracy matrix [T, T] as a heat map, with numbers up to 12 tasks.

    It holds fractions, and NaN or None above the diagonal.
    """
    percent = 100 * np.array(matrix, dtype=float)
    tasks = len(percent)
    side = min(max(3.6, 0.62 * tasks + 1.4), 9.0)
    figure = new_figure(side + 0.9, side)
    axes = figure.add_subplot()
    axes.set_facecolor("#F2F2F2")
    image = axes.imshow(np.ma.masked_invalid(percent), cmap="viridis", vmin=0, vmax=100)
    if tasks <= MAX_NUMBERED_TASKS:
        for t, i in np.argwhere(~np.isnan(percent)):
            # viridis is dark below and bright above
            ink = "white"
            if percent[t, i] > 55:
                ink = "black"
            axes.text(i, t, f"{percent[t, i]:.1f}", ha="center", va="center", fontsize=9, color=ink)
    ticks = np.array(_ticks(tasks))
    axes.set_xticks(ticks - 1, ticks)
    axes.set_yticks(ticks - 1, ticks)
    axes.set(xlabel="Accuracy on task", ylabel="After learning task")
    figure.colorbar(image, label="Accuracy (%)", shrink=0.85)
    return figure


def reliability(calibration: Mapping[str, Any]) -> Figure:
    """Draw the reliability diagram: the accuracy in each bin of confidence, the
    diagonal where the two would be equal, and below the share of the images that each
    bin has.

    Args:
      calibration: as `metrics.Calibration.to_json` gives it. The bars of accuracy have
        the gid `bins`, those below `shares`.
    """
    examples = np.array(calibration["examples"], float)
    accuracy = np.array(calibration["accuracy"], float)
    edges = np.linspace(0, 1, len(examples) + 1)
    figure = new_figure(4.6, 5.2)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    has_examples = examples > 0
    error = "unknown"
    if calibration["ece"] is not None:
        error = f"{100 * calibration['ece']:.1f} %"
    bars = {"width": 1 / len(examples), "align": "edge", "edgecolor": "white", "linewidth": 0.6}
    upper.bar(edges[:-1][has_examples], 100 * accuracy[has_examples], color=PALETTE[0], gid="bins", **bars)
    upper.plot([0, 1], [0, 100], color="#555555", linestyle="--", linewidth=1)
    upper.set(ylabel="Accuracy (%)", ylim=(0, 100), title=f"ECE {error}")
    lower.bar(edges[:-1], 100 * examples / max(examples.sum(), 1), color="#999999", gid="shares", **bars)
    lower.set(xlabel="Confidence", ylabel="Images (%)", xlim=(0, 1))
    for axes in (upper, lower):
        open_frame(axes)
    return figure


def class_counts(
    counts: Num[np.ndarray, "K C"],
    tasks: Sequence | np.ndarray | None = None,
) -> Figure:
    """Draw the classes of each client's partition: bubbles with areas as the examples,
    beyond 40 classes a heat map.

    Args:
      counts: training examples of each client and class.
      tasks: the class ids of each task, in order; columns follow it and a line
        separates the tasks; negative ids are padding. None: classes in their own order.
    """
    if tasks is None:
        tasks = [range(counts.shape[1])]
    tasks = [np.asarray(task) for task in tasks]
    tasks = [task[task >= 0] for task in tasks]
    order = np.concatenate(tasks)
    counts = counts[:, order]
    clients, classes = counts.shape
    figure = new_figure(min(max(5.0, 0.3 * classes + 2), 12.0), min(max(2.8, 0.3 * clients + 1.4), 9.0))
    axes = figure.add_subplot()
    edges = np.cumsum([0] + [len(task) for task in tasks])
    axes.vlines(edges[1:-1] - 0.5, -0.5, clients - 0.5, color="#777777", linewidth=0.9, zorder=3)
    # bubbles compare sizes better than colours do, as long as they have room
    if classes <= MAX_BUBBLE_CLASSES:
        _bubbles(figure, axes, counts)
        # more names than that overlap unless they stand upright
        rotation = 0
        if classes > 25:
            rotation = 90
        axes.set_xticks(range(classes), order, fontsize=8, rotation=rotation)
        label = "Class"
        if len(tasks) > 1:
            label = "Class, in the order of the tasks"
        axes.set_xlabel(label)
    else:
        _cells_map(figure, axes, counts)
        step = math.ceil(len(tasks) / 25)
        middles = (edges[1:] + edges[:-1] - 1) / 2
        numbers = range(1, len(tasks) + 1, step)
        axes.set_xticks(middles[::step], [str(number) for number in numbers])
        axes.set_xlabel("Task, one column for each of its classes")
    axes.set_yticks(range(0, clients, math.ceil(clients / 25)))
    axes.set(ylabel="Client", xlim=(-0.5, classes - 0.5), ylim=(clients - 0.5, -0.5))
    return figure


def contact_sheet(
    images: Sequence[UInt8[np.ndarray, "_ H W 3"]],
    names: Sequence[str],
) -> Figure:
    """Draw a row of images for each class, with its name.

    Args:
      images: for each class some images, not equally many for all.
      names: of the classes.
    """
    columns = max(map(len, images))
    figure = new_figure(0.8 * columns + 0.2, len(images) + 0.2)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    grid = figure.subplots(len(images), columns, squeeze=False)
    for row, name, cells in zip(images, names, grid, strict=True):
        for axes in cells:
            axes.set_axis_off()
        for image, axes in zip(row, cells, strict=False):
            axes.imshow(image, interpolation="nearest")
        cells[0].set_title(words(name, 24), loc="left", fontsize=8)
    return figure


def reconstructions(
    steps: Sequence[int] | np.ndarray,
    losses: Series,
    baseline: float,
    strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]],
) -> Figure:
    """Draw what a masked autoencoder has learned: its losses over the steps, and rows
    of images.

    Args:
      steps: of the losses.
      losses: name -> mean squared error at these steps.
      baseline: the loss of the mean patch, a horizontal line.
      strips: name -> images, one row each.
    """
    figure = new_figure(11.0, 3.6)
    grid = figure.add_gridspec(len(strips), 2, width_ratios=(0.8, 1.0))
    axes = figure.add_subplot(grid[:, 0])
    for (name, values), color in zip(losses.items(), PALETTE, strict=False):
        axes.plot(steps, values, label=name, color=color, linewidth=1.6)
    axes.axhline(baseline, label="mean patch", color=INK, linestyle="--", linewidth=1.2)
    axes.set(xlabel="Step", ylabel="Mean squared error of hidden patches", ylim=(0, None))
    axes.legend(frameon=False)
    open_frame(axes)
    _strips([figure.add_subplot(grid[i, 1]) for i in range(len(strips))], strips)
    return figure


def image_rows(strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]]) -> Figure:
    """Draw rows of images side by side.

    Args:
      strips: name -> images, one row each, equally many.
    """
    columns = max((len(images) for images in strips.values()), default=1)
    figure = new_figure(1.0 * columns + 0.2, 1.25 * len(strips))
    _strips(figure.subplots(len(strips), squeeze=False)[:, 0], strips)
    return figure


def _strips(cells: Sequence[Axes] | np.ndarray, strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]]) -> None:
    """Draw a row of images in each of the cells, with its name."""
    gap = [(0, 0), (1, 1), (1, 1), (0, 0)]
    for cell, (name, images) in zip(cells, strips.items(), strict=True):
        row = np.concatenate(list(np.pad(images, gap, constant_values=255)), axis=1)
        cell.imshow(row, interpolation="nearest")
        cell.set_title(name, loc="left", fontsize=9, color=INK)
        cell.set_axis_off()


def _bubbles(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    clients, classes = counts.shape
    client, column = np.nonzero(counts)
    examples = counts[client, column]
    # the largest bubble just fits its cell, in points
    width, height = figure.get_size_inches()
    diameter = 0.92 * 72 * min((width - 1.6) / classes, (height - 0.9) / clients)
    largest = max(float(counts.max(initial=0)), 1.0)
    area = diameter**2 * examples / largest
    axes.scatter(column, client, s=area, color=PALETTE[0], alpha=0.85, linewidth=0)
    axes.set_title(f"bubble area: examples; largest {largest:g}", fontsize=9, color=INK, loc="right")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _cells_map(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    # small counts stay visible beside large ones, and a single example is not white
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(counts.max()), 1.0))
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))
    shown = np.ma.masked_equal(counts, 0)
    image = axes.imshow(shown, cmap=blues, norm=norm, aspect="auto", interpolation="nearest")
    figure.colorbar(image, label="Examples (white: none)", fraction=0.03, pad=0.01)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def words(text: str, most: int = MAX_NAME) -> str:
    """Return a user's text for a figure: cut in its middle; a dollar is no formula, and
    a name that begins with _ is not hidden from the legend."""
    line = one_line(text)
    if len(line) > most:
        line = f"{line[: most // 2]} ... {line[-most // 4 :]}"
    if line.startswith("_"):
        line = f" {line}"
    return line.replace("$", r"\$")


def open_frame(axes: Axes) -> None:
    """Remove the frame's upper and right line."""
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(tasks: int) -> list[int]:
    step = max(1, math.ceil(tasks / 20))
    return list(range(1, tasks + 1, step))
