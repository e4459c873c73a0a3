"""Average precision by COCO's protocol, over any number of ranks, and detections at the original image size.

Shapes: `n` objects of an image, `M` side of a mask as the model returns it, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from inline_attention.data.coco.annotations import CocoAnnotations
from inline_attention.data.coco.masks import mask_library
from inline_attention.tasks.task import MetricTable

MASK_THRESHOLD = 0.5
KINDS = {"boxes": "bbox", "masks": "segm"}  # our name of each kind of precision, and the protocol's
KINDS_OF_FIGURES = ("box", "mask")
FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
COLUMNS = ("AP", "AP50", "AP75", "small", "medium", "large")  # what tables call them
Predictions = dict[int, list[dict[str, Any]]]  # COCO results of each image by its id


@dataclass(frozen=True)
class AveragePrecision:
    """Metrics of the protocol, from 0 to 1; NaN if there is no object.

    Attributes:
        ap: Mean over overlaps (IoU) of 0.5, 0.55, …, 0.95 and over categories.
        ap50: At an overlap of 0.5.
        ap75: At an overlap of 0.75.
        ap_small: `ap` of objects below 32² pixels.
        ap_medium: `ap` of objects of 32² to 96² pixels.
        ap_large: `ap` of objects above 96² pixels.
        recall: Mean recall with 100 objects an image.
        by_category: `ap` of each category, by name.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    recall: float
    by_category: dict[str, float]

    def __str__(self) -> str:
        return f"AP {100 * self.ap:.1f} %, AP50 {100 * self.ap50:.1f} %, AP75 {100 * self.ap75:.1f} %"


@dataclass(frozen=True)
class DetectionMetrics:
    """Average precision of boxes and, if there are any, of masks, over `count` images."""

    boxes: AveragePrecision
    masks: AveragePrecision | None
    count: int

    @property
    def figures(self) -> dict[str, float]:
        """In percent, as tables have them: box_ap, box_ap50, … and mask_ap, …"""
        return {
            f"{kind}_{name}": 100 * getattr(precision, name)
            for kind, precision in zip(KINDS_OF_FIGURES, (self.boxes, self.masks), strict=True)
            if precision is not None
            for name in FIGURES
        }

    @property
    def tables(self) -> list[MetricTable]:
        """Precision by overlap and size, and of each category."""
        measured = {"boxes": self.boxes} | ({} if self.masks is None else {"masks": self.masks})
        return [
            {
                kind: {column: 100 * getattr(precision, name) for column, name in zip(COLUMNS, FIGURES, strict=True)}
                for kind, precision in measured.items()
            },
            {
                category: {f"{kind} AP": 100 * precision.by_category[category] for kind, precision in measured.items()}
                for category in self.boxes.by_category
            },
        ]

    def __str__(self) -> str:
        masks = "" if self.masks is None else f"; masks: {self.masks}"
        return f"boxes: {self.boxes}{masks}; {self.count} images"


