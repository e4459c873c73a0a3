"""Batches of images of unequal size, and feature pyramids that keep their padding out of the features.

A plain vision transformer has one stride. Its pyramid is that of "Exploring Plain Vision Transformer Backbones for
Object Detection", arXiv 2203.16527: four levels, each made from the last map alone.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels, `h`×`w` token grid of a level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from timm.layers.norm import LayerNorm2d
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from inline_attention.layers.conversion import RECORD
from inline_attention.layers.grids import Grid, pad_to_multiple
from inline_attention.models.base import VisionModel
from inline_attention.models.described import ModelDescriptionError, create_described_model, model_family
from inline_attention.ops.tracing import autocast_enabled

SHORTEST_SIDE = 32  # the coarsest stride of the backbones, which take no thinner image
STRIDES = (4, 8, 16, 32)
PLAIN_STRIDE = 16  # of the plain models whose levels have these strides; those of others scale with their patches
DEFAULT_WIDTH = 256
BACKBONE = "backbone."
BACKBONE_MODEL = f"{BACKBONE}body.model."  # prefix of the model's weights inside a `DenseModel`


@dataclass(frozen=True)
class PaddedImages:
    """A batch in which each image occupies the top left corner of its canvas, and the rest is zero.

    The canvas is as small as it can be: images of one size, or one alone, fill it, and nothing has to be masked.
    """

    canvas: Tensor  # [B, C, H, W], both sides at least SHORTEST_SIDE
    sizes: list[tuple[int, int]]  # height and width of each image in pixels
    _outside: dict[float, Tensor | None] = field(default_factory=dict)

    @cached_property
    def backbone_sizes(self) -> list[tuple[int, int]]:
        """Sizes of the images for the backbone, which takes thinner ones as padded to `SHORTEST_SIDE`."""
        return [(max(height, SHORTEST_SIDE), max(width, SHORTEST_SIDE)) for height, width in self.sizes]

    def extents(self, stride: float) -> list[tuple[int, int]]:
        """Rows and columns of tokens of a stride that belong to each image, incomplete ones included."""
        return [_grid_size(size, stride) for size in self.backbone_sizes]

    def outside(self, stride: float) -> Tensor | None:
        """`[B, 1, h, w]` bool, true where a token of a stride belongs to no image; None if all do."""
        if stride not in self._outside:
            size = _grid_size(self.canvas.shape[-2:], stride)
            grid = Grid(*size, self.extents(stride), self.canvas.device)
            mask = grid.mask()
            self._outside[stride] = None if mask is None else ~mask.unflatten(1, grid.size)[:, None]
        return self._outside[stride]


def _grid_size(size: Sequence[int], stride: float) -> tuple[int, int]:
    """Rows and columns of tokens of an image. Patches of 14 have a level of stride 3.5; the quotients are exact."""
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


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
    """A model that returns features of four strides, or some of them.

    A model with a pyramid returns its stages, each with its own norm: the scale of features grows with depth, and
    detectors and segmenters need one scale. Swin's authors add these norms too. A plain model gets a `SimpleLevel` for
    each stride. Weights in half precision are used without autocast, so that the fused kernels for inference apply.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        strides: Sequence[int] = STRIDES,
        width: int = DEFAULT_WIDTH,
    ):
        """Build the model of that name with random weights; `ValueError` if it is unknown, or has no such features.

        `strides` to return are some of `STRIDES`; those of a plain model scale with its patches, and its levels have
        `width` channels.
        """
        super().__init__()
        if (reason := unfit_reason(name)) is not None:
            raise ValueError(reason)
        self._is_ours = model_family(name) is not None
        self.is_plain = model_family(name) in (None, "deit")
        own: dict[str, Any] = {"out_indices": tuple(STRIDES.index(stride) for stride in strides)}
        if self.is_plain:
            own = {"out_indices": (-1,)} if self._is_ours else _PLAIN_OF_TIMM
        self.body: Any = create_described_model(name, arguments or {}, features_only=True, **own)
        channels, (patch, *_) = self.body.feature_info.channels(), self.body.feature_info.reduction()
        self.strides: tuple[float, ...] = tuple(strides)
        self.channels: list[int] = channels
        if not self.is_plain:
            self.norms = nn.ModuleList(LayerNorm2d(count) for count in channels)
            return
        if patch > SHORTEST_SIDE:
            raise ValueError(f"expected patches of at most {SHORTEST_SIDE} pixels, got {patch} of {name}")
        self.strides = tuple(stride * patch / PLAIN_STRIDE for stride in strides)
        self.channels = [width] * len(strides)
        self.levels = nn.ModuleList(SimpleLevel(channels[0], width, patch, stride) for stride in self.strides)

    @property
    def model(self) -> VisionModel:
        """The model inside, without final norm and head; a classifier's weights can be loaded into it."""
        return self.body.model

    @property
    def note(self) -> str | None:
        """A sentence about the pyramid of a plain model; None for other models."""
        if not self.is_plain:
            return None
        strides = ", ".join(f"{stride:g}" for stride in self.strides)
        return f"the backbone has one stride; a simple feature pyramid makes strides {strides} from its last map"

    def forward(self, images: PaddedImages) -> list[Tensor]:
        """`[B, C, h, w]` of each stride, zero where there is no image."""
        canvas, dtype = images.canvas, next(self.parameters()).dtype
        is_half = dtype in (torch.bfloat16, torch.float16)
        stop_autocast = is_half and autocast_enabled(canvas)
        with torch.autocast(canvas.device.type, enabled=False) if stop_autocast else nullcontext():
            canvas = canvas.to(dtype) if is_half else canvas
            if self.is_plain:
                (feature,) = self._run(canvas, images) if self._is_ours else self._run_without_masks(canvas, images)
                return [level(feature, images) for level in self.levels]
            return [
                masked(norm(feature), images, stride)
                for norm, feature, stride in zip(self.norms, self._run(canvas, images), self.strides, strict=True)
            ]

    def _run(self, canvas: Tensor, images: PaddedImages) -> list[Tensor]:
        return self.body(canvas, image_sizes=images.backbone_sizes)

    def _run_without_masks(self, canvas: Tensor, images: PaddedImages) -> list[Tensor]:
        """Run a model of timm, which knows no padding: images of one size together, others one by one."""
        (patch,) = self.body.feature_info.reduction()
        if len(set(images.backbone_sizes)) == 1:
            return self.body(pad_to_multiple(canvas, patch))
        alone = [
            self.body(pad_to_multiple(image[None, :, :height, :width], patch))[0][0]
            for image, (height, width) in zip(canvas, images.backbone_sizes, strict=True)
        ]
        return [stack_padded(alone, _grid_size(canvas.shape[-2:], patch), 0.0)]


