"""Charts as inline SVG, pure functions from numbers to markup. All text is escaped.

They read without colours: curves differ by dashes and markers too, and the parts of bars by hatching. Every
mark has a title, which browsers show beside the pointer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fcljax.errors import one_line
from fcljax.results.figures import PALETTE

Number = float | int

WIDTH, HEIGHT = 600, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 44  # margins of the plotting area
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MOST_OF_LABEL = 48  # characters of a name beside a mark
ROW = 40  # height of a row of bars or dots
# radius 4.5 around the origin
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-4-4h8v8h-8z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M0 5L-5-4h10z",
    "M0-5L5 4h-10z",
    "M-4-4L4 4M4-4L-4 4",
    "M-5 0h10M0-5v10",
)


class Line(NamedTuple):
    """A curve's values in per cent, None where there is none, and half the width of a band around it."""

    values: Sequence[Number | None]
    spread: Sequence[Number] | None = None


class Scale(NamedTuple):
    """Values `low` to `high` onto the pixels `start` to `end`."""

    low: Number
    high: Number
    start: Number
    end: Number

    def __call__(self, value: Number) -> Number:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def swatch(place: int) -> Markup:
    """How the curve at a place of a chart is drawn, for its legend."""
    return Markup(
        '<svg class="swatch" width="44" height="16" viewBox="0 0 44 16" aria-hidden="true">{}{}</svg>'
    ).format(_path("M2 8H42", place), _marker(22, 8, place))


def curves(lines: Mapping[str, Line], label: str, xlabel: str, ylabel: str) -> Markup:
    """Lines over 1, 2, ...: one group of the class `curve` for each, with a marker at every value."""
    known = [v for line in lines.values() for v in _bounds(line)]
    longest = max((len(line.values) for line in lines.values()), default=1)
    ticks = _nice(min(known, default=0), max(known, default=100))
    x = Scale(0.7, max(longest, 1) + 0.3, LEFT, WIDTH - RIGHT)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    step = math.ceil(longest / 20)
    frame = _frame(x, y, range(1, longest + 1, step), ticks, xlabel, ylabel)
    drawn = [_curve(name, line, place, x, y) for place, (name, line) in enumerate(lines.items())]
    return _svg(HEIGHT, label, [frame, *drawn])


def scatter(points: Mapping[str, tuple[Number, Number]], label: str, xlabel: str, ylabel: str) -> Markup:
    """A marker for each name; x is on a logarithmic axis, so only points with x > 0 are drawn."""
    there = {name: (math.log10(x), y) for name, (x, y) in points.items() if x > 0}
    logs = [x for x, _ in there.values()] or [0.0]
    first, last = math.floor(min(logs) - 0.05), math.ceil(max(logs) + 0.05)
    ticks = _nice(
        min((y for _, y in there.values()), default=0), max((y for _, y in there.values()), default=1)
    )
    x = Scale(first, last, LEFT, WIDTH - RIGHT)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    frame = _frame(x, y, range(first, last + 1), ticks, xlabel, ylabel, lambda tick: f"1e{tick}")
    marks = [
        _titled(
            "point",
            f"{name}: {10 ** at[0]:,.0f}; {at[1]:.2f} %",
            [_marker(x(at[0]), y(at[1]), list(points).index(name))],
        )
        for name, at in there.items()
    ]
    return _svg(HEIGHT, label, [frame, *marks])


def bars(rows: Mapping[str, Sequence[Number]], parts: Sequence[str], label: str, unit: str) -> Markup:
    """A bar for each row, of parts one after the other."""
    most = max((sum(values) for values in rows.values()), default=0) or 1.0
    ticks = _nice(0, most)
    x = Scale(0, ticks[-1], LEFT, WIDTH - RIGHT)
    drawn = []
    for place, (name, values) in enumerate(rows.items()):
        top, begin = TOP + ROW * place, 0.0
        drawn.append(_text(LEFT, top + 10, _short(name), "start"))
        for part, value in enumerate(values):
            box = Markup('<rect x="{}" y="{}" width="{}" height="18" class="bar" fill="{}"/>').format(
                _n(x(begin)), top + 15, _n(x(begin + value) - x(begin)), fill_of(part)
            )
            drawn.append(_titled("part", f"{name}, {parts[part]}: {value:,.1f} {unit}", [box]))
            begin += value
    height = TOP + ROW * len(rows) + BOTTOM
    axis = _axis(x, ticks, height - BOTTOM, TOP, unit)
    return _svg(height, label, [_hatches(), axis, *drawn])


