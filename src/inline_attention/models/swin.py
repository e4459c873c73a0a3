"""InLine-Swin: a pyramid with InLine attention over the map in fine stages, shifted windows in coarse stages.

"Bridging the Divide: Reconsidering Softmax and Linear Attention", NeurIPS 2024, arXiv 2412.06590. Skeleton: "Swin
Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021, arXiv 2103.14030.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from inline_attention.layers.embeddings import ConvEmbedding, PatchMerging
from inline_attention.layers.window_attention import WindowAttention, resample_relative_positions
from inline_attention.models.base import blocks_of, check_counts, check_stages, global_attention
from inline_attention.models.pyramid import NORM_EPS, PyramidModel, rename
from inline_attention.models.registry import AttentionKind, record_arguments, register_family


class InLineSwin(PyramidModel):
    """4×4 patches, four stages with patch merging between them, final norm, mean pooling."""

    def __init__(
        self,
        embed_dim: int,
        depths: tuple[int, int, int, int],
        num_heads: tuple[int, int, int, int],
        global_blocks: tuple[int, int, int, int],
        *,
        attention: AttentionKind = "inline",
        attention_options: Mapping[str, Any] | None = None,
        window_size: int = 7,
        in_chans: int = 3,
        **common: Any,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Channels of the first stage. Each later stage has twice as many.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage.
            global_blocks: Number of blocks of each stage, counted from its first, that attend to the whole map. The
                others attend in windows. The softmax twin has none.
            attention: "inline", or "softmax" (windows in all blocks) or "linear" for a twin.
            attention_options: Extra arguments of the InLine or linear attention layer.
            window_size: Side of a window in tokens.
            in_chans: Channels of the images.
            **common: `mlp_ratio`, dropout rates, and arguments of the head: see `PyramidModel`.
        """
        check_counts(embed_dim=embed_dim, window_size=window_size, in_chans=in_chans)
        check_stages(num_heads=num_heads)
        check_stages(least=0, global_blocks=global_blocks)
        dims = [embed_dim * 2**stage for stage in range(4)]
        stem = ConvEmbedding(in_chans, embed_dim, kernel_size=4, stride=4, norm_eps=NORM_EPS)
        merging = [PatchMerging(dim, norm_eps=NORM_EPS) for dim in dims[:-1]]

        def make_attention(stage: int, index: int, **drops: Any) -> nn.Module:
            dim, heads = dims[stage], num_heads[stage]
            if attention != "softmax" and index < global_blocks[stage]:
                return global_attention(attention, dim, heads, attention_options, **drops)
            return WindowAttention(dim, heads, window_size=window_size, shifted=index % 2 == 1, **drops)

        super().__init__([stem, *merging], make_attention, depths, dims, in_chans=in_chans, **common)

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, window_size: int | None = None) -> None:
        """Change the window size and resample the relative position biases. `img_size` has no effect."""
        del img_size
        for block in blocks_of(self):
            if window_size is not None and isinstance(block.attn, WindowAttention):
                block.attn.set_window_size(window_size)
        if window_size is not None:
            record_arguments(self, window_size=window_size)

    def translate_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' keys to ours, remove constant buffers, and resample biases of another window size."""
        table = [
            (r"patch_embed\.", "embeddings.0."),
            *((rf"layers\.{stage}\.downsample\.", f"embeddings.{stage + 1}.") for stage in range(3)),
            (r"layers\.(\d+)\.blocks\.", r"stages.\1."),
        ]
        constants = ("attn_mask", "relative_position_index")
        converted = {key: value for key, value in rename(state_dict, table).items() if not key.endswith(constants)}
        for key, parameter in self.named_parameters():
            if key.endswith("relative_position_bias_table") and key in converted:
                side = (round(parameter.shape[0] ** 0.5) + 1) // 2
                converted[key] = resample_relative_positions(converted[key], side)
        return converted


_SMALL = {"embed_dim": 96, "num_heads": (3, 6, 12, 24)}
_BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "global_blocks": (2, 2, 2, 0)}
register_family(
    InLineSwin,
    {
        # 29.2 M parameters, InLine in the first three stages
        "inline_swin_tiny": {**_SMALL, "depths": (2, 2, 6, 2), "global_blocks": (2, 2, 6, 0)},
        # 49.8 M, InLine in the first two stages
        "inline_swin_small": {**_SMALL, "depths": (2, 2, 18, 2), "global_blocks": (2, 2, 0, 0)},
        # 88.4 M, InLine in the first two stages and the first two blocks of the third
        "inline_swin_base": _BASE,
        "inline_swin_base_384": {**_BASE, "img_size": 384, "window_size": 12},
    },
)
