"""Random erasing (Zhong et al., 2017) for whole batches, by the rules of timm's.

Shapes: `N` samples of a dataset, `R` rectangles, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from inline_attention.data.on_device.noise import LARGEST_KEY, pixel_noise
from inline_attention.data.on_device.step import Step

SMALLEST_AREA, LARGEST_AREA = 0.02, 1 / 3  # of the image, for all its rectangles together
LARGEST_ASPECT = 1 / 0.3


class RandomErasing(Step):
    """Fills rectangles of normalised images with noise, a colour, or zeros."""

    purpose = "erasing"

    def __init__(
        self, probability: float, *, size: tuple[int, int], mode: Literal["pixel", "rand", "const"], largest_count: int
    ):
        """Set up.

        Args:
            probability: That anything is erased from an image.
            size: (height, width) of the images.
            mode: "pixel": noise, "rand": one random colour per rectangle, "const": zeros.
            largest_count: Rectangles are from 1 to this many, the smaller the more there are.
        """
        super().__init__()
        self._probability, self._size, self._mode, self._largest_count = probability, size, mode, largest_count

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """A key for the fill, then top, bottom, left and right of each rectangle; empty ones where there is none.

        Where a rectangle does not fit timm tries others; here it is cut to fit, which is rare.
        """
        rectangles = self._largest_count
        key = torch.randint(LARGEST_KEY, (count, 1), generator=generator).to(device)
        erased = torch.rand(count, 1, generator=generator).to(device) < self._probability
        wanted = torch.randint(1, rectangles + 1, (count, 1), generator=generator).to(device)
        share, aspect, down, right = torch.rand(4, count, rectangles, generator=generator).to(device)
        height, width = self._size
        area = height * width * (SMALLEST_AREA + (LARGEST_AREA - SMALLEST_AREA) * share) / wanted
        aspect = torch.exp(math.log(LARGEST_ASPECT) * (2 * aspect - 1))
        present = erased & (torch.arange(rectangles, device=device) < wanted)
        tall = (area * aspect).sqrt().round().clamp(max=height - 1) * present
        wide = (area / aspect).sqrt().round().clamp(max=width - 1) * present
        top = (down * (height - tall + 1)).floor()
        left = (right * (width - wide + 1)).floor()
        corners = torch.stack([top, top + tall, left, left + wide], dim=2)  # [N, R, 4]
        return torch.cat([key, corners.flatten(1)], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Fill the rectangles."""
        channels, height, width = images.shape[1:]
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        keys, corners = plan[:, 0], plan[:, 1:].view(len(plan), -1, 4)
        fills = self._fills(keys, (channels, height, width))
        for rectangle in range(self._largest_count):
            top, bottom, left, right = corners[:, rectangle, :, None, None].unbind(1)
            inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # [B, H, W]
            fill = fills[:, rectangle].to(images.dtype)
            images = torch.where(inside[:, None], fill, images)
        return images

    def _fills(self, keys: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """What rectangles are filled with, `[B, R, C, H or 1, W or 1]`."""
        count, channels = self._largest_count, shape[0]
        if self._mode == "pixel":
            return pixel_noise(keys, shape)[:, None].expand(-1, count, -1, -1, -1)
        if self._mode == "rand":
            return pixel_noise(keys, (count, channels, 1, 1))
        return torch.zeros(len(keys), count, channels, 1, 1, device=keys.device)
