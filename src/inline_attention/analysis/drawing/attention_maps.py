"""Where tokens of a picture look, model beside model, and the 3×3 kernels of the local term."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.patches import Rectangle

from inline_attention.analysis.attention_maps import AttentionMaps, TokenMap
from inline_attention.analysis.subjects import Subject
from inline_attention.support.figures import (
    INK,
    KIND_LABELS,
    MUTED,
    as_picture,
    new_figure,
    save,
    weights_note,
    without_ticks,
)

QUERY_COLOR = "#00E5A8"  # seen on photographs and on both colour maps
MOST_KERNELS = 12


def draw_attention_maps(
    subjects: Sequence[Subject], maps: Sequence[AttentionMaps], picture_name: str, folder: Path
) -> list[Path]:
    """Draw a row per token: the picture with the token marked, then its weights under each model; kernels below.

    Args:
        subjects: The models.
        maps: Theirs, in the same order, of corresponding tokens.
        picture_name: For the title.
        folder: Where `attention-map.png` and `.svg` go.
    """
    tokens = len(maps[0].maps)
    small_print = (
        f"{weights_note(subjects)} Weights in multiples of the uniform weight: 1 is what uniform attention gives every "
        "key. Red is positive, blue negative; one scale per model, cut at its 99.5th percentile. "
        "The green square is the query. Maps are without the local term, whose kernels (means over channels, per head) "
        "are below where a model has one."
    )
    first = maps[0].pixels
    panel_height = 2.5 * min(1.6, max(0.55, first.shape[1] / first.shape[2]))
    with_kernels = any(item.kernels is not None for item in maps)
    height = tokens * panel_height + (1.7 if with_kernels else 0) + 1.7
    title = f"Where tokens of {picture_name} look"
    with new_figure(max(8.5, 3.1 * (1 + len(maps))), height, title, small_print) as figure:
        ratios = [panel_height] * tokens + ([1.5] if with_kernels else [])
        grid = figure.add_gridspec(len(ratios), 1 + len(maps), height_ratios=ratios)
        for row in range(tokens):
            _draw_query(figure.add_subplot(grid[row, 0]), maps[0], maps[0].maps[row])
        for column, item in enumerate(maps, start=1):
            norm, colormap = _scale(item)
            panels = [figure.add_subplot(grid[row, column]) for row in range(tokens)]
            for axes, token_map in zip(panels, item.maps, strict=True):
                _draw_map(axes, item, token_map, norm, colormap)
            figure.colorbar(panels[0].images[0], ax=panels, shrink=0.7, pad=0.02, aspect=24, label="× uniform")
            heads = f"head {item.heads[0]}" if len(item.heads) == 1 else f"mean of {len(item.heads)} heads"
            panels[0].set_title(
                f"{KIND_LABELS[item.attention]}\n{item.label}, layer {item.layer}, {heads}", fontsize=9.5, color=INK
            )
            if item.kernels is not None:
                _draw_kernels(figure, grid[tokens, column], item)
        if with_kernels:
            axes = figure.add_subplot(grid[tokens, 0])
            axes.set_axis_off()
            axes.text(1, 0.5, "3×3 kernels\nof the local term", ha="right", va="center", transform=axes.transAxes)
        return save(figure, folder, "attention-map")


def _draw_query(axes: Axes, item: AttentionMaps, token_map: TokenMap) -> None:
    rows, columns = item.grid_size
    axes.imshow(as_picture(item.pixels), extent=(0, columns, rows, 0), aspect=_cell_aspect(item))
    _mark(axes, token_map)
    without_ticks(axes)
    row, column = token_map.token
    axes.set_ylabel(f"row {row}, column {column}", color=MUTED)


def _draw_map(axes: Axes, item: AttentionMaps, token_map: TokenMap, norm: Normalize, colormap: str) -> None:
    rows, columns = item.grid_size
    axes.imshow(
        token_map.times_uniform.numpy(),
        norm=norm, cmap=colormap, extent=(0, columns, rows, 0), aspect=_cell_aspect(item), interpolation="nearest",
    )  # fmt: skip
    _mark(axes, token_map)
    without_ticks(axes)
    if len(token_map.prefix_weights):
        names = ", ".join(f"{weight / token_map.uniform:.2f}" for weight in token_map.prefix_weights.tolist())
        axes.set_xlabel(f"class token: {names} × uniform", fontsize=8, color=MUTED, labelpad=2)


def _scale(item: AttentionMaps) -> tuple[Normalize, str]:
    """One scale for all tokens of a model: diverging around zero if any weight is negative."""
    values = torch.cat([token_map.times_uniform.flatten() for token_map in item.maps])
    limit = max(values.abs().quantile(0.995).item(), 1e-9)
    # Rounding leaves a softmax no negative weight, but linear attention may have some of either size.
    if values.min().item() < 0:
        return TwoSlopeNorm(0, -limit, limit), "RdBu_r"
    return Normalize(0, limit), "Reds"


def _draw_kernels(figure: Figure, place: SubplotSpec, item: AttentionMaps) -> None:
    assert item.kernels is not None
    kernels = item.kernels[:MOST_KERNELS]
    columns = min(6, len(kernels))
    tiles = place.subgridspec(-(-len(kernels) // columns), columns)
    limit = max(item.kernels.abs().max().item(), 1e-9)
    for number, kernel in enumerate(kernels):
        axes = figure.add_subplot(tiles[number // columns, number % columns])
        axes.imshow(kernel.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        without_ticks(axes)
        axes.set_title(f"head {item.heads[number]}", fontsize=7, color=MUTED, pad=2, loc="center")
        if number == len(kernels) - 1:
            axes.annotate(f"±{limit:.2g}", (1, 0), (2, 0), "axes fraction", "offset points", fontsize=7, color=MUTED)


def _mark(axes: Axes, token_map: TokenMap) -> None:
    row, column = token_map.token
    axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=INK, linewidth=3.2))
    axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=QUERY_COLOR, linewidth=1.7))


def _cell_aspect(item: AttentionMaps) -> float:
    """Height over width of a token in pixels: grids are drawn in the shape of the picture."""
    rows, columns = item.grid_size
    return (item.pixels.shape[1] / rows) / (item.pixels.shape[2] / columns)
