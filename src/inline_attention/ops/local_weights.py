"""The 3×3 weights of the local residual, predicted from tokens by a fused kernel where there is one."""

from __future__ import annotations

import torch

from inline_attention.ops.backends.cuda import predictor


def predict_local_weight(
    tokens: torch.Tensor, parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], num_heads: int
) -> torch.Tensor | None:
    """Weights `[B, H, D, 3, 3]` from tokens `[B, N, C]`, or None where no fused kernel applies and the caller composes.

    Args:
        tokens: Their mean over N is what the weights depend on.
        parameters: Weight and bias of the first and of the second map, as `BlockDiagonalLinear` holds them.
        num_heads: H.
    """
    if predictor.unsupported_reason(tokens, parameters, num_heads) is not None:
        return None
    return predictor.predict(tokens, *parameters, num_heads)
