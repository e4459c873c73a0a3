"""InLine-DeiT: a plain vision transformer with InLine attention in every block.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "Training
data-efficient image transformers & distillation through attention", ICML 2021, arXiv 2012.12877.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.layers.block import Block
from inline_attention.layers.embeddings import ConvEmbedding, ConvStem
from inline_attention.layers.grids import Grid, resample_positions
from inline_attention.layers.hooks import has_hooks
from inline_attention.models.base import (
    Level,
    VisionModel,
    check_counts,
    drop_path_rates,
    global_attention,
    image_sides,
    initialize,
)
from inline_attention.models.registry import AttentionKind, record_arguments, register_family

NORM_EPS = 1e-6


class InLineDeiT(VisionModel):
    """Class token, learned positions, `depth` blocks over all tokens, head on the class token."""

    num_prefix_tokens = 1
    global_pools = ("token", "avg", "")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention: AttentionKind = "inline",
        attention_options: Mapping[str, Any] | None = None,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stem: Sequence[tuple[int, int]] = (),
        depth: int = 12,
        mlp_ratio: float = 4.0,
        in_chans: int = 3,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **head: Any,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Number of channels C.
            num_heads: Number of heads H.
            attention: "inline", or "softmax" or "linear" for a twin.
            attention_options: Extra arguments of the attention layer, such as `local_residual`.
            img_size: Native image size of the learned positions. Other sizes work too.
            patch_size: Side of a patch in pixels.
            stem: Channels and stride of 3×3 convolutions, which with one more to C channels take the place of the
                single large one. Their strides divide `patch_size`; the last convolution has what is left.
            depth: Number of blocks.
            mlp_ratio: Hidden width of the MLPs in multiples of C.
            in_chans: Channels of the images.
            proj_drop_rate: Dropout rate after projections.
            attn_drop_rate: Dropout rate of the attention.
            drop_path_rate: Stochastic depth rate of the last block.
            **head: Arguments of `VisionModel`: `num_classes`, `global_pool`, `drop_rate`.
        """
        check_counts(embed_dim=embed_dim, num_heads=num_heads, patch_size=patch_size, depth=depth)
        super().__init__(embed_dim, in_chans=in_chans, **head)
        self.largest_stride = patch_size
        self.patch_embed = _patch_embedding(in_chans, embed_dim, patch_size, stem)
        self.position_grid = Grid(*image_sides(img_size)).coarser(patch_size).size
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.position_grid[0] * self.position_grid[1], embed_dim))
        arguments: dict[str, Any] = {"num_prefix_tokens": 1, "attn_drop": attn_drop_rate, "proj_drop": proj_drop_rate}
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                global_attention(attention, embed_dim, num_heads, attention_options, **arguments),
                mlp_ratio=mlp_ratio,
                norm_eps=NORM_EPS,
                drop=proj_drop_rate,
                drop_path=rate,
            )
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{index}"} for index in range(depth)
        ]
        self.apply(initialize)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def embed(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Return patches with their positions, without the class token."""
        tokens, grid = self.patch_embed(x, grid)
        return tokens + grid.positions(self.pos_embed[:, 1:], self.position_grid), grid

    def prefix_tokens(self) -> Tensor:
        """Return the class token with its position, `[1, 1, C]`."""
        return self.cls_token + self.pos_embed[:, :1]

    def network(self) -> list[Level]:
        """Return one level per block; the first embeds."""
        blocks: list[Any] = list(self.blocks)
        stride, halo = self.patch_embed.stride, self.patch_embed.halo
        return [Level(None if index else self.embed, stride, halo, [block]) for index, block in enumerate(blocks)]

    @property
    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Native grid of the position embedding, by parameter name. Its first token is the class token's."""
        return {"pos_embed": self.position_grid}

    @classmethod
    def feature_levels(cls, depth: int = 12, **_arguments: Any) -> tuple[int, ...]:
        """Return the last block of each quarter of the network."""
        check_counts(depth=depth)
        return tuple(sorted({max(0, depth * quarter // 4 - 1) for quarter in (1, 2, 3, 4)}))

    def num_head_tokens(self) -> int | None:
        """Return 1 if only the class token is read, else None for all tokens.

        With 1, the last MLP and the norm run for the class token only. Hooks need all tokens.
        """
        if self.global_pool != "token" or has_hooks(*self.blocks[-1].modules(), *self.norm.modules()):
            return None
        return 1

    def prune_levels(self, last: int) -> None:
        """Remove the blocks after `last`."""
        self.blocks = self.blocks[: last + 1]

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Change the native image size and resample the positions."""
        grid_size = Grid(*image_sides(img_size)).coarser(self.largest_stride).size
        self.pos_embed = nn.Parameter(resample_positions(self.pos_embed.detach(), self.position_grid, grid_size, 1))
        self.position_grid = grid_size
        record_arguments(self, img_size=image_sides(img_size))

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: positions and class token."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for layer-wise learning rates."""
        del coarse
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def _shape_features(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.clear_padding(tokens, self.num_prefix_tokens)


def _patch_embedding(
    in_chans: int, embed_dim: int, patch_size: int, stem: Sequence[tuple[int, int]]
) -> ConvEmbedding | ConvStem:
    if not stem:
        return ConvEmbedding(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
    expected = "stem must be pairs (channels, stride)"
    if not all(isinstance(layer, Sequence) and len(layer) == 2 for layer in stem):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{expected}, got {stem!r}")
    for channels, stride in stem:
        check_counts(**{"channels of the stem": channels, "stride of the stem": stride})
    left, rest = divmod(patch_size, math.prod(stride for _, stride in stem))
    if rest or left > 3 or any(stride > 3 for _, stride in stem):
        raise ValueError(f"{expected} of at most 3, which divide patch_size {patch_size} up to 3 or less, got {stem!r}")
    return ConvStem(in_chans, [*stem, (embed_dim, left)], norm_eps=NORM_EPS)


register_family(
    InLineDeiT,
    {
        "inline_deit_tiny": {"embed_dim": 192, "num_heads": 6},  # 6.5 M parameters
        "inline_deit_small": {"embed_dim": 320, "num_heads": 10, "img_size": 288},  # 16.7 M
        "inline_deit_base": {"embed_dim": 384, "num_heads": 12, "img_size": 448},  # 23.8 M
    },
    first_conv="patch_embed.proj",
)  # fmt: skip
register_family(
    InLineDeiT,
    {
        # 2.0 M parameters, for 32×32 pixels; not of the paper
        "inline_deit_micro": {
            "embed_dim": 192, "num_heads": 6, "depth": 3, "patch_size": 4, "stem": ((64, 1), (128, 2), (128, 1)),
            "img_size": 32, "num_classes": 10, "global_pool": "avg",
        },
    },
    first_conv="patch_embed.layers.0.proj",
)  # fmt: skip
