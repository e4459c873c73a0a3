"""Augment whole batches on the device, without worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from inline_attention.data.batch import Normalize
from inline_attention.data.on_device.rand_augment import ColorJitter, RandAugment, unsupported_policy
from inline_attention.data.on_device.steps import PaddedCropAndFlip, RandomErasing, Step
from inline_attention.data.randomness import derived_seed

__all__ = ["BatchAugmentation", "training_augmentation", "unsupported_policy"]


class BatchAugmentation(nn.Module):
    """Steps on bytes, normalization, steps on normalized numbers."""

    def __init__(self, on_bytes: Sequence[Step], normalize: Normalize, on_numbers: Sequence[Step] = ()):
        """Combine the steps."""
        super().__init__()
        self._on_bytes = nn.ModuleList(on_bytes)
        self._normalize = normalize
        self._on_numbers = nn.ModuleList(on_numbers)

    def draw(self, count: int, seed: int, epoch: int, device: torch.device) -> list[Tensor]:
        """Draw the plan of every step for `count` samples in an epoch: `[N, P]` each."""
        return [
            step.draw(count, torch.Generator().manual_seed(derived_seed(step.purpose, seed, epoch)), device)
            for step in self._steps()
        ]

    def forward(self, images: Tensor, plans: Sequence[Tensor]) -> Tensor:
        """Augment and normalize.

        Args:
            images: `[B, C, H, W]` uint8.
            plans: `[B, P]` of each step: the rows of these images.

        Returns:
            `[B, C, H, W]` normalized.
        """
        steps = list(zip(self._steps(), plans, strict=True))
        for step, plan in steps[: len(self._on_bytes)]:
            images = step(images, plan)
        images = self._normalize(images)
        for step, plan in steps[len(self._on_bytes) :]:
            images = step(images, plan)
        return images

    def _steps(self) -> list[Step]:
        return [cast(Step, step) for step in (*self._on_bytes, *self._on_numbers)]


def training_augmentation(
    size: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    crop_padding: int = 0,
    hflip: float = 0.0,
    vflip: float = 0.0,
    auto_augment: str | None = None,
    color_jitter: float = 0.0,
    re_prob: float = 0.0,
    re_mode: Literal["pixel", "rand", "const"] = "pixel",
    re_count: int = 1,
) -> BatchAugmentation:
    """Padded crop, flips, colors and erasing, in the words of `training_transform`.

    Args:
        size: (height, width) of the images.
        mean: Per channel, of values from 0 to 1.
        std: Per channel, of values from 0 to 1.
        crop_padding: Black pixels added on each side, from which the original size is cropped.
        hflip: Probability of a left-right flip.
        vflip: Probability of an upside-down flip.
        auto_augment: timm's description of RandAugment.
        color_jitter: Strength of changes of brightness, contrast and saturation; as in timm, none beside
            `auto_augment`.
        re_prob: Probability of erasing rectangles.
        re_mode: What fills them: noise per pixel, one random color, or the mean.
        re_count: Largest number of them.
    """
    on_bytes: list[Step] = []
    if crop_padding or hflip or vflip:
        on_bytes.append(PaddedCropAndFlip(crop_padding, hflip=hflip, vflip=vflip))
    if auto_augment is not None:
        on_bytes.append(RandAugment(auto_augment, size=size, mean=mean))
    elif color_jitter:
        on_bytes.append(ColorJitter(color_jitter))
    erasing = [RandomErasing(re_prob, size=size, mode=re_mode, largest_count=re_count)] if re_prob else []
    return BatchAugmentation(on_bytes, Normalize(mean, std), erasing)