class DetectionEvaluator:
    """Collects detections and computes average precision.

    Each rank adds its images, and all call `compute`. Only added images count, so unreadable ones do not matter.
    """

    def __init__(self, annotations: CocoAnnotations, *, masks: bool = True):
        """Set up.

        Args:
            annotations: Ground truth, crowds included.
            masks: Evaluate masks, too.

        Raises:
            ImportError: If faster-coco-eval is not installed: better now than after an epoch.
        """
        self._annotations, self._masks = annotations, masks
        self._sizes = {image.id: (image.height, image.width) for image in annotations.images}
        self._categories = annotations.label_to_category
        self._found: Predictions = {}
        _protocol()

    def add(
        self,
        image_ids: Iterable[int],
        outputs: Sequence[Mapping[str, Tensor]],
        masks: Sequence[Iterable[Tensor]] | None = None,
    ) -> None:
        """Add the detections of some images.

        Args:
            image_ids: COCO's id of each image.
            outputs: For each image, as torchvision's detectors return it: boxes `[n, 4]` (left, top, right, bottom in
                pixels of the original image), labels `[n]` from 1, scores `[n]` and masks `[n, 1, H, W]` from 0 to 1.
            masks: For each image the `n` masks `[H, W]`, in place of those in `outputs`. They are taken one at a time,
                and only run lengths are kept, so that an iterator needs memory for one of them.

        Raises:
            ValueError: If an image is unknown, a label too, or masks are of another size than their image.
        """
        if masks is None:
            masks = [output["masks"] if self._masks else () for output in outputs]
        for image_id, output, masks_of_image in zip(image_ids, outputs, masks, strict=True):
            if image_id not in self._sizes:
                raise ValueError(f"{self._annotations.location} has no image with the id {image_id}")
            self._found[int(image_id)] = self._results(int(image_id), output, masks_of_image)

    def compute(self, gather: Callable[[Predictions], list[Predictions]] | None = None) -> DetectionMetrics:
        """Compute the metrics over all ranks; the result is the same on each.

        Args:
            gather: Gathers values of all ranks; None for one rank.

        Raises:
            ValueError: If no image was added.
        """
        shares = [self._found] if gather is None else gather(self._found)
        # By id, so that ties between equal scores do not depend on which process saw an image, and when.
        found = dict(sorted((image_id, results) for share in shares for image_id, results in share.items()))
        if not found:
            raise ValueError("there is no image to evaluate on; check the data's validation split")
        results = [result for of_image in found.values() for result in of_image]
        truth = self._truth(set(found))
        boxes = [{key: value for key, value in result.items() if key != "segmentation"} for result in results]
        # Without boxes: with them, the protocol would take areas of boxes for those of masks.
        masks = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
        return DetectionMetrics(
            _measure(truth, boxes, "boxes"), _measure(truth, masks, "masks") if self._masks else None, len(found)
        )

    def _results(self, image_id: int, output: Mapping[str, Tensor], masks: Iterable[Tensor]) -> list[dict[str, Any]]:
        boxes = output["boxes"].detach().double().cpu()
        corners = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1).tolist()
        labels, scores = output["labels"].tolist(), output["scores"].double().tolist()
        unknown = [label for label in labels if label not in self._categories]
        if unknown:
            raise ValueError(
                f"labels must be 1 to {len(self._categories)}, got {unknown[0]}; has the model as many classes?"
            )
        results = [
            {"image_id": image_id, "category_id": self._categories[label], "bbox": box, "score": score}
            for label, box, score in zip(labels, corners, scores, strict=True)
        ]
        if self._masks:
            for result, mask in zip(results, masks, strict=True):
                result["segmentation"] = self._encoded(image_id, mask)
        return results

    def _encoded(self, image_id: int, mask: Tensor) -> dict[str, Any]:
        if mask.shape[-2:] != self._sizes[image_id]:
            raise ValueError(
                f"masks must be of the size of the original image, {self._sizes[image_id]}, got {tuple(mask.shape)}"
            )
        # Binary on the device, where it is quick; columns first, as run lengths go.
        binary = (mask.reshape(mask.shape[-2:]) > MASK_THRESHOLD).to(torch.uint8).cpu().numpy()
        return mask_library().encode(np.asfortranarray(binary))

    def _truth(self, image_ids: set[int]) -> dict[str, Any]:
        truth = self._annotations.to_json()
        truth["images"] = [image for image in truth["images"] if image["id"] in image_ids]
        truth["annotations"] = [item for item in truth["annotations"] if item["image_id"] in image_ids]
        for number, item in enumerate(truth["annotations"], start=1):
            item["id"] = number  # the protocol takes an object with the id 0 for one that was not found
        return truth


def _protocol() -> Any:
    try:
        import faster_coco_eval
    except ImportError as error:
        raise ImportError(
            "average precision is measured by faster-coco-eval, which is not installed: "
            "pip install 'inline-attention[detection]'"
        ) from error
    return faster_coco_eval


def _measure(truth: dict[str, Any], results: list[dict[str, Any]], kind: str) -> AveragePrecision:
    library = _protocol()
    expected = library.COCO(truth, use_deepcopy=True)
    evaluation = library.COCOeval_faster(expected, expected.loadRes(results), KINDS[kind], print_function=_silent)
    evaluation.run()
    figures = {name: _nan_if_absent(value) for name, value in evaluation.stats_as_dict.items()}
    # Overlap, recall, category, range of areas (0: all), number of objects (last: 100).
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    names = {category["id"]: category["name"] for category in truth["categories"]}
    by_category = {
        names[category_id]: _mean_of_present(precision[:, :, place])
        for place, category_id in enumerate(evaluation.params.catIds)
    }
    return AveragePrecision(
        figures["AP_all"],
        figures["AP_50"],
        figures["AP_75"],
        figures["AP_small"],
        figures["AP_medium"],
        figures["AP_large"],
        figures["AR_third"],
        by_category,
    )


def _nan_if_absent(value: float) -> float:
    """The protocol writes -1 where there is nothing to find, which looks like a figure."""
    return math.nan if value < 0 else float(value)


def _mean_of_present(precision: np.ndarray) -> float:
    present = precision[precision >= 0]
    return float(present.mean()) if present.size else math.nan


def _silent(*_message: Any) -> None:
    pass


def at_original_size(
    found: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]
) -> dict[str, Tensor]:
    """Boxes enlarged or reduced; all else as it is, masks too, which are relative to their box.

    Args:
        found: Detections of one image.
        size: (height, width) of the image it was given.
        original: (height, width) of the original.
    """
    (height, width), (original_height, original_width) = size, original
    x, y = original_width / width, original_height / height
    return {**found, "boxes": found["boxes"].float() * found["boxes"].new_tensor([x, y, x, y])}


def whole_mask(probabilities: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """The mask of one object in its image.

    Of one, as a hundred of a large photograph would take gigabytes.

    Args:
        probabilities: `[1, M, M]`, as a detector gives it.
        box: `[4]` in pixels of the image.
        size: (height, width) of the image.

    Returns:
        `[H, W]` bool.
    """
    pasted = paste_masks_in_image(probabilities[None].float(), box[None].float(), size)
    return pasted[0, 0] > MASK_THRESHOLD


def whole_masks(found: Mapping[str, Tensor], size: tuple[int, int]) -> Iterator[Tensor]:
    """`whole_mask` of each object that was found, made when it is asked for."""
    for probabilities, box in zip(found["masks"], found["boxes"], strict=True):
        yield whole_mask(probabilities, box, size)
