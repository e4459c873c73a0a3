"""The predictor of the local residual: from the mean token, nine weights for every channel.

Shapes: `B` batch, `C` channels, `H` heads, `D` = C / H.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from inline_attention.layers.hooks import must_be_called
from inline_attention.ops.backends.cuda.predictor import predict_local_weight


class BlockDiagonalLinear(nn.Module):
    """A linear map of `[B, C]` that keeps the heads apart: head h reads and writes only its own channels.

    The weight is stored as a grouped 1×1 `Conv1d` stores it, `[out, C / H, 1]`, as in published
    checkpoints; it is applied as one batched matrix product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.empty(out_features, in_features // num_heads, 1, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal weights and zero biases, as in the linear layers of vision transformers."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, C]` to `[B, out]`."""
        heads = self.num_heads
        weight = torch.unflatten(self.weight.squeeze(-1), 0, (heads, -1))  # [H, out / H, D]
        bias = torch.unflatten(self.bias, 0, (heads, 1, -1))  # [H, 1, out / H]
        out = torch.baddbmm(bias, torch.unflatten(x, 1, (heads, -1)).transpose(0, 1), weight.transpose(1, 2))
        return out.transpose(0, 1).flatten(1)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        out_features, block, _ = self.weight.shape
        return f"{block * self.num_heads}, {out_features}, num_heads={self.num_heads}"


class LocalWeightPredictor(nn.Sequential):
    """Mean token `[B, C]` → 3×3 weights `[B, H, D, 3, 3]`: linear, GELU, linear, all block-diagonal over heads.

    Channel c owns outputs 9c … 9c + 8, row-major.
    """

    def __init__(
        self, dim: int, num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(
            BlockDiagonalLinear(dim, dim, num_heads, device=device, dtype=dtype),
            nn.GELU(),
            BlockDiagonalLinear(dim, 9 * dim, num_heads, device=device, dtype=dtype),
        )
        self.num_heads = num_heads

    def forward(self, input: Tensor) -> Tensor:
        """Map the mean token `[B, C]` to `[B, H, D, 3, 3]`."""
        weight = cast(Tensor, super().forward(input))  # pyright: ignore[reportUnknownMemberType]
        return torch.unflatten(weight, 1, (self.num_heads, -1, 3, 3))

    def predict(self, tokens: Tensor, key_padding_mask: Tensor | None = None, *, fused: bool = True) -> Tensor:
        """Predict the weights `[B, H, D, 3, 3]` from the mean of the real tokens, by a fused kernel if allowed."""
        if fused and key_padding_mask is None:
            parameters = self._fusable_parameters()
            weight = None if parameters is None else predict_local_weight(tokens, parameters, self.num_heads)
            if weight is not None:
                return weight
        return self(mean_token(tokens, key_padding_mask))

    def _fusable_parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return weight and bias of both linear maps; None if a module must be called."""
        modules = tuple(self)
        if len(modules) != 3 or must_be_called(self, *modules):
            return None
        hidden, activation, last = modules
        if type(hidden) is not BlockDiagonalLinear or type(last) is not BlockDiagonalLinear:
            return None
        if type(activation) is not nn.GELU or activation.approximate != "none":
            return None
        return hidden.weight, hidden.bias, last.weight, last.bias

    def zero_last_layer(self) -> None:
        """Set the last layer to zero: no local term until training finds one."""
        last = self[-1]
        assert isinstance(last, BlockDiagonalLinear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)


def mean_token(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Mean over the real tokens, `[B, N, C]` → `[B, C]`, summed in float32 at least."""
    if key_padding_mask is None:
        return tokens.mean(1)
    count = key_padding_mask.sum(1, keepdim=True).clamp(min=1)
    return (token_sum(tokens, key_padding_mask) / count).to(tokens.dtype)


def token_sum(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Sum over the real tokens, `[B, N, C]` → `[B, C]`, in float32 at least."""
    if key_padding_mask is not None:
        tokens = tokens.masked_fill(~key_padding_mask[:, :, None], 0)
    return tokens.sum(1, dtype=torch.promote_types(tokens.dtype, torch.float32))
