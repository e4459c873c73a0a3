"""The classification task: data, model, loss and metrics for the training engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.data.config import resolve_data_config
from timm.data.mixup import Mixup
from torch import Tensor, nn

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.checks import open_and_check
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.memory import MemoryImages, MemoryLoader, decode_to_memory
from inline_attention.data.on_device import training_augmentation
from inline_attention.data.sampling import TrainingBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import SeededMixup, evaluation_options, evaluation_transform, training_transform
from inline_attention.models.checkpoints import load_checkpoint, number_of_classes, open_checkpoint
from inline_attention.models.described import create_described_model
from inline_attention.support.files import read_bounded
from inline_attention.tasks.classification.evaluation import ClassificationEvaluator
from inline_attention.tasks.task import DataChoice, ModelChoice, Reading, TaskData, UnusableDataError


class Objective:
    """The loss of a batch: cross entropy, on mixed images where mixing is on."""

    def __init__(self, *, smoothing: float = 0.0, mixup: SeededMixup | None = None, off_epoch: int = 0):
        """Choose.

        Args:
            smoothing: Of labels; mixing has its own.
            mixup: How images are mixed; not at all, if None.
            off_epoch: Epoch from which nothing is mixed; 0 for never.
        """
        self._smoothing, self._mixup, self._off_epoch = smoothing, mixup, off_epoch

    def __call__(self, runnable: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""
        images, targets = self.inputs(batch)
        return self.loss(runnable(images), targets)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images, and class numbers `[B]` or shares of classes `[B, K]`."""
        if self._mixup is None or (self._off_epoch and batch.epoch >= self._off_epoch):
            return batch.images, batch.targets
        return self._mixup(batch)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy; shares of classes are smoothed already."""
        smoothing = self._smoothing if targets.dim() == 1 else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def mixing(*, num_classes: int, smoothing: float, seed: int, rank: int, **options: Any) -> SeededMixup | None:
    """How images are mixed; None if they are not.

    Args:
        num_classes: K.
        smoothing: Of labels.
        seed: Of the random numbers.
        rank: This process.
        options: As for timm's `Mixup`.
    """
    if not (options["mixup_alpha"] or options["cutmix_alpha"]):
        return None
    mixup = Mixup(label_smoothing=smoothing, num_classes=num_classes, **options)
    return SeededMixup(mixup, seed=seed, rank=rank)


@dataclass(frozen=True)
class Preparation:
    """What is done to images.

    Attributes:
        image_size: (height, width) in pixels; the model's own, if None.
        channels: Of images.
        crop_pct: Share of the resized image's side that evaluation keeps; the model's own, if None.
        in_memory: Keep images decoded on the device, and augment batches there.
        crop_padding: Pixels added around images before they are cropped, of those in memory.
        crop: Options of `training_transform` for images from files: scale and ratio.
        augmentation: Options that `training_transform` and `training_augmentation` both take.
    """

    image_size: tuple[int, int] | None = None
    channels: int = 3
    crop_pct: float | None = None
    in_memory: bool = False
    crop_padding: int = 0
    crop: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Mapping[str, Any] = field(default_factory=dict)

    def described(self, model: nn.Module) -> dict[str, Any]:
        """timm's data settings: size, crop, interpolation, mean and deviation."""
        size = self.image_size or getattr(model, "pretrained_cfg")["input_size"][1:]  # noqa: B009 - timm's have one
        return resolve_data_config({"input_size": (self.channels, *size), "crop_pct": self.crop_pct}, model=model)


@dataclass(frozen=True)
class Mixing:
    """How images are mixed, and labels smoothed.

    Attributes:
        smoothing: Of labels.
        seed: Of the mixing.
        off_epoch: Epoch from which nothing is mixed; 0 for never.
        options: Of timm's `Mixup`.
    """

    smoothing: float = 0.0
    seed: int = 0
    off_epoch: int = 0
    options: Mapping[str, Any] = field(default_factory=lambda: {"mixup_alpha": 0.0, "cutmix_alpha": 0.0})


