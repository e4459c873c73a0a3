"""Samples of detection and segmentation: an image and its target, transformed together.

Images leave as bytes. They are normalized on the device and padded after that, so that the padding is zero. Random
numbers come from torch's global generator, which the loader seeds for each sample.

Shapes: `n` objects, `H`, `W` height and width in pixels, `S` side of crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.batch import Target
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.loading import Samples
from inline_attention.data.segmentation.pairs import IGNORED, SegmentationSource

SHORTER_SIDE, LONGEST_SIDE = 800, 1333
MULTI_SCALE = tuple(range(480, SHORTER_SIDE + 1, 32))
LONGEST_TO_SHORTEST = 4  # label maps of longer images are scaled by their longer side
CROP_ATTEMPTS = 10
LABELS = "labels"
DetectionTransform = Callable[[Image.Image, Target], tuple[Tensor, Target]]
SegmentationTransform = Callable[[Image.Image, np.ndarray], tuple[Tensor, Tensor]]


class CocoSamples(Samples):
    """Images with boxes and masks."""

    def __init__(self, source: CocoSource, transform: DetectionTransform):
        super().__init__(source, transform)

    def read(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its target. Evaluation finds the original height and width under `size`."""
        image, target = self._transform(self._source.load(index), self._source.target(index))
        return image, {**target, "size": torch.tensor(self._source.sizes[index])}


class SegmentationSamples(Samples):
    """Images with a label for each pixel."""

    def __init__(self, source: SegmentationSource, transform: SegmentationTransform):
        super().__init__(source, transform)

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
    return _TargetTransform(v2.Compose([_RandomResize(shorter_sides, longest_side), v2.RandomHorizontalFlip(flip)]))


def detection_evaluation_transform(
    shorter_side: int = SHORTER_SIDE, longest_side: int = LONGEST_SIDE
) -> DetectionTransform:
    """Return a transform that resizes. Arguments and result are those of `detection_training_transform`."""
    return _TargetTransform(_RandomResize((shorter_side,), longest_side))


def segmentation_training_transform(
    crop: int = 512,
    *,
    scale: tuple[float, float] = (0.5, 2.0),
    largest_class_share: float = 0.75,
    flip: float = 0.5,
    photometric: bool = True,
) -> SegmentationTransform:
    """Return a transform that scales, crops, flips and recolors at random, as is usual on ADE20K.

    It takes an image and its `[H, W]` uint8 labels (see `SegmentationSource.target`) to a `[3, S, S]` uint8 tensor and
    `[S, S]` int64 labels. They are smaller where the resized image is smaller than the crop.

    Args:
        crop: Side of crops in pixels.
        scale: Smallest and largest share of `crop` that the shorter side is resized to.
        largest_class_share: Largest share of a crop that one class may take, if a few attempts can avoid more.
        flip: Probability of a left-right flip.
        photometric: Change brightness, contrast, saturation and hue.
    """
    steps = [_RandomScale(crop, scale), _VariedCrop(crop, largest_class_share), v2.RandomHorizontalFlip(flip)]
    if photometric:
        # Not torchvision's `RandomPhotometricDistort`, which also swaps red, green and blue in every second image:
        # after that colors tell a network nothing.
        ranges = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
        steps += [v2.RandomApply([v2.ColorJitter(**{name: limits})], p=0.5) for name, limits in ranges.items()]
    return _LabelTransform(v2.Compose(steps))


def segmentation_evaluation_transform(shorter_side: int = 512) -> SegmentationTransform:
    """Return a transform that resizes the image. Labels keep their size, as metrics count the original pixels."""
    return _ImageResize(shorter_side)


class _RandomResize(v2.Transform):
    """Resize to a shorter side chosen at random from `shorter_sides`. With one to choose from, nothing is random.

    torchvision's `RandomShortestSize` fails on an image so thin that a side vanishes.
    """

    def __init__(self, shorter_sides: Sequence[int], longest_side: int):
        super().__init__()
        self._shorter_sides, self._longest_side = tuple(shorter_sides), longest_side

    def draw(self) -> tuple[float, float]:
        return self._shorter_sides[int(torch.randint(len(self._shorter_sides), ()))], self._longest_side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        return {"size": list(fitted_size((height, width), *self.draw()))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return transforms.resize(inpt, params["size"], antialias=True)


class _RandomScale(_RandomResize):
    """Resize the shorter side to a random share of the crop's size."""

    def __init__(self, crop: int, scale: tuple[float, float]):
        super().__init__((), 0)
        self._crop, self._scale = crop, scale

    def draw(self) -> tuple[float, float]:
        shorter = self._crop * float(torch.empty(()).uniform_(*self._scale))
        return shorter, LONGEST_TO_SHORTEST * shorter


class _VariedCrop(v2.Transform):
    """Crop at random, several times if one class fills nearly all of the crop. Small images stay whole."""

    def __init__(self, crop: int, largest_share: float):
        super().__init__()
        self._crop, self._largest_share = crop, largest_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        labels = next(item for item in flat_inputs if isinstance(item, tv_tensors.Mask))
        params: dict[str, Any] = {"height": min(height, self._crop), "width": min(width, self._crop)}
        for _ in range(CROP_ATTEMPTS):
            params["top"] = int(torch.randint(height - params["height"] + 1, ()))
            params["left"] = int(torch.randint(width - params["width"] + 1, ()))
            if _largest_share(transforms.crop(labels, **params)) <= self._largest_share:
                break
        return params

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return transforms.crop(inpt, **params)


def _largest_share(labels: Tensor) -> float:
    """Return the share of the labeled pixels that the most frequent class has, 1 if no pixel is labeled."""
    counts = torch.bincount(labels.flatten(), minlength=IGNORED + 1)[:IGNORED]
    total = int(counts.sum())
    return int(counts.max()) / total if total else 1.0


class _TargetTransform:  # not a function within a function: transforms are pickled for worker processes
    """Apply a torchvision transform to an image and a plain target."""

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


class _LabelTransform:
    """Apply a torchvision transform to an image and plain labels."""

    def __init__(self, transform: v2.Transform):
        self._transform = transform

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        pixels, mask = self._transform(pixels, tv_tensors.Mask(torch.from_numpy(labels)))
        return pixels.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor).long()


class _ImageResize:
    def __init__(self, shorter_side: int):
        self._shorter_side = shorter_side

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        longest = LONGEST_TO_SHORTEST * self._shorter_side
        size = fitted_size((image.height, image.width), self._shorter_side, longest)
        pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
        return pixels, torch.from_numpy(labels).long()
