"""Annotated pictures as a loader reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inline_attention.data.broken import BrokenImage
from inline_attention.data.coco.source import CocoSource, Target
from inline_attention.data.coco.transforms import DetectionTransform
from inline_attention.data.sampling import BatchKey
from inline_attention.data.unequal_batch import UnequalBatch


class CocoSamples:
    """Pictures with boxes and masks, transformed together."""

    def __init__(self, source: CocoSource, transform: DetectionTransform):
        self._source, self._transform = source, transform

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        """The picture's path."""
        return self._source.name(index)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """Picture and target; see `Samples`. Evaluation finds the original's height and width under `size`."""
        image, target = self._transform(self._source.load(index), self._source.target(index))
        height, width = map(int, self._source.sizes[index])
        return image, {**target, "size": torch.tensor([height, width])}

    def batch(
        self,
        key: BatchKey,
        samples: Sequence[tuple[Tensor, Target]],
        indices: Sequence[int],
        broken: tuple[BrokenImage, ...],
    ) -> UnequalBatch:
        """Samples side by side; see `Samples`."""
        images, targets = tuple(image for image, _ in samples), tuple(target for _, target in samples)
        return UnequalBatch(key.epoch, key.number, images, targets, torch.tensor(indices, dtype=torch.int64), broken)
