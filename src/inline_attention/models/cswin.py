"""InLine-CSWin: a pyramid with InLine attention over the map in fine stages, crossed stripes in coarse stages.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "CSWin
Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows", CVPR 2022, arXiv 2107.00652.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from inline_attention.layers.embeddings import ConvEmbedding
from inline_attention.layers.window_attention import StripeAttention
from inline_attention.models.base import check_counts, check_stages, global_attention
from inline_attention.models.pyramid import NORM_EPS, PyramidModel, rename
from inline_attention.models.registry import AttentionKind, record_arguments, register_family


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
        global_stages: int = 2,
        stripe_widths: tuple[int, int, int] = (1, 2, 7),
        in_chans: int = 3,
        **common: Any,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Channels of the first stage. Each later stage has twice as many.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage.
            attention: "inline", or "softmax" (stripes in all blocks) or "linear" for a twin.
            attention_options: Extra arguments of the InLine or linear attention layer.
            global_stages: Number of stages, counted from the first, with InLine attention. The softmax twin has none.
            stripe_widths: Width of a stripe in tokens, for the first three stages. The last stage has one softmax
                attention over the map.
            in_chans: Channels of the images.
            **common: `mlp_ratio`, dropout rates, and arguments of the head: see `PyramidModel`.
        """
        check_counts(embed_dim=embed_dim, in_chans=in_chans)
        check_stages(num_heads=num_heads)
        check_stages(3, stripe_widths=stripe_widths)
        check_counts(least=0, global_stages=global_stages)
        dims = [embed_dim * 2**stage for stage in range(4)]
        stem = ConvEmbedding(in_chans, embed_dim, kernel_size=7, stride=4, padding=2, norm_eps=NORM_EPS)
        merging = [
            ConvEmbedding(dim, 2 * dim, kernel_size=3, stride=2, padding=1, norm_eps=NORM_EPS) for dim in dims[:-1]
        ]

        def make_attention(stage: int, _index: int, **drops: Any) -> nn.Module:
            dim, heads = dims[stage], num_heads[stage]
            if attention != "softmax" and stage < global_stages:
                return global_attention(attention, dim, heads, attention_options, static_local=True, **drops)
            return StripeAttention(dim, heads, stripe_width=(*stripe_widths, None)[stage], **drops)

        common = {"local_from_input": True, **common}
        super().__init__([stem, *merging], make_attention, depths, dims, in_chans=in_chans, **common)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, stripe_widths: tuple[int, int, int] | None = None
    ) -> None:
        """Change the stripe widths. `img_size` has no effect."""
        del img_size
        if stripe_widths is not None:
            check_stages(3, stripe_widths=stripe_widths)
            record_arguments(self, stripe_widths=stripe_widths)
        for blocks, width in zip(self.stages, stripe_widths or (), strict=False):
            for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                if isinstance(block.attn, StripeAttention):
                    block.attn.stripe_width = width

    def translate_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


_SMALL = {"embed_dim": 64, "num_heads": (2, 4, 8, 16)}
_BASE = {"embed_dim": 96, "depths": (3, 6, 29, 2), "num_heads": (4, 8, 16, 32)}
register_family(
    InLineCSWin,
    {
        "inline_cswin_tiny": {**_SMALL, "depths": (2, 4, 18, 1)},  # 20.6 M parameters
        "inline_cswin_small": {**_SMALL, "depths": (3, 6, 29, 2)},  # 33.0 M
        "inline_cswin_base": _BASE,  # 73.4 M
        "inline_cswin_base_384": {**_BASE, "img_size": 384, "stripe_widths": (1, 2, 12)},
    },
)