class SimpleLevel(nn.Module):
    """A level of a plain model's pyramid: its map, enlarged or reduced, and two convolutions with norms."""

    def __init__(self, channels: int, width: int, patch: float, stride: float):
        super().__init__()
        self._patch, self._stride = patch, stride
        resize: list[nn.Module] = []
        while patch > stride:  # twice as fine, with half of the channels
            resize += [LayerNorm2d(channels), nn.GELU()] if resize else []
            resize.append(nn.ConvTranspose2d(channels, max(1, channels // 2), 2, 2))
            channels, patch = max(1, channels // 2), patch / 2
        self.resize = nn.Sequential(*resize)
        self.project = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), LayerNorm2d(width))
        self.smooth = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), LayerNorm2d(width))

    def forward(self, feature: Tensor, images: PaddedImages) -> Tensor:
        """`[B, width, h, w]` from the model's map, zero where there is no image."""
        if self._stride > self._patch:  # incomplete squares of tokens have the largest of those that there are
            feature = filled(feature, images.outside(self._patch), -torch.inf)
            feature = masked(F.max_pool2d(feature, 2, 2, ceil_mode=True), images, self._stride)
        rows, columns = _grid_size(images.canvas.shape[-2:], self._stride)
        feature = self.resize(feature)[:, :, :rows, :columns]  # a patch may reach over the edge of the image
        return masked(self.smooth(masked(self.project(feature), images, self._stride)), images, self._stride)


