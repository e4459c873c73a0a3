"""The arguments of one attention call, which travel together from the public functions to a backend."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from inline_attention.ops.feature_maps import FeatureMap

Normalization: TypeAlias = Literal["subtract", "divide", "magnitude"]
Layout: TypeAlias = Literal["bnhd", "bhnd"]

# A mean score z this close to zero cannot be divided by. 1/z then counts as zero, without a gradient: "divide" gives
# uniform weights, and "magnitude" those of InLine. Otherwise infinity times zero would make a NaN.
SMALLEST_MEAN_SCORE = 1e-12


class AttentionCall(NamedTuple):
    """One attention call. `validation.validated` checks it and fills in defaults; every backend receives the result.

    Attributes:
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, M, H, D]`.
        v: Values `[B, M, H, Dv]`.
        qkv: `[B, N, 3, H, D]` when q, k and v are its three slices, so that a backend may return one packed gradient.
        scale: Factor on the inner products; None for the default, before validation only.
        feature_map: Name of a built-in map, or a callable.
        normalization: How the weights of a query are made to sum to one.
        key_padding_mask: `[B, M]` bool, True for a real key; None when all are real.
        local_weight: `[B, H, Dv, 3, 3]`, or None without the local term.
        grid_size: `(height, width)` of the tokens after the prefix; given whenever `local_weight` is.
        num_prefix_tokens: Tokens before the grid (class or register tokens), outside the local term.
        overwrite_q: True if the output may take the memory of q, because the caller will not read q again. Backends
            may ignore it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qkv: Tensor | None
    scale: float
    feature_map: str | FeatureMap
    normalization: Normalization
    key_padding_mask: Tensor | None
    local_weight: Tensor | None
    grid_size: tuple[int, int] | None
    num_prefix_tokens: int
    overwrite_q: bool = False
