"""Figures in one style: colors and markers by attention, captions, PNG and SVG files. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common form of colour blindness.
KIND_COLORS = {"softmax": "#0072B2", "softmax_explicit": "#56B4E9", "linear": "#E69F00", "inline": "#D55E00"}
KIND_MARKERS = {"softmax": "s", "softmax_explicit": "D", "linear": "^", "inline": "o"}
INK, MUTED, LINE, FAINT, ALARM = "#222222", "#666666", "#CFCFCF", "#E4E4E4", "#B83A00"
STYLE: dict[Any, Any] = {  # matplotlib types the keys as a list of literals of its own
    "font.family": "DejaVu Sans",  # ships with matplotlib: the picture looks the same everywhere
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
DOTS_PER_INCH = 160

COLORS = {**KIND_COLORS, "magnitude": "#009E73"}
MARKERS = {**KIND_MARKERS, "magnitude": "D"}
KIND_LABELS = {"softmax": "softmax", "linear": "linear", "inline": "InLine", "magnitude": "MALA"}
LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 2, 1, 2)))
# Of DejaVu Sans at the sizes below: what fits beside or below something else is estimated, not laid out twice.
CHARACTERS_PER_INCH, LEGEND_CHARACTERS_PER_INCH, TITLE_CHARACTERS_PER_INCH = 14.0, 11.0, 7.0
# The same picture is the same file: no random element names, and no date.
# Names come from files: a dollar sign in one is no formula.
SVG_STYLE: dict[Any, Any] = {"svg.hashsalt": "inline-attention", "text.parse_math": False}


@dataclass(frozen=True)
class LineStyle:
    """How one model is drawn: colour and marker by its attention, dashes by its number among those of one attention."""

    color: str
    marker: str
    dashes: Any


def line_styles(subjects: Sequence[Any]) -> dict[str, LineStyle]:
    """Styles by label."""
    seen: Counter[str] = Counter()
    styles: dict[str, LineStyle] = {}
    for subject in subjects:
        dashes = LINE_STYLES[seen[subject.kind] % len(LINE_STYLES)]
        styles[subject.label] = LineStyle(COLORS[subject.kind], MARKERS[subject.kind], dashes)
        seen[subject.kind] += 1
    return styles


@contextmanager
def new_figure(width: float, height: float, title: str, small_print: str) -> Iterator[Figure]:
    """A figure of so many inches in the house style, to be filled and saved inside."""
    with mpl.rc_context({**STYLE, **SVG_STYLE}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
        lines = textwrap.fill(small_print, int(CHARACTERS_PER_INCH * width))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=8.5, color=MUTED, linespacing=1.5)
        yield figure


def shared_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """One legend for all panels: beside the title where there is room, else to the right of the panels."""
    title = figure.get_suptitle()
    needed = len(title) / TITLE_CHARACTERS_PER_INCH + sum(
        0.6 + len(label) / LEGEND_CHARACTERS_PER_INCH for label in labels
    )
    if needed < figure.get_figwidth():
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=10)
    else:
        figure.legend(handles, labels, loc="outside right upper", fontsize=10)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `NAME.png` and `NAME.svg`."""
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(files[0], dpi=DOTS_PER_INCH, facecolor="white")
    figure.savefig(files[1], facecolor="white", metadata={"Date": None})
    return files


def weights_note(subjects: Sequence[Any]) -> str:
    """For the small print: whose weights these are, above all if nobody's."""
    untrained = [subject.label for subject in subjects if subject.weights is None]
    if len(untrained) == len(subjects):
        return "Untrained weights."
    return f"Untrained weights: {', '.join(untrained)}." if untrained else "Trained weights."


def as_picture(pixels: Any) -> np.ndarray:
    """uint8 `[3, H, W]` as matplotlib wants pictures, `[H, W, 3]`."""
    return pixels.permute(1, 2, 0).cpu().numpy()


def light_grid(axes: Axes, axis: Any = "y") -> None:
    """Faint lines behind the data."""
    axes.grid(axis=axis, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def without_ticks(axes: Axes) -> None:
    """Neither ticks nor a frame, as for a picture."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
