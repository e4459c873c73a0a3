"""Where single tokens of one picture look: their weights as maps, and the 3×3 kernels of the local term.

Shapes: `h`×`w` token grid, `H` heads, `P` prefix tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.analysis.explicit import AttentionKind
from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.probes import capture_attention, choose_heads, choose_layers
from inline_attention.analysis.subjects import Subject

Place = tuple[int, int]  # row and column on a token grid
LEAST_WITH_BORDER = 6  # tokens along a side, from which on the outermost are not picked


@dataclass(frozen=True)
class TokenMap:
    """The weights of one token, averaged over the chosen heads.

    Attributes:
        token: Row and column of the query.
        weights: `[h, w]` float64 of the grid's keys, without the local term.
        prefix_weights: `[P]` of the class or register tokens.
        uniform: The weight that uniform attention to the keys in sight would give each of them.
    """

    token: Place
    weights: Tensor
    prefix_weights: Tensor
    uniform: float

    @property
    def times_uniform(self) -> Tensor:
        """`[h, w]` weights in multiples of the uniform one."""
        return self.weights / self.uniform


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one model.

    Attributes:
        label: The model's.
        attention: Of the layer.
        layer: Number of the layer.
        layer_name: Its path in the model.
        heads: Numbers of the heads, of which maps are the mean.
        grid_size: (h, w).
        pixels: `[3, height, width]` uint8, the picture as the model saw it.
        maps: One per token.
        kernels: `[heads, 3, 3]` float64 of the local term, each the mean over its head's channels; None without one.
    """

    label: str
    attention: AttentionKind
    layer: int
    layer_name: str
    heads: tuple[int, ...]
    grid_size: tuple[int, int]
    pixels: Tensor
    maps: tuple[TokenMap, ...]
    kernels: Tensor | None


def measure_attention_maps(
    subject: Subject,
    pixels: Tensor,
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[Place] | None = None,
    token_grid: tuple[int, int] | None = None,
) -> AttentionMaps:
    """Run a model on one picture and take the weights of some tokens.

    Args:
        subject: The model.
        pixels: `[3, height, width]` uint8, as `subject.transform` makes them.
        layer: Number of the layer; the middle one by default.
        heads: Numbers of the heads to average; all by default.
        tokens: Rows and columns on the layer's grid; by default three where the picture has detail.
        token_grid: (h, w) of another grid over the same picture that `tokens` refer to, as that of another model.

    Raises:
        ValueError: If there is no such layer, head or token.
        MatrixTooLargeError: If even the weights of these tokens do not fit.
    """
    everything = choose_layers(subject.model, None)
    chosen = [everything[len(everything) // 2] if layer is None else layer]
    (attention,) = capture_attention(subject.model, subject.normalize(pixels[None]), layers=chosen)
    picked = choose_heads(attention, heads)
    places = list(tokens) if tokens else interesting_tokens(pixels, attention.grid_size)
    if token_grid is not None:
        places = corresponding_tokens(places, token_grid, attention.grid_size)
    kernels = None
    if attention.local_weight is not None:
        kernels = attention.local_weight[0, picked].double().mean(1).cpu()
    return AttentionMaps(
        subject.label,
        attention.rule.kind,
        attention.index,
        attention.name,
        tuple(picked),
        attention.grid_size,
        pixels,
        tuple(_token_map(attention, picked, place) for place in places),
        kernels,
    )


def interesting_tokens(pixels: Tensor, grid_size: tuple[int, int], count: int = 3) -> list[Place]:
    """Places with much contrast, far from each other and, on larger grids, from the border.

    Args:
        pixels: `[3, height, width]` uint8.
        grid_size: (h, w).
        count: How many; fewer where the grid is smaller.
    """
    height, width = grid_size
    grey = pixels.float().mean(0)[None, None]
    brightness = F.adaptive_avg_pool2d(grey, (height, width))
    variance = F.adaptive_avg_pool2d(grey**2, (height, width)) - brightness**2
    contrast = variance.clamp(min=0).sqrt().flatten() + 1  # of grey values; a blank picture has tokens too
    place = torch.arange(height * width)
    places = torch.stack([place // width, place % width], dim=1)
    if min(height, width) >= LEAST_WITH_BORDER:
        inner = ((places > 0) & (places < torch.tensor([height - 1, width - 1]))).all(1)
        places, contrast = places[inner], contrast[inner]
    chosen = [int(contrast.argmax())]
    while len(chosen) < min(count, len(places)):
        distance = torch.cdist(places.float(), places[chosen].float()).min(1).values
        chosen.append(int((distance * contrast).argmax()))
    return sorted((row, column) for row, column in places[chosen].tolist())


def corresponding_tokens(tokens: Sequence[Place], grid_size: tuple[int, int], other: tuple[int, int]) -> list[Place]:
    """The tokens of another grid over the same picture that lie where the given ones do."""
    return [
        (
            min(other[0] - 1, int((row + 0.5) / grid_size[0] * other[0])),
            min(other[1] - 1, int((column + 0.5) / grid_size[1] * other[1])),
        )
        for row, column in tokens
    ]


def weight_rows(maps: Sequence[AttentionMaps]) -> Iterator[dict[str, Any]]:
    """A row per model, token and key of the grid, for result files."""
    for item in maps:
        for token_map in item.maps:
            for row, weights in enumerate(token_map.weights.tolist()):
                for column, weight in enumerate(weights):
                    yield {
                        "model": item.label,
                        "layer": item.layer,
                        "token_row": token_map.token[0],
                        "token_column": token_map.token[1],
                        "key_row": row,
                        "key_column": column,
                        "weight": weight,
                    }


def kernel_rows(maps: Sequence[AttentionMaps]) -> Iterator[dict[str, Any]]:
    """A row per model, head and place of its 3×3 kernel, for result files."""
    for item in maps:
        if item.kernels is None:
            continue
        for head, kernel in zip(item.heads, item.kernels.flatten(1).tolist(), strict=True):
            for place, weight in enumerate(kernel):
                places = {"kernel_row": place // 3, "kernel_column": place % 3}
                yield {"model": item.label, "layer": item.layer, "head": head, **places, "weight": weight}


def _token_map(attention: LayerAttention, heads: Sequence[int], place: Place) -> TokenMap:
    token = torch.tensor([attention.token(*place)], device=attention.q.device)
    row = torch.stack([attention.rows(0, head, token)[0] for head in heads]).mean(0).cpu()
    # Heads may see different keys, as those of CSWin's two branches do.
    reaches = [attention.reach(head, token) for head in heads]
    uniform = mean(1 / (attention.num_tokens if reach is None else int(reach.sum())) for reach in reaches)
    prefix = attention.num_prefix_tokens
    return TokenMap(place, row[prefix:].view(attention.grid_size), row[:prefix], uniform)
