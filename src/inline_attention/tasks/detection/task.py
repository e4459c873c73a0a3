"""Detection as the engine trains it: RetinaNet and Mask R-CNN on data of COCO's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from inline_attention.data.batch import Target, UnequalBatch
from inline_attention.data.broken import BrokenImages
from inline_attention.data.coco.annotations import (
    CocoAnnotations,
    find_annotation_file,
    find_image_folder,
    read_annotations,
)
from inline_attention.data.coco.checks import check_annotations
from inline_attention.data.coco.opening import open_and_check_coco
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.dense import (
    CocoSamples,
    detection_evaluation_transform,
    detection_training_transform,
)
from inline_attention.data.listed_files import ListedFiles
from inline_attention.data.loading import Loader, SampleLoader
from inline_attention.data.sampling import AspectRatioBatches
from inline_attention.data.sources import DataError
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.reading import Checkpoint, open_checkpoint, show_difference
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
from inline_attention.tasks.detection.evaluation import (
    FIGURES,
    KINDS_OF_FIGURES,
    DetectionEvaluator,
    DetectionMetrics,
    at_original_size,
    whole_masks,
)
from inline_attention.tasks.detection.models import (
    DetectionOptions,
    Detector,
    build_detector,
)
from inline_attention.tasks.task import Collectives, DataSection, ModelChoice, Reading, TaskData


@dataclass(frozen=True)
class ValidationImages:
    """Images, and all that is to be found in them, crowds included."""

    source: CocoSource
    annotations: CocoAnnotations

    def __len__(self) -> int:
        return len(self.source)


class DetectionTask:
    """Finding objects; see `Task` for the methods."""

    name = "detection"

    def __init__(
        self, data: DataSection, model: ModelChoice, options: DetectionOptions | None = None, *, flip: float = 0.5
    ):
        """Choose data and model.

        Args:
            data: A folder in COCO's format.
            model: The backbone. Its initial weights are a classifier's or a detector's.
            options: The detector around it.
            flip: Probability of a horizontal flip in training.
        """
        self._data, self._model, self.options, self._flip = data, model, options or DetectionOptions(), flip
        self.start: str | None = None
        kinds = KINDS_OF_FIGURES if self.options.finds_masks else KINDS_OF_FIGURES[:1]
        self.metrics: Mapping[str, bool] = {f"{kind}_{figure}": True for kind in kinds for figure in FIGURES}

    @classmethod
    def of_checkpoint(cls, file: Checkpoint, data: DataSection) -> tuple[Self, list[str]]:
        """Return the task that a file of weights was trained for, and its class names.

        Raises:
            CheckpointError: If it was trained for another, or describes an impossible one.
        """
        described = read_task_metadata(file, cls.name, DetectionOptions)
        task = cls(data, described.backbone, described.options, flip=described.flip)
        check_size(file, lambda: task.build_model(described.class_names))
        return task, described.class_names

    def open(self) -> TaskData:
        """Open and check both splits."""
        choice = self._data
        opened = open_and_check_coco(
            choice.dir or "",
            train_split=choice.train_split,
            validation_split=choice.val_split,
            masks=self.options.finds_masks,
            num_classes=self._model.num_classes,
            repair=choice.repair,
            allow_outside=choice.allow_outside_files,
        )
        annotations = opened.validation_annotations
        if opened.problems or opened.train is None or opened.validation is None or annotations is None:
            raise unusable(opened.problems, opened.reports)
        validation = ValidationImages(opened.validation, annotations)
        return TaskData(opened.train, validation, notes_of(opened.reports))

    def open_validation(self, class_names: Sequence[str]) -> tuple[ValidationImages, tuple[str, ...]]:
        """Open and check the validation split alone, which must have the classes of a model.

        Returns:
            The images, and what was repaired.

        Raises:
            DataError: If it cannot be used.
        """
        choice, masks = self._data, self.options.finds_masks
        folder, split = choice.dir or "", choice.val_split
        read = read_annotations(find_annotation_file(folder, split))
        images = ListedFiles(
            find_image_folder(folder, read, split, allow_outside=choice.allow_outside_files),
            folder,
            allow_outside=choice.allow_outside_files,
        )
        checked = check_annotations(read, images, masks=masks, every_category=False, repair=choice.repair)
        if checked.report.problems:
            raise DataError("\n".join(checked.report.problems))
        found = checked.annotations.class_names
        if list(found) != list(class_names):
            theirs, known = show_difference(found, class_names)
            raise DataError(
                f"{read.location} has the categories {theirs}, the model knows {known}; they must be the same"
            )
        validation = ValidationImages(CocoSource(checked.annotations, images, masks=False), checked.annotations)
        return validation, notes_of([checked.report])

    def build_model(self, class_names: Sequence[str]) -> Detector:
        """Build the detector around its backbone."""
        model = build_detector(self.options, self._model.name, self._model.arguments, len(class_names))
        if self._model.initial_checkpoint is not None:
            file = open_checkpoint(self._model.initial_checkpoint)
            self.start = initialize_from(model, model.backbone, file, self.name)
        if self._model.grad_checkpointing:
            model.set_grad_checkpointing()
        return model

    def training_loader(
        self, source: CocoSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """Batches of pictures alike in shape."""
        assert isinstance(model, Detector)
        options = self.options
        transform = detection_training_transform(options.shorter_sides, options.longest_side, self._flip)
        return SampleLoader(
            CocoSamples(source, transform),
            AspectRatioBatches(
                source.sizes,
                reading.batch_size,
                seed=reading.seed,
                rank=reading.rank,
                world_size=reading.world_size,
            ),
            normalize=normalization(model.backbone),
            broken=broken,
            replace_broken=True,
            **reading.loading,
        )

    def validation_loader(
        self, source: ValidationImages, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[UnequalBatch]:
        """All pictures in order."""
        assert isinstance(model, Detector)
        return SampleLoader(
            CocoSamples(
                source.source.without_masks(),
                detection_evaluation_transform(self.options.shorter_side, self.options.longest_side),
            ),
            reading.evaluation_batches(len(source)),
            normalize=normalization(model.backbone),
            broken=broken,
            replace_broken=False,
            **reading.loading,
        )

    def sampling_options(self, batch_size: int) -> dict[str, int]:
        """A batch has images of one orientation, so its size decides which images it gets."""
        return {"images per batch": batch_size}

    def objective(self, class_names: Sequence[str], rank: int) -> SumOfLosses:
        """The sum of the detector's losses."""
        del class_names, rank
        return SumOfLosses(_for_losses)

    def evaluator(self, source: ValidationImages, device: torch.device) -> _Evaluator:
        """Average precision by COCO's protocol."""
        del device
        return _Evaluator(DetectionEvaluator(source.annotations, masks=self.options.finds_masks))

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return all that is needed to build the detector again."""
        return task_metadata(self.name, self._model, self.options, class_names, flip=self._flip)


def _for_losses(target: Target) -> Target:
    """What losses look at."""
    return {name: target[name] for name in ("boxes", "labels", "masks") if name in target}


def load_detector(file: Checkpoint) -> tuple[Detector, DetectionOptions, list[str]]:
    """The detector of a file of weights, its options and the names of its classes, that of label 1 first.

    Raises:
        CheckpointError: If the file is not a detector's, or does not fit.
    """
    task, class_names = DetectionTask.of_checkpoint(file, DataSection("coco"))
    model = task.build_model(class_names)
    load_checkpoint(model, file)
    return model, task.options, class_names


class _Evaluator:
    """Runs a detector, and brings what it finds to the size of the originals."""

    def __init__(self, protocol: DetectionEvaluator):
        self._protocol = protocol

    def add(self, model: nn.Module, batch: UnequalBatch) -> None:
        for image, target, found in zip(batch.images, batch.targets, model(batch.images), strict=True):
            height, width = target["size"].tolist()
            original = (height, width)
            moved = at_original_size(found, (image.shape[-2], image.shape[-1]), original)
            masks = [whole_masks(moved, original)] if "masks" in moved else None
            self._protocol.add([int(target["image_id"])], [moved], masks)

    def compute(self, collectives: Collectives) -> DetectionMetrics:
        return self._protocol.compute(collectives.gather)
