"""The 3×3 weights of the local residual, predicted by a fused kernel where there is one.

Both functions return weights `[B, H, D, 3, 3]`, or None where no fused kernel applies and the caller composes. Their
parameters are weight and bias of the first and of the second map, as `BlockDiagonalLinear` holds them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from inline_attention.ops.backends.cuda import predictor

Parameters: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def predict_local_weight(tokens: torch.Tensor, parameters: Parameters, num_heads: int) -> torch.Tensor | None:
    """From tokens `[B, N, C]`, on whose mean over N the weights depend."""
    if predictor.unsupported_reason(tokens, parameters, num_heads) is not None:
        return None
    return predictor.predict(tokens, tokens.shape[1], *parameters, num_heads)


def predict_local_weight_from_sums(
    sums: torch.Tensor, count: int, parameters: Parameters, num_heads: int
) -> torch.Tensor | None:
    """From float32 `[B, S, C]`, whose sum over S is that of a sample's `count` tokens."""
    if predictor.unsupported_reason(sums, parameters, num_heads) is not None:
        return None
    return predictor.predict(sums, count, *parameters, num_heads)
