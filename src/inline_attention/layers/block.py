"""The pre-norm transformer block that all families share.

Shapes: `B` batch, `N` tokens, `C` channels.
"""

from __future__ import annotations

import torch
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from torch import nn

from inline_attention.ops.feed_forward import FeedForwardParameters, fused_feed_forward


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_ratio: float,
        norm_eps: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
        local_from_input: bool = False,
    ) -> None:
        """Build the block.

        Args:
            dim: Channels C.
            attention: A layer called as `attention(x, grid_size, key_padding_mask)`.
            mlp_ratio: Hidden width of the MLP, in multiples of C.
            norm_eps: Epsilon of both norms.
            drop: Dropout rate in the MLP.
            drop_path: Rate of stochastic depth.
            local_from_input: Predict the local weights from the block's un-normalised input (CSWin).
        """
        super().__init__()
        self.local_from_input = local_from_input
        self.backend = "auto"
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self, x: torch.Tensor, grid_size: tuple[int, int], key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[B, N, C]` → `[B, N, C]`."""
        options = {"local_input": x} if self.local_from_input else {}
        branch = self.drop_path1(self.attn(self.norm1(x), grid_size, key_padding_mask, **options))
        fused = self._fused_second_half(x, branch)
        if fused is not None:
            return fused
        x = x + branch
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _fused_second_half(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor | None:
        """What `forward` returns, in one kernel; None where there is none, or where a module must be called."""
        norm, hidden, last = self.norm2, self.mlp.fc1, self.mlp.fc2
        if self.training or self.backend != "auto":
            return None
        if type(norm) is not nn.LayerNorm or type(hidden) is not nn.Linear or type(last) is not nn.Linear:
            return None
        if any(_has_hooks(module) for module in (norm, self.mlp, hidden, self.mlp.act, last, self.drop_path2)):
            return None
        parameters = (norm.weight, norm.bias, hidden.weight, hidden.bias, last.weight, last.bias)
        return fused_feed_forward(x, branch, FeedForwardParameters(*parameters), norm.eps)


def _has_hooks(module: nn.Module) -> bool:
    # torch has no public name for the question.
    return len(module._forward_hooks) + len(module._forward_pre_hooks) > 0  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownArgumentType]
