"""The definition: explicit weights of every query for every key, in float64.

This is the oracle of every test and what `analysis` draws. It takes O(N·M) memory and is written straight from the
formulas of docs/math.md, on purpose unlike the fast paths (no covariance, no shared state). It needs only torch.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

import torch

from inline_attention.ops.call import SMALLEST_MEAN_SCORE, AttentionCall, Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_feature_map


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the reference cannot run this call, or None."""
    if call.q.device.type == "mps":
        return "it computes in float64, which MPS devices lack"
    return None


def run(call: AttentionCall) -> torch.Tensor:
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
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    feature_map: str | FeatureMap,
    normalization: Normalization,
    key_padding_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Weights `[B, H, N, M]` in float64 of linear, InLine or MALA attention; rows sum to one, padded keys get zero."""
    query = apply_feature_map(feature_map, q, torch.float64)
    key = apply_feature_map(feature_map, k, torch.float64)
    if key_padding_mask is None:
        key_padding_mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    real = key_padding_mask[:, None, None, :]
    key = key.masked_fill(~key_padding_mask[:, :, None, None], 0)  # padding may hold NaN, and 0 · NaN is NaN

    count = real.sum(-1, keepdim=True).clamp(min=1)
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", query, key)
    mean = scores.sum(-1, keepdim=True) / count
    divisible = mean.abs() > SMALLEST_MEAN_SCORE
    inverse = torch.where(divisible, 1 / torch.where(divisible, mean, 1), 0)
    if normalization == "subtract":
        weights = scores - mean + 1
    elif normalization == "divide":
        weights = torch.where(divisible, scores * inverse, 1)
    else:
        weights = torch.where(divisible, (1 + inverse) * scores - mean, scores - mean + 1)
    return torch.where(real, weights / count, 0)


def softmax_weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, key_padding_mask: torch.Tensor | None
) -> torch.Tensor:
    """Weights `[B, H, N, M]` in float64 of softmax attention."""
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double())
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1)


def _local_term(
    value: torch.Tensor, local_weight: torch.Tensor, grid_size: tuple[int, int], num_prefix_tokens: int
) -> torch.Tensor:
    """Dynamic 3×3 cross-correlation of the value grid, `[B, N, H, Dv]`; zero on prefix tokens."""
    outside = value.shape[1]  # index of an extra all-zero value: the neighbour beyond the border
    table = torch.full((value.shape[1], 9), outside, device=value.device)
    height, width = grid_size
    for row in range(height):
        for column in range(width):
            for tap in range(9):
                i, j = row + tap // 3 - 1, column + tap % 3 - 1
                if 0 <= i < height and 0 <= j < width:
                    table[num_prefix_tokens + row * width + column, tap] = num_prefix_tokens + i * width + j
    neighbours = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)[:, table]
    return torch.einsum("bnthd,bhdt->bnhd", neighbours, local_weight.flatten(-2))
