"""Draw the charts of the report page: matplotlib's figures as SVG elements that stand
in the page itself.

They read without colours: curves differ by dashes and markers too. Every mark has a
title, which browsers show beside the pointer.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fcljax.errors import one_line
from fcljax.results import figures
from fcljax.results.figures import PALETTE, Series
from fcljax.results.run_folder import Number

WIDTH = 7.2  # inches
ROW_HEIGHT = 0.5  # inches, of a row of dots
MAX_LABEL = 48  # characters of a name above a row
HREF = "{http://www.w3.org/1999/xlink}href"
# digits of coordinates that no screen shows
EXTRA_DIGITS = re.compile(r"(\.\d\d)\d+")


def inline(
    figure: Figure,
    label: str,
    titles: Mapping[str, Sequence[str]] | None = None,
) -> Markup:
    """Return a figure as an SVG element for an HTML page that allows no inline styles.
    Equal figures give equal text.

    Args:
      figure: to draw.
      label: what the chart shows, in words; empty for a decoration.
      titles: gid of artists -> a title for each of their marks, in the order of
        drawing. The gid becomes the class of the group.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcljax"}), warnings.catch_warnings():
        # matplotlib warns of each letter that its font lacks, such as in a user's class
        # name
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="svg")
    drawing = ElementTree.fromstring(buffer.getvalue())
    # matplotlib defines a marker once and refers to it by an id, which two charts of
    # a page would share; so each use gets the path itself
    markers = {f"#{path.get('id')}": path for path in drawing.iterfind(".//{*}defs/{*}path")}
    for element in drawing.iter():
        _to_html(element, markers)
    # lists: to remove a child while iterating would skip its neighbour
    for parent in list(drawing.iter()):
        for child in list(parent):
            if child.tag in ("metadata", "defs"):
                parent.remove(child)
    remaining = {gid: iter(texts) for gid, texts in (titles or {}).items()}
    for group in drawing.iter("g"):
        _set_titles(group, remaining)
    root = Element("svg", viewBox=drawing.attrib["viewBox"])
    root.attrib |= {"role": "img", "aria-label": one_line(label)} if label else {"aria-hidden": "true"}
    root.attrib |= {"class": "chart" if label else "swatch", "stroke-linejoin": "round"}
    root.extend(drawing)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def curves(runs: Series, spread: Series, label: str) -> Markup:
    """Draw the average accuracies of runs over the tasks, all as fractions.

    Args:
      runs: name -> A [T]. The group of run i has the class `curve c{i}`.
      spread: name -> half the width [T] of a band around the curve, in a group of class
        `band c{i}`.
      label: what the chart shows, in words.
    """
    titles = {}
    for i, (name, values) in enumerate(runs.items()):
        deviations = [""] * len(values)
        if name in spread:
            deviations = [f"±{100 * half:.2f}" for half in spread[name]]
        titles[f"curve c{i}"] = [
            f"{name}, {t}: {100 * value:.2f}{deviation} %"
            for t, (value, deviation) in enumerate(zip(values, deviations, strict=True), start=1)
            if value is not None and not np.isnan(value)
        ]
        # the band gets its class, by which the legend hides it, and no titles
        titles[f"band c{i}"] = []
    return inline(figures.accuracy_curve(runs, spread, legend=False), label, titles)


def scatter(points: Mapping[str, tuple[Number, Number]], label: str, xlabel: str, ylabel: str) -> Markup:
    """Draw a marker for each name, as `figures.scatter` does."""
    titles = {
        f"point p{i}": [f"{name}: {x:,g}; {y:.2f} %"]
        for i, (name, (x, y)) in enumerate(points.items())
        if x > 0
    }
    return inline(figures.scatter(points, xlabel, ylabel), label, titles)


def dots(
    rows: Mapping[str, Mapping[str, Number | None]],
    label: str,
    xlabel: str,
) -> Markup:
    """Draw a dot for every value of a row, in %, and a line at their mean. The row's
    name stands above it."""
    figure = figures.new_figure(WIDTH, ROW_HEIGHT * len(rows) + 0.6)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, xlim=(-1, 101), yticks=[], ylim=(len(rows) - 0.5, -0.65))
    axes.grid(axis="x", color=figures.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    figures.open_frame(axes)
    # diamonds have the shortest paths, and a page may have thousands of them
    dot = {"marker": "D", "linestyle": "", "color": PALETTE[0], "alpha": 0.5, "markeredgewidth": 0}
    titles = {}
    for i, (name, values) in enumerate(rows.items()):
        text = figures.words(name, MAX_LABEL)
        axes.text(0.005, i - 0.3, text, transform=axes.get_yaxis_transform(), fontsize=9)
        valid = {item: value for item, value in values.items() if value is not None}
        if valid:
            mean = sum(valid.values()) / len(valid)
            axes.plot(list(valid.values()), [i] * len(valid), gid=f"dots d{i}", **dot)
            axes.plot([mean], [i], "|", color="black", markersize=18, markeredgewidth=2.5, gid=f"mean m{i}")
            titles[f"dots d{i}"] = [f"{name}, {item}: {value:.2f} %" for item, value in valid.items()]
            titles[f"mean m{i}"] = [f"{name}, mean: {mean:.2f} %"]
    return inline(figure, label, titles)


def curve_key(i: int) -> Markup:
    """Draw a sample of curve or point i, for a legend."""
    figure = Figure(figsize=(0.6, 0.22))
    figure.add_artist(Line2D([0.05, 0.5, 0.95], [0.5] * 3, markevery=[1], **figures.curve_style(i)))
    return inline(figure, "")


def _to_html(element: Element, markers: Mapping[str, Element]) -> None:
    """Rewrite matplotlib's element for a page that allows no inline styles and no id
    twice: properties become attributes, and a marker is drawn where it is used."""
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    attributes = element.attrib
    for declaration in attributes.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        if name.strip() not in ("", "font-family"):
            attributes[name.strip()] = value.strip()
    attributes.pop("clip-path", None)
    marker = markers.get(attributes.pop(HREF, ""))
    if marker is not None:
        element.tag = "path"
        position = f"translate({attributes.pop('x')} {attributes.pop('y')})"
        element.attrib = {**marker.attrib, **attributes, "transform": position}
    if element.tag != "g":
        element.attrib.pop("id", None)
    for name in {"d", "transform"} & set(element.attrib):
        element.set(name, EXTRA_DIGITS.sub(r"\1", " ".join(element.attrib[name].split())))


def _set_titles(group: Element, remaining: dict[str, Iterator[str]]) -> None:
    """Give the marks of a group their titles, and their class, where its id is one of
    `remaining`."""
    gid = group.attrib.pop("id", "")
    if gid not in remaining:
        return
    group.set("class", gid)
    # a marker has a transform; a bar or a band is the path alone
    marks = [mark for mark in group.iter("path") if "transform" in mark.attrib] or group.iter("path")
    for mark, title in zip(marks, remaining[gid], strict=False):
        ElementTree.SubElement(mark, "title").text = one_line(title)
