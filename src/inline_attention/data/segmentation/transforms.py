"""Scaling, cropping, flipping and recolouring of pictures with their maps of labels.

Pictures leave as bytes and are normalised where they arrive. Random numbers come from torch's global generator, which
the loader seeds for each sample.

Shapes: `H`, `W` height and width in pixels, `S` side of crops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.resizing import fitted_size
from inline_attention.data.segmentation.source import IGNORED

LONGEST_TO_SHORTEST = 4  # pictures longer than that are scaled by their longer side
CROP_ATTEMPTS = 10
SegmentationTransform = Callable[[Image.Image, np.ndarray], tuple[Tensor, Tensor]]


def segmentation_training_transform(
    crop: int = 512,
    *,
    scale: tuple[float, float] = (0.5, 2.0),
    largest_class_share: float = 0.75,
    flip: float = 0.5,
    photometric: bool = True,
) -> SegmentationTransform:
    """Scale, crop, flip and recolour at random, as is usual on ADE20K.

    Args:
        crop: Pixels of the side of crops.
        scale: Least and greatest share of `crop` that the shorter side of a picture is resized to.
        largest_class_share: No class may take more of a crop, if a few attempts can avoid it.
        flip: Share of pictures that are mirrored left to right.
        photometric: Whether to change brightness, contrast, saturation and hue.

    Returns:
        Makes of a picture and its `[H, W]` uint8 labels (see `SegmentationSource.target`) a `[3, S, S]` uint8 tensor
        and `[S, S]` int64 labels; smaller where the resized picture is: whoever batches them tells the model how much.
    """
    steps: list[v2.Transform] = [
        _RandomScale(crop, scale),
        _VariedCrop(crop, largest_class_share),
        v2.RandomHorizontalFlip(flip),
    ]
    if photometric:
        steps += _colour_steps()
    return _Applied(v2.Compose(steps))


def segmentation_evaluation_transform(shorter_side: int = 512) -> SegmentationTransform:
    """Resize the picture, nothing at random; labels stay as they are, as figures are of the original pixels."""
    return _Resized(shorter_side)


def _colour_steps() -> list[v2.Transform]:
    """Each change to half of the pictures.

    Not torchvision's `RandomPhotometricDistort`, which also swaps red, green and blue in every second picture: after
    that colours tell a network nothing.
    """
    ranges = {"brightness": (0.875, 1.125), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
    return [v2.RandomApply([v2.ColorJitter(**{name: limits})], p=0.5) for name, limits in ranges.items()]


class _RandomScale(v2.Transform):
    """Resizes to a random share of the crop's size."""

    def __init__(self, crop: int, scale: tuple[float, float]):
        super().__init__()
        self._crop, self._scale = crop, scale

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        shorter = self._crop * float(torch.empty(()).uniform_(*self._scale))
        return {"size": list(fitted_size((height, width), shorter, LONGEST_TO_SHORTEST * shorter))}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return transforms.resize(inpt, params["size"], antialias=True)


class _VariedCrop(v2.Transform):
    """Crops at random, several times if need be, until no class fills nearly all of it; small pictures stay whole."""

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
    """Share of the labelled pixels that the most frequent class has; 1 if no pixel is labelled."""
    counts = torch.bincount(labels.flatten(), minlength=IGNORED + 1)[:IGNORED]
    total = int(counts.sum())
    return int(counts.max()) / total if total else 1.0


class _Applied:
    """A torchvision transform of pictures with plain labels; a class, as it travels to worker processes."""

    def __init__(self, transform: v2.Transform):
        self._transform = transform

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = tv_tensors.Image(transforms.pil_to_tensor(image))
        pixels, mask = self._transform(pixels, tv_tensors.Mask(torch.from_numpy(labels)))
        return pixels.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor).long()


class _Resized:
    def __init__(self, shorter_side: int):
        self._shorter_side = shorter_side

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        longest = LONGEST_TO_SHORTEST * self._shorter_side
        size = fitted_size((image.height, image.width), self._shorter_side, longest)
        pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
        return pixels, torch.from_numpy(labels).long()
