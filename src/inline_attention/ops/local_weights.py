"""Fused prediction of the 3×3 weights of the local residual."""

from __future__ import annotations

import torch

from inline_attention.ops.backends.cuda import predictor


def predict_local_weight(
    tokens: torch.Tensor, parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], num_heads: int
) -> torch.Tensor | None:
    """Predict weights `[B, H, D, 3, 3]` by a fused kernel; return None if there is none for this call.

    Args:
        tokens: `[B, N, C]`; the weights depend on their mean.
        parameters: Weight and bias of the first and of the second map, as `BlockDiagonalLinear` holds them.
        num_heads: H.
    """
    if predictor.unsupported_reason(tokens, parameters, num_heads) is not None:
        return None
    return predictor.predict(tokens, *parameters, num_heads)