def dots(rows: Mapping[str, Mapping[str, Number | None]], label: str, xlabel: str) -> Markup:
    """For each row a dot at every value in per cent, with its name, and a line at their mean."""
    x = Scale(0, 100, LEFT, WIDTH - RIGHT)
    drawn = []
    for place, (name, values) in enumerate(rows.items()):
        top, known = TOP + ROW * place, {k: v for k, v in values.items() if v is not None}
        drawn.append(_text(LEFT, top + 10, _short(name), "start"))
        drawn += [
            _titled(
                "dot",
                f"{name}, {each}: {value:.2f} %",
                [Markup('<circle cx="{}" cy="{}" r="5"/>').format(_n(x(value)), top + 24)],
            )
            for each, value in known.items()
        ]
        if known:
            mean = sum(known.values()) / len(known)
            stroke = Markup('<path class="mean" d="M{} {}v20"/>').format(_n(x(mean)), top + 14)
            drawn.append(_titled("dot", f"{name}, mean: {mean:.2f} %", [stroke]))
    height = TOP + ROW * len(rows) + BOTTOM
    return _svg(height, label, [_axis(x, range(0, 101, 20), height - BOTTOM, TOP, xlabel), *drawn])


def reliability(accuracy: Sequence[Number | None], rows: Sequence[Number], label: str) -> Markup:
    """The accuracy (fractions) in bins of confidence, the diagonal where they would be equal, and a line of
    small bars below with the share of the images in each bin."""
    side, low = 260, 56
    x, y = Scale(0, 1, LEFT, LEFT + side), Scale(0, 100, TOP + side, TOP)
    share = Scale(0, 1, TOP + side + 12 + low, TOP + side + 12)
    width, total, drawn = 1 / max(len(rows), 1), sum(rows) or 1, []
    for place, (value, count) in enumerate(zip(accuracy, rows, strict=True)):
        said = f"confidence {place * width:.2f} to {(place + 1) * width:.2f}: {count:g} images"
        boxes = [_box(x(place * width), share(count / total), x(width) - x(0), share(0), "share")]
        if value is not None and count:
            said += f", accuracy {100 * value:.1f} %"
            boxes.append(_box(x(place * width), y(100 * value), x(width) - x(0), y(0), "bin"))
        drawn.append(_titled("part", said, boxes))
    diagonal = Markup('<path class="diagonal" d="M{} {}L{} {}"/>').format(
        *map(_n, (x(0), y(0), x(1), y(100)))
    )
    bottom = TOP + side + 12 + low
    frame = [
        *(_text(LEFT - 6, y(tick) + 4, f"{tick}", "end") for tick in range(0, 101, 20)),
        *(_text(x(tick / 5), bottom + 16, f"{tick / 5:.1f}") for tick in range(6)),
        _text(LEFT + side / 2, bottom + 34, "Confidence"),
        _upright(14, TOP + side / 2, "Accuracy (%)"),
        _upright(14, bottom - low / 2, "Images"),
    ]
    return _svg(bottom + BOTTOM, label, [*frame, *drawn, diagonal], LEFT + side + RIGHT)


def fill_of(part: int) -> str:
    """How the part of a bar is filled, by its place."""
    return f"url(#hatch-{part})" if part else PALETTE[0]


def key_of(part: int) -> Markup:
    """A part's filling, for the legend of bars."""
    return Markup(
        '<svg class="swatch" width="30" height="16" aria-hidden="true">'
        '<rect x="1" y="1" width="28" height="14" class="bar" fill="{}"/></svg>'
    ).format(fill_of(part))


def _curve(name: str, line: Line, place: int, x: Scale, y: Scale) -> Markup:
    points = [(t + 1, value) for t, value in enumerate(line.values) if value is not None]
    path = "".join(f"{'L' if i else 'M'}{_n(x(t))} {_n(y(v))}" for i, (t, v) in enumerate(points))
    drawn = [_path(path, place)] if points else []
    if line.spread is not None:
        half = {t: line.spread[t - 1] for t, _ in points}
        upper = [f"{_n(x(t))} {_n(y(_within(v + half[t])))}" for t, v in points]
        lower = [f"{_n(x(t))} {_n(y(_within(v - half[t])))}" for t, v in reversed(points)]
        band = Markup('<path class="band" d="M{}z" fill="{}"/>').format(
            "L".join(upper + lower), _color(place)
        )
        drawn.insert(0, band)
    for t, value in points:
        more = f" ± {line.spread[t - 1]:.2f}" if line.spread is not None else ""
        drawn.append(_titled("point", f"{name}, {t}: {value:.2f}{more} %", [_marker(x(t), y(value), place)]))
    return Markup('<g class="curve">{}</g>').format(Markup("").join(drawn))


