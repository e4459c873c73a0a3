"""Base class of PVT, Swin and CSWin: four stages of an embedding and blocks, at strides 4, 8, 16 and 32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inline_attention.layers.block import Block
from inline_attention.layers.grids import Grid, tokens_to_map
from inline_attention.models.base import VisionModel, initialize
from inline_attention.models.reading import CheckpointError

STRIDES = (4, 8, 16, 32)


class PyramidModel(VisionModel):
    """Four stages of embedding and blocks, then a final norm, mean pooling and a linear head."""

    largest_stride = STRIDES[-1]
    output_fmt = "NHWC"

    def __init__(
        self,
        embeddings: Sequence[nn.Module],
        stages: Sequence[Sequence[Block]],
        dims: Sequence[int],
        norm: nn.Module,
        *,
        num_classes: int,
        in_chans: int,
        global_pool: str,
        drop_rate: float,
    ) -> None:
        """Assemble the model.

        Args:
            embeddings: One embedding per stage; the first one takes images.
            stages: Blocks of each stage.
            dims: Channels of each stage.
            norm: Norm after the last stage.
            num_classes: Outputs of the head; 0 for none.
            in_chans: Channels of the images.
            global_pool: "avg", or "" for no pooling.
            drop_rate: Dropout rate before the head.
        """
        super().__init__(dims[-1], num_classes, in_chans, global_pool, drop_rate)
        self.embeddings = nn.ModuleList(embeddings)
        self.stages = nn.ModuleList(nn.ModuleList(blocks) for blocks in stages)
        self.norm = norm
        self.feature_info = [
            {"num_chs": dim, "reduction": stride, "module": f"stages.{index}"}
            for index, (dim, stride) in enumerate(zip(dims, STRIDES, strict=True))
        ]
        self.apply(initialize)

    def levels(
        self, x: torch.Tensor, grid: Grid, last: int, num_tokens: int | None = None
    ) -> Iterator[tuple[torch.Tensor, Grid]]:
        """Yield tokens and grid after each stage; the last stage returns the first `num_tokens`, or all."""
        for index, (embedding, stage) in enumerate(zip(self.embeddings, self.stages, strict=True)):
            if index > last:
                return
            tokens, grid = embedding(x, grid)
            blocks: list[nn.Module] = list(stage)  # pyright: ignore[reportArgumentType] - children() drops duplicates
            for number, block in enumerate(blocks, start=1):
                is_last = index == last and number == len(blocks)
                tokens = self.run_block(block, tokens, grid, num_tokens if is_last else None)
            yield tokens, grid
            x = tokens_to_map(tokens, grid)

    def final_norm(self, tokens: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the last stage's tokens."""
        return self.norm(tokens)

    def prune_levels(self, last: int) -> None:
        """Remove the stages after `last`."""
        self.embeddings = self.embeddings[: last + 1]
        self.stages = self.stages[: last + 1]
        self.feature_info = self.feature_info[: last + 1]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups for layer-wise learning rates: by stage if `coarse`, else by block."""
        blocks = r"^(?:stages|embeddings)\.(\d+)"
        fine = [(r"^embeddings\.(\d+)", (0,)), (r"^stages\.(\d+)\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^embeddings\.0\.", "blocks": blocks if coarse else fine}


def rename(state_dict: Mapping[str, torch.Tensor], table: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Rename each key by the first pattern that matches its start; keep keys without a match.

    Raises:
        CheckpointError: If two keys get the same name.
    """
    origins: dict[str, str] = {}
    for key in state_dict:
        name = key
        for pattern, replacement in table:
            if match := re.match(pattern, key):
                name = match.expand(replacement) + key[match.end() :]
                break
        if name in origins:
            raise CheckpointError(
                f"the weights hold {name} twice, as {origins[name]!r} and as {key!r}; remove one of them"
            )
        origins[name] = key
    return {name: state_dict[key] for name, key in origins.items()}
