"""Batches that a loader hands to a model.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from inline_attention.data.broken import BrokenImage

Target = dict[str, Tensor]
Images = TypeVar("Images")
Targets = TypeVar("Targets")


@dataclass(frozen=True)
class AnyBatch(Generic[Images, Targets]):
    """Some samples of an epoch, with a report on those that could not be read. Epochs and batches count from 0."""

    epoch: int
    number: int
    images: Images  # as read (uint8), or normalized floating-point numbers
    targets: Targets
    indices: Tensor  # [B] numbers of the samples in the dataset
    broken: tuple[BrokenImage, ...] = ()  # images that were left out of this batch, or replaced in it

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory; called by torch's data loader."""
        return self._mapped(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """Return a copy on the device, without waiting for it."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def normalized(self, normalize: Normalize) -> Self:
        """Return a copy with normalized images."""
        return replace(self, images=tree_map(normalize, self.images))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        images, targets, indices = tree_map(function, (self.images, self.targets, self.indices))
        return replace(self, images=images, targets=targets, indices=indices)


class Batch(AnyBatch[Tensor, Tensor]):
    """Images `[B, C, H, W]` with class numbers `[B]`."""


class UnequalBatch(AnyBatch[tuple[Tensor, ...], tuple[Target, ...]]):
    """Images `[C, H, W]`, each of its own size, with a target each."""


class Normalize(nn.Module):
    """Bytes to floating-point numbers of about zero mean and unit variance, on the images' device.

    The operations and their order are those of torchvision's `ToTensor` and `Normalize`: on a CPU, so is every bit.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        """Set the statistics of values from 0 to 1, one of each per channel."""
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Normalize `[..., C, H, W]` bytes; floating-point numbers are taken to be normalized already."""
        if images.is_floating_point():
            return images
        # Rearranged first, while they are small: sums over planes are faster than over three interleaved channels.
        return images.contiguous().float().div_(255).sub_(self.mean).div_(self.std)
