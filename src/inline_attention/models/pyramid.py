"""Base class of PVT, Swin and CSWin: four stages of an embedding and blocks, at strides 4, 8, 16 and 32."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from inline_attention.layers.attention import TokenAttention
from inline_attention.layers.block import Block
from inline_attention.models.base import Level, VisionModel, check_stages, drop_path_rates, image_sides, initialize
from inline_attention.models.reading import CheckpointError

STRIDES = (4, 8, 16, 32)
NORM_EPS = 1e-5


class PyramidModel(VisionModel):
    """Four stages of embedding and blocks, then a final norm, mean pooling and a linear head."""

    largest_stride = STRIDES[-1]
    output_fmt = "NHWC"

    def __init__(
        self,
        embeddings: Sequence[nn.Module],
        make_attention: Callable[..., nn.Module],
        depths: Sequence[int],
        dims: Sequence[int],
        *,
        mlp_ratio: float | Sequence[float] = 4.0,
        norm_eps: float = NORM_EPS,
        final_norm: bool = True,
        local_from_input: bool = False,
        img_size: int | tuple[int, int] = 224,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **head: Any,
    ) -> None:
        """Assemble the model.

        Args:
            embeddings: One embedding per stage; the first one takes images.
            make_attention: Returns the layer of block `index` of a `stage`, given both and the dropout rates.
            depths: Number of blocks of each stage.
            dims: Channels of each stage.
            mlp_ratio: Hidden width of the MLPs in multiples of the channels, one for all stages or one for each.
            norm_eps: Epsilon of the norms.
            final_norm: True for a norm after the last stage.
            local_from_input: Predict local weights from the un-normalized input of a block (CSWin).
            img_size: Native image size. Only learned positions depend on it.
            proj_drop_rate: Dropout rate after projections.
            attn_drop_rate: Dropout rate of the attention.
            drop_path_rate: Stochastic depth rate of the last block.
            **head: Arguments of `VisionModel`: `num_classes`, `in_chans`, `global_pool`, `drop_rate`.
        """
        check_stages(depths=depths)
        image_sides(img_size)
        mlp_ratios = mlp_ratio if isinstance(mlp_ratio, Sequence) else [mlp_ratio] * len(dims)
        if len(mlp_ratios) != len(dims):
            raise ValueError(f"mlp_ratio must be one number, or one for each of {len(dims)} stages, got {mlp_ratio!r}")
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))

        def block(stage: int, index: int) -> Block:
            layer = make_attention(stage, index, attn_drop=attn_drop_rate, proj_drop=proj_drop_rate)
            return Block(
                dims[stage],
                layer,
                mlp_ratio=mlp_ratios[stage],
                norm_eps=norm_eps,
                drop=proj_drop_rate,
                drop_path=next(rates),
                local_from_input=local_from_input and isinstance(layer, TokenAttention),
            )

        stages = [[block(stage, index) for index in range(depth)] for stage, depth in enumerate(depths)]
        super().__init__(dims[-1], **head)
        self.embeddings = nn.ModuleList(embeddings)
        self.stages = nn.ModuleList(nn.ModuleList(blocks) for blocks in stages)
        self.norm = nn.LayerNorm(dims[-1], eps=norm_eps) if final_norm else nn.Identity()
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"stages.{index}"}
            for index, (dim, stride) in enumerate(zip(dims, STRIDES, strict=True))
        ]
        self.apply(initialize)

    def network(self) -> list[Level]:
        """Return one level per stage."""
        pairs: list[Any] = list(zip(self.embeddings, self.stages, strict=True))
        return [Level(embedding, embedding.stride, embedding.halo, list(stage)) for embedding, stage in pairs]

    def prune_levels(self, last: int) -> None:
        """Remove the stages after `last`."""
        self.embeddings = self.embeddings[: last + 1]
        self.stages = self.stages[: last + 1]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for layer-wise learning rates: by stage if `coarse`, else by block."""
        blocks = r"^(?:stages|embeddings)\.(\d+)"
        fine = [(r"^embeddings\.(\d+)", (0,)), (r"^stages\.(\d+)\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^embeddings\.0\.", "blocks": blocks if coarse else fine}


def rename(state_dict: Mapping[str, Tensor], table: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Rename each key by the first pattern that matches its start; refuse two keys with the same new name."""
    origins: dict[str, str] = {}
    for key in state_dict:
        name = next((re.sub(pattern, new, key, count=1) for pattern, new in table if re.match(pattern, key)), key)
        if name in origins:
            raise CheckpointError(
                f"the weights hold {name} twice, as {origins[name]!r} and as {key!r}; remove one of them"
            )
        origins[name] = key
    return {name: state_dict[key] for name, key in origins.items()}
