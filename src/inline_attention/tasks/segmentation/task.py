"""The segmentation task: Semantic FPN and UPerNet on images with label maps, IoU and accuracy of each class of pixels.

Shapes: `B` batch, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.data.batch import Target, UnequalBatch
from inline_attention.data.dense import (
    LABELS,
    SegmentationSamples,
    segmentation_evaluation_transform,
    segmentation_training_transform,
)
from inline_attention.data.segmentation import (
    IGNORED,
    LabelRules,
    OpenedPairs,
    SegmentationSource,
    check_pairs,
    find_class_file,
    find_pair_folders,
    open_and_check_pairs,
    read_class_names,
)
from inline_attention.data.sources import DataError
from inline_attention.tasks.dense import DenseTask, check_same_classes, notes_of
from inline_attention.tasks.segmentation.models import (
    SegmentationOptions,
    SlidingWindows,
    build_segmenter,
    labels_at,
    scores_of,
)
from inline_attention.tasks.task import Collectives, Metrics, MetricTable, import_extra

MOST_OVERLAP = 16  # windows that a file may lay over a pixel, in each direction


@dataclass(frozen=True)
class SegmentationMetrics(Metrics):
    """Metrics from 0 to 1; NaN for classes without pixels."""

    mean_iou: float  # over the classes that occur in truth or prediction
    mean_accuracy: float  # over the classes that occur in truth
    pixel_accuracy: float
    iou: dict[str, float]  # by class name
    accuracy: dict[str, float]
    count: int  # pixels, without ignored ones

    @property
    def figures(self) -> dict[str, float]:
        """Metrics in percent."""
        return {"miou": 100 * self.mean_iou, "macc": 100 * self.mean_accuracy, "aacc": 100 * self.pixel_accuracy}

    @property
    def tables(self) -> list[MetricTable]:
        """IoU and accuracy of each class."""
        return [{name: {"IoU": 100 * iou, "accuracy": 100 * self.accuracy[name]} for name, iou in self.iou.items()}]

    def __str__(self) -> str:
        means = f"mIoU {100 * self.mean_iou:.2f} %, mAcc {100 * self.mean_accuracy:.2f} %"
        return f"{means}, aAcc {100 * self.pixel_accuracy:.2f} % of {self.count:,} pixels"


class SegmentationEvaluator:
    """Counts the confusion matrix over all pixels. Each rank adds its images, and all call `compute`."""

    def __init__(
        self, class_names: Sequence[str], device: torch.device | str = "cpu", windows: SlidingWindows | None = None
    ):
        """Take class names by label, device of labels, sliding windows.

        Raises:
            ImportError: If torchmetrics is missing.
        """
        library = import_extra("torchmetrics.classification", "segmentation")
        matrix = library.MulticlassConfusionMatrix(len(class_names), ignore_index=IGNORED, validate_args=False)
        self._class_names, self._confusion, self._windows = tuple(class_names), matrix.to(device), windows

    def add(self, model: nn.Module, batch: UnequalBatch) -> None:
        """Label the pixels of a batch, and count them at the size of the original images."""
        for target, scores in zip(batch.targets, scores_of(model, batch.images, self._windows), strict=True):
            labels = target[LABELS]
            self.count(labels_at(scores, (labels.shape[0], labels.shape[1]))[None], labels[None])

    def count(self, predicted: Tensor, target: Tensor) -> None:
        """Count pixels by predicted and true labels (or `IGNORED`), `[B, H, W]` each; `ValueError` if they differ."""
        if predicted.shape != target.shape or predicted.is_floating_point():
            raise ValueError(
                "predicted and true labels must be whole numbers of one shape, got "
                f"{predicted.dtype} {tuple(predicted.shape)} and {target.dtype} {tuple(target.shape)}"
            )
        predicted, target = predicted.long(), target.long()
        if torch.are_deterministic_algorithms_enabled():
            # torchmetrics would compare every pixel with all K² pairs of classes then: 63 GB for one photograph.
            labeled, matrix = target != IGNORED, self._confusion.confmat
            pairs = target[labeled] * len(matrix) + predicted[labeled]
            self._confusion.confmat = matrix + torch.bincount(pairs, minlength=matrix.numel()).view_as(matrix)
        else:
            self._confusion.update(predicted, target)

    def compute(self, collectives: Collectives | None = None) -> SegmentationMetrics:
        """Compute the metrics over all ranks, or over this one alone; raise ValueError if no pixel was counted."""
        matrix = self._confusion.confmat.clone()  # a sum over processes may be taken in place
        if collectives is not None:
            matrix = collectives.sum(matrix)
        matrix = matrix.double().cpu()  # [K, K], truth by prediction
        count = int(matrix.sum())
        if count == 0:
            raise ValueError("there is no labeled pixel to evaluate on; check the data's validation split")
        right, true, predicted = matrix.diag(), matrix.sum(1), matrix.sum(0)
        iou, accuracy = right / (true + predicted - right), right / true  # 0 ÷ 0 is NaN
        return SegmentationMetrics(
            iou.nanmean().item(),
            accuracy.nanmean().item(),
            right.sum().item() / count,
            dict(zip(self._class_names, iou.tolist(), strict=True)),
            dict(zip(self._class_names, accuracy.tolist(), strict=True)),
            count,
        )


class SegmentationTask(DenseTask[SegmentationOptions]):
    """Semantic segmentation."""

    name = "segmentation"
    metrics: Mapping[str, bool] = {"miou": True, "macc": True, "aacc": True}
    options_type = SegmentationOptions
    dataset, library = "pairs", "torchmetrics"
    flags = ("reduce_zero_label",)
    build = staticmethod(build_segmenter)

    def open_validation(self, class_names: Sequence[str]) -> tuple[SegmentationSource, tuple[str, ...]]:
        """Open and check the validation split alone, whose list of classes, if it has one, must be the model's."""
        choice, folder = self._data, self._data.dir or ""
        file = choice.class_map
        if file is None:
            with suppress(DataError):  # the maps alone say nothing about classes
                file = find_class_file(folder)
        if file is not None:
            found = read_class_names(file, reduce_zero_label=choice.reduce_zero_label)
            check_same_classes(file, "classes", found, class_names)
        rules = LabelRules(len(class_names), reduce_zero_label=choice.reduce_zero_label)
        folders = find_pair_folders(
            folder, choice.val_split, choice.image_folder, choice.map_folder, allow_outside=choice.allow_outside_files
        )
        location = f"{Path(folder)} ({choice.val_split})"
        source, report = check_pairs(folders, location, class_names, rules, every_class=False, repair=choice.repair)
        if source is None:
            raise DataError("\n".join(report.problems))
        return source, notes_of([report])

    def evaluator(self, source: SegmentationSource, device: torch.device) -> SegmentationEvaluator:
        """Return an evaluator of mean IoU and accuracies."""
        return SegmentationEvaluator(source.class_names, device, self.options.windows)

    @classmethod
    def _check_options(cls, options: SegmentationOptions) -> None:
        if options.window_step is not None and MOST_OVERLAP * options.window_step < options.crop:
            raise ValueError(
                f"it asks for a window every {options.window_step} pixels, for windows of {options.crop}; "
                f"a file may ask for one every {-(-options.crop // MOST_OVERLAP)} pixels at the least"
            )

    def _open(self, folder: str, **options: Any) -> OpenedPairs:
        choice = self._data
        return open_and_check_pairs(
            folder,
            class_file=choice.class_map,
            image_folder=choice.image_folder,
            map_folder=choice.map_folder,
            reduce_zero_label=choice.reduce_zero_label,
            **options,
        )

    def _training_samples(self, source: SegmentationSource) -> SegmentationSamples:
        options = self.options
        transform = segmentation_training_transform(options.crop, scale=options.scale, flip=self._flip)
        return SegmentationSamples(source, transform)

    def _validation_samples(self, source: SegmentationSource) -> SegmentationSamples:
        return SegmentationSamples(source, segmentation_evaluation_transform(self.evaluation_side or self.options.crop))

    def _model_target(self, target: Target) -> Tensor:
        return target[LABELS]
