"""What models lose when neighbourhoods, or as many random tokens, are hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from inline_attention.analysis.masking import MaskingResult
from inline_attention.analysis.subjects import Subject
from inline_attention.support.figures import (
    FAINT,
    INK,
    MUTED,
    light_grid,
    new_figure,
    save,
    shared_legend,
    weights_note,
)

COLORS = {"neighbourhood": "#D55E00", "random": "#56B4E9"}
LABELS = {"neighbourhood": "neighbourhood hidden", "random": "as many random tokens hidden"}
LEAST_FOR_LABEL = 10.0  # percent of top-1 that leave room for a label inside the bar
TERM_LABELS = {"hidden": "from the 3×3 term too", "kept": "3×3 term kept", "none": ""}


def draw_masking(
    subjects: Sequence[Subject], results: Mapping[str, Sequence[MaskingResult]], folder: Path
) -> list[Path]:
    """Draw a panel per model, and per treatment of its local term: top-1 by the side of what is hidden.

    Args:
        subjects: The models.
        results: By label.
        folder: Where `masking.png` and `.svg` go.
    """
    panels = [
        (subject.label, term)
        for subject in subjects
        for term in dict.fromkeys(item.hiding.local_term for item in results[subject.label] if item.hiding.side)
    ]
    images = max(item.images for items in results.values() for item in items)
    small_print = (
        f"{weights_note(subjects)} {images:,} images. Hidden tokens count nowhere for their query: weights are "
        "normalised over what is left, in all layers and heads. Dashed: nothing hidden."
    )
    size = (max(8.0, 3.7 * len(panels)), 4.6)
    with new_figure(*size, "What hiding each query's neighbourhood costs", small_print) as figure:
        row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for (label, term), axes in zip(panels, row, strict=True):
            shown = [item for item in results[label] if item.hiding.local_term == term and item.hiding.side]
            _draw_panel(axes, shown)
            axes.set_title(TERM_LABELS[term] or "no 3×3 term", fontsize=10, color=MUTED)
            axes.annotate(label, (0, 1), (0, 22), "axes fraction", "offset points", fontsize=11.5, fontweight="bold")
        row[0].set_ylabel("top-1 (%)")
        handles = [Patch(color=COLORS[where]) for where in LABELS]
        shared_legend(figure, handles, list(LABELS.values()))
        return save(figure, folder, "masking")


def _draw_panel(axes: Axes, items: Sequence[MaskingResult]) -> None:
    sides = sorted({item.hiding.side for item in items})
    for item in items:
        position = sides.index(item.hiding.side) + (-0.2 if item.hiding.where == "neighbourhood" else 0.2)
        bar = axes.bar(position, item.top1, 0.38, color=COLORS[item.hiding.where])
        inside = item.top1 > LEAST_FOR_LABEL  # above the bar, the label of a good result would lie on the dashed line
        axes.bar_label(bar, fmt="{:.1f}", padding=-13 if inside else 2, fontsize=8.5, color=INK)
    axes.axhline(items[0].baseline_top1, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(sides)), [f"{side}×{side}" for side in sides])
    axes.set_xlabel("tokens hidden around each query")
    axes.set_ylim(0, 109)
    axes.set_yticks(range(0, 101, 20))
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_color(FAINT)
    light_grid(axes)
