"""Labels of whole images, at once or by sliding windows, at the original size.

Shapes: `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES_AT_ONCE = 8  # to enlarge to the original size: 150 of a large photograph would take gigabytes


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of `side` pixels, one every `step` pixels, `batch_size` of them in a forward pass."""

    side: int
    step: int
    batch_size: int = 4

    def __post_init__(self):
        if not 1 <= self.step <= self.side:
            raise ValueError(f"the step between windows must be from 1 to their side {self.side}, got {self.step}")

    def starts(self, extent: int) -> list[int]:
        """Return where windows begin along a side of an image; the last one ends with it."""
        last = max(0, extent - self.side)
        return [*range(0, last, self.step), last]


def scores_of(model: nn.Module, images: Sequence[Tensor], windows: SlidingWindows | None = None) -> list[Tensor]:
    """Return scores `[K, H, W]` of each image `[3, H, W]`, at once or as means over the windows that cover a pixel."""
    return model(images) if windows is None else [_sliding_scores(model, image, windows) for image in images]


def labels_at(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the best class of each pixel of the original (height, width), from scores `[K, H, W]` of any size."""
    best, labels = scores.new_full(size, -torch.inf, dtype=torch.float32), scores.new_zeros(size, dtype=torch.int64)
    for first in range(0, len(scores), CLASSES_AT_ONCE):
        some = scores[None, first : first + CLASSES_AT_ONCE].float()
        values, places = F.interpolate(some, size=size, mode="bilinear", align_corners=False)[0].max(0)
        labels = torch.where(values > best, places + first, labels)
        best = torch.maximum(values, best)
    return labels


def _sliding_scores(model: nn.Module, image: Tensor, windows: SlidingWindows) -> Tensor:
    height, width = image.shape[-2:]
    places = [
        (..., slice(top, top + windows.side), slice(left, left + windows.side))
        for top in windows.starts(height)
        for left in windows.starts(width)
    ]
    total, counts = image.new_zeros(()), image.new_zeros(height, width)
    for first in range(0, len(places), windows.batch_size):
        chosen = places[first : first + windows.batch_size]
        for place, scores in zip(chosen, model([image[place] for place in chosen]), strict=True):
            if total.ndim == 0:
                total = scores.new_zeros(len(scores), height, width)
            total[place] += scores
            counts[place] += 1
    return total / counts
