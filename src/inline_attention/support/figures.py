"""Charts in one style, for files and for web pages. matplotlib is imported when something is drawn.

A chart is a list of panels with one legend. `Chart.save` writes the panels side by side as PNG and SVG. `Chart.svgs`
returns each panel as SVG for a page: text stays text, and colors are CSS variables, which follow the page's theme.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import ImageColor

from inline_attention.support.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # annotations of drawing functions

# One color for each attention everywhere: distinct with every common form of color blindness, and readable as text.
LIGHT = {
    "paper": "#ffffff", "raised": "#f6f6f4", "ink": "#1d1d1f", "muted": "#5c5c63", "faint": "#e2e2e0",
    "inline": "#c85000", "softmax": "#0072b2", "linear": "#b07a00", "magnitude": "#008060", "other": "#a0447e",
    "uniform": "#6e6e75", "hidden": "#6a3d9a", "random": "#8c8c94", "more": "#7b3294", "less": "#1b7837",
    "link": "#0b5cad", "good": "#0a6b3d", "bad": "#b3261e",
}  # fmt: skip
DARK = {
    "paper": "#141416", "raised": "#1e1e22", "ink": "#ececf0", "muted": "#a6a6b0", "faint": "#35353b",
    "inline": "#ff8a4c", "softmax": "#5db8ee", "linear": "#f0b429", "magnitude": "#3fc99a", "other": "#e08cc0",
    "uniform": "#9a9aa4", "hidden": "#b794f4", "random": "#85858f", "more": "#c48ae0", "less": "#5dbb7a",
    "link": "#7cb8f5", "good": "#58d68d", "bad": "#ff8a80",
}  # fmt: skip
PAPER, INK, MUTED, FAINT, ALARM = (LIGHT[name] for name in ("paper", "ink", "muted", "faint", "bad"))
MARKERS = {"inline": "o", "softmax": "s", "linear": "^", "magnitude": "D", "other": "P", "uniform": ""}
KIND_LABELS = {"softmax": "softmax", "linear": "linear", "inline": "InLine", "magnitude": "MALA"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 2, 1, 2)))
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the picture looks the same everywhere
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "inline-attention",  # no date: equal pictures are equal files
    "text.parse_math": False,  # names come from files, and a dollar sign in one starts no formula
}
DOTS_PER_INCH = 160
PANEL = (4.4, 2.9)  # inches
# Average characters of DejaVu Sans per inch, to estimate what fits.
SMALL_PRINT_CHARACTERS, LEGEND_CHARACTERS, TITLE_CHARACTERS = 14.0, 10.0, 6.5
LEGEND_HANDLE = 3.5  # font sizes: long enough to show dashes beside a marker
ROW_HEIGHT = 0.53  # inches of one row of dots
LONGEST_ROW_LABEL = 52  # characters of a row's label and text together
MOST_MARKERS = 12  # of a line with many points


@dataclass(frozen=True)
class Style:
    """How a series is drawn: color and marker by its kind, dashes by its number among those of one kind."""

    kind: str  # key of LIGHT
    number: int = 0
    tint: float = 0.0  # share of white in the color, for variants of one attention
    own_marker: str = ""  # instead of the kind's

    @property
    def color(self) -> str:
        """Color for files; pages replace it by a CSS variable."""
        return "#" + "".join(f"{round(c + self.tint * (255 - c)):02x}" for c in ImageColor.getrgb(LIGHT[self.kind]))

    @property
    def marker(self) -> str:
        """matplotlib's marker."""
        return self.own_marker or MARKERS[self.kind]

    @property
    def dashes(self) -> Any:
        """matplotlib's line style."""
        return DASHES[1 if self.kind == "uniform" else self.number % len(DASHES)]


class LegendEntry(NamedTuple):
    """One line of a legend; bars have patches instead of lines."""

    label: str
    style: Style
    hollow: bool = False
    is_patch: bool = False


class Panel(NamedTuple):
    """One pair of axes that `draw` fills, with a description for readers who cannot see it; the height is in inches."""

    title: str
    draw: Callable[[Axes], None]
    description: str = ""
    height: float = PANEL[1]


