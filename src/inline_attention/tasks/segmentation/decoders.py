"""From the features of four stages to scores of classes at the resolution of the finest.

Shapes: `B` batch, `C` channels, `K` classes, `h`×`w` token grid of a stage; sides need not be half of the finer one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

POOLED_SIZES = (1, 2, 3, 6)
DROPOUT = 0.1


class SemanticFPNDecoder(nn.Module):
    """A feature pyramid whose levels are enlarged step by step to the finest, and added."""

    def __init__(self, channels: Sequence[int], num_classes: int, width: int = 256):
        """Build it.

        Args:
            channels: Of each stage.
            num_classes: K.
            width: Channels of the pyramid; enlarged levels have half as many.
        """
        super().__init__()
        self.pyramid = FeaturePyramidNetwork(list(channels), width)
        # One convolution for the finest level, and for each other as many as there are steps from it to the finest.
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
    """Means over the whole map and its parts, a pyramid that spreads them, and all of its levels side by side."""

    def __init__(self, channels: Sequence[int], num_classes: int, width: int = 512):
        """Build it.

        Args:
            channels: Of each stage.
            num_classes: K.
            width: Channels of all that is inside.
        """
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


class FCNDecoder(nn.Module):
    """Scores from one stage alone."""

    def __init__(self, channels: int, num_classes: int, width: int = 256):
        """Build it.

        Args:
            channels: Of the stage.
            num_classes: K.
            width: Channels inside.
        """
        super().__init__()
        self.convolution = _convolution(channels, width)
        self.classifier = _classifier(width, num_classes)

    def forward(self, feature: Tensor) -> Tensor:
        """Scores `[B, K, h, w]` of the stage's grid."""
        return self.classifier(self.convolution(feature))


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
