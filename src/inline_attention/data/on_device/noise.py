"""Normally distributed noise for the pixels of a batch, from a number per image.

Generators of a GPU give numbers that depend on where in a batch an image lies. These are hashes of the image's own
number and of their place in it, and the same on every device to within rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOW_32_BITS = 0xFFFFFFFF
LARGEST_KEY = 1 << 24  # whole numbers that float32 tells apart


def pixel_noise(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Noise of zero mean and unit variance.

    Args:
        keys: `[B]` a whole number per image, from 0 to below `LARGEST_KEY`.
        shape: Of the noise for one image.

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
