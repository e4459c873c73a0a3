"""Labels of whole images: at once or window by window, at the size of the original.

Shapes: `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES_AT_ONCE = 8  # that are enlarged to the original's size: 150 of a large photograph would take gigabytes


@dataclass(frozen=True)
class SlidingWindows:
    """Windows that cover an image, and overlap.

    Attributes:
        side: Pixels of a window, or as many as the image has.
        step: Pixels from one window to the next.
        batch_size: Windows of one forward pass.
    """

    side: int
    step: int
    batch_size: int = 4

    def __post_init__(self):
        if not 1 <= self.step <= self.side:
            raise ValueError(f"the step between windows must be from 1 to their side {self.side}, got {self.step}")

    def starts(self, extent: int) -> list[int]:
        """Where windows begin along a side of an image; the last one ends with it."""
        last = max(0, extent - self.side)
        return [*range(0, last, self.step), last]


def scores_of(model: nn.Module, images: Sequence[Tensor], windows: SlidingWindows | None = None) -> list[Tensor]:
    """Scores `[K, H, W]` of each image `[3, H, W]`, at once or as means over the windows that cover a pixel."""
    if windows is None:
        return model(images)
    return [_sliding_scores(model, image, windows) for image in images]


def labels_at(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """The best class of each pixel of the original image.

    Args:
        scores: `[K, H, W]` of the resized image.
        size: (height, width) of the original.

    Returns:
        Labels of that size, int64.
    """
    best = labels = None
    for first in range(0, len(scores), CLASSES_AT_ONCE):
        some = scores[None, first : first + CLASSES_AT_ONCE].float()
        values, places = F.interpolate(some, size=size, mode="bilinear", align_corners=False)[0].max(0)
        if best is None or labels is None:
            best, labels = values, places
        else:
            labels = torch.where(values > best, places + first, labels)
            best = torch.maximum(values, best)
    assert labels is not None
    return labels


def _sliding_scores(model: nn.Module, image: Tensor, windows: SlidingWindows) -> Tensor:
    height, width = image.shape[-2:]
    corners = [(top, left) for top in windows.starts(height) for left in windows.starts(width)]
    total = counts = None
    for first in range(0, len(corners), windows.batch_size):
        chosen = corners[first : first + windows.batch_size]
        crops = [image[:, top : top + windows.side, left : left + windows.side] for top, left in chosen]
        for (top, left), scores in zip(chosen, model(crops), strict=True):
            if total is None or counts is None:
                total, counts = scores.new_zeros(len(scores), height, width), scores.new_zeros(height, width)
            total[:, top : top + windows.side, left : left + windows.side] += scores
            counts[top : top + windows.side, left : left + windows.side] += 1
    assert total is not None
    assert counts is not None
    return total / counts
