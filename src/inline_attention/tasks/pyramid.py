"""Batches of images of unequal size, and feature pyramids that keep their padding out of the features.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels, `h`×`w` token grid of a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from inline_attention.layers.grids import Grid
from inline_attention.models.base import VisionModel
from inline_attention.models.described import create_described_model
from inline_attention.models.registry import list_models
from inline_attention.ops.tracing import autocast_enabled

SHORTEST_SIDE = 32  # the coarsest stride of the backbones, which take no thinner image
STRIDES = (4, 8, 16, 32)
BACKBONE = "backbone."
BACKBONE_MODEL = f"{BACKBONE}body.model."  # prefix of the model's weights inside a `DenseModel`


@dataclass(frozen=True)
class PaddedImages:
    """A batch in which each image occupies the top left corner of its canvas, and the rest is zero.

    The canvas is as small as it can be: images of one size, or one alone, fill it, and nothing has to be masked.
    """

    canvas: Tensor  # [B, C, H, W], both sides at least SHORTEST_SIDE
    sizes: list[tuple[int, int]]  # height and width of each image in pixels
    _outside: dict[int, Tensor | None] = field(default_factory=dict)

    @cached_property
    def backbone_sizes(self) -> list[tuple[int, int]]:
        """Sizes of the images for the backbone, which takes thinner ones as padded to `SHORTEST_SIDE`."""
        return [(max(height, SHORTEST_SIDE), max(width, SHORTEST_SIDE)) for height, width in self.sizes]

    def extents(self, stride: int) -> list[tuple[int, int]]:
        """Rows and columns of tokens of a stride that belong to each image, incomplete ones included."""
        return [(-(-height // stride), -(-width // stride)) for height, width in self.backbone_sizes]

    def outside(self, stride: int) -> Tensor | None:
        """`[B, 1, h, w]` bool, true where a token of a stride belongs to no image; None if all do."""
        if stride not in self._outside:
            height, width = self.canvas.shape[-2:]
            grid = Grid(height, width, self.backbone_sizes, self.canvas.device).coarser(stride)
            mask = grid.mask()
            self._outside[stride] = None if mask is None else ~mask.unflatten(1, grid.size)[:, None]
        return self._outside[stride]


def pad_images(images: Sequence[Tensor]) -> PaddedImages:
    """Put normalized images `[C, H, W]` of one device and dtype on a common canvas."""
    if not images:
        raise ValueError("there are no images; pass a list of at least one [C, H, W]")
    sizes = [(image.shape[-2], image.shape[-1]) for image in images]
    canvas_size = [max(SHORTEST_SIDE, *sides) for sides in zip(*sizes, strict=True)]
    return PaddedImages(stack_padded(images, canvas_size, 0.0), sizes)


def stack_padded(tensors: Sequence[Tensor], size: Sequence[int], value: float) -> Tensor:
    """Stack tensors `[..., H, W]` after padding them to a size at the bottom and on the right."""
    height, width = size
    return torch.stack([F.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2]), value=value) for t in tensors])


class PyramidBackbone(nn.Module):
    """A model of this library that returns the features of the stages with the given strides, each with its own norm.

    The scale of features grows with depth, and detectors and segmenters need one scale: Swin's authors add these norms
    too. Weights in half precision are used without autocast, so that the fused kernels for inference apply.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None, strides: Sequence[int] = STRIDES):
        """Build it with random weights, or raise ValueError if the model has no pyramid, or there is no such model."""
        super().__init__()
        if (reason := unfit_reason(name)) is not None:
            raise ValueError(reason)
        self.strides = tuple(strides)
        indices = tuple(STRIDES.index(stride) for stride in strides)
        self.body: Any = create_described_model(name, arguments or {}, features_only=True, out_indices=indices)
        self.channels: list[int] = self.body.feature_info.channels()
        self.norms = nn.ModuleList(LayerNorm2d(channels) for channels in self.channels)

    @property
    def model(self) -> VisionModel:
        """The model inside, without final norm and head; a classifier's weights can be loaded into it."""
        return self.body.model

    def forward(self, images: PaddedImages) -> list[Tensor]:
        """`[B, C, h, w]` of each stage, zero where there is no image."""
        canvas, dtype = images.canvas, next(self.norms.parameters()).dtype
        is_half = dtype in (torch.bfloat16, torch.float16)
        stop_autocast = is_half and autocast_enabled(canvas)
        with torch.autocast(canvas.device.type, enabled=False) if stop_autocast else nullcontext():
            canvas = canvas.to(dtype) if is_half else canvas
            features = self.body(canvas, image_sizes=images.backbone_sizes)
            return [
                masked(norm(feature), images, stride)
                for norm, feature, stride in zip(self.norms, features, self.strides, strict=True)
            ]