class ClassificationTask:
    """Naming what a picture shows; see `Task` for the methods."""

    name = "classification"
    metrics: Mapping[str, bool] = {"top1": True, "top5": True, "loss": False}

    def __init__(
        self,
        data: DataChoice,
        model: ModelChoice,
        preparation: Preparation | None = None,
        mixing: Mixing | None = None,
    ):
        """Choose.

        Args:
            data: As for `open_dataset`.
            model: Of timm's registry.
            preparation: What is done to images.
            mixing: How they are mixed in training.
        """
        self._data, self._model = data, model
        self._preparation, self._mixing = preparation or Preparation(), mixing or Mixing()
        self.start: str | None = None

    def open(self) -> TaskData:
        """Open and check."""
        choice = self._data
        opened = open_and_check(
            choice.dataset,
            choice.folder,
            train_split=choice.train_split,
            validation_split=choice.validation_split,
            num_classes=choice.num_classes,
        )
        if opened.problems or opened.train is None or opened.validation is None:
            raise UnusableDataError(opened.problems)
        if choice.class_file is None:
            return TaskData(opened.train, opened.validation)
        try:
            lines = read_bounded(choice.class_file, 2**24).decode().splitlines()
            names = [line.strip() for line in lines if line.strip()]
            return TaskData(opened.train.with_classes(names), opened.validation.with_classes(names))
        except (OSError, ValueError) as error:
            raise UnusableDataError([str(error)], "data.class_map") from error

    def build_model(self, class_names: Sequence[str]) -> nn.Module:
        """timm's, with a new head if the file's is of another number of classes."""
        choice = self._model
        model = create_described_model(choice.name, self._model_arguments(class_names), **choice.own_arguments)
        if choice.initial_checkpoint is not None:
            file = open_checkpoint(choice.initial_checkpoint)
            other_classes = number_of_classes(file.weights, model) != getattr(model, "num_classes", None)
            load_checkpoint(model, file, reinitialize_head=other_classes)
            self.start = f"all of {file.path}" + (" but the head, which is of other classes" if other_classes else "")
        if choice.grad_checkpointing:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
        return model

    def training_loader(
        self, source: ImageSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[Batch]:
        """From files or from memory."""
        described = self._preparation.described(model)
        size, statistics = described["input_size"][1:], {"mean": described["mean"], "std": described["std"]}
        options = dict(self._preparation.augmentation)
        if self._preparation.in_memory:
            images = self._decoded(source, described, reading, broken)
            return MemoryLoader(
                images,
                TrainingBatches(len(images), reading.batch_size, seed=reading.seed, **reading.share),
                augmentation=training_augmentation(
                    size, crop_padding=self._preparation.crop_padding, **options, **statistics
                ),
                device=reading.device,
                seed=reading.seed,
            )
        transform = training_transform(
            size, interpolation=described["interpolation"], **self._preparation.crop, **options, **statistics
        )
        return ImageLoader(
            source,
            transform,
            TrainingBatches(len(source), reading.batch_size, seed=reading.seed, **reading.share),
            normalize=Normalize(**statistics),
            broken=broken,
            replace_broken=True,
            **reading.loading,
        )

    def validation_loader(
        self, source: ImageSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[Batch]:
        """From files or from memory."""
        described = self._preparation.described(model)
        size, statistics = described["input_size"][1:], {"mean": described["mean"], "std": described["std"]}
        if self._preparation.in_memory:
            images = self._decoded(source, described, reading, broken)
            return MemoryLoader(
                images,
                reading.evaluation_batches(len(images)),
                augmentation=training_augmentation(size, **statistics),
                device=reading.device,
            )
        return ImageLoader(
            source,
            evaluation_transform(size, **evaluation_options(described)),
            reading.evaluation_batches(len(source)),
            normalize=Normalize(**statistics),
            broken=broken,
            replace_broken=False,
            **reading.loading,
        )

    def objective(self, class_names: Sequence[str], rank: int) -> Objective:
        """Cross entropy."""
        choice = self._mixing
        mixup = mixing(
            num_classes=self._num_classes(class_names),
            smoothing=choice.smoothing,
            seed=choice.seed,
            rank=rank,
            **choice.options,
        )
        return Objective(smoothing=choice.smoothing, mixup=mixup, off_epoch=choice.off_epoch)

    def evaluator(self, source: ImageSource, device: torch.device) -> ClassificationEvaluator:
        """Counts right answers."""
        del source
        return ClassificationEvaluator(device)

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Name and arguments of the model, names of classes, and the crop that was evaluated with."""
        notes = {
            "model": self._model.name,
            "model_arguments": json.dumps(self._model_arguments(class_names)),
            "class_names": json.dumps(list(class_names)),
        }
        if self._preparation.crop_pct is not None:
            notes["crop_pct"] = json.dumps(self._preparation.crop_pct)
        return notes

    def _num_classes(self, class_names: Sequence[str]) -> int:
        return self._data.num_classes or len(class_names)

    def _model_arguments(self, class_names: Sequence[str]) -> dict[str, Any]:
        return {"num_classes": self._num_classes(class_names), **self._model.arguments}

    def _decoded(
        self, source: ImageSource, described: Mapping[str, Any], reading: Reading, broken: BrokenImages
    ) -> MemoryImages:
        return decode_to_memory(
            source,
            described["input_size"][1:],
            broken=broken,
            workers=reading.workers,
            interpolation=described["interpolation"],
        )
