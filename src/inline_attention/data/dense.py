"""Samples of detection and segmentation: an image and its target, transformed together.

Images leave as bytes. They are normalized on the device and padded after that, so that the padding is zero. Random
numbers come from torch's global generator, which the loader seeds for each sample.

Shapes: `n` objects, `H`, `W` height and width in pixels, `S` side of crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.batch import Target
from inline_attention.data.loading import Samples
from inline_attention.data.segmentation import IGNORED

SHORTER_SIDE, LONGEST_SIDE = 800, 1333
MULTI_SCALE = tuple(range(480, SHORTER_SIDE + 1, 32))
LONGEST_TO_SHORTEST = 4  # label maps of longer images are scaled by their longer side
CROP_ATTEMPTS = 10
LABELS = "labels"
# Not torchvision's `RandomPhotometricDistort`: it swaps red, green and blue in every second image, so that colors mean
# nothing.
_RANGES = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
RECOLOR = v2.Compose([v2.RandomApply([v2.ColorJitter(**{name: limits})], p=0.5) for name, limits in _RANGES.items()])
DetectionTransform = Callable[[Image.Image, Target], tuple[Tensor, Target]]
SegmentationTransform = Callable[[Image.Image, np.ndarray], tuple[Tensor, Tensor]]


class CocoSamples(Samples):
    """Images of a `CocoSource` with boxes and masks, changed by a `DetectionTransform`."""

    def read(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its target. Evaluation finds the original height and width under `size`."""
        image, target = self._transform(self._source.load(index), self._source.target(index))
        return image, {**target, "size": torch.tensor(self._source.sizes[index])}


class SegmentationSamples(Samples):
    """Images of a `SegmentationSource` with a label for each pixel, changed by a `SegmentationTransform`."""

    def read(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its labels."""
        image = self._source.load(index)
        pixels, labels = self._transform(image, self._source.target(index, (image.height, image.width)))
        return pixels, {LABELS: labels}


def fitted_size(size: tuple[int, int], shorter_side: float, longest_side: float) -> tuple[int, int]:
    """Return the (height, width) of an image that is resized to a shorter side, within the limit of the longer one.

    The aspect ratio is kept, except where a side would vanish.
    """
    scale = min(shorter_side / min(size), longest_side / max(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def detection_training_transform(
    shorter_sides: Sequence[int] = (SHORTER_SIDE,), longest_side: int = LONGEST_SIDE, flip: float = 0.5
) -> DetectionTransform:
    """Return a transform that resizes to one of the shorter sides (`MULTI_SCALE` for 3× schedules) and flips at random.

    It takes an image and its target (see `CocoSource.target`) to a `[3, H, W]` uint8 tensor and its target. Areas stay
    those of the original image.
    """
    return partial(_transform_target, shorter_sides=tuple(shorter_sides), longest_side=longest_side, flip=flip)


def detection_evaluation_transform(
    shorter_side: int = SHORTER_SIDE, longest_side: int = LONGEST_SIDE
) -> DetectionTransform:
    """Return a transform that resizes. Arguments and result are those of `detection_training_transform`."""
    return partial(_transform_target, shorter_sides=(shorter_side,), longest_side=longest_side, flip=0.0)


def segmentation_training_transform(
    crop: int = 512, *, scale: tuple[float, float] = (0.5, 2.0), largest_class_share: float = 0.75, flip: float = 0.5
) -> SegmentationTransform:
    """Return a transform that scales, crops, flips and recolors at random, as is usual on ADE20K.

    It takes an image and its `[H, W]` uint8 labels (see `SegmentationSource.target`) to a `[3, S, S]` uint8 tensor and
    `[S, S]` int64 labels. They are smaller where the resized image is smaller than the crop.

    Args:
        crop: Side of crops in pixels.
        scale: Smallest and largest share of `crop` that the shorter side is resized to.
        largest_class_share: Largest share of a crop that one class may take, if a few attempts can avoid more.
        flip: Probability of a left-right flip.
    """
    return partial(_transform_labels, crop=crop, scale=scale, largest_share=largest_class_share, flip=flip)


def segmentation_evaluation_transform(shorter_side: int = 512) -> SegmentationTransform:
    """Return a transform that resizes the image. Labels keep their size, as metrics count the original pixels."""
    return partial(_resize_image, shorter_side=shorter_side)


# The transforms are pickled for worker processes, which functions inside of functions cannot be.
def _transform_target(
    image: Image.Image, target: Target, *, shorter_sides: tuple[int, ...], longest_side: int, flip: float
) -> tuple[Tensor, Target]:
    boxes = tv_tensors.BoundingBoxes(
        target["boxes"],
        format=tv_tensors.BoundingBoxFormat.XYXY,  # pyright: ignore[reportCallIssue]
        canvas_size=(image.height, image.width),
    )
    masks = {"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {}
    moved: dict[str, Any] = {"image": transforms.pil_to_tensor(image), "boxes": boxes, **masks}
    # torchvision's `RandomShortestSize` fails on an image so thin that a side vanishes.
    shorter_side = shorter_sides[int(torch.randint(len(shorter_sides), ()))]
    size = list(fitted_size((image.height, image.width), shorter_side, longest_side))
    mirrored = float(torch.rand(())) < flip
    for name, value in moved.items():
        resized = transforms.resize(value, size, antialias=True)
        moved[name] = (transforms.horizontal_flip(resized) if mirrored else resized).as_subclass(torch.Tensor)
    return moved.pop("image"), {**target, **moved}


def _transform_labels(
    image: Image.Image, labels: np.ndarray, *, crop: int, scale: tuple[float, float], largest_share: float, flip: float
) -> tuple[Tensor, Tensor]:
    shorter_side = crop * float(torch.empty(()).uniform_(*scale))
    size = fitted_size((image.height, image.width), shorter_side, LONGEST_TO_SHORTEST * shorter_side)
    pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
    mask: Tensor = transforms.resize(tv_tensors.Mask(torch.from_numpy(labels)), list(size)).as_subclass(torch.Tensor)
    window = _varied_window(mask, crop, largest_share)
    pixels, mask = transforms.crop(pixels, *window), transforms.crop(mask, *window)
    if float(torch.rand(())) < flip:
        pixels, mask = transforms.horizontal_flip(pixels), transforms.horizontal_flip(mask)
    return RECOLOR(pixels), mask.long()


def _varied_window(labels: Tensor, crop: int, largest_share: float) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop; drawn several times if one class fills nearly all of it."""
    height, width = (min(side, crop) for side in labels.shape)
    top = left = 0
    for _ in range(CROP_ATTEMPTS):
        top = int(torch.randint(labels.shape[0] - height + 1, ()))
        left = int(torch.randint(labels.shape[1] - width + 1, ()))
        counts = torch.bincount(labels[top : top + height, left : left + width].flatten(), minlength=IGNORED + 1)
        labeled = int(counts[:IGNORED].sum())
        share = int(counts[:IGNORED].max()) / labeled if labeled else 1.0
        if share <= largest_share:
            break
    return top, left, height, width


def _resize_image(image: Image.Image, labels: np.ndarray, *, shorter_side: int) -> tuple[Tensor, Tensor]:
    size = fitted_size((image.height, image.width), shorter_side, LONGEST_TO_SHORTEST * shorter_side)
    pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
    return pixels, torch.from_numpy(labels).long()