class DotRow(NamedTuple):
    """A row of dots, one per observation, with a bar at `mark` and `text` at the right end."""

    label: str
    style: Style
    dots: Sequence[float]
    mark: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Panels with one legend."""

    panels: Sequence[Panel]
    legend: Sequence[LegendEntry] = ()

    def save(
        self,
        folder: Path,
        name: str,
        *,
        title: str,
        small_print: str,
        columns: int = 4,
        width: float = PANEL[0],
        formats: Sequence[str] = ("png", "svg"),
    ) -> list[Path]:
        """Write `NAME.png` and `NAME.svg` with panels of `width` inches, at most `columns` side by side."""
        columns = min(columns, len(self.panels))
        rows = -(-len(self.panels) // columns)
        height = rows * (0.6 + max(panel.height for panel in self.panels)) + 1.3
        total = max(8.0, width * columns)
        labels = [entry.label for entry in self.legend]
        if labels and not _fits_beside(title, labels, total):
            total += 1.0 + max(map(len, labels)) / LEGEND_CHARACTERS  # else the legend would cover titles of panels
        with new_figure(total, height, title, small_print) as figure:
            places = list(figure.subplots(rows, columns, squeeze=False).flat)
            for axes, panel in zip(places, self.panels, strict=False):
                panel.draw(axes)
                if panel.title:
                    axes.set_title(panel.title, fontsize=11, fontweight="bold")
            for axes in places[len(self.panels) :]:
                axes.set_axis_off()
            if self.legend:
                _add_legend(figure, self.legend)
            return save(figure, folder, name, formats)

    def svgs(self, prefix: str, width: float = 1) -> list[tuple[Panel, str, str]]:
        """Return each panel with the view box and content of its SVG, whose ids start with the prefix.

        `width` is in widths of a usual panel.
        """
        drawn = []
        for number, panel in enumerate(self.panels):
            with new_figure(width * PANEL[0], panel.height, svg_text="none") as figure:
                axes = figure.subplots()
                panel.draw(axes)
                figure.draw_without_rendering()
                figure.set_layout_engine("none")
                # Without clipping there are no clip paths, which would have to be referred to by address.
                for artist in axes.findobj():
                    artist.set_clip_on(False)
                drawn.append((panel, *_page_svg(figure, f"{prefix}-{number}-")))
        return drawn


def numbered_styles(kinds: Mapping[str, str]) -> dict[str, Style]:
    """Return styles by label from kinds of attention by label; a kind without a color is "other"."""
    known = [kind if kind in KIND_LABELS else "other" for kind in kinds.values()]
    return {label: Style(known[i], known[:i].count(known[i])) for i, label in enumerate(kinds)}


@contextmanager
def new_figure(
    width: float, height: float, title: str = "", small_print: str = "", *, svg_text: str = "path"
) -> Iterator[Figure]:
    """Yield a figure of so many inches, to be filled and saved inside; `svg_text` "none" keeps text as text in SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.fonttype": svg_text}):
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
            lines = textwrap.fill(small_print, int(SMALL_PRINT_CHARACTERS * width))
            figure.supxlabel(lines, x=0.01, ha="left", fontsize=8.5, color=MUTED, linespacing=1.5)
        yield figure


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure to files `NAME.FORMAT`."""
    files = [folder / f"{name}.{suffix}" for suffix in formats]
    for file in files:
        options: dict[str, Any] = {"dpi": DOTS_PER_INCH} if file.suffix == ".png" else {"metadata": {"Date": None}}
        figure.savefig(file, facecolor=PAPER, **options)
    return files


def draw_line(
    axes: Axes, style: Style, points: Iterable[tuple[float, float]], *, hollow: bool = False, secondary: bool = False
) -> None:
    """Draw a series; with empty markers and a thin line if hollow, dashed and without markers if secondary."""
    places = list(points)
    marker = "" if secondary else style.marker
    every = max(1, -(-len(places) // MOST_MARKERS))  # more would hide the line
    axes.plot(
        [x for x, _ in places], [y for _, y in places], color=style.color, marker=marker, markersize=6.5,
        markevery=(every * style.number // len(DASHES), every),
        linestyle=DASHES[1] if secondary else style.dashes, linewidth=1.3 if secondary or hollow else 2.2,
        markerfacecolor=PAPER if hollow else style.color, alpha=0.8 if secondary else 1,
    )  # fmt: skip


def dot_panel(rows: Sequence[DotRow], label: str, description: str, *, from_zero: bool = False) -> Panel:
    """Return a panel with a row per item on a common axis: its label above, every observation a dot."""

    def draw(axes: Axes) -> None:
        for number, row in enumerate(rows):
            # Spread by their number, so that equal dots are seen to be several.
            heights = [number + 0.55 + 0.16 * ((index * 0.618) % 1 - 0.5) for index in range(len(row.dots))]
            axes.plot(row.dots, heights, "o", color=row.style.color, alpha=0.5, markersize=6, markeredgewidth=0)
            axes.plot([row.mark] * 2, [number + 0.33, number + 0.77], color=INK, linewidth=2.2)
            name = shortened(row.label, LONGEST_ROW_LABEL - len(row.text))
            place = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(0, number + 0.12, name, fontweight="bold", **place)
            axes.text(1, number + 0.12, row.text, ha="right", color=MUTED, **place)
        axes.set(ylim=(len(rows), -0.15), yticks=[], xlabel=label)
        axes.margins(x=0.03)
        if from_zero:
            # A limit below zero keeps the dots at zero whole.
            highest = max([value for row in rows for value in row.dots] or [1.0]) or 1.0
            axes.set_xlim(-0.02 * highest, 1.03 * highest)
        axes.locator_params(axis="x", nbins=5)
        light_grid(axes, "x")

    return Panel("", draw, description, ROW_HEIGHT * len(rows) + 0.65)


def log_axes(axes: Axes, ticks: Sequence[float], tick_format: str = "{x:,.0f}") -> None:
    """Make both axes logarithmic, with these ticks on the x axis and plain numbers on the y axis."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    light_grid(axes)
    axes.xaxis.set_major_formatter(tick_format)


