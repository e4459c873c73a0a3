"""The segmentation task: Semantic FPN and UPerNet on images with label maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inline_attention.data.batch import Target
from inline_attention.data.dense import (
    LABELS,
    SegmentationSamples,
    segmentation_evaluation_transform,
    segmentation_training_transform,
)
from inline_attention.data.segmentation import (
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
from inline_attention.tasks.segmentation.evaluation import SegmentationEvaluator
from inline_attention.tasks.segmentation.models import SegmentationOptions, build_segmenter

MOST_OVERLAP = 16  # windows that a file may lay over a pixel, in each direction


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
