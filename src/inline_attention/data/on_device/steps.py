"""Steps of an augmentation of whole batches: crop, flip and erase.

What happens to a sample is drawn on the CPU for a whole epoch at once (the plan). It is the same on every device and
for every composition of batches. A batch picks its rows of the plan and follows them without waiting for the GPU.

Shapes: `N` samples, `P` columns of a plan, `R` rectangles, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Step(nn.Module, ABC):
    """One random change of images.

    Attributes:
        purpose: Tells its random numbers from those of other steps: adding a step changes nothing about the others.
    """

    purpose: ClassVar[str]

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Draw the plan for `count` samples.

        Args:
            count: Samples of the dataset.
            generator: Random generator on the CPU, so that numbers do not depend on the device.
            device: Where to work out what follows from them.

        Returns:
            `[N, P]` float32 on the device, a row for each sample.
        """

    @abstractmethod
    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Change images as planned.

        Args:
            images: `[B, C, H, W]`.
            plan: `[B, P]` their rows.

        Returns:
            `[B, C, H, W]` of the same dtype.
        """


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
        """Crop and flip."""
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


SMALLEST_AREA, LARGEST_AREA = 0.02, 1 / 3  # of the image, for all its rectangles together
LARGEST_ASPECT = 1 / 0.3


class RandomErasing(Step):
    """Fills rectangles of normalized images with noise, a color, or zeros."""

    purpose = "erasing"

    def __init__(
        self, probability: float, *, size: tuple[int, int], mode: Literal["pixel", "rand", "const"], largest_count: int
    ):
        """Set up.

        Args:
            probability: That anything is erased from an image.
            size: (height, width) of the images.
            mode: "pixel": noise, "rand": one random color per rectangle, "const": zeros.
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
        """Return the fill of rectangles, `[B, R, C, H or 1, W or 1]`."""
        count, channels = self._largest_count, shape[0]
        if self._mode == "pixel":
            return pixel_noise(keys, shape)[:, None].expand(-1, count, -1, -1, -1)
        if self._mode == "rand":
            return pixel_noise(keys, (count, channels, 1, 1))
        return torch.zeros(len(keys), count, channels, 1, 1, device=keys.device)


LOW_32_BITS = 0xFFFFFFFF
LARGEST_KEY = 1 << 24  # whole numbers that float32 tells apart


def pixel_noise(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Noise of zero mean and unit variance.

    Args:
        keys: `[B]` a whole number per image, from 0 to below `LARGEST_KEY`.
        shape: Shape of the noise for one image.

    Returns:
        `[B, *shape]`.
    """
    places = torch.arange(math.prod(shape), device=keys.device)
    hashes = _hashed(_hashed(keys.long())[:, None] ^ places)
    uniform = ((hashes >> 9).float() + 0.5) * 2**-23  # as many bits as float32 holds between, but not at, 0 and 1
    return (math.sqrt(2) * torch.erfinv(2 * uniform - 1)).view(-1, *shape)


def _hashed(numbers: Tensor) -> Tensor:
    """Whole numbers below 2³², mixed such that each bit depends on all: the last steps of MurmurHash3."""
    numbers = numbers ^ (numbers >> 16)
    numbers = (numbers * 0x85EBCA6B) & LOW_32_BITS
    numbers = numbers ^ (numbers >> 13)
    numbers = (numbers * 0xC2B2AE35) & LOW_32_BITS
    return numbers ^ (numbers >> 16)
