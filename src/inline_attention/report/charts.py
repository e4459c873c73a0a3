"""Charts as inline SVG: text stays text, colours are the page's, and every chart says in words what it shows.

Colours and dashes come from classes: `k-inline` is InLine's colour whatever the theme, `d1` the second run of a kind.
Panels are drawn for a width of `WIDTH` and are shown at about that, so that text has its size on a phone as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inline_attention.report.html import Content, Html, tag

WIDTH, HEIGHT = 380.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 30.0, 42.0
ROW = 46.0  # of charts with a row per item: its label, and below it the dots
MARKER = 4.2
LETTER = 7.7  # width of a bold letter, on average: SVG does not wrap text, nor tell how long it is


@dataclass(frozen=True)
class Style:
    """How a model is drawn: colour and marker by its attention, dashes by its number among those of one attention."""

    kind: str
    number: int = 0

    @property
    def classes(self) -> str:
        """For any element of it."""
        return f"k-{self.kind} d{self.number % 4}"


@dataclass(frozen=True)
class Series:
    """A line: its points, in order."""

    label: str
    style: Style
    points: Sequence[tuple[float, float]]
    hollow: bool = False
    markers: bool = True


@dataclass(frozen=True)
class Scale:
    """An axis: what it measures, from where to where, and what is written on it."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two ends of the picture."""
        low, high, value = (math.log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return start + (end - start) * (value - low) / (high - low)


def linear_scale(
    label: str, values: Sequence[float], *, zero: bool = False, percent: bool = False, whole: bool = False
) -> Scale:
    """An axis with round ticks that holds all values.

    Args:
        label: With its unit.
        values: What is to be shown.
        zero: Begin at zero.
        percent: Go no further than 100.
        whole: Mark whole numbers only.
    """
    low, high = (0.0 if zero else min(values, default=0.0)), max(values, default=1.0)
    if high - low < 1e-9:
        high = low + 1
    step = _round_step((high - low) / 4, (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
    step = max(step, 1.0) if whole else step
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    high = min(high, 100.0) if percent else high
    count = round((high - low) / step)
    decimals = next(digits for digits in range(12) if abs(round(step, digits) - step) < 1e-9 * step)
    return Scale(label, low, high, [(low + i * step, f"{low + i * step:,.{decimals}f}") for i in range(count + 1)])


def logarithmic_scale(label: str, values: Sequence[float]) -> Scale:
    """An axis in powers of ten."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    return Scale(label, 10.0**first, 10.0**last, [(10.0**i, _power(i)) for i in range(first, last + 1)], True)


def listed_scale(label: str, values: Sequence[float]) -> Scale:
    """A logarithmic axis that is marked at the given values."""
    return Scale(label, values[0] / 1.15, values[-1] * 1.15, [(value, f"{value:,g}") for value in values], True)


def line_panel(title: str, series: Sequence[Series], x: Scale, y: Scale, *, description: str) -> Html:
    """Lines over a common axis.

    Args:
        title: Above it.
        series: The lines; later ones lie on top.
        x: The horizontal axis.
        y: The vertical axis.
        description: In words, for those who cannot see it.
    """
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn: list[Html] = []
    for line in series:
        places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) for a, b in line.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        classes = f"{line.style.classes}{' hollow' if line.hollow else ''}"
        markers = [_marker(line.style.kind, *place) for place in places] if line.markers else []
        drawn.append(tag("g", tag("polyline", points=path, class_="line"), *markers, class_=classes))
    return _svg(HEIGHT, title, description, *_axes(x, y, bottom), *drawn)


def bar_panel(
    title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], y: Scale, *, x_label: str, level: float,
    description: str,
) -> Html:  # fmt: skip
    """Bars side by side in groups, and a dashed line to hold them against.

    Args:
        title: Above it.
        groups: A label each, and its bars: a class and a value.
        y: The vertical axis.
        x_label: What tells the groups apart.
        level: Of the dashed line.
        description: In words.
    """
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    room = (right - LEFT) / len(groups)
    parts: list[Html] = []
    for number, (label, bars) in enumerate(groups):
        width = min(46.0, 0.8 * room / len(bars))
        start = LEFT + room * (number + 0.5) - width * len(bars) / 2
        for place, (class_, value) in enumerate(bars):
            top = y.place(value, bottom, TOP)
            left = start + place * width
            parts.append(tag("rect", x=left + 1, y=top, width=width - 2, height=bottom - top, class_=f"bar {class_}"))
            inside = bottom - top > 24
            parts.append(tag("text", f"{value:.1f}", x=left + width / 2, y=top + 15 if inside else top - 5,
                             class_="on-bar" if inside else "value", text_anchor="middle"))  # fmt: skip
        parts.append(tag("text", label, x=LEFT + room * (number + 0.5), y=bottom + 16, text_anchor="middle"))
    at = y.place(level, bottom, TOP)
    parts.append(tag("line", x1=LEFT, x2=right, y1=at, y2=at, class_="level"))
    unmarked = Scale(x_label, 0, 1, [])
    return _svg(HEIGHT, title, description, *_axes(unmarked, y, bottom), *parts)


@dataclass(frozen=True)
class DotRow:
    """A row of dots with a mark at their middle, and what is written at its end."""

    label: str
    style: Style
    dots: Sequence[float]
    mark: float | None
    text: str


def dot_rows(rows: Sequence[DotRow], x: Scale, *, description: str) -> Html:
    """A row per item on a common axis: every observation a dot, a bar at the mean or median."""
    left, right, top = 12.0, WIDTH - RIGHT, 8.0
    bottom = top + ROW * len(rows)
    parts: list[Content] = []
    for value, text in x.ticks:
        at = x.place(value, left, right)
        parts += [tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"),
                  tag("text", text, x=at, y=bottom + 16, text_anchor="middle")]  # fmt: skip
    parts.append(tag("text", x.label, x=(left + right) / 2, y=bottom + 35, text_anchor="middle", class_="axis"))
    for number, row in enumerate(rows):
        base = top + ROW * number
        room = int((right - left) / LETTER) - len(row.text)
        parts.append(tag("text", *_shortened(row.label, room), x=left, y=base + 14, class_="row-label"))
        parts.append(tag("text", row.text, x=right, y=base + 14, text_anchor="end", class_="value"))
        dots = [
            # Spread by their number, so that equal ones are seen to be several.
            tag("circle", cx=x.place(value, left, right), cy=base + 30 + 7 * ((index * 0.618) % 1 - 0.5), r=3.4)
            for index, value in enumerate(row.dots)
        ]
        mark = None
        if row.mark is not None:
            at = x.place(row.mark, left, right)
            mark = tag("line", x1=at, x2=at, y1=base + 20, y2=base + 40, class_="mark")
        parts.append(tag("g", *dots, mark, class_=f"dots {row.style.classes}"))
    return _svg(bottom + 44, None, description, *parts)


def legend(entries: Sequence[tuple[str, Style, bool]]) -> Html:
    """A list of lines and their labels; hollow markers where the last is true."""
    items = []
    for label, style, hollow in entries:
        swatch = tag(
            "svg", tag("line", x1=1.0, x2=27.0, y1=7.0, y2=7.0, class_="line"), _marker(style.kind, 14.0, 7.0),
            viewBox="0 0 28 14", width="28", height="14", aria_hidden="true",
            class_=f"{style.classes}{' hollow' if hollow else ''}",
        )  # fmt: skip
        items.append(tag("li", swatch, label))
    return tag("ul", *items, class_="legend")


def bar_legend(entries: Sequence[tuple[str, str]]) -> Html:
    """A list of labels and the classes of their bars."""
    return tag(
        "ul", *(tag("li", tag("span", class_=f"patch {class_}"), label) for label, class_ in entries), class_="legend"
    )


def _svg(height: float, title: str | None, description: str, *parts: Content) -> Html:
    heading = None
    if title is not None:
        heading = tag("text", *_shortened(title, int(WIDTH / LETTER)), x=0.0, y=15.0, class_="title")
    return tag("svg", heading, *parts, viewBox=f"0 0 {WIDTH:.0f} {height:.0f}", role="img", aria_label=description,
               class_="chart")  # fmt: skip


def _axes(x: Scale, y: Scale, bottom: float) -> list[Html]:
    right = WIDTH - RIGHT
    parts: list[Html] = []
    for value, text in y.ticks:
        at = y.place(value, bottom, TOP)
        parts += [tag("line", x1=LEFT, x2=right, y1=at, y2=at, class_="grid"),
                  tag("text", text, x=LEFT - 6, y=at + 4, text_anchor="end")]  # fmt: skip
    for value, text in x.ticks:
        at = x.place(value, LEFT, right)
        parts.append(tag("text", text, x=at, y=bottom + 16, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="base"))
    parts.append(tag("text", x.label, x=(LEFT + right) / 2, y=bottom + 35, text_anchor="middle", class_="axis"))
    middle = (TOP + bottom) / 2
    parts.append(tag("text", y.label, transform=f"translate(12 {middle:.1f}) rotate(-90)", text_anchor="middle",
                     class_="axis"))  # fmt: skip
    return parts


def _marker(kind: str, x: float, y: float) -> Html:
    """The same shapes as in the pictures of `inline analyze`: square softmax, triangular linear, round InLine."""
    size = MARKER
    if kind == "softmax":
        return tag("rect", x=x - size, y=y - size, width=2 * size, height=2 * size, class_="marker")
    if kind == "linear":
        points = f"{x:.1f},{y - 1.2 * size:.1f} {x - 1.2 * size:.1f},{y + size:.1f} {x + 1.2 * size:.1f},{y + size:.1f}"
        return tag("polygon", points=points, class_="marker")
    return tag("circle", cx=x, cy=y, r=size, class_="marker")


def _shortened(text: str, room: int) -> tuple[Content, ...]:
    """Text that fits in so many letters; what is cut off shows when pointed at."""
    return (text,) if len(text) <= room else (tag("title", text), f"{text[: max(room - 1, 1)]}…")


def _round_step(step: float, factors: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor in factors if factor * power >= step * (1 - 1e-9))


def _power(exponent: int) -> str:
    return f"{10.0**exponent:,g}" if -3 <= exponent < 6 else f"1e{exponent}"
