"""How much attention stays in each query's neighbourhood, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from inline_attention.analysis.locality import Locality
from inline_attention.analysis.subjects import Subject
from inline_attention.support.figures import (
    LineStyle,
    light_grid,
    line_styles,
    new_figure,
    save,
    shared_legend,
    weights_note,
)


def draw_locality(subjects: Sequence[Subject], measured: Mapping[str, Sequence[Locality]], folder: Path) -> list[Path]:
    """Draw a panel per neighbourhood: its share of |w| by layer, against uniform attention.

    Args:
        subjects: The models.
        measured: By label; heads are averaged.
        folder: Where `locality.png` and `.svg` go.
    """
    sides = sorted({item.side for items in measured.values() for item in items})
    styles = line_styles(subjects)
    small_print = (
        f"{weights_note(subjects)} Share: sum of |w| over the neighbourhood ÷ sum of |w| over all keys, mean over "
        "queries, heads and images. Hollow: with the 3×3 local term, mean over channels. Dashed: uniform attention to "
        "the keys in sight, in the model's colour."
    )
    with new_figure(max(8.0, 4.3 * len(sides)), 4.9, "Attention that stays near its query", small_print) as figure:
        panels = figure.subplots(1, len(sides), squeeze=False)[0]
        for side, axes in zip(sides, panels, strict=True):
            _draw_side(axes, side, measured, styles)
        panels[0].set_ylabel("share of |w| in the neighbourhood")
        shared_legend(figure, *panels[0].get_legend_handles_labels())
        return save(figure, folder, "locality")


def _draw_side(
    axes: Axes, side: int, measured: Mapping[str, Sequence[Locality]], styles: Mapping[str, LineStyle]
) -> None:
    for label, items in measured.items():
        style = styles[label]
        for local_term in ("without", "with"):
            by_layer: dict[int, list[Locality]] = {}
            for item in items:
                if item.side == side and item.local_term == local_term:
                    by_layer.setdefault(item.layer, []).append(item)
            if not by_layer:
                continue
            layers = sorted(by_layer)
            if local_term == "without":
                uniform = [mean(item.uniform for item in by_layer[layer]) for layer in layers]
                axes.plot(layers, uniform, color=style.color, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            is_with = local_term == "with"
            axes.plot(
                layers, [mean(item.share for item in by_layer[layer]) for layer in layers],
                color=style.color, marker=style.marker, linestyle=style.dashes, linewidth=1.3 if is_with else 2.2,
                markerfacecolor="white" if is_with else style.color, markersize=6.5,
                label=f"{label} with 3×3" if is_with else label,
            )  # fmt: skip
    axes.set_title(f"{side}×{side} tokens", fontsize=11, fontweight="bold")
    axes.set_xlabel("layer")
    axes.set_ylim(0, 1.07 * axes.dataLim.ymax)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    light_grid(axes)
