"""Pictures with maps of labels as a loader reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inline_attention.data.broken import BrokenImage
from inline_attention.data.sampling import BatchKey
from inline_attention.data.segmentation.source import SegmentationSource
from inline_attention.data.segmentation.transforms import SegmentationTransform
from inline_attention.data.unequal_batch import UnequalBatch

LABELS = "labels"


class SegmentationSamples:
    """Pictures and labels of their pixels, transformed together."""

    def __init__(self, source: SegmentationSource, transform: SegmentationTransform):
        self._source, self._transform = source, transform

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        """The picture's path."""
        return self._source.name(index)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Picture and labels; see `Samples`."""
        image = self._source.load(index)
        return self._transform(image, self._source.target(index, (image.height, image.width)))

    def batch(
        self,
        key: BatchKey,
        samples: Sequence[tuple[Tensor, Tensor]],
        indices: Sequence[int],
        broken: tuple[BrokenImage, ...],
    ) -> UnequalBatch:
        """Samples side by side; see `Samples`."""
        images, targets = tuple(image for image, _ in samples), tuple({LABELS: labels} for _, labels in samples)
        return UnequalBatch(key.epoch, key.number, images, targets, torch.tensor(indices, dtype=torch.int64), broken)
