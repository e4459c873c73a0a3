"""Semantic segmentation as the engine trains it: Semantic FPN and UPerNet on pictures with maps of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from inline_attention.data.batch import Target, UnequalBatch
from inline_attention.data.broken import BrokenImages
from inline_attention.data.dense import (
    LABELS,
    SegmentationSamples,
    segmentation_evaluation_transform,
    segmentation_training_transform,
)
from inline_attention.data.loading import Loader, SampleLoader
from inline_attention.data.sampling import TrainingBatches
from inline_attention.data.segmentation.checks import check_pairs, open_and_check_pairs
from inline_attention.data.segmentation.files import find_class_file, find_pair_folders, find_pairs, read_class_names
from inline_attention.data.segmentation.source import LabelRules, SegmentationSource
from inline_attention.data.sources import DataError
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.reading import Checkpoint, CheckpointError, open_checkpoint, show_difference
from inline_attention.tasks.dense import (
    SumOfLosses,
    check_size,
    initialize_from,
    normalization,
    notes_of,
    read_task_metadata,
    task_metadata,
    unusable,
)
from inline_attention.tasks.segmentation.evaluation import SegmentationEvaluator, SegmentationMetrics
from inline_attention.tasks.segmentation.inference import SlidingWindows, labels_at, scores_of
from inline_attention.tasks.segmentation.models import SegmentationOptions, Segmenter, build_segmenter
from inline_attention.tasks.task import Collectives, DataSection, ModelChoice, Reading, TaskData

MOST_OVERLAP = 16  # windows that a file may lay over a pixel, in each direction


class SegmentationTask:
    """Naming every pixel; see `Task` for the methods.

    Attributes:
        options: Options of the segmenter.
        evaluation_side: Pixels of the shorter side of images to evaluate on, windows staying as they are; the options'
            `crop`, if None.
    """

    name = "segmentation"
    metrics: Mapping[str, bool] = {"miou": True, "macc": True, "aacc": True}

    def __init__(
        self, data: DataSection, model: ModelChoice, options: SegmentationOptions | None = None, *, flip: float = 0.5
    ):
        """Choose data and model.

        Args:
            data: A folder of images and label maps.
            model: The backbone. Its initial weights are a classifier's or a segmenter's.
            options: The segmenter around it.
            flip: Probability of a horizontal flip in training.
        """
        self._data, self._model, self.options, self._flip = data, model, options or SegmentationOptions(), flip
        self.start: str | None = None
        self.evaluation_side: int | None = None

    @classmethod
    def of_checkpoint(cls, file: Checkpoint, data: DataSection) -> tuple[Self, list[str]]:
        """Return the task that a file of weights was trained for, and its class names.

        Raises:
            CheckpointError: If it was trained for another, or describes an impossible one.
        """
        described = read_task_metadata(file, cls.name, SegmentationOptions, flags=("reduce_zero_label",))
        data = replace(data, **described.flags)
        options = described.options
        if options.window_step is not None and MOST_OVERLAP * options.window_step < options.crop:
            raise CheckpointError(
                f"{file.path} asks for a window every {options.window_step} pixels, for windows of {options.crop}; "
                f"a file may ask for one every {-(-options.crop // MOST_OVERLAP)} pixels at the least"
            )
        task = cls(data, described.backbone, options, flip=described.flip)
        check_size(file, lambda: task.build_model(described.class_names))
        return task, described.class_names

    def open(self) -> TaskData:
        """Open and check both splits."""
        choice = self._data
        opened = open_and_check_pairs(
            choice.dir or "",
            train_split=choice.train_split,
            validation_split=choice.val_split,
            class_file=choice.class_map,
            image_folder=choice.image_folder,
            map_folder=choice.map_folder,
            reduce_zero_label=choice.reduce_zero_label,
            num_classes=self._model.num_classes,
            repair=choice.repair,
            allow_outside=choice.allow_outside_files,
        )
        if opened.problems or opened.train is None or opened.validation is None:
            raise unusable(opened.problems, opened.reports)
        return TaskData(opened.train, opened.validation, notes_of(opened.reports))

    def open_validation(self, class_names: Sequence[str]) -> tuple[SegmentationSource, tuple[str, ...]]:
        """Open and check the validation split alone, which must have the classes of a model if it names its own.

        Returns:
            The images, and what was repaired.

        Raises:
            DataError: If it cannot be used.
        """
        choice = self._data
        folder, split = choice.dir or "", choice.val_split
        self._check_same_classes(class_names)
        rules = LabelRules(len(class_names), reduce_zero_label=choice.reduce_zero_label)
        folders = find_pair_folders(
            folder, split, choice.image_folder, choice.map_folder, allow_outside=choice.allow_outside_files
        )
        found, location = find_pairs(*folders), f"{Path(folder)} ({split})"
        checked = check_pairs(found, location, class_names, rules, every_class=False, repair=choice.repair)
        if checked.source is None:
            raise DataError("\n".join(checked.report.problems))
        return checked.source, notes_of([checked.report])

    def build_model(self, class_names: Sequence[str]) -> Segmenter:
        """Build the segmenter around its backbone."""
        choice = self._model
        model = build_segmenter(self.options, choice.name, choice.arguments, len(class_names))
        if choice.initial_checkpoint is not None:
            self.start = initialize_from(model, model.backbone, open_checkpoint(choice.initial_checkpoint), self.name)
        if choice.grad_checkpointing:
            model.set_grad_checkpointing()
        return model

    def training_loader(
        self, source: SegmentationSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """Random crops."""
        assert isinstance(model, Segmenter)
        transform = segmentation_training_transform(self.options.crop, scale=self.options.scale, flip=self._flip)
        return SampleLoader(
            SegmentationSamples(source, transform),
            TrainingBatches(len(source), reading.batch_size, seed=reading.seed, **reading.share),
            normalize=normalization(model.backbone),
            broken=broken,
            replace_broken=True,
            **reading.loading,
        )

    def validation_loader(
        self, source: SegmentationSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """All pictures in order, resized."""
        assert isinstance(model, Segmenter)
        return SampleLoader(
            SegmentationSamples(source, segmentation_evaluation_transform(self.evaluation_side or self.options.crop)),
            reading.evaluation_batches(len(source)),
            normalize=normalization(model.backbone),
            broken=broken,
            replace_broken=False,
            **reading.loading,
        )

    def sampling_options(self, batch_size: int) -> dict[str, int]:
        """Nothing: samples are shuffled whatever the batch size."""
        del batch_size
        return {}

    def objective(self, class_names: Sequence[str], rank: int) -> SumOfLosses:
        """The sum of the segmenter's losses."""
        del class_names, rank
        return SumOfLosses(_labels)

    def evaluator(self, source: SegmentationSource, device: torch.device) -> _Evaluator:
        """Mean IoU and accuracies."""
        return _Evaluator(SegmentationEvaluator(source.class_names, device), self.options.windows)

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return all that is needed to build the segmenter again, and what the numbers in maps mean to it."""
        return task_metadata(
            self.name,
            self._model,
            self.options,
            class_names,
            flip=self._flip,
            reduce_zero_label=self._data.reduce_zero_label,
        )

    def _check_same_classes(self, class_names: Sequence[str]) -> None:
        """Refuse data whose list of classes is not that of a model: its labels would mean something else."""
        file = self._class_file()
        if file is None:
            return
        found = read_class_names(file, reduce_zero_label=self._data.reduce_zero_label)
        if list(found) != list(class_names):
            theirs, known = show_difference(found, class_names)
            raise DataError(f"{file} has the classes {theirs}, the model knows {known}; they must be the same")

    def _class_file(self) -> Path | None:
        """The data's list of classes, if it has one."""
        if self._data.class_map is not None:
            return Path(self._data.class_map)
        try:
            return find_class_file(self._data.dir or "")
        except DataError:
            return None


def load_segmenter(file: Checkpoint) -> tuple[Segmenter, SegmentationOptions, list[str]]:
    """The segmenter of a file of weights, its options and the names of its classes.

    Raises:
        CheckpointError: If the file is not a segmenter's, or does not fit.
    """
    task, class_names = SegmentationTask.of_checkpoint(file, DataSection("pairs"))
    model = task.build_model(class_names)
    load_checkpoint(model, file)
    return model, task.options, class_names


def _labels(target: Target) -> Tensor:
    return target[LABELS]


class _Evaluator:
    """Runs a segmenter, and compares labels at the size of the originals."""

    def __init__(self, counting: SegmentationEvaluator, windows: SlidingWindows | None):
        self._counting, self._windows = counting, windows

    def add(self, model: nn.Module, batch: UnequalBatch) -> None:
        for target, scores in zip(batch.targets, scores_of(model, batch.images, self._windows), strict=True):
            labels = target[LABELS]
            self._counting.add(labels_at(scores, (labels.shape[0], labels.shape[1]))[None], labels[None])

    def compute(self, collectives: Collectives) -> SegmentationMetrics:
        return self._counting.compute(collectives.sum)
