"""Which rules give different queries equal weights, and how well the keys of each layer tell queries apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from inline_attention.analysis.collisions import EQUAL_ROWS, CollisionRate
from inline_attention.analysis.key_conditions import KeyCondition
from inline_attention.analysis.subjects import Subject
from inline_attention.support.figures import (
    COLORS,
    INK,
    KIND_LABELS,
    MUTED,
    light_grid,
    new_figure,
    save,
    shared_legend,
    weights_note,
)

KIND_ORDER = ("softmax", "inline", "magnitude", "linear")
BAR = 0.38
SEARCHED = 0.45  # opacity of what was found by search


def draw_injectivity(
    subjects: Sequence[Subject],
    rates: Mapping[str, Sequence[CollisionRate]],
    conditions: Mapping[str, Sequence[KeyCondition]],
    folder: Path,
) -> list[Path]:
    """Draw a column per model: collisions by rule above, spectra of the centred keys by layer below.

    Args:
        subjects: The models.
        rates: By label.
        conditions: By label.
        folder: Where `injectivity.png` and `.svg` go.
    """
    small_print = (
        f"{weights_note(subjects)} A query collides if another, at least 10 % away, has the same weights to "
        f"{EQUAL_ROWS:g} of what they have beyond uniform attention. All rules are tried on the model's own queries "
        "and keys; ◂ marks its own rule. Softmax and InLine tell all queries apart exactly when no singular value of "
        "the centred keys is zero (docs/math.md, section 4). Lines: medians over heads and images."
    )
    size = (max(10.0, 4.9 * len(subjects)), 9.2)
    with new_figure(*size, "Do different queries get different weights?", small_print) as figure:
        ratios = {"height_ratios": (1.35, 1)}
        panels = figure.subplots(2, len(subjects), squeeze=False, sharey="row", gridspec_kw=ratios)
        for column, subject in enumerate(subjects):
            _draw_rates(panels[0, column], rates[subject.label])
            panels[0, column].set_title(subject.label, fontsize=12, fontweight="bold", pad=10)
            _draw_spectra(panels[1, column], conditions[subject.label])
        panels[1, 0].set_ylabel("singular value ÷ largest")
        handles = [Patch(color=MUTED, alpha=alpha) for alpha in (1.0, SEARCHED)]
        shared_legend(figure, handles, ["by construction", "by search"])
        return save(figure, folder, "injectivity")


def _draw_rates(axes: Axes, rates: Sequence[CollisionRate]) -> None:
    groups: dict[tuple[str, str], list[CollisionRate]] = {}
    for rate in sorted(rates, key=lambda rate: KIND_ORDER.index(rate.attention)):
        groups.setdefault((rate.attention, rate.feature_map), []).append(rate)
    for position, ((kind, _), items) in enumerate(groups.items()):
        total = sum(item.queries for item in items)
        ways = (
            (sum(item.constructed for item in items) / total, -BAR / 2, 1.0),
            (sum(item.found for item in items) / total, BAR / 2, SEARCHED),
        )
        for share, offset, alpha in ways:
            axes.barh(position + offset, share, BAR, color=COLORS[kind], alpha=alpha)
        if all(share == 0 for share, *_ in ways):
            axes.text(0.015, position, "none", va="center", fontsize=9, color=MUTED)
        if any(item.is_own for item in items):
            axes.text(1.02, position, "◂", va="center", color=INK, clip_on=False)
    axes.set_yticks(
        range(len(groups)),
        [KIND_LABELS[kind] + ("" if name == "none" else f", φ = {name}") for kind, name in groups],
    )
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("queries that collide")
    axes.tick_params(axis="y", length=0)
    light_grid(axes, "x")


def _draw_spectra(axes: Axes, conditions: Sequence[KeyCondition]) -> None:
    layers = sorted({condition.layer for condition in conditions})
    colors = mpl.colormaps["viridis"]
    for place, layer in enumerate(layers):
        spectra = [
            [value / condition.largest if condition.largest > 0 else 0.0 for value in condition.singular_values]
            for condition in conditions
            if condition.layer == layer
        ]
        # Layers of a pyramid have heads of one width; a median per position is meaningful.
        middle = [max(median(values), 1e-17) for values in zip(*spectra, strict=True)]
        color = colors(0.92 * place / max(len(layers) - 1, 1))
        axes.plot(range(1, len(middle) + 1), middle, color=color, linewidth=1.6, label=f"layer {layer}")
    injective = sum(condition.injective is True for condition in conditions)
    unknown = sum(condition.injective is None for condition in conditions)
    axes.set(yscale="log", ylim=(1e-9, 1.8), xlabel="singular value of the centred keys, by rank")
    worst = min(conditions, key=lambda condition: condition.rank - condition.needed)
    share = f"one-to-one: {injective} of {len(conditions)} (heads × images)" + (
        f", {unknown} unknown" if unknown else ""
    )
    axes.set_title(f"{share}; rank [K, 1] ≥ {worst.rank} of {worst.needed}", fontsize=10, color=INK)
    light_grid(axes)
    if len(layers) <= 6:
        axes.legend(loc="lower left", fontsize=9)
    else:
        ends = (0, len(layers) // 2, len(layers) - 1)
        handles = [axes.lines[place] for place in ends]
        axes.legend(handles, [f"layer {layers[place]}" for place in ends], loc="lower left", fontsize=9)