class DenseModel(nn.Module):
    """A detector or segmenter: takes images of any sizes, returns losses in training and predictions otherwise."""

    def __init__(self, backbone: PyramidBackbone):
        super().__init__()
        self.backbone = backbone

    @property
    def attention_conversion(self) -> Any:
        """What `convert_attention` did to the backbone, for files of weights; None if nothing."""
        return getattr(self.backbone.model, RECORD, None)

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

    The levels of a plain model are used as they are. It adds coarser levels: "pooled", one that takes every second
    token of the last (Faster and Mask R-CNN); "convolved", two by strided convolutions (RetinaNet).
    """

    def __init__(self, backbone: PyramidBackbone, width: int, extra: Literal["pooled", "convolved"]):
        super().__init__()
        self._strides, self._extra = backbone.strides, extra
        self.levels = None if backbone.is_plain else FeaturePyramidNetwork(backbone.channels, width)
        self.coarser = nn.ModuleList()
        for _ in range(2 if extra == "convolved" else 0):
            layer = nn.Conv2d(width, width, 3, 2, 1)
            nn.init.kaiming_uniform_(layer.weight, a=1)  # as torchvision initializes the other levels
            layer.bias = nn.Parameter(torch.zeros(width))
            self.coarser.append(layer)

    def forward(self, features: Sequence[Tensor], images: PaddedImages) -> list[Tensor]:
        """`[B, width, h, w]` of each level, the finest first."""
        results = list(features) if self.levels is None else self._merged(self.levels, features, images)
        if self._extra == "pooled":
            results.append(results[-1][:, :, ::2, ::2])
        stride = self._strides[-1]
        for place, layer in enumerate(self.coarser):
            stride *= 2
            source = results[-1] if place == 0 else F.relu(results[-1])
            results.append(masked(layer(source), images, stride))
        return results

    def _merged(self, levels: FeaturePyramidNetwork, features: Sequence[Tensor], images: PaddedImages) -> list[Tensor]:
        results: list[Tensor] = []
        coarser = None
        for place in reversed(range(len(features))):
            stride = self._strides[place]
            merged = levels.inner_blocks[place](features[place])
            if coarser is not None:
                # Not to a size: of an odd one, nearest neighbors are a matter of rounding.
                doubled = F.interpolate(coarser, scale_factor=2.0, mode="nearest")
                merged = merged + doubled[:, :, : merged.shape[-2], : merged.shape[-1]]
            coarser = masked(merged, images, stride)
            results.insert(0, masked(levels.layer_blocks[place](coarser), images, stride))
        return results


def masked(features: Tensor, images: PaddedImages, stride: float) -> Tensor:
    """`[B, C, h, w]` with zeros where a token belongs to no image."""
    return filled(features, images.outside(stride), 0)


def filled(features: Tensor, outside: Tensor | None, value: float) -> Tensor:
    """`[B, C, h, w]` with a value where a token belongs to no image, as `PaddedImages.outside` says."""
    return features if outside is None else features.masked_fill(outside, value)


def edges_extended(features: Tensor, images: PaddedImages, stride: float) -> Tensor:
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


_PLAIN_OF_TIMM: dict[str, Any] = {"out_indices": (-1,), "dynamic_img_size": True}


@cache
def unfit_reason(name: str) -> str | None:
    """Return why a model that exists cannot be the backbone of a detector or a segmenter; None if it can."""
    if model_family(name) is not None or not timm.is_model(name):
        return None  # if there is no such model, building it raises an error that suggests a name
    try:
        with torch.device("meta"):
            body = create_described_model(name, {}, features_only=True, **_PLAIN_OF_TIMM)
        model: Any = body.model if isinstance(body, FeatureGetterNet) else None
        if model is not None and len({level["reduction"] for level in model.feature_info}) == 1:
            return None
    except ModelDescriptionError:
        pass  # it has no such arguments
    return (
        f"{name} is no plain vision transformer that takes images of any size; of timm's models, detection and "
        "segmentation take those (vit_…, deit3_…, eva02_…), or use one of this library (`inline models` lists them)"
    )
