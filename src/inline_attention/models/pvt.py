"""InLine-PVT: a pyramid with InLine attention over the whole map in every stage, without spatial reduction.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "Pyramid
Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions", ICCV 2021, arXiv 2102.12122.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inline_attention.layers.attention import TokenAttention
from inline_attention.layers.embeddings import ConvEmbedding
from inline_attention.layers.grids import Grid
from inline_attention.models.base import check_counts, global_attention, image_sides
from inline_attention.models.pyramid import STRIDES, PyramidModel, rename
from inline_attention.models.registry import AttentionKind, record_arguments, register_family

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
        in_chans: int = 3,
        **common: Any,
    ) -> None:
        """Build the model.

        Args:
            depths: Number of blocks of each stage.
            attention: "inline", or "softmax" (over the whole map) or "linear" for a twin.
            attention_options: Extra arguments of the attention layer, such as `local_residual`.
            img_size: Native image size of the learned positions. Other sizes work too.
            in_chans: Channels of the images.
            **common: Dropout rates, and arguments of the head: see `PyramidModel`.
        """
        check_counts(in_chans=in_chans)
        pixels = Grid(*image_sides(img_size))
        embeddings = [
            ConvEmbedding(
                channels, dim, kernel_size=step, stride=step, norm_eps=1e-5, position_grid=pixels.coarser(stride).size
            )
            for channels, dim, step, stride in zip((in_chans, *DIMS[:-1]), DIMS, (4, 2, 2, 2), STRIDES, strict=True)
        ]

        def make_attention(stage: int, _index: int, **drops: Any) -> TokenAttention:
            return global_attention(attention, DIMS[stage], HEADS[stage], attention_options, fused_qkv=False, **drops)

        super().__init__(
            embeddings,
            make_attention,
            depths,
            DIMS,
            mlp_ratio=MLP_RATIOS,
            norm_eps=1e-6,
            final_norm=False,
            img_size=img_size,
            in_chans=in_chans,
            **common,
        )

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Change the native image size and resample the positions of every stage."""
        pixels = Grid(*image_sides(img_size))
        for embedding, stride in zip(self.embeddings, STRIDES, strict=False):
            assert isinstance(embedding, ConvEmbedding)
            embedding.set_position_grid(pixels.coarser(stride).size)
        record_arguments(self, img_size=image_sides(img_size))

    @property
    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Native grid of each stage's position embedding, by parameter name."""
        return {
            f"embeddings.{stage}.positions": embedding.position_grid
            for stage, embedding in enumerate(self.embeddings)
            if isinstance(embedding, ConvEmbedding) and embedding.position_grid is not None
        }

    def translate_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' keys to ours."""
        table: list[tuple[str, str]] = []
        for stage in range(4):
            table += [
                (rf"patch_embed{stage + 1}\.", f"embeddings.{stage}."),
                (rf"pos_embed{stage + 1}$", f"embeddings.{stage}.positions"),
                (rf"block{stage + 1}\.", f"stages.{stage}."),
            ]
        return rename(state_dict, table)


register_family(
    InLinePVT,
    {
        "inline_pvt_tiny": {"depths": (2, 2, 2, 2)},  # 12.0 M parameters
        "inline_pvt_small": {"depths": (3, 4, 6, 3)},  # 21.6 M
        "inline_pvt_medium": {"depths": (3, 4, 18, 3)},  # 37.6 M
        "inline_pvt_large": {"depths": (3, 8, 27, 3)},  # 51.2 M
    },
)
