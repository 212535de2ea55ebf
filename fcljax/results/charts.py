"""The charts of the report page: matplotlib's figures as SVG elements that stand in the page itself.

They read without colours: curves differ by dashes and markers too, and the parts of bars by hatching. Every
mark has a title, which browsers show beside the pointer.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fcljax.errors import one_line
from fcljax.results import figures
from fcljax.results.figures import PALETTE, Series
from fcljax.results.run_folder import Number

WIDTH = 7.2  # inches
ROW = 0.5  # inches, height of a row of bars or dots
HATCHES = ("", "/////", "|||||", "\\\\\\\\\\")  # dots are too large: 170 kB
MAX_LABEL = 48  # characters of a name above a row
HREF = "{http://www.w3.org/1999/xlink}href"
DIGITS = re.compile(r"(\.\d\d)\d+")  # of a coordinate, more than a screen shows


def inline(
    figure: Figure, label: str, titles: Mapping[str, Sequence[str]] | None = None, ids: str = ""
) -> Markup:
    """A figure as an SVG element for an HTML page that allows no inline styles. Equal figures give equal
    text.

    Args:
      figure: to draw.
      label: what the chart shows, in words; empty for a decoration.
      titles: gid of artists -> a title for each of their marks, in the order of drawing. The gid becomes the
        class of the group.
      ids: prefix of the ids, which must be unique in a page; only hatched figures have some.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcljax"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
        figure.savefig(buffer, format="svg")
    drawn = ElementTree.fromstring(buffer.getvalue())
    markers = {f"#{path.get('id')}": path for path in drawn.iterfind(".//{*}defs/{*}path")}
    for element in drawn.iter():
        _to_html(element, markers, ids)
    for parent in list(drawn.iter()):
        for child in list(parent):
            if child.tag == "metadata" or (child.tag == "defs" and child.find("pattern") is None):
                parent.remove(child)
    remaining = {gid: iter(each) for gid, each in (titles or {}).items()}
    for group in drawn.iter("g"):
        _set_titles(group, remaining)
    root = Element("svg", viewBox=drawn.attrib["viewBox"])
    root.attrib |= {"role": "img", "aria-label": one_line(label)} if label else {"aria-hidden": "true"}
    root.attrib |= {"class": "chart" if label else "swatch", "stroke-linejoin": "round"}
    root.extend(drawn)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def curves(runs: Series, spread: Series, label: str) -> Markup:
    """The average accuracies of runs in fractions over the tasks, and half the width of a band around some.
    The groups of run i have the classes `curve c{i}` and `band c{i}`."""
    titles = {}
    for i, (name, values) in enumerate(runs.items()):
        more = [f" ± {100 * half:.2f}" for half in spread[name]] if name in spread else [""] * len(values)
        titles[f"curve c{i}"] = [
            f"{name}, {t}: {100 * value:.2f}{half} %"
            for t, (value, half) in enumerate(zip(values, more, strict=True), start=1)
            if value is not None and not np.isnan(value)
        ]
        titles[f"band c{i}"] = []
    return inline(figures.accuracy_curve(runs, spread, legend=False), label, titles)


def scatter(points: Mapping[str, tuple[Number, Number]], label: str, xlabel: str, ylabel: str) -> Markup:
    """A marker for each name, as `figures.scatter` draws it."""
    drawn = {
        f"point p{i}": [f"{name}: {x:,g}; {y:.2f} %"]
        for i, (name, (x, y)) in enumerate(points.items())
        if x > 0
    }
    return inline(figures.scatter(points, xlabel, ylabel), label, drawn)


def lines(
    series: Mapping[str, tuple[Sequence[Number], Sequence[Number]]],
    names: Sequence[str],
    label: str,
    xlabel: str,
    ylabel: str,
) -> Markup:
    """A curve for each name in `series`, of its x and y, drawn as in charts that have all `names`."""
    figure = figures.new_figure(WIDTH, 3.6)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(axis="y", color=figures.GRID, linewidth=0.8)
    figures.open_frame(axes)
    titles = {}
    for name, (x, y) in series.items():
        i = names.index(name)
        axes.plot(x, y, gid=f"line l{i}", **figures.curve_style(i) | {"markersize": 4})
        titles[f"line l{i}"] = [f"{name}, {a:g}: {b:,.4g}" for a, b in zip(x, y, strict=True)]
    axes.set_ylim(bottom=0)
    return inline(figure, label, titles)


def bars(rows: Mapping[str, Sequence[Number]], parts: Sequence[str], label: str, unit: str) -> Markup:
    """A bar for each row, of parts one after the other."""
    figure, axes = _rows_figure(list(rows), unit)
    values = np.array(list(rows.values()), float).reshape(len(rows), len(parts))
    begin = np.zeros(len(rows))
    titles = {}
    for j, part in enumerate(parts):
        axes.barh(np.arange(len(rows)), values[:, j], 0.4, left=begin, gid=f"part b{j}", **_filling(j))
        titles[f"part b{j}"] = [f"{name}, {part}: {row[j]:,.1f} {unit}" for name, row in rows.items()]
        begin += values[:, j]
    return inline(figure, label, titles, ids="bars-")


