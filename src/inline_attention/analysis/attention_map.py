"""Where single tokens of one picture look: their weights as maps, and the 3×3 kernels of the local term.

Shapes: `h`×`w` token grid, `H` heads, `P` prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.analysis.probes import LayerAttention, capture_attention, choose_heads, choose_layers
from inline_attention.analysis.subjects import Subject, check_has_head
from inline_attention.data.slides import Slide
from inline_attention.layers.attention import KernelAttention
from inline_attention.models.streaming import streamed
from inline_attention.ops.reference import AttentionKind
from inline_attention.support.figures import INK, KIND_LABELS, MUTED, Axes, draw_picture, new_figure, save
from inline_attention.support.text import did_you_mean, printable, some_of

Place = tuple[int, int]  # row and column on a token grid
LEAST_WITH_BORDER = 6  # tokens along a side, from which on the outermost are not chosen
QUERY_COLOR = "#00E5A8"  # visible on photographs and on both color maps
MOST_KERNELS = 12
SLIDE_CELLS = 256  # along a side of the maps of a slide


@dataclass(frozen=True)
class TokenMap:
    """The weights of one token, averaged over the chosen heads, without the local term."""

    token: Place
    weights: Tensor  # [h, w] float64, of the grid tokens
    prefix_weights: Tensor  # [P], of class or register tokens
    uniform: float  # weight of every visible key under uniform attention

    @property
    def times_uniform(self) -> Tensor:
        """Weights `[h, w]` in multiples of the uniform weight."""
        return self.weights / self.uniform


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one layer of a model, one per token, averaged over heads."""

    label: str
    attention: AttentionKind
    layer: int
    layer_name: str
    heads: tuple[int, ...]
    grid_size: tuple[int, int]
    pixels: Tensor  # [3, height, width] uint8, as the model sees them
    maps: tuple[TokenMap, ...]
    kernels: Tensor | None  # [heads, 3, 3] float64, of the local term, means over channels
    cell_pixels: int = 0  # of a slide: pixels along a side of a place of the grid


@dataclass(frozen=True)
class EvidenceMap:
    """What the tokens of a slide say about a class, averaged over cells; see `StreamedModel.class_evidence`."""

    label: str  # of the model
    class_name: str
    logit: float
    values: Tensor  # [h, w]
    cell_pixels: int


def measure_attention_maps(
    subject: Subject,
    pixels: Tensor,
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[Place] | None = None,
    token_grid: tuple[int, int] | None = None,
    count: int = 3,
) -> AttentionMaps:
    """Run a model on one picture `[3, height, width]`, uint8, and take the weights of some tokens in one layer.

    By default, these are `count` tokens where the picture has detail, in the middle layer. `token_grid` is the size of
    the grid that `tokens` refer to, if it is another model's.
    """
    layer = len(choose_layers(subject.model, None)) // 2 if layer is None else layer
    (found,) = capture_attention(subject.model, subject.normalize(pixels[None]), layers=[layer])
    picked = choose_heads(found, heads)
    places = list(tokens) if tokens else interesting_tokens(pixels, found.grid_size, count)
    if token_grid is not None:
        places = corresponding_tokens(places, token_grid, found.grid_size)
    maps = tuple(_token_map(found, picked, place) for place in places)
    local = found.local_weight
    kernels = None if local is None else local[0, picked].double().mean(1).cpu()
    return AttentionMaps(
        subject.label, found.rule.kind, found.index, found.name, tuple(picked), found.grid_size, pixels, maps, kernels
    )


