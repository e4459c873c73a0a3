"""Accuracy of an ablation's cells: every seed a dot, their mean a line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from inline_attention.ablation.tables import CellResult, mean_and_spread
from inline_attention.support.figures import ALARM, FAINT, INK, MUTED, light_grid, new_figure, save, shared_legend

ROW_HEIGHT = 0.38  # inches
DOT = "#0072B2"
LONGEST_NOTE = 60  # characters that fit between the axes


def draw_ablation(
    results: Sequence[CellResult], folder: Path, name: str, *, title: str, small_print: str
) -> list[Path]:
    """Draw a row per cell that can be trained; those without a figure say why.

    Args:
        results: In the order of the rows, from the top.
        folder: Where `NAME.png` and `.svg` go.
        name: Of the files.
        title: Of the picture.
        small_print: Below it: how these were trained.
    """
    results = [result for result in results if result.cell.problem is None]
    with new_figure(8.6, 1.7 + ROW_HEIGHT * len(results), title, small_print) as figure:
        axes = figure.subplots()
        known = [value for result in results for value in result.top1]
        low, high = (min(known), max(known)) if known else (0.0, 100.0)
        margin = max(0.5, 0.12 * (high - low))
        axes.set_xlim(low - margin, high + margin)
        for row, result in enumerate(results):
            axes.axhline(row, color=FAINT, linewidth=0.6, zorder=0)
            if result.mean is None:
                reason = textwrap.shorten(result.note or "not trained yet", LONGEST_NOTE, placeholder="…")
                axes.annotate(
                    reason, (low - margin, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5,
                    color=ALARM if result.note else MUTED,
                )  # fmt: skip
                continue
            axes.plot(result.top1, [row] * len(result.top1), "o", color=DOT, alpha=0.55, markersize=7, zorder=2)
            axes.plot([result.mean] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=2, zorder=3)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(results)), [mean_and_spread(result) for result in results], fontsize=9)
        right.tick_params(length=0)
        right.spines["right"].set_visible(False)
        axes.set_yticks(range(len(results)), [result.cell.label for result in results])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xlabel("top-1 (%)")
        light_grid(axes, "x")
        handles = [Line2D([], [], color=DOT, marker="o", linestyle="", alpha=0.55), Line2D([], [], color=INK, lw=2)]
        shared_legend(figure, handles, ["one seed", "mean"])
        return save(figure, folder, name)
