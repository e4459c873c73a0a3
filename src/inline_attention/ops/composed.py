"""InLine attention composed from differentiable PyTorch operations, in linear time: any device, dtype and transform.

Nothing here branches on a size, so one compiled graph serves every shape. Every 3×3 tap is a shifted view, which a
compiler fuses into one loop. Weights sum to one in all three normalizations, so all three are

    out = vbar + a(z) · phi(q) C,    C = scale · Cov(phi(k), v),    z = scale · phi(q) · kbar

with a = 1 (subtract), 1/z (divide) or 1 + 1/z (magnitude). Keys and values are centered before they are multiplied:
nothing large is ever subtracted from something large.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.ops.call import SMALLEST_MEAN_SCORE, AttentionCall, Normalization
from inline_attention.ops.feature_maps import apply_to_queries_and_keys
from inline_attention.ops.tracing import is_exporting


def mapped(call: AttentionCall, compute_dtype: torch.dtype) -> AttentionCall:
    """Apply the feature map and the mask, and cast to the compute dtype; padded keys and values become zero."""
    q, k = apply_to_queries_and_keys(call.feature_map, call.q, call.k, compute_dtype)
    v = call.v.to(compute_dtype)
    if call.key_padding_mask is not None:
        k, v = without_padding(k, v, call.key_padding_mask)
    local_weight = None if call.local_weight is None else call.local_weight.to(compute_dtype)
    return call._replace(q=q, k=k, v=v, qkv=None, local_weight=local_weight, feature_map="identity", overwrite_q=False)


def attend(call: AttentionCall) -> Tensor:
    """Output `[B, N, H, Dv]` of a call that `mapped` returned, local term included."""
    out = global_term(call.q, call.k, call.v, call.key_padding_mask, call.scale, call.normalization)
    if call.local_weight is None or call.grid_size is None:
        return out
    prefix = call.num_prefix_tokens
    local = local_term(call.v[:, prefix:], call.local_weight, call.grid_size)
    return out + local if prefix == 0 else torch.cat([out[:, :prefix], out[:, prefix:] + local], dim=1)


def without_padding(k: Tensor, v: Tensor, key_padding_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Set padded keys and values to zero."""
    # A fill, not a product: whatever padding holds, NaN included, must not reach a sum.
    padded = ~key_padding_mask[:, :, None, None]
    return k.masked_fill(padded, 0), v.masked_fill(padded, 0)


def global_term(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, scale: float, normalization: Normalization
) -> Tensor:
    """Output `[B, N, H, Dv]` of the global term, from mapped queries and keys; padded keys and values are zero."""
    return apply_moments(q, *moments(k, v, key_padding_mask), scale, normalization)


def moments(k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Means of mapped keys `[B, 1, H, D]` and values `[B, 1, H, Dv]`, and their covariance `[B, H, D, Dv]`."""
    if key_padding_mask is None:
        inverse_count = 1 / k.shape[1]
        key_mean = k.mean(1, keepdim=True)
        value_mean = v.mean(1, keepdim=True)
        centered_key = k - key_mean
        centered_value = v - value_mean
    else:
        real = key_padding_mask[:, :, None, None].to(k.dtype)
        inverse_count = 1 / real.sum(1, keepdim=True).clamp(min=1)
        key_mean = k.sum(1, keepdim=True) * inverse_count
        value_mean = v.sum(1, keepdim=True) * inverse_count
        centered_key = (k - key_mean) * real
        centered_value = v - value_mean
    covariance = torch.matmul(centered_key.permute(0, 2, 3, 1), centered_value.permute(0, 2, 1, 3))
    return key_mean, value_mean, covariance * inverse_count


def apply_moments(
    q: Tensor, key_mean: Tensor, value_mean: Tensor, covariance: Tensor, scale: float, normalization: Normalization
) -> Tensor:
    """Output `[B, N, H, Dv]` of mapped queries, from the moments of the keys and values."""
    deviation = torch.matmul(q.permute(0, 2, 1, 3), scale * covariance).permute(0, 2, 1, 3)
    if normalization != "subtract":
        mean_score = scale * (q * key_mean).sum(-1, keepdim=True)
        deviation = deviation * amplification(mean_score, normalization)
    return value_mean + deviation


def amplification(mean_score: Tensor, normalization: Normalization) -> Tensor:
    """The factor a(z) of `divide` or `magnitude`, with 1/z replaced by 0 where z is too small to divide by."""
    divisible = mean_score.abs() > SMALLEST_MEAN_SCORE
    # Two wheres: the inner one keeps the branch not taken finite, so that its zero gradient is not 0 · inf.
    inverse = torch.where(divisible, torch.where(divisible, mean_score, 1).reciprocal(), 0)
    return inverse if normalization == "divide" else 1 + inverse


def local_term(v: Tensor, local_weight: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Dynamic 3×3 cross-correlation of grid values `[B, h·w, H, Dv]` with `[B, H, Dv, 3, 3]`, zero-padded."""
    height, width = grid_size
    padded = F.pad(torch.unflatten(v, 1, (height, width)), (0, 0, 0, 0, 1, 1, 1, 1))
    taps = local_weight.flatten(-2).unsqueeze(1).unsqueeze(1).unbind(-1)
    # `narrow`: indexing would record an operation for every axis, and exporters take milliseconds for each.
    rows = [padded.narrow(1, i, height) for i in range(3)]
    shifted = [row.narrow(2, j, width) for row in rows for j in range(3)]
    out = shifted[0] * taps[0]
    for values, tap in zip(shifted[1:], taps[1:], strict=True):
        out = out + values * tap if is_exporting() else torch.addcmul(out, values, tap)
    return out.flatten(1, 2)