def measure_slide_maps(
    subject: Subject,
    slide: Slide,
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[Place] | None = None,
    count: int = 3,
    memory: str | int = "4GiB",
    on_progress: Callable[[float], None] | None = None,
) -> AttentionMaps:
    """Take the weights of some tokens of a slide, as `measure_attention_maps` does, in linear memory.

    The maps are averaged over cells of tokens, and so are the places of `AttentionMaps`. `tokens` are rows and columns
    of the whole grid. The default layer is the middle one of those with linear-time attention.
    """
    reader = streamed(subject.model, memory, on_progress=on_progress)
    blocks = reader.blocks
    linear = [index for index, block in enumerate(blocks) if isinstance(block.attn, KernelAttention)]
    if layer is None:
        if not linear:
            raise ValueError(f"{subject.label} has softmax attention only, which needs quadratic memory on slides")
        layer = linear[len(linear) // 2]
    thumbnail = torch.from_numpy(np.array(slide.thumbnail(SLIDE_CELLS))).permute(2, 0, 1)
    grid = reader.grid_size(slide, layer)
    cell = -(-max(grid) // SLIDE_CELLS)
    cells = -(-grid[0] // cell), -(-grid[1] // cell)
    chosen = list(tokens or ()) or [
        (min(row * cell + cell // 2, grid[0] - 1), min(column * cell + cell // 2, grid[1] - 1))
        for row, column in interesting_tokens(thumbnail, cells, count)
    ]
    found = reader.attention_maps(slide, layer, chosen, SLIDE_CELLS)
    number = found.weights.shape[1]
    picked = list(range(number)) if heads is None else list(heads)
    if not all(0 <= head < number for head in picked):
        raise ValueError(f"layer {layer} has heads 0 to {number - 1}, got {', '.join(map(str, picked))}")
    uniform = 1 / (math.prod(grid) + found.prefix_weights.shape[2])
    maps = tuple(
        TokenMap((row // cell, column // cell), weights[picked].mean(0) * uniform, prefix[picked].mean(0) * uniform,
                 uniform)
        for (row, column), weights, prefix in zip(
            chosen, found.weights.double(), found.prefix_weights.double(), strict=True
        )
    )  # fmt: skip
    name = next(name for name, module in subject.model.named_modules() if module is blocks[layer].attn)
    index = layer % len(blocks)
    return AttentionMaps(
        subject.label, subject.kind, index, name, tuple(picked), cells, thumbnail, maps, None, found.cell_pixels
    )


def measure_slide_evidence(
    subject: Subject,
    slide: Slide,
    classes: Sequence[str],
    *,
    memory: str | int = "4GiB",
    on_progress: Callable[[float], None] | None = None,
) -> list[EvidenceMap]:
    """Return the evidence of the tokens of a slide for classes, given by their names or numbers."""
    check_has_head(subject)
    names = subject.class_names or tuple(map(str, range(getattr(subject.model, "num_classes", 0))))
    numbers = [names.index(name) if name in names else int(name) if name.isdecimal() else -1 for name in classes]
    for name, number in zip(classes, numbers, strict=True):
        if not 0 <= number < len(names):
            hint = did_you_mean(name, names) or f"; it has {some_of(names)}"
            raise ValueError(f"expected a class of {subject.label}, got {name!r}{hint}")
    reader = streamed(subject.model, memory, on_progress=on_progress)
    found = reader.class_evidence(slide, numbers, SLIDE_CELLS)
    return [
        EvidenceMap(subject.label, names[number], logit, values.double(), found.cell_pixels)
        for number, logit, values in zip(numbers, found.logits.tolist(), found.values, strict=True)
    ]


def evidence_rows(evidence: Sequence[EvidenceMap]) -> Iterator[dict[str, Any]]:
    """Yield a row per model, class and cell, for result files."""
    for item in evidence:
        for (row, column), value in np.ndenumerate(item.values.numpy()):
            place = {"row": row, "column": column}
            yield {"model": item.label, "class": item.class_name, **place, "evidence": float(value)}


def interesting_tokens(pixels: Tensor, grid_size: tuple[int, int], count: int = 3) -> list[Place]:
    """Return places of a grid with high contrast, far from each other and, on larger grids, from the border."""
    gray = pixels.float().mean(0)[None, None]
    variance = F.adaptive_avg_pool2d(gray**2, grid_size) - F.adaptive_avg_pool2d(gray, grid_size) ** 2
    contrast = variance.clamp(min=0).sqrt().flatten() + 1  # a blank picture has tokens too
    places = torch.cartesian_prod(*map(torch.arange, grid_size))
    if min(grid_size) >= LEAST_WITH_BORDER:
        inner = ((places > 0) & (places < torch.tensor(grid_size) - 1)).all(1)
        places, contrast = places[inner], contrast[inner]
    chosen = [int(contrast.argmax())]
    while len(chosen) < min(count, len(places)):
        distance = torch.cdist(places.float(), places[chosen].float()).min(1).values
        chosen.append(int((distance * contrast).argmax()))
    return sorted(map(tuple, places[chosen].tolist()))


def corresponding_tokens(tokens: Sequence[Place], grid_size: tuple[int, int], other: tuple[int, int]) -> list[Place]:
    """Return the tokens of another grid over the same picture at the same places."""
    down, across = other[0] / grid_size[0], other[1] / grid_size[1]
    return [(int((row + 0.5) * down), int((column + 0.5) * across)) for row, column in tokens]


def weight_rows(maps: Sequence[AttentionMaps]) -> Iterator[dict[str, Any]]:
    """Yield a row per model, token and key of the grid, for result files."""
    for item in maps:
        for token_map in item.maps:
            row, column = token_map.token
            query = {"model": item.label, "layer": item.layer, "token_row": row, "token_column": column}
            for (key_row, key_column), weight in np.ndenumerate(token_map.weights.numpy()):
                yield {**query, "key_row": key_row, "key_column": key_column, "weight": float(weight)}


def kernel_rows(maps: Sequence[AttentionMaps]) -> Iterator[dict[str, Any]]:
    """Yield a row per model, head and place of its 3×3 kernel, for result files."""
    for item in maps:
        for (number, row, column), weight in np.ndenumerate(() if item.kernels is None else item.kernels.numpy()):
            place = {"head": item.heads[number], "kernel_row": row, "kernel_column": column}
            yield {"model": item.label, "layer": item.layer, **place, "weight": float(weight)}


def draw_attention_maps(maps: Sequence[AttentionMaps], picture_name: str, note: str, folder: Path) -> list[Path]:
    """Write `attention-map.png` and `.svg`: a row per token, a column per model, kernels below."""
    tokens = len(maps[0].maps)
    with_kernels = any(item.kernels is not None for item in maps)
    small_print = (
        f"{note} Weights in multiples of the uniform weight, 1. Purple is above it, green below, also where "
        "weights are negative; one scale per model, cut at its 99.5th percentile. The framed token is the query. Maps "
        "do not include the local term"
        + (", whose kernels (means over channels, per head) are in the last row." if with_kernels else ".")
    )
    first = maps[0].pixels
    panel_height = 2.5 * min(1.6, max(0.55, first.shape[1] / first.shape[2]))
    height = tokens * panel_height + (1.7 if with_kernels else 0) + 1.7
    title = f"Where tokens of {printable(picture_name)} look"
    with new_figure(max(8.5, 3.1 * (1 + len(maps))), height, title, small_print) as figure:
        ratios = [panel_height] * tokens + ([1.5] if with_kernels else [])
        grid = figure.subplots(len(ratios), 1 + len(maps), squeeze=False, height_ratios=ratios)
        for axes, token_map in zip(grid[:, 0], maps[0].maps, strict=False):
            draw_picture(axes, first.permute(1, 2, 0).cpu().numpy(), maps[0].grid_size)
            _mark(axes, token_map)
            axes.set_ylabel("row {}, column {}".format(*token_map.token))
        for column, item in enumerate(maps, start=1):
            # One scale for all tokens of a model, diverging around uniform attention.
            values = torch.cat([token_map.times_uniform.flatten() for token_map in item.maps])
            limit = max((values - 1).abs().quantile(0.995).item(), 1e-9)
            scale = {"vmin": 1 - limit, "vmax": 1 + limit, "cmap": "PRGn_r"}
            panels = list(grid[:tokens, column])
            for axes, token_map in zip(panels, item.maps, strict=True):
                _draw_map(axes, item, token_map, scale)
            figure.colorbar(
                panels[0].images[0], ax=panels, shrink=0.7, pad=0.02, aspect=24, label="weight ÷ uniform weight"
            )
            heads = f"head {item.heads[0]}" if len(item.heads) == 1 else f"mean of {len(item.heads)} heads"
            name = f"{KIND_LABELS[item.attention]}\n{item.label}, layer {item.layer}, {heads}"
            panels[0].set_title(name, fontsize=9.5)
            if with_kernels:
                _draw_kernels(grid[tokens, column], item)
        if with_kernels:
            grid[tokens, 0].set_axis_off()
            grid[tokens, 0].text(1, 0.5, "3×3 kernels\nof the local term", ha="right", va="center")
        return save(figure, folder, "attention-map")


def _draw_map(axes: Axes, item: AttentionMaps, token_map: TokenMap, scale: Mapping[str, Any]) -> None:
    rows, columns = item.grid_size
    aspect = (item.pixels.shape[1] / rows) / (item.pixels.shape[2] / columns)  # that of the picture
    weights = token_map.times_uniform.numpy()
    draw_picture(axes, weights, item.grid_size, aspect=aspect, interpolation="nearest", **scale)
    _mark(axes, token_map)
    if len(token_map.prefix_weights):
        names = ", ".join(f"{weight / token_map.uniform:.2f}" for weight in token_map.prefix_weights.tolist())
        axes.set_xlabel(f"class token: {names} × uniform", fontsize=8, labelpad=2)


def _draw_kernels(place: Axes, item: AttentionMaps) -> None:
    place.set_axis_off()
    if item.kernels is None:
        return
    kernels = item.kernels[:MOST_KERNELS]
    columns = min(6, len(kernels))
    tiles: Any = place.get_subplotspec()
    tiles = tiles.subgridspec(-(-len(kernels) // columns), columns)
    limit = max(item.kernels.abs().max().item(), 1e-9)
    for number, kernel in enumerate(kernels):
        axes: Any = place.figure.add_subplot(tiles[divmod(number, columns)])
        draw_picture(axes, kernel.numpy(), cmap="PRGn_r", vmin=-limit, vmax=limit)
        axes.set_title(f"head {item.heads[number]}", fontsize=7, color=MUTED, pad=2, loc="center")
        if number == len(kernels) - 1:
            axes.annotate(f"±{limit:.2g}", (1, 0), (2, 0), "axes fraction", "offset points", fontsize=7, color=MUTED)


def _mark(axes: Axes, token_map: TokenMap) -> None:
    from matplotlib.patches import Rectangle

    row, column = token_map.token
    for color, width in ((INK, 3.2), (QUERY_COLOR, 1.7)):
        axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=color, linewidth=width))


def _token_map(attention: LayerAttention, heads: Sequence[int], place: Place) -> TokenMap:
    token = torch.tensor([attention.token(*place)], device=attention.q.device)
    row = torch.stack([attention.rows(0, head, token)[0] for head in heads]).mean(0).cpu()
    # Heads may see different keys, as in CSWin's two branches.
    uniform = mean(1 / int(attention.reach(head, token).sum()) for head in heads)
    prefix = attention.num_prefix_tokens
    return TokenMap(place, row[prefix:].view(attention.grid_size), row[:prefix], uniform)
