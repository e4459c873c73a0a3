"""The detection task: RetinaNet, Faster R-CNN and Mask R-CNN on data of COCO's format, and average precision.

Precision is that of COCO's protocol, over any number of ranks, of detections at the original image size.

Shapes: `n` objects of an image, `M` side of a mask as the model returns it, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import box_convert

from inline_attention.data.batch import UnequalBatch
from inline_attention.data.coco.annotations import CocoAnnotations
from inline_attention.data.coco.checks import OpenedCoco, check_split, open_and_check_coco
from inline_attention.data.coco.masks import mask_library
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.dense import CocoSamples, detection_evaluation_transform, detection_training_transform
from inline_attention.data.sampling import AspectRatioBatches
from inline_attention.data.sources import DataError
from inline_attention.tasks.dense import DenseTask, check_same_classes, notes_of
from inline_attention.tasks.detection.models import DetectionOptions, build_detector
from inline_attention.tasks.task import Collectives, Metrics, MetricTable, Reading, import_extra

MASK_THRESHOLD = 0.5
# Prefix of the metrics, the protocol's name, and what its results must not hold: with boxes, it would take areas of
# boxes for those of masks.
KINDS = {"boxes": ("box", "bbox", "segmentation"), "masks": ("mask", "segm", "bbox")}
# Our names of the metrics, their columns in tables, and the protocol's names.
FIGURES = {
    "ap": ("AP", "AP_all"),
    "ap50": ("AP50", "AP_50"),
    "ap75": ("AP75", "AP_75"),
    "ap_small": ("small", "AP_small"),
    "ap_medium": ("medium", "AP_medium"),
    "ap_large": ("large", "AP_large"),
}
METRIC_NAMES = [f"{kind}_{name}" for kind in ("box", "mask") for name in FIGURES]
Predictions = dict[int, list[dict[str, Any]]]  # COCO results of each image by its id


@dataclass(frozen=True)
class AveragePrecision:
    """Metrics of the protocol, from 0 to 1; NaN if there is no object."""

    ap: float  # mean over overlaps (IoU) of 0.5, 0.55, …, 0.95 and over categories
    ap50: float  # at an overlap of 0.5
    ap75: float
    ap_small: float  # of objects below 32² pixels
    ap_medium: float
    ap_large: float  # of objects above 96² pixels
    recall: float  # with 100 objects an image
    by_category: dict[str, float]  # `ap` by name

    def __str__(self) -> str:
        return f"AP {100 * self.ap:.1f} %, AP50 {100 * self.ap50:.1f} %, AP75 {100 * self.ap75:.1f} %"


@dataclass(frozen=True)
class DetectionMetrics(Metrics):
    """Average precision of boxes and, if there are any, of masks, over `count` images."""

    boxes: AveragePrecision
    masks: AveragePrecision | None
    count: int

    @property
    def figures(self) -> dict[str, float]:
        """Metrics in percent, by `METRIC_NAMES`."""
        return {
            f"{KINDS[kind][0]}_{name}": 100 * getattr(precision, name)
            for kind, precision in self._measured.items()
            for name in FIGURES
        }

    @property
    def tables(self) -> list[MetricTable]:
        """Precision by overlap and size, and of each category."""
        measured = self._measured
        return [
            {
                kind: {column: 100 * getattr(precision, name) for name, (column, _) in FIGURES.items()}
                for kind, precision in measured.items()
            },
            {
                category: {f"{kind} AP": 100 * precision.by_category[category] for kind, precision in measured.items()}
                for category in self.boxes.by_category
            },
        ]

    def __str__(self) -> str:
        return "; ".join([*(f"{kind}: {found}" for kind, found in self._measured.items()), f"{self.count} images"])

    @property
    def _measured(self) -> dict[str, AveragePrecision]:
        return {"boxes": self.boxes} | ({} if self.masks is None else {"masks": self.masks})


class DetectionEvaluator:
    """Computes average precision. Each rank adds its images, which alone count, and all call `compute`."""

    def __init__(self, annotations: CocoAnnotations, *, masks: bool = True):
        """Take the ground truth, crowds included; evaluate masks, too.

        Raises:
            ImportError: If faster-coco-eval is missing.
        """
        self._annotations, self._masks = annotations, masks
        self._sizes = {image.id: (image.height, image.width) for image in annotations.images}
        self._categories = annotations.label_to_category
        self._found: Predictions = {}
        self._protocol = import_extra("faster_coco_eval", "detection")

    def add(self, model: nn.Module, batch: UnequalBatch) -> None:
        """Detect objects in a batch, and add them at the size of the original images."""
        for image, target, found in zip(batch.images, batch.targets, model(batch.images), strict=True):
            height, width = target["size"].tolist()
            moved = at_original_size(found, (image.shape[-2], image.shape[-1]), (height, width))
            masks = [whole_masks(moved, (height, width))] if "masks" in moved else None
            self.add_detections([int(target["image_id"])], [moved], masks)

    def add_detections(
        self,
        image_ids: Iterable[int],
        outputs: Sequence[Mapping[str, Tensor]],
        masks: Sequence[Iterable[Tensor]] | None = None,
    ) -> None:
        """Add the detections of some images, by COCO's ids.

        Outputs are those of torchvision's detectors: boxes `[n, 4]` (left, top, right, bottom in pixels of the original
        image), labels `[n]` from 1, scores `[n]` and masks `[n, 1, H, W]` from 0 to 1. Other masks, `n` of `[H, W]` for
        each image, may take the place of these. They are taken one at a time, and only run lengths are kept, so that an
        iterator needs memory for one of them.

        Raises:
            ValueError: If an image or a label is unknown, or a mask has another size than its image.
        """
        if masks is None:
            masks = [output["masks"] if self._masks else () for output in outputs]
        for image_id, output, masks_of_image in zip(image_ids, outputs, masks, strict=True):
            if image_id not in self._sizes:
                raise ValueError(f"{self._annotations.location} has no image with the id {image_id}")
            self._found[int(image_id)] = self._results(int(image_id), output, masks_of_image)

    def compute(self, collectives: Collectives | None = None) -> DetectionMetrics:
        """Compute the metrics over all ranks, or over this one alone; raise ValueError if no image was added."""
        shares = [self._found] if collectives is None else collectives.gather(self._found)
        # By id, so that ties between equal scores do not depend on which process saw an image, and when.
        found = dict(sorted((image_id, results) for share in shares for image_id, results in share.items()))
        if not found:
            raise ValueError("there is no image to evaluate on; check the data's validation split")
        truth = self._annotations.to_json()
        truth["images"] = [image for image in truth["images"] if image["id"] in found]
        truth["annotations"] = [item for item in truth["annotations"] if item["image_id"] in found]
        for number, item in enumerate(truth["annotations"], start=1):
            item["id"] = number  # the protocol takes an object with the id 0 for one that was not found
        results = [result for of_image in found.values() for result in of_image]
        boxes = _measure(self._protocol, truth, results, "boxes")
        masks = _measure(self._protocol, truth, results, "masks") if self._masks else None
        return DetectionMetrics(boxes, masks, len(found))

    def _results(self, image_id: int, output: Mapping[str, Tensor], masks: Iterable[Tensor]) -> list[dict[str, Any]]:
        boxes = box_convert(output["boxes"].detach().double().cpu(), "xyxy", "xywh").tolist()
        labels, scores = output["labels"].tolist(), output["scores"].double().tolist()
        if unknown := [label for label in labels if label not in self._categories]:
            raise ValueError(
                f"labels must be 1 to {len(self._categories)}, got {unknown[0]}; has the model as many classes?"
            )
        results = [
            {"image_id": image_id, "category_id": self._categories[label], "bbox": box, "score": score}
            for label, box, score in zip(labels, boxes, scores, strict=True)
        ]
        if self._masks:
            for result, mask in zip(results, masks, strict=True):
                result["segmentation"] = _encoded(mask, self._sizes[image_id])
        return results


def _measure(library: Any, truth: dict[str, Any], results: list[dict[str, Any]], kind: str) -> AveragePrecision:
    _, iou_type, left_out = KINDS[kind]
    expected = library.COCO(truth, use_deepcopy=True)
    found = expected.loadRes([{key: value for key, value in result.items() if key != left_out} for result in results])
    evaluation = library.COCOeval_faster(expected, found, iou_type, print_function=lambda *_: None)
    evaluation.run()
    # The protocol writes -1 where there is nothing to find.
    stats = {name: math.nan if value < 0 else value for name, value in evaluation.stats_as_dict.items()}
    # Overlap, recall, category, range of areas (0: all), number of objects (last: 100).
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    names = {category["id"]: category["name"] for category in truth["categories"]}
    by_category = {}
    for place, category_id in enumerate(evaluation.params.catIds):
        present = precision[:, :, place][precision[:, :, place] >= 0]
        by_category[names[category_id]] = float(present.mean()) if present.size else math.nan
    figures = {name: stats[label] for name, (_, label) in FIGURES.items()}
    return AveragePrecision(**figures, recall=stats["AR_third"], by_category=by_category)


def _encoded(mask: Tensor, size: tuple[int, int]) -> dict[str, Any]:
    if mask.shape[-2:] != size:
        raise ValueError(f"masks must be of the size of the original image, {size}, got {tuple(mask.shape)}")
    # Binary on the device, where it is quick; columns first, as run lengths go.
    binary = (mask.reshape(size) > MASK_THRESHOLD).to(torch.uint8).cpu().numpy()
    return mask_library().encode(np.asfortranarray(binary))


def at_original_size(
    found: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]
) -> dict[str, Tensor]:
    """Scale the boxes of an image from its (height, width) to the original one; masks are relative to their box."""
    x, y = original[1] / size[1], original[0] / size[0]
    return {**found, "boxes": found["boxes"].float() * found["boxes"].new_tensor([x, y, x, y])}


def whole_mask(probabilities: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the mask `[H, W]` bool of one object, whose probabilities `[1, M, M]` cover its box `[4]` in pixels."""
    pasted = paste_masks_in_image(probabilities[None].float(), box[None].float(), size)
    return pasted[0, 0] > MASK_THRESHOLD