class DenseModel(nn.Module):
    """A detector or segmenter: takes images of any sizes, returns losses in training and predictions otherwise."""

    def __init__(self, backbone: PyramidBackbone):
        super().__init__()
        self.backbone = backbone

    def run_without_values(self, images: Sequence[Tensor]) -> None:
        """Run what costs memory or time on images `[3, H, W]` of the meta device, where scores cannot be read."""
        self(images)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that an optimizer should not decay: those of the backbone."""
        return {f"{BACKBONE_MODEL}{name}" for name in self.backbone.model.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: recompute each block of the backbone in the backward pass."""
        self.backbone.model.set_grad_checkpointing(enable)


class FeaturePyramid(nn.Module):
    """torchvision's feature pyramid network, with the padding cleared wherever a convolution could read it.

    It adds coarser levels: "pooled", one that takes every second token of the last (Faster and Mask R-CNN);
    "convolved", two by strided convolutions (RetinaNet).
    """

    def __init__(self, backbone: PyramidBackbone, width: int, extra: Literal["pooled", "convolved"]):
        super().__init__()
        self._strides, self._extra = backbone.strides, extra
        self.levels = FeaturePyramidNetwork(backbone.channels, width)
        self.coarser = nn.ModuleList()
        for _ in range(2 if extra == "convolved" else 0):
            layer = nn.Conv2d(width, width, 3, 2, 1)
            nn.init.kaiming_uniform_(layer.weight, a=1)  # as torchvision initializes the other levels
            layer.bias = nn.Parameter(torch.zeros(width))
            self.coarser.append(layer)

    def forward(self, features: Sequence[Tensor], images: PaddedImages) -> list[Tensor]:
        """`[B, width, h, w]` of each level, the finest first."""
        results: list[Tensor] = []
        coarser = None
        for place in reversed(range(len(features))):
            stride = self._strides[place]
            merged = self.levels.inner_blocks[place](features[place])
            if coarser is not None:
                # Not to a size: of an odd one, nearest neighbors are a matter of rounding.
                doubled = F.interpolate(coarser, scale_factor=2.0, mode="nearest")
                merged = merged + doubled[:, :, : merged.shape[-2], : merged.shape[-1]]
            coarser = masked(merged, images, stride)
            results.insert(0, masked(self.levels.layer_blocks[place](coarser), images, stride))
        if self._extra == "pooled":
            results.append(results[-1][:, :, ::2, ::2])
        stride = self._strides[-1]
        for place, layer in enumerate(self.coarser):
            stride *= 2
            source = results[-1] if place == 0 else F.relu(results[-1])
            results.append(masked(layer(source), images, stride))
        return results


def masked(features: Tensor, images: PaddedImages, stride: int) -> Tensor:
    """`[B, C, h, w]` with zeros where a token belongs to no image."""
    return filled(features, images.outside(stride), 0)


def filled(features: Tensor, outside: Tensor | None, value: float) -> Tensor:
    """`[B, C, h, w]` with a value where a token belongs to no image, as `PaddedImages.outside` says."""
    return features if outside is None else features.masked_fill(outside, value)


def edges_extended(features: Tensor, images: PaddedImages, stride: int) -> Tensor:
    """`[B, C, h, w]` with the last row and column of each image repeated once, for interpolation at its edge."""
    if images.outside(stride) is None:
        return features
    features = features.clone()
    for place, (rows, columns) in enumerate(images.extents(stride)):
        if columns < features.shape[3]:
            features[place, :, :, columns] = features[place, :, :, columns - 1]
        if rows < features.shape[2]:
            features[place, :, rows] = features[place, :, rows - 1]
    return features


def unfit_reason(name: str) -> str | None:
    """Return why a model that exists cannot be the backbone of a detector or a segmenter; None if it can."""
    if name in list_models():
        if "_deit_" not in name:
            return None
        return (
            f"{name} has one resolution throughout, and detection and segmentation need four; "
            "use a model with a pyramid, such as inline_pvt_tiny, inline_swin_tiny or inline_cswin_tiny"
        )
    if timm.is_model(name):
        return (
            f"{name} cannot keep the padding of a batch out of its features; use a model of this library with a "
            "pyramid, such as inline_pvt_tiny (`inline models` lists them)"
        )
    return None  # there is no such model; building it raises an error that suggests a name
