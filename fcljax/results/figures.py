"""Figures and files of finished runs.

Figures use matplotlib's objects and Agg, never pyplot, so nothing global is touched; every file is written to
a temporary name in its folder and then renamed, so a reader never meets half a file.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure

from fcljax.errors import InputError, one_line
from fcljax.files import atomic, write_text

# Okabe and Ito's, distinct under the common colour blindnesses, without its yellow: too faint on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX<>p"
LINES = ("-", "--", ":", "-.")
INK = "#333333"
MAX_NUMBERED_TASKS = 12  # larger matrices get a colour bar instead of numbers
MOST_OF_NAME = 80  # characters of a run's name in a legend
MAX_BUBBLE_CLASSES = 40  # beyond this bubbles overlap, and a heat map reads better

SUMMARY_FIELDS = {
    "method": (),
    "dataset": (),
    "backbone": (),
    "seed": (),
    "fidelity": (),
    "accuracy": (),
    "A": (),
    "A_avg": (),
    "A_last": (),
    "forgetting": ("paper", "released", "diagonal"),
    "communication": ("upload_scalars", "upload_bytes", "download_scalars", "download_bytes"),
    "trainable_params": (),
    "time": ("compile_s", "client_s", "server_s", "eval_s"),
    "client_images_per_s": (),
    "slot_efficiency": (),
    "traces": (),
}


def write_json(path: str | Path, obj: object) -> None:
    """Write `obj` as strict JSON: NaN and infinity are null, arrays lists, named tuples and mappings objects.

    Raises:
      TypeError: a value that JSON has no form for; an existing file is then left as it is.
    """
    text = json.dumps(_plain(obj), indent=2, allow_nan=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")


def load_summary(run_dir: str | Path) -> dict[str, Any]:
    """The `summary.json` of a run directory.

    Raises:
      InputError: no such directory, no summary (the run has not finished), not JSON, or fields missing.
    """
    path = Path(run_dir) / "summary.json"
    if not path.parent.is_dir():
        raise InputError(f"run: no directory {str(run_dir)!r}")
    if not path.is_file():
        raise InputError(f"run: {str(run_dir)!r} has no summary.json; has the run finished?")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError; nested too deep
        raise InputError(f"run: {str(path)!r} is not JSON ({error})") from None
    missing = _missing(summary)
    if missing:
        raise InputError(f"run: {str(path)!r} lacks {', '.join(missing)}")
    return summary


Series = Mapping[str, Sequence | np.ndarray]


def accuracy_curve(path: str | Path, runs: Series, spread: Series | None = None) -> Path:
    """A_t over tasks, one line per run, as a PNG.

    Args:
      path: file to write.
      runs: name -> A [T], fractions; lengths may differ.
      spread: name -> half width [T] of a band around the line of that name.
    """
    figure = _figure(7.2 if len(runs) <= 6 else 9.6, 4.4)
    axes = figure.add_subplot()
    longest = max((len(values) for values in runs.values()), default=0)
    for i, (name, values) in enumerate(runs.items()):
        percent = 100 * np.asarray(values, float)
        tasks = np.arange(1, len(percent) + 1)
        color = PALETTE[i % len(PALETTE)]
        style = {"marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i // len(PALETTE) % len(LINES)]}
        edge = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
        axes.plot(tasks, percent, label=_words(name), color=color, linewidth=1.8, **style, **edge)
        if spread and name in spread:
            half = 100 * np.asarray(spread[name], float)
            axes.fill_between(tasks, percent - half, percent + half, color=color, alpha=0.18, linewidth=0)
    axes.set(xlabel="Tasks learned", ylabel="Average accuracy $A_t$ (%)", xlim=(0.6, max(longest, 1) + 0.4))
    axes.set_xticks(_ticks(longest))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    _open_frame(axes)
    if len(runs) > 6:
        figure.legend(loc="outside right upper", frameon=False)
    elif runs:
        axes.legend(frameon=False)
    return _save(path, figure)


def accuracy_matrix(path: str | Path, matrix: Sequence | np.ndarray) -> Path:
    """The accuracy matrix [T, T] as a heat map PNG, with numbers up to 12 tasks.

    It holds fractions, and NaN or None above the diagonal.
    """
    percent = 100 * np.array(matrix, dtype=float)
    tasks = len(percent)
    side = min(max(3.6, 0.62 * tasks + 1.4), 9.0)
    figure = _figure(side + 0.9, side)
    axes = figure.add_subplot()
    axes.set_facecolor("#F2F2F2")
    image = axes.imshow(np.ma.masked_invalid(percent), cmap="viridis", vmin=0, vmax=100)
    if tasks <= MAX_NUMBERED_TASKS:
        for t, i in np.argwhere(~np.isnan(percent)):
            ink = "black" if percent[t, i] > 55 else "white"
            axes.text(i, t, f"{percent[t, i]:.1f}", ha="center", va="center", fontsize=9, color=ink)
    ticks = np.array(_ticks(tasks))
    axes.set_xticks(ticks - 1, ticks)
    axes.set_yticks(ticks - 1, ticks)
    axes.set(xlabel="Accuracy on task", ylabel="After learning task")
    figure.colorbar(image, label="Accuracy (%)", shrink=0.85)
    return _save(path, figure)


def reliability(path: str | Path, calibration: Mapping[str, Any]) -> Path:
    """The reliability diagram as a PNG: the accuracy in each bin of confidence, the diagonal where they would
    be equal, and below the share of the images that each bin has.

    Args:
      path: file to write.
      calibration: as `metrics.Calibration.to_json` gives it.
    """
    rows = np.array(calibration["rows"], float)
    accuracy, edges = np.array(calibration["accuracy"], float), np.linspace(0, 1, len(rows) + 1)
    figure = _figure(4.6, 5.2)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    width, there = edges[1] - edges[0], rows > 0
    error = "unknown" if calibration["ece"] is None else f"{100 * calibration['ece']:.1f} %"
    bars = {"width": width, "align": "edge", "edgecolor": "white", "linewidth": 0.6}
    upper.bar(edges[:-1][there], 100 * accuracy[there], color=PALETTE[0], **bars)
    upper.plot([0, 1], [0, 100], color="#555555", linestyle="--", linewidth=1)
    upper.set(ylabel="Accuracy (%)", ylim=(0, 100), title=f"ECE {error}")
    lower.bar(edges[:-1], 100 * rows / max(rows.sum(), 1), color="#999999", **bars)
    lower.set(xlabel="Confidence", ylabel="Images (%)", xlim=(0, 1))
    for axes in (upper, lower):
        _open_frame(axes)
    return _save(path, figure)


def class_holdings(
    path: str | Path, counts: Num[np.ndarray, "K C"], tasks: Sequence | np.ndarray | None = None
) -> Path:
    """Who holds which class, as a PNG: bubbles with areas as the rows, beyond 40 classes a heat map.

    Args:
      path: file to write.
      counts: rows of each client and class.
      tasks: the class ids of each task, in order; columns follow it and a line parts the tasks; negative ids
        are padding. None: classes in their own order.
    """
    tasks = [np.asarray(task) for task in (tasks if tasks is not None else [range(counts.shape[1])])]
    tasks = [task[task >= 0] for task in tasks]
    order = np.concatenate(tasks)
    counts = counts[:, order]
    clients, classes = counts.shape
    figure = _figure(min(max(5.0, 0.3 * classes + 2), 12.0), min(max(2.8, 0.3 * clients + 1.4), 9.0))
    axes = figure.add_subplot()
    edges = np.cumsum([0] + [len(task) for task in tasks])
    axes.vlines(edges[1:-1] - 0.5, -0.5, clients - 0.5, color="#777777", linewidth=0.9, zorder=3)
    if classes <= MAX_BUBBLE_CLASSES:
        _bubbles(figure, axes, counts)
        axes.set_xticks(range(classes), order, fontsize=8, rotation=90 if classes > 25 else 0)
        axes.set_xlabel("Class, in the order of the tasks" if len(tasks) > 1 else "Class")
    else:
        _cells_map(figure, axes, counts)
        step = math.ceil(len(tasks) / 25)
        middles, numbers = (edges[1:] + edges[:-1] - 1) / 2, range(1, len(tasks) + 1, step)
        axes.set_xticks(middles[::step], [str(number) for number in numbers])
        axes.set_xlabel("Task, one column for each of its classes")
    axes.set_yticks(range(0, clients, math.ceil(clients / 25)))
    axes.set(ylabel="Client", xlim=(-0.5, classes - 0.5), ylim=(clients - 0.5, -0.5))
    return _save(path, figure)


def contact_sheet(
    path: str | Path, images: Sequence[UInt8[np.ndarray, "_ H W 3"]], names: Sequence[str]
) -> Path:
    """A row of images for each class, with its name.

    Args:
      path: PNG file.
      images: for each class some images; rows may differ in length.
      names: of the classes.
    """
    columns = max(map(len, images))
    figure = _figure(0.8 * columns + 0.2, len(images) + 0.2)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    grid = figure.subplots(len(images), columns, squeeze=False)
    for row, name, cells in zip(images, names, grid, strict=True):
        for axes in cells:
            axes.set_axis_off()
        for image, axes in zip(row, cells, strict=False):
            axes.imshow(image, interpolation="nearest")
        short = name if len(name) <= 24 else f"{name[:23]}\u2026"
        cells[0].set_title(_words(short), loc="left", fontsize=8)
    return _save(path, figure)


def reconstructions(
    path: str | Path,
    steps: Sequence[int] | np.ndarray,
    losses: Series,
    baseline: float,
    strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]],
) -> Path:
    """What a masked autoencoder has learned, as a PNG: its losses over the steps, and rows of images.

    Args:
      path: file to write.
      steps: of the losses.
      losses: name -> mean squared error at these steps.
      baseline: the loss of the mean patch, a horizontal line.
      strips: name -> images, one row each.
    """
    figure = _figure(11.0, 3.6)
    grid = figure.add_gridspec(len(strips), 2, width_ratios=(0.8, 1.0))
    axes = figure.add_subplot(grid[:, 0])
    for (name, values), color in zip(losses.items(), PALETTE, strict=False):
        axes.plot(steps, values, label=name, color=color, linewidth=1.6)
    axes.axhline(baseline, label="mean patch", color=INK, linestyle="--", linewidth=1.2)
    axes.set(xlabel="Step", ylabel="Mean squared error of hidden patches", ylim=(0, None))
    axes.legend(frameon=False)
    _open_frame(axes)
    _strips([figure.add_subplot(grid[i, 1]) for i in range(len(strips))], strips)
    return _save(path, figure)


def image_rows(path: str | Path, strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]]) -> Path:
    """Rows of images side by side, as a PNG.

    Args:
      path: file to write.
      strips: name -> images, one row each, equally many.
    """
    columns = max((len(images) for images in strips.values()), default=1)
    figure = _figure(1.0 * columns + 0.2, 1.25 * len(strips))
    _strips(figure.subplots(len(strips), squeeze=False)[:, 0], strips)
    return _save(path, figure)


def _strips(cells: Sequence[Axes] | np.ndarray, strips: Mapping[str, UInt8[np.ndarray, "n H W 3"]]) -> None:
    """A row of images in each of the cells, with its name."""
    gap = [(0, 0), (1, 1), (1, 1), (0, 0)]
    for cell, (name, images) in zip(cells, strips.items(), strict=True):
        row = np.concatenate(list(np.pad(images, gap, constant_values=255)), axis=1)
        cell.imshow(row, interpolation="nearest")
        cell.set_title(name, loc="left", fontsize=9, color=INK)
        cell.set_axis_off()


def _bubbles(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    clients, classes = counts.shape
    client, column = np.nonzero(counts)
    rows = counts[client, column]
    # the largest bubble just fits its cell, in points
    width, height = figure.get_size_inches()
    diameter = 0.92 * 72 * min((width - 1.6) / classes, (height - 0.9) / clients)
    largest = max(float(rows.max()), 1.0) if rows.size else 1.0
    axes.scatter(column, client, s=diameter**2 * rows / largest, color=PALETTE[0], alpha=0.85, linewidth=0)
    axes.set_title(f"bubble area: rows held; largest {largest:g}", fontsize=9, color=INK, loc="right")
    axes.grid(color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)


def _cells_map(figure: Figure, axes: Axes, counts: np.ndarray) -> None:
    # small holdings stay visible beside large ones
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(counts.max()), 1.0))
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # a holding of one row is not white
    image = axes.imshow(
        np.ma.masked_equal(counts, 0), cmap=blues, norm=norm, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(image, label="Rows held (white: none)", fraction=0.03, pad=0.01)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _words(text: str) -> str:
    """A user's text for a figure: a dollar is no formula, and a name that begins with _ not hidden from the
    legend."""
    line = one_line(text)
    line = line if len(line) <= MOST_OF_NAME else f"{line[: MOST_OF_NAME // 2]} ... {line[-20:]}"
    return f"{' ' if line.startswith('_') else ''}{line}".replace("$", r"\$")


def _open_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(tasks: int) -> list[int]:
    step = max(1, math.ceil(tasks / 20))
    return list(range(1, tasks + 1, step))


def _save(path: str | Path, figure: Figure) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font has not
        # so the same data give the same bytes
        figure.savefig(temporary, format="png", metadata={"Software": None})
    return path


def _plain(obj: object) -> object:
    if hasattr(obj, "_asdict"):
        obj = obj._asdict()
    if hasattr(obj, "tolist"):  # numpy and jax arrays and scalars
        obj = obj.tolist()
    if isinstance(obj, dict):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_plain(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return None
    return str(obj) if isinstance(obj, Path) else obj


def _missing(summary: object) -> list[str]:
    if not isinstance(summary, dict):
        return ["every field: it is not a JSON object"]
    missing = [name for name in SUMMARY_FIELDS if name not in summary]
    for name in [name for name in SUMMARY_FIELDS if name in summary]:
        inner = summary[name] if isinstance(summary[name], dict) else {}
        missing += [f"{name}.{part}" for part in SUMMARY_FIELDS[name] if part not in inner]
    return missing
