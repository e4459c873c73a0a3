"""How much of its attention a query spends on its neighbourhood, against what it would spend if it were uniform.

InLine's weights may be negative, so "how much" has two answers, and both are given:
- *share*: the sum of |w| inside the neighbourhood over the sum of |w| over all keys, from 0 to 1;
- *signed*: the sum of w inside; for softmax, and for linear attention with a non-negative phi, the same as the share.

The local residual adds a 3×3 kernel per channel to these weights. With it, both are computed for each channel and
averaged: |w + r| is not |w| + |r|.

Neighbourhoods end at the border and, in windows, at the window's edge, and so does the uniform value they are held
against: neighbours in sight over keys in sight. Class tokens are keys like others, but have no neighbourhood.

Shapes: `Q` queries, `N` tokens, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from inline_attention.analysis.explicit import AttentionKind
from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.neighbourhoods import TAPS, neighbourhood_mask

SIDES = (3, 5, 7)
LocalTerm: TypeAlias = Literal["without", "with"]


@dataclass(frozen=True)
class Locality:
    """Attention inside the neighbourhoods of one head, averaged over queries and images.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        attention: The layer's.
        local_term: Without or with the 3×3 term; only layers that have one give both.
        side: Of the neighbourhood in tokens.
        share: Of |w|.
        signed: Sum of w.
        uniform: What uniform attention would give for either.
    """

    layer: int
    head: int
    attention: AttentionKind
    local_term: LocalTerm
    side: int
    share: float
    signed: float
    uniform: float


def measure_locality(
    layer: LayerAttention, image: int, head: int, *, sides: Sequence[int] = SIDES
) -> Iterator[Locality]:
    """The locality of one head of one image: per side without the local term, then with it where there is one.

    Raises:
        ValueError: If a side is below 3, or even.
        MatrixTooLargeError: If there are too many tokens to write all weights out.
    """
    if any(side < 3 for side in sides):
        raise ValueError(f"neighbourhoods must be at least 3 tokens wide, as the local term is, got {list(sides)}")
    rows = layer.rows(image, head)
    absolute = rows.abs()
    grid = slice(layer.num_prefix_tokens, None)
    reach = layer.reach(head)
    in_sight = rows.new_full((layer.num_tokens,), layer.num_tokens) if reach is None else reach.sum(1).to(rows.dtype)
    with_local = None if layer.local_weight is None else _changes_by_local_term(layer, image, head, rows)
    for side in sides:
        near = neighbourhood_mask(layer.grid_size, layer.num_prefix_tokens, side, rows.device)
        near = near if reach is None else near & reach
        uniform = (near.sum(1) / in_sight)[grid].mean().item()
        inside, inside_absolute = (rows * near).sum(1), (absolute * near).sum(1)
        parts: list[tuple[LocalTerm, Tensor, Tensor]] = [("without", inside_absolute / absolute.sum(1), inside)]
        if with_local is not None:
            # A 3×3 kernel lies inside every neighbourhood, so both sums change by as much.
            added, added_absolute = with_local  # [N, D]
            share = (inside_absolute[:, None] + added_absolute) / (absolute.sum(1, keepdim=True) + added_absolute)
            parts.append(("with", share.mean(1), (inside[:, None] + added).mean(1)))
        for local_term, share, signed in parts:
            yield Locality(
                layer=layer.index,
                head=head,
                attention=layer.rule.kind,
                local_term=local_term,
                side=side,
                share=share[grid].mean().item(),
                signed=signed[grid].mean().item(),
                uniform=uniform,
            )


def average(measured: Sequence[Locality]) -> list[Locality]:
    """One entry per layer, head, local term and side: the mean over those that are given, as of several images."""
    groups: dict[tuple[object, ...], list[Locality]] = {}
    for item in measured:
        key = (item.layer, item.head, item.attention, item.local_term, item.side)
        groups.setdefault(key, []).append(item)
    return [_mean(items, items[0].head) for items in groups.values()]


def _mean(items: Sequence[Locality], head: int) -> Locality:
    first, count = items[0], len(items)
    return Locality(
        layer=first.layer,
        head=head,
        attention=first.attention,
        local_term=first.local_term,
        side=first.side,
        share=sum(item.share for item in items) / count,
        signed=sum(item.signed for item in items) / count,
        uniform=sum(item.uniform for item in items) / count,
    )


def _changes_by_local_term(layer: LayerAttention, image: int, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the 3×3 term changes the sums of w and of |w| of every row, per channel: `[N, D]` each."""
    assert layer.local_weight is not None
    numbers, exists = layer.neighbours(head)
    weights = rows.gather(1, numbers)  # [N, 9]
    kernel = layer.local_weight[image, head].double().flatten(-2)  # [D, 9]
    added = rows.new_zeros(layer.num_tokens, layer.head_dim)
    added_absolute = torch.zeros_like(added)
    for tap in range(TAPS):
        weight, present = weights[:, tap, None], exists[:, tap, None]
        added += kernel[None, :, tap] * present
        added_absolute += ((weight + kernel[None, :, tap]).abs() - weight.abs()) * present
    return added, added_absolute
