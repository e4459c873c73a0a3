"""Pictures brought to a size that a network can take, with all that is annotated on them.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms


def fitted_size(size: tuple[int, int], shorter_side: float, longest_side: float) -> tuple[int, int]:
    """(height, width) of a picture enlarged or reduced until its shorter side is as wanted, or its longer one too long.

    Args:
        size: (height, width) of the picture, whose aspect ratio is kept, except where a side would vanish.
        shorter_side: Pixels of the shorter side.
        longest_side: Pixels that the longer side may have at most.
    """
    scale = min(shorter_side / min(size), longest_side / max(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


class RandomShorterSide(v2.Transform):
    """Resizes to a shorter side chosen at random among some; with one to choose from, nothing is random.

    torchvision's `RandomShortestSize` does the same, but fails on a picture so thin that a side vanishes.
    """

    def __init__(self, shorter_sides: Sequence[int], longest_side: int):
        """Set the choice.

        Args:
            shorter_sides: Pixels to choose from.
            longest_side: Pixels that the longer side may have at most.
        """
        super().__init__()
        self.shorter_sides, self.longest_side = tuple(shorter_sides), longest_side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Choose for one sample."""
        height, width = v2.query_size(flat_inputs)
        chosen = self.shorter_sides[int(torch.randint(len(self.shorter_sides), ()))]
        return {"size": list(fitted_size((height, width), chosen, self.longest_side))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Resize a picture, its boxes or its masks."""
        return transforms.resize(inpt, params["size"], antialias=True)
