"""Detection as the engine trains it: RetinaNet and Mask R-CNN on data of COCO's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
    LONGEST_SIDE,
    SHORTER_SIDE,
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
    describe,
    described_in,
    initialize_from,
    normalization,
    notes_of,
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
    DEFAULT_SAMPLED_BOXES,
    DEFAULT_SMALLEST_ANCHOR,
    DEFAULT_WIDTH,
    Detector,
    DetectorDescription,
    Head,
    build_detector,
)
from inline_attention.tasks.task import Collectives, DataChoice, ModelChoice, Reading, TaskData

SCALE_STEP = 32  # pixels between the shorter sides that multi-scale training chooses from


@dataclass(frozen=True)
class DetectionOptions:
    """What a detector is, and at what size it looks at images; plain data, which travels with its weights.

    Attributes:
        head: As for `DetectorDescription`.
        width: As for `DetectorDescription`.
        sampled_boxes: As for `DetectorDescription`.
        smallest_anchor: As for `DetectorDescription`.
        shorter_side: Pixels that the shorter side of images is resized to.
        longest_side: Pixels that the longer side may have at most.
        multi_scale_from: In training, resize to a shorter side chosen at random from this to `shorter_side`; always to
            `shorter_side`, if None.
        flip: Share of images that are mirrored in training.
    """

    head: Head = "mask_rcnn"
    width: int = DEFAULT_WIDTH
    sampled_boxes: int = DEFAULT_SAMPLED_BOXES
    smallest_anchor: int = DEFAULT_SMALLEST_ANCHOR
    shorter_side: int = SHORTER_SIDE
    longest_side: int = LONGEST_SIDE
    multi_scale_from: int | None = None
    flip: float = 0.5

    @property
    def finds_masks(self) -> bool:
        """Whether objects come with masks."""
        return self.head == "mask_rcnn"

    @property
    def shorter_sides(self) -> tuple[int, ...]:
        """Those that training chooses from."""
        if self.multi_scale_from is None:
            return (self.shorter_side,)
        return tuple(range(self.shorter_side, self.multi_scale_from - 1, -SCALE_STEP))[::-1]

    def at_size(self, shorter_side: int) -> DetectionOptions:
        """The same for images of another size: the longer side may have as many times it as before."""
        longest_side = max(shorter_side, self.longest_side * shorter_side // self.shorter_side)
        return replace(self, shorter_side=shorter_side, longest_side=longest_side)


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

    def __init__(self, data: DataChoice, model: ModelChoice, options: DetectionOptions | None = None):
        """Choose.

        Args:
            data: A folder of COCO's format.
            model: The backbone. Its initial weights are a classifier's, or those of a detector.
            options: What is built around it.
        """
        self._data, self._model, self.options = data, model, options or DetectionOptions()
        self.start: str | None = None
        kinds = KINDS_OF_FIGURES if self.options.finds_masks else KINDS_OF_FIGURES[:1]
        self.metrics: Mapping[str, bool] = {f"{kind}_{figure}": True for kind in kinds for figure in FIGURES}

    @classmethod
    def of_checkpoint(cls, file: Checkpoint, data: DataChoice) -> tuple[Self, list[str]]:
        """The task that a file of weights was trained for, and the names of its classes.

        Raises:
            CheckpointError: If it was trained for another.
        """
        names = [field.name for field in fields(DetectionOptions)]
        options, class_names = described_in(file, cls.name, [*names, "backbone", "backbone_arguments"])
        backbone, arguments = options.pop("backbone"), options.pop("backbone_arguments")
        return cls(data, ModelChoice(backbone, arguments), DetectionOptions(**options)), class_names

    def open(self) -> TaskData:
        """Open and check both splits."""
        choice = self._data
        opened = open_and_check_coco(
            choice.folder or "",
            train_split=choice.train_split,
            validation_split=choice.validation_split,
            masks=self.options.finds_masks,
            num_classes=choice.num_classes,
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
        folder, split = choice.folder or "", choice.validation_split
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
        """The detector around its backbone."""
        model = build_detector(self._description(len(class_names)))
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
        transform = detection_training_transform(options.shorter_sides, options.longest_side, options.flip)
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

    def objective(self, class_names: Sequence[str], rank: int) -> SumOfLosses:
        """The sum of the detector's losses."""
        del class_names, rank
        return SumOfLosses(_learnt)

    def evaluator(self, source: ValidationImages, device: torch.device) -> _Evaluator:
        """Average precision by COCO's protocol."""
        del device
        return _Evaluator(DetectionEvaluator(source.annotations, masks=self.options.finds_masks))

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """All that it takes to build the detector again."""
        backbone = {"backbone": self._model.name, "backbone_arguments": dict(self._model.arguments)}
        return describe(self.name, self._model.name, asdict(self.options) | backbone, class_names)

    def _description(self, num_classes: int) -> DetectorDescription:
        options, backbone = self.options, self._model
        return DetectorDescription(
            options.head,
            backbone.name,
            backbone.arguments,
            num_classes,
            options.smallest_anchor,
            options.width,
            options.sampled_boxes,
        )


def _learnt(target: Target) -> Target:
    """What losses look at."""
    return {name: target[name] for name in ("boxes", "labels", "masks") if name in target}


def load_detector(file: Checkpoint) -> tuple[Detector, DetectionOptions, list[str]]:
    """The detector of a file of weights, its options and the names of its classes, that of label 1 first.

    Raises:
        CheckpointError: If the file is of something else, or does not fit.
    """
    task, class_names = DetectionTask.of_checkpoint(file, DataChoice("coco"))
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
