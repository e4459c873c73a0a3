"""Feature maps: the functions phi applied to queries and keys before their inner product.

Shapes: `[..., D]` in, `[..., D]` out for the built-in maps. A callable may change `D`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

FeatureMap: TypeAlias = Callable[[Tensor], Tensor]

LEAKY_RELU_SLOPE = 0.01
EXP_RATE = 0.2
# exp(32) squared, times a value of 1e6, times a head dim of 128 still fits float32; inputs beyond 160 saturate.
EXP_LARGEST_EXPONENT = 32.0


def identity(x: Tensor) -> Tensor:
    """phi(x) = x, the paper's default."""
    return x


def leaky_relu(x: Tensor) -> Tensor:
    """phi(x) = x for x > 0, 0.01 x otherwise."""
    return F.leaky_relu(x, LEAKY_RELU_SLOPE)


def exp(x: Tensor) -> Tensor:
    """phi(x) = exp(0.2 x), saturating at x = 160 so that no finite input overflows."""
    return torch.exp((EXP_RATE * x).clamp(max=EXP_LARGEST_EXPONENT))


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1: positive everywhere, as MALA and classic linear attention want it."""
    # Not elu(x) + 1: that subtracts one and adds it again, and loses exp(x) to rounding below x = -16.
    return torch.exp(x.clamp(max=0)) + torch.relu(x)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": identity,
    "relu": torch.relu,
    "leaky_relu": leaky_relu,
    "exp": exp,
    "elu_plus_one": elu_plus_one,
}


def apply_feature_map(feature_map: str | FeatureMap, x: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """phi(x) of `[B, N, H, D]` in the compute dtype, which is at least as wide as float32 and the dtype of x."""
    if isinstance(feature_map, str):
        return FEATURE_MAPS[feature_map](x.to(compute_dtype))
    # A callable may have float32 parameters, so it sees float32 (float64 for float64) and its result is widened. It
    # sees a copy, which it may change in place: q and k are the caller's, and may share memory.
    x = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    shape, dtype, device = x.shape, x.dtype, x.device
    mapped: Any = feature_map(x)
    if not isinstance(mapped, Tensor) or mapped.layout != torch.strided or mapped.is_nested:
        got = type(mapped).__name__ if not isinstance(mapped, Tensor) else f"a tensor of layout {mapped.layout}"
        raise ValueError(f"a callable feature_map must return a dense tensor, got {got}")
    if mapped.shape[:-1] != shape[:-1] or mapped.dtype != dtype or mapped.device != device:
        raise ValueError(
            "a callable feature_map must keep every dimension but the last, the dtype and the device; it turned "
            f"{tuple(shape)} {dtype} on {device} into {tuple(mapped.shape)} {mapped.dtype} on {mapped.device}"
        )
    return mapped.to(compute_dtype)


def apply_to_queries_and_keys(
    feature_map: str | FeatureMap, q: Tensor, k: Tensor, compute_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """phi(q) and phi(k) in the compute dtype. Both have the same last dimension."""
    query = apply_feature_map(feature_map, q, compute_dtype)
    key = apply_feature_map(feature_map, k, compute_dtype)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "a callable feature_map must give queries and keys the same last dimension, got "
            f"{query.shape[-1]} for queries and {key.shape[-1]} for keys"
        )
    return query, key
