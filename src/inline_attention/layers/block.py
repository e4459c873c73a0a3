"""The pre-norm transformer block that all families share.

Shapes: `B` batch, `N` tokens, `C` channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from inline_attention.layers.attention import ProjectedAttention
from inline_attention.layers.hooks import must_be_called
from inline_attention.layers.row_shards import RowShards
from inline_attention.layers.window_attention import WindowAttention
from inline_attention.ops.feed_forward import FeedForwardParameters, fused_feed_forward, unsupported_reason
from inline_attention.ops.tracing import is_exporting
from inline_attention.ops.validation import check_rate, check_ratio

# Modules that return their input unless they are training.
_IDLE_AT_INFERENCE = (nn.Dropout, nn.Identity, DropPath)


class TokenNorm(nn.LayerNorm):
    """A LayerNorm of tokens, which a compiler is shown as rows.

    TorchInductor takes the samples' axis into account where it need not: a batch of 12 × 4097 tokens then got a kernel
    that takes 22 µs on an H200 instead of 8.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`[B, N, C]` → `[B, N, C]`."""
        if not torch.compiler.is_compiling() or is_exporting():
            return super().forward(input)
        return super().forward(input.flatten(0, 1)).view(input.shape)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    tells_grid = True  # see `convert_attention`

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

        `attention` is called as `attention(x, grid_size, key_padding_mask)`. `local_from_input` predicts the local
        weights from the block's un-normalized input (CSWin).
        """
        super().__init__()
        check_rate("drop", drop)
        check_rate("drop_path", drop_path)
        check_ratio("mlp_ratio", mlp_ratio, dim)
        self.local_from_input = local_from_input
        self.backend = "auto"
        self.norm1 = TokenNorm(dim, eps=norm_eps)
        self.attn = attention
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = TokenNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None = None,
        wanted: int | None = None,
        extents: Sequence[tuple[int, int]] | None = None,
        shards: RowShards | None = None,
    ) -> Tensor:
        """Run the block on tokens `[B, N, C]` of a grid; return the first `wanted` tokens, or all.

        `extents` are the rows and columns of each image, so that attention need not read them from the mask. `shards`
        are the rows that this rank has, if ranks share them.
        """
        options: dict[str, Any] = {"local_input": x} if self.local_from_input else {}
        if isinstance(self.attn, WindowAttention):
            options["extents"] = extents
        if shards is not None:
            options["shards"] = shards
        attention, parameters = self.attn, self._fusable_parameters()
        if parameters is not None and unsupported_reason(x, parameters) is None:
            attended = cast(ProjectedAttention, attention).attend(self.norm1(x), grid_size, key_padding_mask, **options)
            return fused_feed_forward(_first(x, wanted), _first(attended, wanted), parameters, self.norm2.eps)
        branch = attention(self.norm1(x), grid_size, key_padding_mask, **options)
        x = _first(x, wanted) + self.drop_path1(_first(branch, wanted))
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the rest of the block, given its input and the output of `self.attn.attend`, `[B, N, C]` each."""
        attention, parameters = cast(ProjectedAttention, self.attn), self._fusable_parameters()
        if parameters is not None and unsupported_reason(x, parameters) is None:
            return fused_feed_forward(x, attended, parameters, self.norm2.eps)
        x = x + self.drop_path1(attention.proj_drop(attention.proj(attended)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _fusable_parameters(self) -> FeedForwardParameters | None:
        """Return the parameters of everything after the attention; None if a module must be called."""
        attention, mlp = self.attn, self.mlp
        if self.training or self.backend != "auto" or not isinstance(attention, ProjectedAttention):
            return None
        if type(mlp) is not Mlp:
            return None
        projection, norm, hidden, activation, last = attention.proj, self.norm2, mlp.fc1, mlp.act, mlp.fc2
        # A replaced module, such as an adapter, must be called.
        if not (type(projection) is type(hidden) is type(last) is nn.Linear and type(norm) is TokenNorm):
            return None
        if type(activation) is not nn.GELU or activation.approximate != "none":
            return None
        idle = (attention.proj_drop, self.drop_path1, mlp.drop1, mlp.norm, mlp.drop2, self.drop_path2)
        for module in idle:
            if type(module) not in _IDLE_AT_INFERENCE or module.training:  # dropout in a model that is not training
                return None
        if must_be_called(attention, projection, norm, mlp, hidden, activation, last, *idle):
            return None
        learned: list[Any] = [
            projection.weight, projection.bias, norm.weight, norm.bias,
            hidden.weight, hidden.bias, last.weight, last.bias,
        ]  # fmt: skip
        return None if any(parameter is None for parameter in learned) else FeedForwardParameters(*learned)


def _first(tokens: Tensor, count: int | None) -> Tensor:
    return tokens if count is None else tokens[:, :count]