def whole_numbers(axes: Axes, label: str) -> None:
    """Label an x axis of whole numbers, with a light grid."""
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=10, integer=True, steps=[1, 2, 5, 10])
    light_grid(axes)


def light_grid(axes: Axes, axis: Any = "y") -> None:
    """Draw faint lines behind the data; label logarithmic axes with plain numbers, as formulas are off."""
    for logarithmic in (axes.xaxis, axes.yaxis):
        if logarithmic.get_scale() == "log":
            logarithmic.set_major_formatter("{x:,g}")
            logarithmic.set_minor_formatter("")
    axes.grid(axis=axis, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)


def draw_picture(axes: Axes, picture: Any, grid_size: tuple[int, int] | None = None, **options: Any) -> None:
    """Draw a picture `[H, W, ...]` without ticks and frame; over a token grid, tokens are the unit of both axes."""
    if grid_size is not None:
        (height, width), (rows, columns) = picture.shape[:2], grid_size
        options = {"extent": (0, columns, rows, 0), "aspect": (height / rows) / (width / columns), **options}
    axes.imshow(picture, **options)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _add_legend(figure: Figure, entries: Sequence[LegendEntry]) -> None:
    """Add one legend for all panels: beside the title where it fits, else right of the panels."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=entry.style.color, linestyle="" if entry.is_patch else entry.style.dashes, linewidth=2,
            marker="s" if entry.is_patch else entry.style.marker, markersize=9 if entry.is_patch else 6.5,
            markerfacecolor=PAPER if entry.hollow else entry.style.color,
        )
        for entry in entries
    ]  # fmt: skip
    labels = [entry.label for entry in entries]
    width = 1.0 if all(entry.is_patch for entry in entries) else LEGEND_HANDLE
    options: dict[str, Any] = {"fontsize": 10, "handlelength": width}
    if _fits_beside(figure.get_suptitle(), labels, figure.get_figwidth()):
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), **options)
    else:
        figure.legend(handles, labels, loc="outside right upper", **options)


def _fits_beside(title: str, labels: Sequence[str], width: float) -> bool:
    """True if a legend of one row fits beside the title of a figure of so many inches."""
    return len(title) / TITLE_CHARACTERS + sum(0.8 + len(text) / LEGEND_CHARACTERS for text in labels) < width


def _page_svg(figure: Figure, prefix: str) -> tuple[str, str]:
    """Return view box and content of a figure's SVG in the page's colors and font; its ids start with the prefix."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    (view_box,) = re.findall(r'<svg[^>]* viewBox="([^"]*)"', svg)
    body = re.search(r"<svg[^>]*>(.*)</svg>", svg, flags=re.DOTALL)
    assert body is not None
    content = re.sub(r"<style[^>]*>.*?</style>", "", body[1], flags=re.DOTALL)
    used = set(re.findall(r'xlink:href="#(\w+)"', content))

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r' id="([\w.]+)"', lambda found: f' id="{prefix}{found[1]}"' if found[1] in used else "", tag[0])
        text = text.replace('xlink:href="#', f'href="#{prefix}')
        text = re.sub(r"font: (?:(\w+) )?([\d.]+px) [^;\"]*", r"font-weight: \1; font-size: \2", text)
        text = re.sub(r"font-weight: ; |font-family: [^;\"]*(; )?| transform=\"rotate\(-0 [^\"]*\"", "", text)
        for name, color in LIGHT.items():
            text = text.replace(color, f"var(--{name})")
        return re.sub(r"(\.\d\d)\d+", r"\1", text)  # hundredths of a point are enough

    content = re.sub(r"<[^>]*>", adapt, content)  # tags only: the text of labels stays as it is
    return view_box, re.sub(r">\s+<", "><", content).strip()
