"""timm's vision transformers as `streamed` needs a model: an embedding of rows, blocks in parts, and a head.

Attention converted by `convert_attention` streams; softmax that is left runs over all tokens at once. Images may have
any size: results are those of the model with `dynamic_img_size=True` and `dynamic_img_pad=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from inline_attention.layers.adapted_attention import AdaptedAttention
from inline_attention.layers.attention import KernelAttention, TokenAttention
from inline_attention.layers.block import Block
from inline_attention.layers.grids import Grid, pad_to_multiple
from inline_attention.models.base import Level

METHODS = ("forward", "forward_features", "forward_head", "pool", "_pos_embed")


def unsupported_reason(model: nn.Module) -> str | None:
    """Return why a model cannot be run in bands of rows, or None."""
    name = type(model).__name__
    if not isinstance(model, VisionTransformer):
        return f"it is a {name}"
    own = [method for method in METHODS if getattr(type(model), method) is not getattr(VisionTransformer, method)]
    if own:
        return f"{name} has its own {own[0]}"
    if type(model.patch_embed) is not PatchEmbed or len(set(model.patch_embed.patch_size)) != 1:
        return f"its patches come from {type(model.patch_embed).__name__} or are not square"
    if (
        model.attn_pool is not None
        or getattr(model, "pool_include_prefix", False)
        or model.global_pool not in ("avg", "token", "")
    ):
        return f"its pooling is not the mean or the class token (global_pool={model.global_pool!r})"
    for number, block in enumerate(model.blocks):
        if type(block) is not TimmBlock or not hasattr(block.mlp, "fc1"):
            return f"its block {number} is a {type(block).__name__} of another structure"
        attention = block.attn
        is_kept = not isinstance(attention, TokenAttention)  # softmax of timm
        if not is_kept and (isinstance(attention, AdaptedAttention) or not isinstance(attention, KernelAttention)):
            return f"its block {number} has {type(attention).__name__}"
    return None


class StreamedViT:
    """A VisionTransformer for which `unsupported_reason` is None, with what `streamed` uses of a `VisionModel`."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self.norm = model.norm
        self.norms_mean = not isinstance(model.fc_norm, nn.Identity)
        self.largest_stride: int = model.patch_embed.patch_size[0]
        self.in_chans: int = model.patch_embed.proj.in_channels
        blocks = [_BlockInParts(cast(TimmBlock, block)) for block in model.blocks]
        self.levels = [
            Level(None if number else self.embed, self.largest_stride, 0, [cast(Block, block)])
            for number, block in enumerate(blocks)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the model."""
        return self.model.parameters()

    def network(self) -> list[Level]:
        """Return one level per block; the first embeds."""
        return self.levels

    def prefix_tokens(self) -> Tensor:
        """Return class and register tokens `[1, P, C]`, with their positions."""
        model = self.model
        tokens = torch.cat([token for token in (model.cls_token, model.reg_token) if token is not None], dim=1)
        if model.pos_embed is not None and not model.no_embed_class:
            tokens = tokens + model.pos_embed[:, : tokens.shape[1]]
        return model.norm_pre(tokens)

    def embed(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Return patches of some rows with their positions."""
        patches, coarser = self.model.patch_embed, grid.coarser(self.largest_stride)
        tokens = patches.norm(patches.proj(pad_to_multiple(x, self.largest_stride)).flatten(2).transpose(1, 2))
        if self.model.pos_embed is not None:
            tokens = tokens + self._positions(coarser)
        return self.model.norm_pre(tokens), coarser

    def _positions(self, grid: Grid) -> Tensor:
        """Return position embeddings `[1, h·w, C]` of some rows of a grid, resampled as timm does."""
        model = self.model
        table, native = cast(Tensor, model.pos_embed), model.patch_embed.grid_size
        table = torch.unflatten(table[0, -native[0] * native[1] :], 0, native)
        rows = slice(grid.first_row, grid.first_row + grid.size[0])
        if grid.whole.size == native:
            return table[rows].flatten(0, 1)[None]
        down, across = (
            _resampling(old, new).to(table.device) for old, new in zip(native, grid.whole.size, strict=True)
        )
        resampled = torch.einsum("bw,awc->abc", across, torch.einsum("ah,hwc->awc", down[rows], table.float()))
        return resampled.flatten(0, 1)[None].to(table.dtype)


class _BlockInParts:
    """A block of timm with what `streamed` uses of a `Block`."""

    local_from_input = False

    def __init__(self, block: TimmBlock) -> None:
        self.block = block
        self.norm1, self.attn, self.mlp = block.norm1, block.attn, block.mlp

    def __call__(self, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
        del grid_size
        return self.block(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run the rest of the block, given its input and the attention's output before its projection."""
        block, attention = self.block, cast(TokenAttention, self.attn)
        x = x + block.drop_path1(block.ls1(attention.proj_drop(attention.proj(attended))))
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _resampling(old: int, new: int) -> Tensor:
    """Return the matrix `[new, old]` of timm's resampling along one axis: bicubic, with antialiasing."""
    identity = torch.eye(old)[None, None]
    return F.interpolate(identity, size=(new, old), mode="bicubic", antialias=True)[0, 0]