def dots(rows: Mapping[str, Mapping[str, Number | None]], label: str, xlabel: str) -> Markup:
    """For each row a dot at every value in per cent, with its name, and a line at their mean."""
    figure, axes = _rows_figure(list(rows), xlabel)
    axes.set_xlim(-1, 101)
    titles = {}
    for i, (name, values) in enumerate(rows.items()):
        known = {item: value for item, value in values.items() if value is not None}
        if known:
            mean = sum(known.values()) / len(known)
            # a diamond has the shortest path: a page may have thousands
            dot = {"marker": "D", "linestyle": "", "color": PALETTE[0], "alpha": 0.5, "markeredgewidth": 0}
            axes.plot(list(known.values()), [i] * len(known), gid=f"dots d{i}", **dot)
            axes.plot([mean], [i], "|", color="black", markersize=18, markeredgewidth=2.5, gid=f"mean m{i}")
            titles[f"dots d{i}"] = [f"{name}, {item}: {value:.2f} %" for item, value in known.items()]
            titles[f"mean m{i}"] = [f"{name}, mean: {mean:.2f} %"]
    return inline(figure, label, titles)


def reliability(calibration: Mapping, label: str) -> Markup:
    """The reliability diagram of a summary's calibration."""
    examples = calibration["examples"]
    accuracy = calibration["accuracy"]
    said = [
        f"confidence {i / len(examples):.2f} to {(i + 1) / len(examples):.2f}: {count:g} images"
        for i, count in enumerate(examples)
    ]
    right = [
        f"{text}, accuracy {100 * value:.1f} %"
        for text, count, value in zip(said, examples, accuracy, strict=True)
        if count and value is not None
    ]
    return inline(figures.reliability(calibration), label, {"bins": right, "shares": said})


def curve_key(i: int) -> Markup:
    """How the curve or point i is drawn, for a legend."""
    figure = Figure(figsize=(0.6, 0.22))
    figure.add_artist(Line2D([0.05, 0.5, 0.95], [0.5] * 3, markevery=[1], **figures.curve_style(i)))
    return inline(figure, "")


def bar_key(j: int) -> Markup:
    """How part j of a bar is filled, for a legend."""
    figure = Figure(figsize=(0.42, 0.22))
    figure.add_artist(Rectangle((0.04, 0.08), 0.92, 0.84, **_filling(j)))
    return inline(figure, "", ids=f"key{j}-")


def _filling(j: int) -> dict[str, Any]:
    plain = {"facecolor": PALETTE[0], "edgecolor": "#333333", "linewidth": 0.8}
    hatched = {"facecolor": "white", "edgecolor": PALETTE[j % len(PALETTE)], "linewidth": 0.8}
    return hatched | {"hatch": HATCHES[j % len(HATCHES)]} if j else plain


def _rows_figure(names: list[str], xlabel: str) -> tuple[Figure, Axes]:
    """A figure with a row for each name, which stands above its row."""
    figure = figures.new_figure(WIDTH, ROW * len(names) + 0.6)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, yticks=[], ylim=(len(names) - 0.5, -0.65))
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    figures.open_frame(axes)
    left = axes.get_yaxis_transform()
    for i, name in enumerate(names):
        axes.text(0.005, i - 0.3, figures.words(name, MAX_LABEL), transform=left, fontsize=9)
    return figure, axes


def _to_html(element: Element, markers: Mapping[str, Element], ids: str) -> None:
    """Rewrite matplotlib's element for a page that allows no inline styles and no id twice: properties become
    attributes, and a marker is drawn where it is used."""
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    attributes = element.attrib
    for each in attributes.pop("style", "").split(";"):
        name, _, value = each.partition(":")
        if name.strip() not in ("", "font-family"):
            attributes[name.strip()] = value.strip().replace("url(#", f"url(#{ids}")
    attributes.pop("clip-path", None)
    marker = markers.get(attributes.pop(HREF, ""))
    if marker is not None:
        element.tag = "path"
        place = f"translate({attributes.pop('x')} {attributes.pop('y')})"
        element.attrib = {**marker.attrib, **attributes, "transform": place}
    if element.tag == "pattern":
        element.set("id", ids + element.attrib["id"])
    elif element.tag != "g":
        element.attrib.pop("id", None)
    for name in {"d", "transform"} & set(element.attrib):
        element.set(name, DIGITS.sub(r"\1", " ".join(element.attrib[name].split())))


def _set_titles(group: Element, remaining: dict[str, Iterator[str]]) -> None:
    """Give the marks of a group their titles, and their class, where its id is one of `remaining`."""
    gid = group.attrib.pop("id", "")
    if gid not in remaining:
        return
    group.set("class", gid)
    marks = [mark for mark in group.iter("path") if "transform" in mark.attrib] or group.iter("path")
    for mark, title in zip(marks, remaining[gid], strict=False):
        ElementTree.SubElement(mark, "title").text = one_line(title)
