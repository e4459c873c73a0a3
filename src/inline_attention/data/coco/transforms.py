"""Resizing and flipping of pictures with their boxes and masks.

Pictures leave as bytes; they are normalised by the mean and deviation of the model where they arrive, and padded after
that, so that the padding is zero. Random numbers come from torch's global generator, which the loader seeds for each
sample.

Shapes: `n` objects, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.coco.source import Target
from inline_attention.data.resizing import RandomShorterSide

SHORTER_SIDE, LONGEST_SIDE = 800, 1333
MULTI_SCALE = tuple(range(480, SHORTER_SIDE + 1, 32))
DetectionTransform = Callable[[Image.Image, Target], tuple[Tensor, Target]]


def detection_training_transform(
    shorter_sides: Sequence[int] = (SHORTER_SIDE,), longest_side: int = LONGEST_SIDE, flip: float = 0.5
) -> DetectionTransform:
    """Resize and flip at random.

    Args:
        shorter_sides: Pixels to choose from: one for the 1× schedule, `MULTI_SCALE` for 3×.
        longest_side: Pixels that the longer side may have at most.
        flip: Share of pictures that are mirrored left to right.

    Returns:
        Makes of a picture and its target (see `CocoSource.target`) a `[3, H, W]` uint8 tensor and its target; areas
        stay those of the original picture.
    """
    return _Applied(v2.Compose([RandomShorterSide(shorter_sides, longest_side), v2.RandomHorizontalFlip(flip)]))


def detection_evaluation_transform(
    shorter_side: int = SHORTER_SIDE, longest_side: int = LONGEST_SIDE
) -> DetectionTransform:
    """Resize, nothing at random; arguments and result as for `detection_training_transform`."""
    return _Applied(RandomShorterSide((shorter_side,), longest_side))


class _Applied:
    """A torchvision transform of pictures with plain targets; a class, as it travels to worker processes."""

    def __init__(self, transform: v2.Transform):
        self._transform = transform

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        annotated: dict[str, Any] = dict(target)
        annotated["boxes"] = tv_tensors.BoundingBoxes(
            target["boxes"],
            format=tv_tensors.BoundingBoxFormat.XYXY,  # pyright: ignore[reportCallIssue]
            canvas_size=(image.height, image.width),
        )
        if "masks" in target:
            annotated["masks"] = tv_tensors.Mask(target["masks"])
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        pixels, annotated = self._transform(pixels, annotated)
        return pixels.as_subclass(torch.Tensor), {
            name: value.as_subclass(torch.Tensor) for name, value in annotated.items()
        }
