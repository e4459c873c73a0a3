"""Segmenters: Semantic FPN and UPerNet over the backbones of the zoo, and their labels of whole images.

The decoders are ours, not segmentation-models-pytorch's: its encoders take only a tensor, and cannot tell the backbone
where an image ends and its padding begins. They are those of the papers ("Panoptic Feature Pyramid Networks", arXiv
1901.02446; "Unified Perceptual Parsing for Scene Understanding", arXiv 1807.10221) as PVT and Swin use them: batch norm
throughout, and for UPerNet an auxiliary head on the third stage.

Shapes: `B` batch, `C` channels, `K` classes, `H`, `W` height and width in pixels, `h`×`w` token grid of a level.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from inline_attention.data.dense import LONGEST_TO_SHORTEST
from inline_attention.data.segmentation import IGNORED
from inline_attention.support.settings import order_problem, setting
from inline_attention.tasks.pyramid import DenseModel, PaddedImages, PyramidBackbone, pad_images, stack_padded

POOLED_SIZES = (1, 2, 3, 6)
DROPOUT = 0.1
AUXILIARY_STAGE, AUXILIARY_WEIGHT = 2, 0.4
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


@dataclass(frozen=True)
class SegmentationOptions:
    """The segmenter around the model for task.name=segmentation, and its image sizes. Saved with the weights."""

    head: Literal["semantic_fpn", "upernet"] = setting("semantic_fpn", "semantic_fpn or upernet.")
    width: int | None = setting(
        None, "Channels of the decoder; null: 256 for semantic_fpn, 512 for upernet.", at_least=8, at_most=2**13
    )
    crop: int = setting(
        512, "Side of training crops, and shorter side of validation images, in pixels.", at_least=32, at_most=2**13
    )
    scale: tuple[float, float] = setting(
        (0.5, 2.0), "Smallest and largest shorter side in training, relative to crop.", above=0, at_most=100
    )
    inference: Literal["whole", "sliding"] = setting("whole", "Evaluate whole images, or sliding windows of crop size.")
    window_step: int | None = setting(None, "Pixels between windows; null: 2/3 of crop.", at_least=1, at_most=2**13)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield limits in the wrong order, and windows with gaps between them."""
        yield from order_problem("scale", self.scale)
        if self.window_step is not None and self.window_step > self.crop:
            message = f"expected at most the {self.crop} pixels of a window, got {self.window_step}"
            yield "window_step", f"{message}; pixels between windows would be missed"

    @property
    def windows(self) -> SlidingWindows | None:
        """Windows of sliding inference; None for whole images."""
        if self.inference == "whole":
            return None
        return SlidingWindows(self.crop, min(self.crop, self.window_step or max(1, 2 * self.crop // 3)))

    def evaluation_sides(self, shorter_side: int | None = None) -> tuple[int, int]:
        """Return the shorter image side of evaluation and the limit of the longer one, in pixels."""
        shorter_side = shorter_side or self.crop
        return shorter_side, LONGEST_TO_SHORTEST * shorter_side


class SemanticFPNDecoder(nn.Module):
    """A feature pyramid of `width` channels, whose levels are enlarged step by step to the finest, and added."""

    def __init__(self, channels: Sequence[int], num_classes: int, width: int):
        super().__init__()
        self.pyramid = FeaturePyramidNetwork(list(channels), width)
        # One convolution for the finest level; for each other level, one per step down to the finest.
        self.levels = nn.ModuleList(
            nn.ModuleList(_convolution(width if step == 0 else width // 2, width // 2) for step in range(max(1, level)))
            for level in range(len(channels))
        )
        self.classifier = _classifier(width // 2, num_classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Scores `[B, K, h, w]` of the finest grid."""
        pyramid = list(self.pyramid({str(place): feature for place, feature in enumerate(features)}).values())
        sizes = [level.shape[-2:] for level in pyramid]
        total = torch.zeros((), device=pyramid[0].device)
        for place, (level, convolutions) in enumerate(zip(pyramid, self.levels, strict=True)):
            for step, convolution in enumerate(convolutions):  # pyright: ignore[reportArgumentType] - of modules
                level = _resized(convolution(level), sizes[max(0, place - step - 1)])
            total = total + level
        return self.classifier(total)


class UPerNetDecoder(nn.Module):
    """Pyramid pooling of the coarsest stage, a feature pyramid from there, and a fusion of all its levels."""

    def __init__(self, channels: Sequence[int], num_classes: int, width: int):
        super().__init__()
        self.context = _PooledContext(channels[-1], width)
        self.lateral = nn.ModuleList(_convolution(count, width, 1) for count in channels[:-1])
        self.smooth = nn.ModuleList(_convolution(width, width) for _ in channels[:-1])
        self.fuse = _convolution(len(channels) * width, width)
        self.classifier = _classifier(width, num_classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Scores `[B, K, h, w]` of the finest grid."""
        levels = [lateral(feature) for lateral, feature in zip(self.lateral, features[:-1], strict=True)]
        levels.append(self.context(features[-1]))
        for place in reversed(range(len(levels) - 1)):
            levels[place] = levels[place] + _resized(levels[place + 1], levels[place].shape[-2:])
        smoothed = [smooth(level) for smooth, level in zip(self.smooth, levels[:-1], strict=True)] + levels[-1:]
        return self.classifier(self.fuse(torch.cat([_resized(level, levels[0].shape[-2:]) for level in smoothed], 1)))


class _PooledContext(nn.Module):
    """Pyramid pooling: a map beside its means over the whole, 2×2, 3×3 and 6×6 parts."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.pooled = nn.ModuleList(_convolution(channels, width, 1) for _ in POOLED_SIZES)
        self.fuse = _convolution(channels + len(POOLED_SIZES) * width, width)

    def forward(self, feature: Tensor) -> Tensor:
        """`[B, width, h, w]`."""
        means = [
            _resized(convolution(F.adaptive_avg_pool2d(feature, size)), feature.shape[-2:])
            for size, convolution in zip(POOLED_SIZES, self.pooled, strict=True)
        ]
        return self.fuse(torch.cat([feature, *means], dim=1))


def _convolution(channels: int, width: int, kernel_size: int = 3) -> Conv2dNormActivation:
    return Conv2dNormActivation(channels, width, kernel_size)  # with batch norm and ReLU


def _classifier(width: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Dropout2d(DROPOUT), nn.Conv2d(width, num_classes, 1))


def _resized(feature: Tensor, size: Sequence[int]) -> Tensor:
    if feature.shape[-2:] == tuple(size):
        return feature
    return F.interpolate(feature, size=tuple(size), mode="bilinear", align_corners=False)


class Segmenter(DenseModel):
    """A backbone, a decoder to scores at a quarter of the resolution, and in training an auxiliary head."""

    def __init__(self, backbone: PyramidBackbone, decoder: nn.Module, auxiliary: nn.Module | None):
        super().__init__(backbone)
        self.decoder, self.auxiliary = decoder, auxiliary

    def forward(self, images: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Any:
        """Return losses by name in training, scores `[K, H, W]` of each image otherwise.

        Images are `[3, H, W]`, normalized, of any sizes; targets are their `[H, W]` labels, or `IGNORED`.
        """
        padded = pad_images(images)
        features = self.backbone(padded)
        if not self.training:
            return [self._scores(features, padded, place) for place in range(len(images))]
        if targets is None:
            raise ValueError("training needs targets: labels of the pixels of each image; or call eval() first")
        labels = stack_padded(targets, padded.canvas.shape[-2:], IGNORED)
        losses = {"loss": _loss(self.decoder(features), self.backbone.strides[0], labels)}
        if self.auxiliary is not None:
            scores = self.auxiliary(features[AUXILIARY_STAGE])
            losses["auxiliary_loss"] = AUXILIARY_WEIGHT * _loss(scores, self.backbone.strides[AUXILIARY_STAGE], labels)
        return losses

    def _scores(self, features: Sequence[Tensor], images: PaddedImages, place: int) -> Tensor:
        """`[K, H, W]` of one image, decoded by itself: no interpolation or mean of the decoder sees any padding."""
        alone: list[Tensor] = []
        for feature, stride in zip(features, self.backbone.strides, strict=True):
            rows, columns = images.extents(stride)[place]
            alone.append(feature[place : place + 1, :, :rows, :columns])
        return _enlarged(self.decoder(alone), self.backbone.strides[0], images.sizes[place])[0]


def build_segmenter(
    options: SegmentationOptions, backbone: str, arguments: Mapping[str, Any], num_classes: int
) -> Segmenter:
    """Build a segmenter with random weights around the model of that name and arguments."""
    width = options.width or (256 if options.head == "semantic_fpn" else 512)
    body = PyramidBackbone(backbone, arguments, width=width)
    if options.head == "semantic_fpn":
        return Segmenter(body, SemanticFPNDecoder(body.channels, num_classes, width), None)
    auxiliary = nn.Sequential(
        OrderedDict(
            convolution=_convolution(body.channels[AUXILIARY_STAGE], width // 2),
            classifier=_classifier(width // 2, num_classes),
        )
    )
    return Segmenter(body, UPerNetDecoder(body.channels, num_classes, width), auxiliary)


def _enlarged(scores: Tensor, stride: float, size: Sequence[int]) -> Tensor:
    """Scores `[B, K, h, w]` of tokens for every pixel, in float32; the last row and column may be incomplete."""
    pixels = F.interpolate(scores.float(), scale_factor=float(stride), mode="bilinear", align_corners=False)
    return pixels[:, :, : size[0], : size[1]]


def _loss(scores: Tensor, stride: float, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labeled pixels; zero, not NaN, if there is none."""
    scores = _enlarged(scores, stride, labels.shape[-2:])
    total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


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
