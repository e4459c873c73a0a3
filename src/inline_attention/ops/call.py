"""The validated arguments of one attention call: what the dispatcher hands to a backend.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch

from inline_attention.ops.feature_maps import FeatureMap

Normalization: TypeAlias = Literal["subtract", "divide", "magnitude"]

# Queries whose mean score is this close to zero have nothing to divide by: 1/z counts as zero for them, without a
# gradient, so that "divide" makes them attend uniformly and "magnitude" as InLine does. The alternative is an infinity
# times a zero, that is, a NaN.
SMALLEST_MEAN_SCORE = 1e-12


class AttentionCall(NamedTuple):
    """One attention call after validation. Every backend receives exactly this.

    Attributes:
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, M, H, D]`.
        v: Values `[B, M, H, Dv]`.
        qkv: `[B, N, 3, H, D]` when q, k and v are its three slices, so that a backend may return one packed gradient.
        scale: Factor on the inner products.
        feature_map: Name of a built-in map, or a callable.
        normalization: How the weights of a query are made to sum to one.
        key_padding_mask: `[B, M]` bool, True for a real key; None when all are real.
        local_weight: `[B, H, Dv, 3, 3]`, or None without the local term.
        grid_size: `(height, width)` of the tokens after the prefix; given whenever `local_weight` is.
        num_prefix_tokens: Tokens before the grid (class or register tokens), outside the local term.
        overwrite_q: Whether the output may take the memory of q, which nobody reads any more. No backend has to.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qkv: torch.Tensor | None
    scale: float
    feature_map: str | FeatureMap
    normalization: Normalization
    key_padding_mask: torch.Tensor | None
    local_weight: torch.Tensor | None
    grid_size: tuple[int, int] | None
    num_prefix_tokens: int
    overwrite_q: bool


# (q, k, v, qkv, local_weight) to the output, for calls that differ in the data alone from one that was validated.
PreparedCall: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]