def whole_masks(found: Mapping[str, Tensor], size: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the mask of each object; a hundred at once would take gigabytes in a large photograph."""
    for probabilities, box in zip(found["masks"], found["boxes"], strict=True):
        yield whole_mask(probabilities, box, size)


@dataclass(frozen=True)
class ValidationImages:
    """Images, and all that is to be found in them, crowds included."""

    source: CocoSource
    annotations: CocoAnnotations

    def __len__(self) -> int:
        return len(self.source)


class DetectionTask(DenseTask[DetectionOptions]):
    """Object detection."""

    name = "detection"
    metrics: Mapping[str, bool] = dict.fromkeys(METRIC_NAMES, True)  # those of masks only with mask_rcnn
    options_type = DetectionOptions
    dataset, library = "coco", "faster_coco_eval"
    build = staticmethod(build_detector)

    def open_validation(self, class_names: Sequence[str]) -> tuple[ValidationImages, tuple[str, ...]]:
        """Open and check the validation split alone."""
        choice = self._data
        (annotations, report), images = check_split(
            choice.dir or "",
            choice.val_split,
            allow_outside=choice.allow_outside_files,
            masks=self.options.finds_masks,
            every_category=False,
            repair=choice.repair,
        )
        if report.problems:
            raise DataError("\n".join(report.problems))
        check_same_classes(annotations.location, "categories", annotations.class_names, class_names)
        source = CocoSource(annotations, images, masks=False)
        return ValidationImages(source, annotations), notes_of([report])

    def sampling_options(self, batch_size: int) -> dict[str, int]:
        """A batch has images of one orientation, so its size decides which images it gets."""
        return {"images per batch": batch_size}

    def evaluator(self, source: ValidationImages, device: torch.device) -> DetectionEvaluator:
        """Return an evaluator of average precision by COCO's protocol."""
        del device
        return DetectionEvaluator(source.annotations, masks=self.options.finds_masks)

    def _open(self, folder: str, **options: Any) -> OpenedCoco:
        return open_and_check_coco(folder, masks=self.options.finds_masks, **options)

    def _validation(self, opened: OpenedCoco) -> ValidationImages:
        assert opened.validation is not None
        assert opened.validation_annotations is not None
        return ValidationImages(opened.validation, opened.validation_annotations)

    def _training_samples(self, source: CocoSource) -> CocoSamples:
        options = self.options
        transform = detection_training_transform(options.shorter_sides, options.longest_side, self._flip)
        return CocoSamples(source, transform)

    def _training_batches(self, source: CocoSource, reading: Reading) -> AspectRatioBatches:
        return AspectRatioBatches(source.sizes, reading.batch_size, seed=reading.seed, **reading.share)

    def _validation_samples(self, source: ValidationImages) -> CocoSamples:
        sides = self.options.evaluation_sides(self.evaluation_side)
        return CocoSamples(source.source.without_masks(), detection_evaluation_transform(*sides))
