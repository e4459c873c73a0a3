"""IoU and accuracy of each class of pixels, over any number of ranks.

Shapes: `B` batch, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inline_attention.data.batch import UnequalBatch
from inline_attention.data.dense import LABELS
from inline_attention.data.segmentation import IGNORED
from inline_attention.tasks.segmentation.models import SlidingWindows, labels_at, scores_of
from inline_attention.tasks.task import Collectives, Metrics, MetricTable, import_extra


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
        """Take class names by label, device of labels, sliding windows. `ImportError`: torchmetrics is missing."""
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
