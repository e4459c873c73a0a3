"""Detectors: RetinaNet, Faster R-CNN and Mask R-CNN with torchvision's heads over the backbones of the zoo.

torchvision's `forward` gives a backbone only padded tensors. Ours also gives it the sizes of the images, so that the
result for an image does not depend on the batch: attention, convolutions and box pooling do not read the padding, and
anchors in it do not count. Strides are those of the pyramid, and coordinates are float32 even if convolutions are not.

Shapes: `n` objects of an image, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from inline_attention.layers.cache import cache_by_shape
from inline_attention.support.settings import setting
from inline_attention.tasks.pyramid import (
    SHORTEST_SIDE,
    STRIDES,
    DenseModel,
    FeaturePyramid,
    PaddedImages,
    PyramidBackbone,
    edges_extended,
    filled,
    pad_images,
)

BOX_SIDE, BOX_FEATURES = 7, 4  # torchvision's: cells along a side of a box, and 1024 numbers at a width of 256
MASK_SIDE, MASK_LAYERS = 14, 4
MOST_PROPOSALS, MOST_OBJECTS = 1000, 100  # of an image, torchvision's defaults at inference
ASPECT_RATIOS = (0.5, 1.0, 2.0)
LEVELS = 5
SCALE_STEP = 32  # pixels between the shorter sides of multi-scale training
LARGEST_SIDE = 2**13  # a file may ask for it; 65,536² pixels take 50 GB
IMPOSSIBLE = torch.finfo(torch.float32).tiny  # no proposal is of a lower probability; those in the padding have none
Targets = list[dict[str, Tensor]]


@dataclass(frozen=True)
class DetectionOptions:
    """The detector around the model for task.name=detection, and its image sizes. Saved with the weights."""

    head: Literal["mask_rcnn", "faster_rcnn", "retinanet"] = setting(
        "mask_rcnn", "mask_rcnn (boxes and masks), faster_rcnn or retinanet (boxes), with torchvision's heads."
    )
    width: int = setting(256, "Channels of the feature pyramid and the heads.", at_least=8, at_most=2**13)
    sampled_boxes: int = setting(
        512, "Proposals per image in a training step of mask_rcnn or faster_rcnn.", at_least=1, at_most=2**16
    )
    shorter_side: int = setting(800, "Shorter image side in pixels.", at_least=32, at_most=LARGEST_SIDE)
    longest_side: int = setting(1333, "Limit of the longer image side in pixels.", at_least=32, at_most=LARGEST_SIDE)
    multi_scale_from: int | None = setting(
        None, "Smallest shorter side in training; null: shorter_side.", at_least=32, at_most=LARGEST_SIDE
    )
    smallest_anchor: int = setting(
        32, "Anchor side in pixels on the finest level; doubles per level.", at_least=1, at_most=2**12
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield sizes above their limits, and boxes that the head does not sample."""
        default = DetectionOptions().sampled_boxes
        if self.head == "retinanet" and self.sampled_boxes != default:
            message = f"has no effect on retinanet, which takes all boxes, got {self.sampled_boxes}"
            yield "sampled_boxes", f"{message}; set it to {default}"
        for name, limit in (("multi_scale_from", self.shorter_side), ("shorter_side", self.longest_side)):
            value = getattr(self, name)
            if value is not None and value > limit:
                yield name, f"expected at most {limit}, the size it grows to, got {value}"

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

    def evaluation_sides(self, shorter_side: int | None = None) -> tuple[int, int]:
        """Return the shorter image side of evaluation and the limit of the longer one, in pixels."""
        if shorter_side is None:
            return self.shorter_side, self.longest_side
        return shorter_side, max(shorter_side, self.longest_side * shorter_side // self.shorter_side)


class Detector(DenseModel):
    """What all detectors share: images in, features of their pyramid to the heads, losses or objects out."""

    strides: tuple[int, ...]  # of the backbone's features; those of a plain model scale with its patches

    def __init__(self, backbone: PyramidBackbone, width: int, extra: Literal["pooled", "convolved"]):
        super().__init__(backbone)
        self.pyramid = FeaturePyramid(backbone, width, extra)

    @property
    def level_strides(self) -> tuple[float, ...]:
        """Strides of the pyramid's levels, the finest first."""
        return tuple(self.backbone.strides[0] * 2**level for level in range(LEVELS))

    def forward(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None) -> Any:
        """Return losses by name in training, the objects in each image otherwise.

        Images are `[3, H, W]`, normalized, of any sizes. Targets are boxes `[n, 4]` (left, top, right, bottom in
        pixels), labels `[n]` from 1 and, for Mask R-CNN, masks `[n, H, W]`. Objects are boxes, labels and scores `[n]`,
        the best first, and masks `[n, 1, 28, 28]`: the probability that a part of the box belongs to the object.
        """
        if self.training and targets is None:
            raise ValueError("training needs targets: boxes, labels and masks of each image; or call eval() first")
        padded = pad_images(images)
        return self._detect(padded, self.features(padded), [dict(target) for target in targets or ()])

    def features(self, images: PaddedImages) -> list[Tensor]:
        """Return the pyramid's levels, the finest first."""
        # Contiguous, as box pooling needs them: it would copy each level of the pyramid, which are wider, twice.
        return self.pyramid([stage.contiguous() for stage in self.backbone(images)], images)

    @abstractmethod
    def _detect(self, images: PaddedImages, features: list[Tensor], targets: Targets) -> Any: ...

    def _outside(self, images: PaddedImages) -> list[Tensor | None]:
        """For each level, where a token belongs to no image; in training, heads see a little of the padding."""
        return [None if self.training else images.outside(stride) for stride in self.level_strides]


class RCNNDetector(Detector):
    """Two steps: proposals from every level, then a class, a box and, of Mask R-CNN, a mask for each."""

    strides = STRIDES

    def __init__(self, backbone: PyramidBackbone, num_classes: int, options: DetectionOptions):
        super().__init__(backbone, options.width, "pooled")
        width, described = options.width, BOX_FEATURES * options.width  # channels, and numbers that describe a box
        anchors = _Anchors([(options.smallest_anchor * 2**level,) for level in range(LEVELS)], self.level_strides)
        parts: dict[str, Any] = {
            "rpn_anchor_generator": anchors,
            "rpn_head": RPNHead(width, anchors.num_anchors_per_location()[0]),
            "rpn_score_thresh": IMPOSSIBLE,
            "box_roi_pool": _Pool(BOX_SIDE, backbone.strides),
            "box_batch_size_per_image": options.sampled_boxes,
            "box_head": TwoMLPHead(width * BOX_SIDE**2, described),
            "box_predictor": FastRCNNPredictor(described, num_classes + 1),  # with the background
        }
        if options.finds_masks:
            parts |= {
                "mask_roi_pool": _Pool(MASK_SIDE, backbone.strides),
                "mask_head": MaskRCNNHeads(width, (width,) * MASK_LAYERS, 1),
                "mask_predictor": MaskRCNNPredictor(width, width, num_classes + 1),
            }
        channels = SimpleNamespace(out_channels=width)  # all that torchvision reads of a backbone here
        self.heads = (MaskRCNN if options.finds_masks else FasterRCNN)(channels, **parts)
        for name in ("rpn_head", "box_predictor", "mask_predictor"):
            if name in parts:
                parts[name].register_forward_hook(_precise_output)

    def run_without_values(self, images: Sequence[Tensor]) -> None:
        """Run the pyramid and the head of proposals, then the other heads on the largest possible number of boxes."""
        network: Any = self.heads
        features = self.features(pad_images(images))
        network.rpn.head(features)
        boxes, width = network.roi_heads, features[0].shape[1]
        boxes.box_predictor(boxes.box_head(torch.empty(MOST_PROPOSALS, width, BOX_SIDE, BOX_SIDE)))
        if boxes.has_mask():
            boxes.mask_predictor(boxes.mask_head(torch.empty(MOST_OBJECTS, width, MASK_SIDE, MASK_SIDE)))

    def _detect(self, images: PaddedImages, features: list[Tensor], targets: Targets) -> Any:
        if self.training:
            named = _named(features)
            proposals, losses = self.heads.rpn(ImageList(images.canvas, images.sizes), named, targets)
            return self.heads.roi_heads(named, proposals, images.sizes, targets)[1] | losses
        proposals = self._propose(images, features)
        pairs = zip(features, self.backbone.strides, strict=False)
        levels = [edges_extended(level, images, stride) for level, stride in pairs]
        return self.heads.roi_heads(_named(levels), proposals, images.sizes)[0]

    def _propose(self, images: PaddedImages, features: list[Tensor]) -> list[Tensor]:
        """Boxes `[n, 4]` of each image that may hold an object."""
        network: Any = self.heads.rpn
        scores, shifts = network.head(features)
        pairs = zip(scores, self._outside(images), strict=True)
        scores = [filled(level, outside, -torch.inf) for level, outside in pairs]
        anchors = network.anchor_generator(ImageList(images.canvas, images.sizes), features)
        counts = [level[0].numel() for level in scores]
        scores, shifts = concat_box_prediction_layers(scores, shifts)
        boxes = network.box_coder.decode(shifts.detach(), anchors).view(len(anchors), -1, 4)
        return network.filter_proposals(boxes, scores, images.sizes, counts)[0]


class RetinaNetDetector(Detector):
    """Boxes in one step: a class and a box for each anchor of each level."""

    strides = STRIDES[1:]

    def __init__(self, backbone: PyramidBackbone, num_classes: int, options: DetectionOptions):
        super().__init__(backbone, options.width, "convolved")
        sizes = [options.smallest_anchor * 2**level for level in range(LEVELS)]
        sides = [(size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in sizes]
        anchors = _Anchors(sides, self.level_strides)
        # Every class has a score of its own: there is no background to count among them.
        channels = SimpleNamespace(out_channels=options.width)  # all that torchvision reads of a backbone here
        self.heads = RetinaNet(channels, num_classes, anchor_generator=anchors, detections_per_img=100)

    def run_without_values(self, images: Sequence[Tensor]) -> None:
        """Run the pyramid and the heads."""
        padded = pad_images(images)
        self._score(padded, self.features(padded))

    def _detect(self, images: PaddedImages, features: list[Tensor], targets: Targets) -> Any:
        outputs = self._score(images, features)
        anchors = self.heads.anchor_generator(ImageList(images.canvas, images.sizes), features)
        if self.training:
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
        """Scores of the classes and shifts of the box for each anchor, level by level."""
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
    """Build a detector with random weights around the model of that name and arguments."""
    kind = RetinaNetDetector if options.head == "retinanet" else RCNNDetector
    return kind(PyramidBackbone(backbone, arguments, kind.strides, options.width), num_classes, options)


class _Anchors(AnchorGenerator):
    """Anchors in float32 at the places of a pyramid with known strides.

    torchvision divides the canvas by the grid to get strides, which is inexact, and takes the dtype of the features: in
    bfloat16 a place near 1000 pixels is off by up to 2. It also writes to the module in `forward`, which threads share.
    """

    def __init__(self, sizes: Sequence[tuple[int, ...]], strides: Sequence[float]):
        super().__init__(tuple(sizes), (ASPECT_RATIOS,) * len(sizes))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """`[n, 4]` for each image, level by level."""
        anchors = torch.cat(
            [
                _level_anchors(level.device, level.shape[-2], level.shape[-1], stride, sides)
                for level, stride, sides in zip(feature_maps, self.strides, self.sizes, strict=True)
            ]
        )
        return [anchors] * len(image_list.image_sizes)


@cache_by_shape
def _level_anchors(device: torch.device, height: int, width: int, stride: float, sides: tuple[int, ...]) -> Tensor:
    """`[h · w · A, 4]` for A anchors at each place of a level."""
    around_zero = AnchorGenerator.generate_anchors(None, sides, ASPECT_RATIOS).to(device)  # pyright: ignore[reportArgumentType]
    rows, columns = (stride * torch.arange(extent, dtype=torch.int32, device=device) for extent in (height, width))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return (torch.stack((x, y, x, y), dim=-1).view(-1, 1, 4) + around_zero).view(-1, 4)


class _Pool(MultiScaleRoIAlign):
    """RoIAlign over levels of known strides, which torchvision would guess from the first image it sees.

    RoIAlign enlarges boxes smaller than one token. They are shifted away from the lower and right edge, so that the
    token stays inside the image and nothing of the padding is read.
    """

    def __init__(self, side: int, strides: Sequence[float]):
        super().__init__([str(level) for level in range(len(strides))], output_size=side, sampling_ratio=2)
        self.scales, self._finest = [1 / stride for stride in strides], strides[0]
        finest, coarsest = (stride.bit_length() - 1 for stride in (STRIDES[0], STRIDES[-1]))
        # The level of a box depends on its size in tokens, so that other strides take the same numbers of levels.
        scale: Any = self.canonical_scale * strides[0] / STRIDES[0]
        self.map_levels = LevelMapper(finest, coarsest, scale, self.canonical_level)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """`[n, C, side, side]`, of the dtype of the features."""
        boxes = self._whole_tokens_inside(boxes, image_shapes)
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
        token = self._finest * torch.exp2(self.map_levels([flat]).to(flat.dtype))[:, None]
        beyond = (starts + torch.maximum(ends - starts, token) - extents).clamp(min=0)
        return list(torch.cat([starts - beyond, ends - beyond], dim=1).split(counts))


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


def _precise(value: Any) -> Any:
    """Tensors, also in lists and tuples, in float32 if they are in half precision."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return type(value)(map(_precise, value))


def _precise_output(head: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: scores and coordinates are float32 even if convolutions are not."""
    del head, inputs
    return _precise(output)
