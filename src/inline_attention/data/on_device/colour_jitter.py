"""Random brightness, contrast and saturation, in random order: torchvision's `ColorJitter` for whole batches."""

from __future__ import annotations

import torch
from torch import Tensor

from inline_attention.data.on_device.colours import Blend, blend
from inline_attention.data.on_device.step import Step

KINDS = (Blend.BRIGHTNESS, Blend.CONTRAST, Blend.COLOUR)


class ColourJitter(Step):
    """Changes brightness, contrast and saturation of images of bytes."""

    purpose = "colour jitter"

    def __init__(self, strength: float):
        """Set up.

        Args:
            strength: Factors are drawn from 1 - strength, or 0 if that is more, to 1 + strength.
        """
        super().__init__()
        self._lowest, self._highest = max(0.0, 1 - strength), 1 + strength

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Three kinds in the order of their turns, then their factors."""
        order, shares = torch.rand(2, count, len(KINDS), generator=generator).to(device)
        kinds = torch.tensor(KINDS, device=device)[order.argsort(dim=1)]
        return torch.cat([kinds, self._lowest + (self._highest - self._lowest) * shares], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Blend once in each turn."""
        changed = images.float()
        for turn in range(len(KINDS)):
            changed = blend(changed, plan[:, turn], plan[:, len(KINDS) + turn], KINDS)
        return changed.to(torch.uint8)
