"""Padded crops and flips: pixels are moved, never recomputed.

Shapes: `B` batch, `C` channels, `H`, `W` height and width, `P` padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.data.on_device.step import Step


class PaddedCropAndFlip(Step):
    """Adds a black border, crops the original size out of that, and mirrors the result."""

    purpose = "crop and flip"

    def __init__(self, padding: int, *, hflip: float = 0.0, vflip: float = 0.0):
        """Set up.

        Args:
            padding: Black pixels on each side.
            hflip: Probability of a left-right flip.
            vflip: Probability of an upside-down flip.
        """
        super().__init__()
        self._padding, self._hflip, self._vflip = padding, hflip, vflip

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Top and left of the crop in the padded image, whether to mirror it, whether to turn it upside down."""
        corners = torch.randint(2 * self._padding + 1, (count, 2), generator=generator)
        mirrored = torch.rand(count, 1, generator=generator) < self._hflip
        upside_down = torch.rand(count, 1, generator=generator) < self._vflip
        return torch.cat([corners, mirrored, upside_down], dim=1).float().to(device)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """As `crop_and_flip`."""
        moves = plan.long()
        return crop_and_flip(images, moves[:, :2], moves[:, 2:].bool(), self._padding)


def crop_and_flip(images: Tensor, corners: Tensor, flips: Tensor, padding: int) -> Tensor:
    """Pad, crop back to the original size, and flip, each image in its own way.

    Args:
        images: `[B, C, H, W]`.
        corners: `[B, 2]` top and left of the crop in the padded image, from 0 to 2P.
        flips: `[B, 2]` whether to flip it after that: left to right, upside down.
        padding: P, black pixels on each side.

    Returns:
        `[B, C, H, W]` in channels-last order.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding,) * 4)
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    rows = torch.where(flips[:, 1:], rows.flip(0), rows)
    columns = torch.where(flips[:, :1], columns.flip(0), columns)
    samples = torch.arange(len(images), device=images.device)
    cropped = padded[
        samples[:, None, None], :, (rows + corners[:, :1])[:, :, None], (columns + corners[:, 1:])[:, None, :]
    ]  # [B, H, W, C]
    return cropped.permute(0, 3, 1, 2)
