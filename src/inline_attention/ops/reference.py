"""The definition: explicit weights of every query for every key, in float64. The oracle of every test.

It takes O(N·M) memory and is written straight from docs/math.md, on purpose unlike the fast paths.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from inline_attention.ops.call import SMALLEST_MEAN_SCORE, AttentionCall, Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_to_queries_and_keys

AttentionKind: TypeAlias = Literal["softmax", "linear", "inline", "magnitude"]
KIND_OF_NORMALIZATION: dict[Normalization, AttentionKind] = {
    "subtract": "inline",
    "divide": "linear",
    "magnitude": "magnitude",
}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the reference cannot run this call, or None."""
    if call.q.device.type == "mps":
        return "it computes in float64, which MPS devices lack"
    return None


def run(call: AttentionCall) -> Tensor:
    """The call's output `[B, N, H, Dv]`, through explicit weights."""
    weights = kernel_weights(call.q, call.k, call.scale, call.feature_map, call.normalization, call.key_padding_mask)
    value = call.v.double()
    if call.key_padding_mask is not None:
        value = value.masked_fill(~call.key_padding_mask[:, :, None, None], 0)
    out = torch.einsum("bhnm,bmhd->bnhd", weights, value)
    if call.local_weight is not None and call.grid_size is not None:
        out = out + _local_term(value, call.local_weight.double(), call.grid_size, call.num_prefix_tokens)
    return out.to(call.v.dtype)


def kernel_weights(
    q: Tensor,
    k: Tensor,
    scale: float,
    feature_map: str | FeatureMap,
    normalization: Normalization,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """Weights `[B, H, N, M]` in float64 of linear, InLine or MALA attention; rows sum to one, padded keys get zero."""
    query, key = apply_to_queries_and_keys(feature_map, q, k, torch.float64)
    if key_padding_mask is None:
        key_padding_mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    key = key.masked_fill(~key_padding_mask[:, :, None, None], 0)  # padding may hold NaN, and 0 · NaN is NaN
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", query, key)
    return weights_from_scores(scores, normalization, key_padding_mask[:, None, None, :])


def weights_from_scores(scores: Tensor, normalization: Normalization | None, visible: Tensor | None = None) -> Tensor:
    """Turn scaled scores `[..., N, M]` into weights, whose rows sum to one over the visible keys; the others get zero.

    Hidden keys count nowhere: not in a softmax, not in a mean score, not in the number M of keys. A query that sees no
    key has a row of zeros. `normalization` None is softmax; `visible` None is all.
    """
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=scores.device)
    visible = visible.expand_as(scores)
    if normalization is None:
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0)
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~visible, 0).sum(-1, keepdim=True) / count
    divisible = mean.abs() > SMALLEST_MEAN_SCORE
    inverse = torch.where(divisible, 1 / torch.where(divisible, mean, 1), 0)
    if normalization == "subtract":
        weights = scores - mean + 1
    elif normalization == "divide":
        weights = torch.where(divisible, scores * inverse, 1)
    else:
        weights = torch.where(divisible, (1 + inverse) * scores - mean, scores - mean + 1)
    return torch.where(visible, weights / count, 0)


def softmax_weights(q: Tensor, k: Tensor, scale: float, key_padding_mask: Tensor | None) -> Tensor:
    """Weights `[B, H, N, M]` in float64 of softmax attention."""
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double())
    return weights_from_scores(scores, None, None if key_padding_mask is None else key_padding_mask[:, None, None, :])


def _local_term(value: Tensor, local_weight: Tensor, grid_size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """Dynamic 3×3 cross-correlation of the value grid, `[B, N, H, Dv]`; zero on prefix tokens."""
    outside = value.shape[1]  # index of an extra all-zero value: the neighbor beyond the border
    table = torch.full((value.shape[1], 9), outside, device=value.device)
    height, width = grid_size
    for row in range(height):
        for column in range(width):
            for tap in range(9):
                i, j = row + tap // 3 - 1, column + tap % 3 - 1
                if 0 <= i < height and 0 <= j < width:
                    table[num_prefix_tokens + row * width + column, tap] = num_prefix_tokens + i * width + j
    neighbors = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)[:, table]
    return torch.einsum("bnthd,bhdt->bnhd", neighbors, local_weight.flatten(-2))