def _bounds(line: Line) -> list[Number]:
    spread = line.spread if line.spread is not None else [0.0] * len(line.values)
    pairs = [(v, s) for v, s in zip(line.values, spread, strict=True) if v is not None]
    return [_within(v + sign * s) for v, s in pairs for sign in (-1, 1)]


def _within(percent: Number) -> Number:
    return min(max(percent, 0.0), 100.0)


def _frame(x, y, xticks, yticks, xlabel: str, ylabel: str, say=str) -> Markup:
    grid = [
        Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, _n(y(tick)), WIDTH - RIGHT)
        for tick in yticks
    ]
    names = [_text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end") for tick in yticks]
    return Markup("").join(
        [
            *grid,
            *names,
            _axis(x, xticks, HEIGHT - BOTTOM, None, xlabel, say),
            _upright(14, HEIGHT / 2 - 20, ylabel),
        ]
    )


def _axis(
    x: Scale, ticks, bottom: Number, top: Number | None, name: str, say=lambda tick: f"{tick:g}"
) -> Markup:
    """The horizontal axis at `bottom`, with lines up to `top`."""
    lines = [
        Markup('<path class="grid" d="M{} {}V{}"/>').format(_n(x(t)), bottom, top)
        for t in ticks
        if top is not None
    ]
    names = [_text(x(tick), bottom + 17, say(tick)) for tick in ticks]
    middle = _text((x.start + x.end) / 2, bottom + 37, name)
    rule = Markup('<path class="rule" d="M{} {}H{}"/>').format(_n(x.start), bottom, _n(x.end))
    return Markup("").join([*lines, rule, *names, middle])


def _svg(height: Number, label: str, content: Sequence[Markup], width: Number = WIDTH) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _n(width), _n(height), one_line(label), Markup("").join(content)
    )


def _titled(kind: str, title: str, content: Sequence[Markup]) -> Markup:
    return Markup('<g class="{}"><title>{}</title>{}</g>').format(
        kind, one_line(title), Markup("").join(content)
    )


def _path(path: str, place: int) -> Markup:
    return Markup('<path class="line" d="{}" stroke="{}" stroke-dasharray="{}"/>').format(
        path, _color(place), DASHES[place // len(PALETTE) % len(DASHES)] or "none"
    )


def _marker(x: Number, y: Number, place: int) -> Markup:
    return Markup('<path class="mark" transform="translate({} {})" d="{}" fill="{}" stroke="{}"/>').format(
        _n(x),
        _n(y),
        MARKERS[place % len(MARKERS)],
        _color(place) if place // len(MARKERS) % 2 == 0 else "white",
        _color(place),
    )


def _box(left: Number, top: Number, width: Number, bottom: Number, kind: str) -> Markup:
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        kind, *map(_n, (left, top, width, max(bottom - top, 0)))
    )


def _text(x: Number, y: Number, text: str, anchor: str = "middle") -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(_n(x), _n(y), anchor, text)


def _upright(x: Number, y: Number, text: str) -> Markup:
    return Markup('<text transform="translate({} {})rotate(-90)" text-anchor="middle">{}</text>').format(
        _n(x), _n(y), text
    )


def _hatches() -> Markup:
    """Fillings that differ without colour: stripes one way, the other way, and dots."""
    shapes = ("M0 6L6 0", "M0 0L6 6", "M3 0V6")
    patterns = [
        Markup(
            '<pattern id="hatch-{}" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path d="M0 0h6v6H0z" fill="white"/><path d="{}" stroke="{}" stroke-width="2"/></pattern>'
        ).format(place, shape, PALETTE[place % len(PALETTE)])
        for place, shape in enumerate(shapes, start=1)
    ]
    return Markup("<defs>{}</defs>").format(Markup("").join(patterns))


def _color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _short(name: str) -> str:
    line = one_line(name)
    return line if len(line) <= MOST_OF_LABEL else f"{line[: MOST_OF_LABEL - 13]} ... {line[-8:]}"


def _nice(low: Number, high: Number) -> list[Number]:
    """Four to eight round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-9)
    if span < 1e-6 * max(abs(high), 1):
        span = max(abs(high), 1.0)
    raw = span / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(round(step * i, 10)) for i in range(first, max(last, first + 1) + 1)]


def _n(value: Number) -> str:
    """A coordinate, short."""
    return f"{value:.1f}".removesuffix(".0")
