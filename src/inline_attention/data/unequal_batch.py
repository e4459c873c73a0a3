"""Batches of pictures of unequal size, each with targets of its own shape.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from inline_attention.data.batch import Normalize
from inline_attention.data.broken import BrokenImage

Target = dict[str, Tensor]


@dataclass(frozen=True)
class UnequalBatch:
    """Some samples, with a report on those that could not be read; a `Batch` of pictures as they are.

    Attributes:
        epoch: Epoch, from 0.
        number: Batch in the epoch, from 0.
        images: `[C, H, W]` each: uint8 as read, or floating-point numbers, normalised.
        targets: Of each image, by name.
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
        """A copy with images normalised one by one."""
        return replace(self, images=tuple(normalize(image[None])[0] for image in self.images))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            images=tuple(map(function, self.images)),
            targets=tuple({name: function(value) for name, value in target.items()} for target in self.targets),
            indices=function(self.indices),
        )
