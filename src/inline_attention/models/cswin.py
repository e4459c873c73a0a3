"""InLine-CSWin: a pyramid with InLine attention over the map in fine stages, crossed stripes in coarse stages.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "CSWin
Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows", CVPR 2022, arXiv 2107.00652.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from inline_attention.layers.block import Block
from inline_attention.layers.embeddings import ConvEmbedding
from inline_attention.layers.window_attention import StripeAttention
from inline_attention.models.base import check_counts, drop_path_rates, global_attention, image_sides
from inline_attention.models.pyramid import PyramidModel, rename
from inline_attention.models.registry import (
    AttentionKind,
    build,
    merged,
    pretrained_config,
    register_with_twins,
    with_twins,
)

NORM_EPS = 1e-5


class InLineCSWin(PyramidModel):
    """Four stages with overlapping convolutions between them, final norm, mean pooling.

    Every block has a depthwise 3×3 convolution of the values.
    """

    def __init__(
        self,
        embed_dim: int,
        depths: tuple[int, int, int, int],
        num_heads: tuple[int, int, int, int],
        *,
        attention: AttentionKind = "inline",
        attention_options: Mapping[str, Any] | None = None,
        img_size: int | tuple[int, int] = 224,
        global_stages: int = 2,
        stripe_widths: tuple[int, int, int] = (1, 2, 7),
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.2,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Channels of the first stage. Each later stage has twice as many.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage.
            attention: "inline", or "softmax" (stripes in all blocks) or "linear" for a twin.
            attention_options: Extra arguments of the InLine or linear attention layer.
            img_size: Native image size. It has no effect; timm passes it.
            global_stages: Number of stages, counted from the first, with InLine attention. The softmax twin has none.
            stripe_widths: Width of a stripe in tokens, for the first three stages. The last stage has one softmax
                attention over the map.
            mlp_ratio: Hidden width of the MLPs in multiples of the channels.
            num_classes: Outputs of the head; 0 for none.
            in_chans: Channels of the images.
            global_pool: "avg", or "" for no pooling.
            drop_rate: Dropout rate before the head.
            proj_drop_rate: Dropout rate after projections.
            attn_drop_rate: Dropout rate of the attention.
            drop_path_rate: Stochastic depth rate of the last block.
        """
        check_counts(embed_dim=embed_dim, depths=depths, num_heads=num_heads, stripe_widths=stripe_widths)
        check_counts(least=0, global_stages=global_stages)
        image_sides(img_size)
        dims = [embed_dim * 2**stage for stage in range(4)]
        stem = ConvEmbedding(in_chans, embed_dim, kernel_size=7, stride=4, padding=2, norm_eps=NORM_EPS)
        merging = [
            ConvEmbedding(dim, 2 * dim, kernel_size=3, stride=2, padding=1, norm_eps=NORM_EPS) for dim in dims[:-1]
        ]
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        drops: dict[str, Any] = {"attn_drop": attn_drop_rate, "proj_drop": proj_drop_rate}

        def block(stage: int) -> Block:
            dim, heads = dims[stage], num_heads[stage]
            is_global = attention != "softmax" and stage < global_stages
            if is_global:
                layer = global_attention(attention, dim, heads, attention_options, static_local=True, **drops)
            else:
                stripe_width = (*stripe_widths, None)[stage]
                layer = StripeAttention(dim, heads, stripe_width=stripe_width, **drops)
            return Block(
                dim,
                layer,
                mlp_ratio=mlp_ratio,
                norm_eps=NORM_EPS,
                drop=proj_drop_rate,
                drop_path=next(rates),
                local_from_input=is_global,
            )

        super().__init__(
            [stem, *merging],
            [[block(stage) for _ in range(depth)] for stage, depth in enumerate(depths)],
            dims,
            nn.LayerNorm(dims[-1], eps=NORM_EPS),
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, stripe_widths: tuple[int, int, int] | None = None
    ) -> None:
        """Change the stripe widths. `img_size` has no effect."""
        del img_size
        for blocks, width in zip(self.stages, stripe_widths or (), strict=False):
            for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                if isinstance(block.attn, StripeAttention):
                    block.attn.stripe_width = width

    def translate_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename the authors' keys to ours."""
        table = [
            (r"stage1_conv_embed\.0\.", "embeddings.0.proj."),
            (r"stage1_conv_embed\.2\.", "embeddings.0.norm."),
            *((rf"merge{stage}\.conv\.", f"embeddings.{stage}.proj.") for stage in (1, 2, 3)),
            *((rf"merge{stage}\.norm\.", f"embeddings.{stage}.norm.") for stage in (1, 2, 3)),
        ]
        for stage, blocks in enumerate(self.stages):
            attention = blocks[0].attn  # pyright: ignore[reportIndexIssue]
            local = r"static_local.\2." if isinstance(attention, StripeAttention) else "static_local."
            authors = rf"stage{stage + 1}\.(\d+)\."
            ours = rf"stages.{stage}.\1."
            table += [
                (rf"{authors}attns\.(\d+)\.get_v\.", rf"{ours}attn.{local}"),
                (rf"{authors}attns\.0\.residual\.", rf"{ours}attn.residual."),
                (rf"{authors}(qkv|proj)\.", rf"{ours}attn.\2."),
                (authors, ours),
            ]
        return rename(state_dict, table)


_NATIVE = pretrained_config(first_conv="embeddings.0.proj", pool_size=(7, 7))
_LARGE = pretrained_config(384, first_conv="embeddings.0.proj", pool_size=(12, 12), crop_pct=1.0)
default_cfgs = with_twins(
    {
        "inline_cswin_tiny": _NATIVE,
        "inline_cswin_small": _NATIVE,
        "inline_cswin_base": _NATIVE,
        "inline_cswin_base_384": _LARGE,
    }
)
_BASE: dict[str, Any] = {"embed_dim": 96, "depths": (3, 6, 29, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5}


@register_with_twins
def inline_cswin_tiny(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-CSWin-T, 20.6 M parameters."""
    defaults = merged(arguments, embed_dim=64, depths=(2, 4, 18, 1), num_heads=(2, 4, 8, 16))
    return build(InLineCSWin, "inline_cswin_tiny", pretrained, **defaults)


@register_with_twins
def inline_cswin_small(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-CSWin-S, 33.0 M parameters."""
    defaults = merged(arguments, embed_dim=64, depths=(3, 6, 29, 2), num_heads=(2, 4, 8, 16), drop_path_rate=0.4)
    return build(InLineCSWin, "inline_cswin_small", pretrained, **defaults)


@register_with_twins
def inline_cswin_base(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-CSWin-B, 73.4 M parameters."""
    return build(InLineCSWin, "inline_cswin_base", pretrained, **merged(arguments, **_BASE))


@register_with_twins
def inline_cswin_base_384(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """InLine-CSWin-B at 384², with stripes of 1, 2 and 12."""
    defaults = merged(arguments, **(_BASE | {"img_size": 384, "stripe_widths": (1, 2, 12), "drop_path_rate": 0.7}))
    return build(InLineCSWin, "inline_cswin_base_384", pretrained, **defaults)
