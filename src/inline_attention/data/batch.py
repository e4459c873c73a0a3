"""Batches that a loader hands to a model.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from inline_attention.data.broken import BrokenImage


@dataclass(frozen=True)
class Batch:
    """Some samples, with a report on those that could not be read.

    Attributes:
        epoch: Epoch, from 0.
        number: Batch in the epoch, from 0.
        images: `[B, C, H, W]`: uint8 as read, or floating-point numbers, normalized.
        targets: `[B]` class numbers.
        indices: `[B]` numbers of the samples in the dataset.
        broken: Images that were left out of this batch, or replaced in it.
    """

    epoch: int
    number: int
    images: Tensor
    targets: Tensor
    indices: Tensor
    broken: tuple[BrokenImage, ...] = ()

    def __len__(self) -> int:
        return len(self.targets)

    def pin_memory(self) -> Self:
        """A copy that a GPU can fetch by itself; called by torch's data loader."""
        return replace(
            self,
            images=self.images.pin_memory(),
            targets=self.targets.pin_memory(),
            indices=self.indices.pin_memory(),
        )

    def to(self, device: torch.device) -> Self:
        """A copy on the device, without waiting for it."""
        return replace(
            self,
            images=self.images.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            indices=self.indices.to(device, non_blocking=True),
        )

    def normalized(self, normalize: Normalize) -> Self:
        """A copy with normalized images."""
        return replace(self, images=normalize(self.images))


class Normalize(nn.Module):
    """Bytes to floating-point numbers of about zero mean and unit variance, on the images' device.

    The operations and their order are those of torchvision's `ToTensor` and `Normalize`: on a CPU, so is every bit.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        """Set the statistics of values from 0 to 1, one of each per channel."""
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Normalize `[B, C, H, W]` bytes; floating-point numbers are taken to be normalized already."""
        if images.is_floating_point():
            return images
        # Rearranged first, while they are small: sums over planes are faster than over three interleaved channels.
        return images.contiguous().float().div_(255).sub_(self.mean).div_(self.std)


Target = dict[str, Tensor]


@dataclass(frozen=True)
class UnequalBatch:
    """Some samples, with a report on those that could not be read; a `Batch` of images as they are.

    Attributes:
        epoch: Epoch, from 0.
        number: Batch in the epoch, from 0.
        images: `[C, H, W]` each: uint8 as read, or floating-point numbers, normalized.
        targets: Targets of each image, by name.
        indices: `[B]` numbers of the samples in the dataset.
        broken: Images that were left out of this batch, or replaced in it.
    """

    epoch: int
    number: int
    images: tuple[Tensor, ...]
    targets: tuple[Target, ...]
    indices: Tensor
    broken: tuple[BrokenImage, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Self:
        """A copy that a GPU can fetch by itself; called by torch's data loader."""
        return self._mapped(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """A copy on the device, without waiting for it."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def normalized(self, normalize: Normalize) -> Self:
        """A copy with images normalized one by one."""
        return replace(self, images=tuple(normalize(image[None])[0] for image in self.images))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            images=tuple(map(function, self.images)),
            targets=tuple({name: function(value) for name, value in target.items()} for target in self.targets),
            indices=function(self.indices),
        )
