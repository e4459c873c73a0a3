"""Changes of colour in a batch, each image in its own way: blends with a duller image, and tables of new values.

Results are Pillow's to within a unit of 255. Shapes: `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

LEVELS = 256  # values of a byte
GREY_SHARES = (0.299, 0.587, 0.114)  # of red, green and blue in what the eye takes for brightness


class Blend(IntEnum):
    """What an image is blended with; 0 is for none."""

    BRIGHTNESS = 1  # black
    CONTRAST = 2  # its mean grey
    COLOUR = 3  # its grey image
    SHARPNESS = 4  # itself, smoothed


class Table(IntEnum):
    """How values are replaced; 0 is for not at all. The argument of each is in brackets."""

    POSTERISE = 1  # the high bits are kept (mask)
    SOLARISE = 2  # bright values are inverted (first of them)
    SOLARISE_ADD = 3  # dark values are raised (by how much)
    AUTO_CONTRAST = 4  # stretched to the full range, channel by channel (none)
    EQUALISE = 5  # made to occur equally often, channel by channel (none)


def blend(images: Tensor, kinds: Tensor, factors: Tensor, possible: Sequence[Blend] = tuple(Blend)) -> Tensor:
    """Move images away from a duller version of themselves, or towards it.

    Args:
        images: `[B, 3, H, W]` whole numbers from 0 to 255, floating point.
        kinds: `[B]` of `Blend`, or 0 to leave an image alone.
        factors: `[B]` 0 gives the duller version, 1 the image, more than 1 exaggerates it.
        possible: The kinds that may occur.

    Returns:
        `[B, 3, H, W]` whole numbers from 0 to 255, floating point.
    """
    kinds, factors = kinds[:, None, None, None], factors[:, None, None, None]
    duller = images
    for kind in possible:
        duller = torch.where(kinds == kind, _DULLER[kind](images), duller)
    blended = (duller + factors * (images - duller)).clamp(0, 255).floor()
    return torch.where(kinds > 0, blended, images)


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    mixed = GREY_SHARES[0] * red + GREY_SHARES[1] * green + GREY_SHARES[2] * blue
    return mixed.round()[:, None]


def _mean_grey(images: Tensor) -> Tensor:
    return _grey(images).mean((1, 2, 3), keepdim=True).round()


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel counts five times, its eight neighbours once; the outermost pixels stay as they are."""
    if min(images.shape[-2:]) < 3:
        return images
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = ((9 * F.avg_pool2d(images, 3, 1) + 4 * images[..., 1:-1, 1:-1]) / 13).round()
    return smoothed


_DULLER: dict[Blend, Callable[[Tensor], Tensor]] = {
    Blend.BRIGHTNESS: torch.zeros_like,
    Blend.CONTRAST: _mean_grey,
    Blend.COLOUR: _grey,
    Blend.SHARPNESS: _smoothed,
}


def replace_values(images: Tensor, kinds: Tensor, arguments: Tensor) -> Tensor:
    """Replace each value by what a table has for it.

    Args:
        images: `[B, C, H, W]` uint8.
        kinds: `[B]` of `Table`, or 0 to leave an image alone.
        arguments: `[B]` whole numbers: see `Table`.

    Returns:
        `[B, C, H, W]` uint8.
    """
    values = torch.arange(LEVELS, device=images.device)
    kinds, arguments = kinds.long()[:, None, None], arguments.long()[:, None, None]
    pixels = images.flatten(2).long()  # [B, C, H·W]
    table = values.expand(*pixels.shape[:2], LEVELS)
    for kind, new_values in (
        (Table.POSTERISE, values & arguments),
        (Table.SOLARISE, torch.where(values < arguments, values, 255 - values)),
        (Table.SOLARISE_ADD, torch.where(values < 128, values + arguments, values)),
        (Table.AUTO_CONTRAST, _stretched(pixels, values)),
        (Table.EQUALISE, _equalised(pixels, values)),
    ):
        table = torch.where(kinds == kind, new_values, table)
    return table.clamp(0, 255).gather(2, pixels).view(images.shape).to(torch.uint8)


def _stretched(pixels: Tensor, values: Tensor) -> Tensor:
    darkest, brightest = pixels.aminmax(dim=2, keepdim=True)
    span = brightest - darkest
    return torch.where(span > 0, (values - darkest) * 255 // span.clamp(min=1), values)


def _equalised(pixels: Tensor, values: Tensor) -> Tensor:
    counts = torch.zeros(*pixels.shape[:2], LEVELS, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    of_brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - of_brightest) // 255  # pixels per new value; 0 if there are too few to tell
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, (below + step // 2) // step.clamp(min=1), values)
