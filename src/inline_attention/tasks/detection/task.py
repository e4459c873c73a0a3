"""The detection task: RetinaNet, Faster R-CNN and Mask R-CNN on data of COCO's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inline_attention.data.coco.annotations import CocoAnnotations
from inline_attention.data.coco.checks import OpenedCoco, check_split, open_and_check_coco
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.dense import CocoSamples, detection_evaluation_transform, detection_training_transform
from inline_attention.data.sampling import AspectRatioBatches
from inline_attention.data.sources import DataError
from inline_attention.tasks.dense import DenseTask, check_same_classes, notes_of
from inline_attention.tasks.detection.evaluation import METRIC_NAMES, DetectionEvaluator
from inline_attention.tasks.detection.models import DetectionOptions, build_detector
from inline_attention.tasks.task import Reading


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
        return CocoSamples(
            source, detection_training_transform(options.shorter_sides, options.longest_side, self._flip)
        )

    def _training_batches(self, source: CocoSource, reading: Reading) -> AspectRatioBatches:
        return AspectRatioBatches(source.sizes, reading.batch_size, seed=reading.seed, **reading.share)

    def _validation_samples(self, source: ValidationImages) -> CocoSamples:
        sides = self.options.evaluation_sides(self.evaluation_side)
        return CocoSamples(source.source.without_masks(), detection_evaluation_transform(*sides))
