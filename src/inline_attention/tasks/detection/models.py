"""Detectors: RetinaNet and Mask R-CNN with torchvision's heads over the backbones of the zoo.

torchvision's own `forward` hands a backbone nothing but padded tensors. Ours also hands it the sizes of the images, so
that attention over the whole map stops at their edges; what is left to do for torchvision is everything after it. What
it would guess from the first images it sees, or round, is said: strides are those of the pyramid, and whatever becomes
a coordinate is float32, also where convolutions are not. What is found in an image does not depend on others beside it
in the batch: no anchor in its padding counts, no convolution reads it, and no box at its edge is blended with it.

Shapes: `n` objects of an image, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from inline_attention.ops.autocast import autocast_enabled
from inline_attention.support.settings import setting
from inline_attention.tasks.pyramid import (
    SHORTEST_SIDE,
    STRIDES,
    FeaturePyramid,
    PaddedImages,
    PyramidBackbone,
    edges_extended,
    filled,
    names_without_decay,
    pad_images,
)

BOX_SIDE, BOX_FEATURES = 7, 4  # torchvision's: cells along a side of a box, and 1024 numbers at a width of 256
MASK_SIDE, MASK_LAYERS = 14, 4
ASPECT_RATIOS = (0.5, 1.0, 2.0)
LEVELS = 5
SCALE_STEP = 32  # pixels between the shorter sides of multi-scale training
LARGEST_SIDE = 2**13  # a file may ask for it; 65,536² pixels take 50 GB
IMPOSSIBLE = torch.finfo(torch.float32).tiny  # no proposal is of a lower probability; those in the padding have none
Losses = dict[str, Tensor]
Detections = list[dict[str, Tensor]]


@dataclass(frozen=True)
class DetectionOptions:
    """The detector around the model for task.name=detection, and its image sizes. Saved with the weights."""

    head: Literal["mask_rcnn", "retinanet"] = setting(
        "mask_rcnn", "mask_rcnn (boxes and masks) or retinanet (boxes), with torchvision's heads."
    )
    width: int = setting(256, "Channels of the feature pyramid and the heads.", at_least=8, at_most=2**13)
    sampled_boxes: int = setting(512, "Proposals per image in a training step of mask_rcnn.", at_least=1, at_most=2**16)
    shorter_side: int = setting(800, "Shorter image side in pixels.", at_least=32, at_most=LARGEST_SIDE)
    longest_side: int = setting(1333, "Limit of the longer image side in pixels.", at_least=32, at_most=LARGEST_SIDE)
    multi_scale_from: int | None = setting(
        None, "Smallest shorter side in training; null: shorter_side.", at_least=32, at_most=LARGEST_SIDE
    )
    smallest_anchor: int = setting(
        32, "Anchor side in pixels on the finest level; doubles per level.", at_least=1, at_most=2**12
    )

    @property
    def finds_masks(self) -> bool:
        """True if objects have masks."""
        return self.head == "mask_rcnn"

    @property
    def shorter_sides(self) -> tuple[int, ...]:
        """Shorter sides that training draws from."""
        if self.multi_scale_from is None:
            return (self.shorter_side,)
        return tuple(range(self.shorter_side, self.multi_scale_from - 1, -SCALE_STEP))[::-1]

    def at_size(self, shorter_side: int) -> DetectionOptions:
        """Return the options for another image size, with the same limit of the aspect ratio."""
        longest_side = max(shorter_side, self.longest_side * shorter_side // self.shorter_side)
        return replace(self, shorter_side=shorter_side, longest_side=longest_side)


class Detector(nn.Module, ABC):
    """What both detectors share: images in, features of their pyramid to the heads, losses or objects out.

    Attributes:
        strides: Strides of the backbone's features.
    """

    strides: tuple[int, ...]
    backbone: PyramidBackbone
    pyramid: FeaturePyramid

    @property
    def level_strides(self) -> tuple[int, ...]:
        """Of the levels that the heads look at, the finest first."""
        return tuple(self.strides[0] * 2**level for level in range(LEVELS))

    def forward(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None) -> Any:
        """Losses in training, objects otherwise.

        Args:
            images: `[3, H, W]` each, normalized, of any sizes.
            targets: In training, for each image: boxes `[n, 4]` (left, top, right, bottom in pixels), labels `[n]` from
                1 and, for Mask R-CNN, masks `[n, H, W]`.

        Returns:
            Losses by name in training. Otherwise for each image boxes, labels and scores `[n]`, the best first, and,
            of Mask R-CNN, masks `[n, 1, 28, 28]`: the probability that a part of the box belongs to the object.
        """
        if self.training and targets is None:
            raise ValueError("training needs targets: boxes, labels and masks of each image; or call eval() first")
        padded = pad_images(images)
        features = self.features(padded)
        return self._detect(padded, features, None if targets is None else [dict(target) for target in targets])

    def features(self, images: PaddedImages) -> list[Tensor]:
        """The levels that the heads look at, the finest first."""
        # In the layout that pooling of boxes takes: it would copy each level of the pyramid, which are wider, twice.
        stages = [stage.contiguous() for stage in self.backbone(images)]
        return self.pyramid(stages, images)

    @abstractmethod
    def _detect(
        self, images: PaddedImages, features: list[Tensor], targets: list[dict[str, Tensor]] | None
    ) -> Losses | Detections:
        """What `forward` returns, from the features."""

    def _outside(self, images: PaddedImages) -> list[Tensor | None]:
        """Of each level, where a token belongs to no image; in training, as everywhere, heads see a little of that."""
        return [None if self.training else images.outside(stride) for stride in self.level_strides]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that an optimizer should not decay: those of the backbone."""
        return names_without_decay(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: recompute each block of the backbone in the backward pass."""
        self.backbone.model.set_grad_checkpointing(enable)


class MaskRCNNDetector(Detector):
    """Boxes and masks in two steps: proposals from every level, then a class, a box and a mask for each."""

    strides = STRIDES

    def __init__(
        self,
        backbone: PyramidBackbone,
        num_classes: int,
        options: DetectionOptions,
    ):
        """Build the heads with random weights.

        Args:
            backbone: Backbone with features of `strides`.
            num_classes: Number of classes, without the background.
            options: Width, anchors and number of proposals.
        """
        super().__init__()
        smallest_anchor, width = options.smallest_anchor, options.width
        anchors = _Anchors(tuple((smallest_anchor * 2**level,) for level in range(LEVELS)), self.level_strides)
        self.backbone = backbone
        self.pyramid = FeaturePyramid(backbone.channels, width, backbone.strides, extra="pooled")
        described = BOX_FEATURES * width  # numbers that describe a box
        self.heads = MaskRCNN(
            _Channels(width),
            rpn_anchor_generator=anchors,
            rpn_head=_ProposalHead(width, anchors.num_anchors_per_location()[0]),
            rpn_score_thresh=IMPOSSIBLE,
            box_roi_pool=_Pool(BOX_SIDE),
            box_batch_size_per_image=options.sampled_boxes,
            box_head=TwoMLPHead(width * BOX_SIDE**2, described),
            box_predictor=_BoxPredictor(described, num_classes + 1),
            mask_roi_pool=_Pool(MASK_SIDE),
            mask_head=MaskRCNNHeads(width, (width,) * MASK_LAYERS, 1),
            mask_predictor=_MaskPredictor(width, width, num_classes + 1),
        )

    def _detect(
        self, images: PaddedImages, features: list[Tensor], targets: list[dict[str, Tensor]] | None
    ) -> Losses | Detections:
        if self.training:
            listed, named = ImageList(images.canvas, images.sizes), _named(features)
            proposals, proposal_losses = self.heads.rpn(listed, named, targets)
            _, losses = self.heads.roi_heads(named, proposals, images.sizes, targets)
            return losses | proposal_losses
        proposals = self._propose(images, features)
        levels = [edges_extended(level, images, stride) for level, stride in zip(features, STRIDES, strict=False)]
        detections, _ = self.heads.roi_heads(_named(levels), proposals, images.sizes)
        return detections

    def _propose(self, images: PaddedImages, features: list[Tensor]) -> list[Tensor]:
        """Boxes `[n, 4]` of each image that may hold an object."""
        network: Any = self.heads.rpn
        scores, shifts = network.head(features)
        scores = [
            filled(level, outside, -torch.inf) for level, outside in zip(scores, self._outside(images), strict=True)
        ]
        anchors = network.anchor_generator(ImageList(images.canvas, images.sizes), features)
        counts = [level[0].numel() for level in scores]
        scores, shifts = concat_box_prediction_layers(scores, shifts)
        boxes = network.box_coder.decode(shifts.detach(), anchors).view(len(anchors), -1, 4)
        return network.filter_proposals(boxes, scores, images.sizes, counts)[0]


class RetinaNetDetector(Detector):
    """Boxes in one step: a class and a box for each anchor of each level."""

    strides = STRIDES[1:]

    def __init__(
        self,
        backbone: PyramidBackbone,
        num_classes: int,
        options: DetectionOptions,
    ):
        """Build the heads with random weights. Arguments: see `MaskRCNNDetector`."""
        super().__init__()
        smallest_anchor, width = options.smallest_anchor, options.width
        sizes = [smallest_anchor * 2**level for level in range(LEVELS)]
        anchors = _Anchors(
            tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in sizes), self.level_strides
        )
        self.backbone = backbone
        self.pyramid = FeaturePyramid(backbone.channels, width, backbone.strides, extra="convolved")
        # Every class has a score of its own: there is no background to count among them.
        self.heads = RetinaNet(_Channels(width), num_classes, anchor_generator=anchors, detections_per_img=100)

    def _detect(
        self, images: PaddedImages, features: list[Tensor], targets: list[dict[str, Tensor]] | None
    ) -> Losses | Detections:
        outputs = self._score(images, features)
        anchors = self.heads.anchor_generator(ImageList(images.canvas, images.sizes), features)
        if self.training:
            assert targets is not None
            return self.heads.compute_loss([t | {"labels": t["labels"] - 1} for t in targets], outputs, anchors)
        counts = [feature.shape[-2] * feature.shape[-1] for feature in features]
        per_place = outputs["cls_logits"].shape[1] // sum(counts)
        per_level = [count * per_place for count in counts]
        detections = self.heads.postprocess_detections(
            {name: list(output.split(per_level, dim=1)) for name, output in outputs.items()},
            [list(of_image.split(per_level)) for of_image in anchors],
            images.sizes,
        )
        return [found | {"labels": found["labels"] + 1} for found in detections]

    def _score(self, images: PaddedImages, features: list[Tensor]) -> dict[str, Tensor]:
        """For each anchor, level by level, scores of the classes and shifts of the box."""
        scoring, shifting = self.heads.head.classification_head, self.heads.head.regression_head
        scores, shifts = [], []
        for level, outside in zip(features, self._outside(images), strict=True):
            of_classes = scoring.cls_logits(_convolved(level, scoring.conv, outside))
            scores.append(_per_anchor(filled(of_classes, outside, -torch.inf), scoring.num_classes))
            shifts.append(_per_anchor(shifting.bbox_reg(_convolved(level, shifting.conv, outside)), 4))
        # In float32: the focal loss is a sum over a hundred thousand small terms.
        return {"cls_logits": _precise(torch.cat(scores, 1)), "bbox_regression": _precise(torch.cat(shifts, 1))}


def build_detector(
    options: DetectionOptions, backbone: str, arguments: Mapping[str, Any], num_classes: int
) -> Detector:
    """Build a detector with random weights.

    Args:
        options: Kind and sizes.
        backbone: Name of a model with a pyramid.
        arguments: Arguments of that model.
        num_classes: Number of classes, without the background.

    Raises:
        ValueError: If the model cannot be a backbone.
    """
    kind = MaskRCNNDetector if options.finds_masks else RetinaNetDetector
    return kind(PyramidBackbone(backbone, arguments, kind.strides), num_classes, options)


class _Channels(nn.Module):
    """Stands in for the backbone that torchvision's constructors ask for the number of its channels."""

    def __init__(self, out_channels: int):
        super().__init__()
        self.out_channels = out_channels


class _Anchors(AnchorGenerator):
    """Anchors in float32 at the places of a pyramid with known strides.

    torchvision divides the canvas by the grid, which moves those of levels that do not divide it, and takes the dtype
    of the features: in bfloat16 a place near 1000 pixels is off by up to 2.
    """

    def __init__(self, sizes: tuple[tuple[int, ...], ...], strides: Sequence[int]):
        super().__init__(sizes, (ASPECT_RATIOS,) * len(sizes))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """`[n, 4]` for each image, level by level."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        steps: Any = [[stride, stride] for stride in self.strides]  # where torchvision fills a tensor for each
        anchors = torch.cat(self.grid_anchors([list(level.shape[-2:]) for level in feature_maps], steps))
        return [anchors] * len(image_list.image_sizes)


class _Pool(MultiScaleRoIAlign):
    """Boxes cut out of the levels of `STRIDES`, which torchvision would conclude on from the first image it sees.

    Boxes thinner than a token, of which torchvision takes a whole one, are moved away from the lower and right edge, so
    that it lies in the image: what comes after depends on the batch.
    """

    def __init__(self, side: int):
        super().__init__([str(level) for level in range(len(STRIDES))], output_size=side, sampling_ratio=2)
        self.scales = [1 / stride for stride in STRIDES]
        finest, coarsest = (stride.bit_length() - 1 for stride in (STRIDES[0], STRIDES[-1]))
        self.map_levels = LevelMapper(finest, coarsest, self.canonical_scale, self.canonical_level)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """`[n, C, side, side]`, of the dtype of the features."""
        boxes = self._whole_tokens_inside(boxes, image_shapes)
        if autocast_enabled(boxes[0]):
            return super().forward(x, boxes, image_shapes)  # in float32, as autocast has it
        levels = {name: _precise(x[name]) for name in self.featmap_names}
        dtype = levels[self.featmap_names[0]].dtype
        pooled = super().forward(levels, [of_image.to(dtype) for of_image in boxes], image_shapes)
        return pooled.to(x[self.featmap_names[0]].dtype)

    def _whole_tokens_inside(self, boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> list[Tensor]:
        counts, flat = [len(of_image) for of_image in boxes], torch.cat(boxes)
        starts, ends = flat[:, :2], flat[:, 2:]
        extents = torch.empty_like(starts)  # filled there: numbers sent to a GPU would wait for all it has to do
        for of_image, (height, width) in zip(extents.split(counts), image_shapes, strict=True):
            of_image[:, 0], of_image[:, 1] = max(width, SHORTEST_SIDE), max(height, SHORTEST_SIDE)
        token = STRIDES[0] * torch.exp2(self.map_levels([flat]).to(flat.dtype))[:, None]
        beyond = (starts + torch.maximum(ends - starts, token) - extents).clamp(min=0)
        return list(torch.cat([starts - beyond, ends - beyond], dim=1).split(counts))


class _ProposalHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, shifts = super().forward(x)
        return [_precise(level) for level in scores], [_precise(level) for level in shifts]


class _BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, shifts = super().forward(x)
        return _precise(scores), _precise(shifts)


class _MaskPredictor(MaskRCNNPredictor):
    def forward(self, input: Tensor) -> Tensor:
        return _precise(super().forward(input))


def _named(levels: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(place): level for place, level in enumerate(levels)}


def _convolved(level: Tensor, layers: nn.Module, outside: Tensor | None) -> Tensor:
    """`[B, C, h, w]` after several layers, none of which reads what the one before made outside of the images."""
    for layer in layers.children():
        level = filled(layer(level), outside, 0)
    return level


def _per_anchor(level: Tensor, numbers: int) -> Tensor:
    """`[B, A · numbers, h, w]` → `[B, h · w · A, numbers]` for A anchors at each place."""
    return torch.unflatten(level, 1, (-1, numbers)).permute(0, 3, 4, 1, 2).flatten(1, 3)


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
