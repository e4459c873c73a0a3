"""InLine-PVT: a pyramid with InLine attention over the whole map in every stage, without spatial reduction.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "Pyramid
Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions", ICCV 2021, arXiv 2102.12122.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from inline_attention.layers.attention import SoftmaxAttention
from inline_attention.layers.block import Block
from inline_attention.layers.embeddings import ConvEmbedding
from inline_attention.layers.grids import Grid
from inline_attention.models.base import check_counts, drop_path_rates, global_attention, image_sides
from inline_attention.models.pyramid import STRIDES, PyramidModel, rename
from inline_attention.models.registry import (
    AttentionKind,
    build,
    merged,
    pretrained_config,
    register_with_twins,
    with_twins,
)

DIMS = (64, 128, 320, 512)
HEADS = (2, 4, 10, 16)
MLP_RATIOS = (8, 8, 4, 4)


class InLinePVT(PyramidModel):
    """Four stages of strided convolution, learned positions and blocks, then mean pooling without a final norm."""

    def __init__(
        self,
        depths: tuple[int, int, int, int],
        *,
        attention: AttentionKind = "inline",
        attention_options: Mapping[str, Any] | None = None,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
    ) -> None:
        """Build the model.

        Args:
            depths: Number of blocks of each stage.
            attention: "inline", or "softmax" (over the whole map) or "linear" for a twin.
            attention_options: Extra arguments of the InLine or linear attention layer.
            img_size: Native image size of the learned positions. Other sizes work too.
            num_classes: Outputs of the head; 0 for none.
            in_chans: Channels of the images.
            global_pool: "avg", or "" for no pooling.
            drop_rate: Dropout rate before the head.
            proj_drop_rate: Dropout rate after projections.
            attn_drop_rate: Dropout rate of the attention.
            drop_path_rate: Stochastic depth rate of the last block.
        """
        check_counts(depths=depths)
        pixels = Grid(*image_sides(img_size))
        embeddings = [
            ConvEmbedding(
                in_chans if stage == 0 else DIMS[stage - 1],
                dim,
                kernel_size=4 if stage == 0 else 2,
                stride=4 if stage == 0 else 2,
                norm_eps=1e-5,
                position_grid=pixels.coarser(stride).size,
            )
            for stage, (dim, stride) in enumerate(zip(DIMS, STRIDES, strict=True))
        ]
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        arguments: dict[str, Any] = {"fused_qkv": False, "attn_drop": attn_drop_rate, "proj_drop": proj_drop_rate}

        def block(dim: int, num_heads: int, mlp_ratio: float) -> Block:
            if attention == "softmax":
                layer = SoftmaxAttention(dim, num_heads, **arguments)
            else:
                layer = global_attention(attention, dim, num_heads, attention_options, **arguments)
            return Block(dim, layer, mlp_ratio=mlp_ratio, norm_eps=1e-6, drop=proj_drop_rate, drop_path=next(rates))

        stages = [
            [block(*sizes) for _ in range(depth)] for depth, *sizes in zip(depths, DIMS, HEADS, MLP_RATIOS, strict=True)
        ]
        super().__init__(
            embeddings,
            stages,
            DIMS,
            nn.Identity(),
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Change the native image size and resample the positions of every stage."""
        pixels = Grid(*image_sides(img_size))
        for embedding, stride in zip(self.embeddings, STRIDES, strict=False):
            assert isinstance(embedding, ConvEmbedding)
            embedding.set_position_grid(pixels.coarser(stride).size)

    @property
    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Native grid of each stage's position embedding, by parameter name."""
        return {
            f"embeddings.{stage}.positions": embedding.position_grid
            for stage, embedding in enumerate(self.embeddings)
            if isinstance(embedding, ConvEmbedding) and embedding.position_grid is not None
        }

    def translate_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename the authors' keys to ours."""
        table = [
            entry
            for stage in range(4)
            for entry in (
                (rf"patch_embed{stage + 1}\.", f"embeddings.{stage}."),
                (rf"pos_embed{stage + 1}$", f"embeddings.{stage}.positions"),
                (rf"block{stage + 1}\.", f"stages.{stage}."),
            )
        ]
        return rename(state_dict, table)


default_cfgs = with_twins(
    {
        f"inline_pvt_{size}": pretrained_config(first_conv="embeddings.0.proj", pool_size=(7, 7))
        for size in ("tiny", "small", "medium", "large")
    }
)


@register_with_twins
def inline_pvt_tiny(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-PVT-T, 12.0 M parameters."""
    return build(InLinePVT, "inline_pvt_tiny", pretrained, **merged(arguments, depths=(2, 2, 2, 2)))


@register_with_twins
def inline_pvt_small(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-PVT-S, 21.6 M parameters."""
    return build(InLinePVT, "inline_pvt_small", pretrained, **merged(arguments, depths=(3, 4, 6, 3)))


@register_with_twins
def inline_pvt_medium(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-PVT-M, 37.6 M parameters."""
    defaults = merged(arguments, depths=(3, 4, 18, 3), drop_path_rate=0.3)
    return build(InLinePVT, "inline_pvt_medium", pretrained, **defaults)


@register_with_twins
def inline_pvt_large(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-PVT-L, 51.2 M parameters."""
    defaults = merged(arguments, depths=(3, 8, 27, 3), drop_path_rate=0.3)
    return build(InLinePVT, "inline_pvt_large", pretrained, **defaults)
