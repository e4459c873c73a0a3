"""The classification task: data, model, loss and metrics for the training engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.config import resolve_data_config
from timm.data.mixup import Mixup
from torch import Tensor, nn

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.datasets import open_and_check
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.on_device import (
    TIMM_OPTIONS,
    BatchAugmentation,
    MemoryImages,
    MemoryLoader,
    decode_to_memory,
    training_augmentation,
)
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import SeededMixup, evaluation_options, evaluation_transform, training_transform
from inline_attention.models.checkpoints import load_checkpoint, number_of_classes
from inline_attention.models.described import create_described_model, describable, note_preparation, preparation_of
from inline_attention.support.files import read_bounded
from inline_attention.support.settings import ConfigError, Problem, order_problem, setting
from inline_attention.tasks.task import DENSE, Collectives, DataSection, Metrics, ModelSection, Reading, Task, TaskData


@dataclass(frozen=True)
class AugmentationSection:
    """Augmentation of training images, seeded by training.seed, the epoch and the image."""

    crop: Literal["resized", "padded"] = setting(
        "resized", "resized: random resized crop (scale, ratio). padded: pad by crop_padding, then crop."
    )
    scale: tuple[float, float] = setting((0.08, 1.0), "Limits of the area share of a resized crop.", above=0, at_most=1)
    ratio: tuple[float, float] = setting((0.75, 4 / 3), "Limits of the aspect ratio of a resized crop.", above=0)
    crop_padding: int = setting(4, "Pixels added on each side before a padded crop; 0: no crop.", at_least=0)
    hflip: float = setting(
        0.5, "Probability of a horizontal flip.", tasks=("classification", *DENSE), at_least=0, at_most=1
    )
    vflip: float = setting(0.0, "Probability of a vertical flip.", at_least=0, at_most=1)
    auto_augment: str | None = setting(
        "rand-m9-mstd0.5-inc1", "RandAugment, AugMix or AutoAugment in timm's notation; null: none."
    )
    color_jitter: float = setting(0.4, "Strength of color jitter; unused with auto_augment, as in timm.", at_least=0)
    reprob: float = setting(0.25, "Probability of random erasing.", at_least=0, at_most=1)
    remode: Literal["pixel", "rand", "const"] = setting(
        "pixel", "Fill of erased rectangles: noise, one random color, or the mean."
    )
    recount: int = setting(1, "Largest number of erased rectangles.", at_least=1)
    mixup: float = setting(0.8, "Mixup alpha; 0: off.", at_least=0)
    cutmix: float = setting(1.0, "CutMix alpha; 0: off.", at_least=0)
    mixup_prob: float = setting(1.0, "Probability of mixing a batch, if mixup or cutmix is on.", at_least=0, at_most=1)
    mixup_switch_prob: float = setting(0.5, "Probability of CutMix if both are on.", at_least=0, at_most=1)
    mixup_mode: Literal["batch", "pair", "elem"] = setting("batch", "Draw one mix per batch, pair or image.")
    mixup_off_epoch: int = setting(0, "Epoch from which images are not mixed; 0: never.", at_least=0)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield limits in the wrong order, and an unknown policy."""
        for name in ("scale", "ratio"):
            yield from order_problem(name, getattr(self, name))
        if self.auto_augment is not None and not is_known_policy(self.auto_augment):
            message = "expected timm's description of a policy, such as rand-m9-mstd0.5-inc1"
            yield "auto_augment", f"{message}, got {self.auto_augment!r}; null turns it off"


def is_known_policy(description: str) -> bool:
    """True if timm can parse the description of an augmentation policy."""
    # The same choice by prefix that timm's create_transform makes; its parsers assert.
    parsers = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform, "": auto_augment_transform}
    parse = next(parser for prefix, parser in parsers.items() if description.startswith(prefix))
    try:
        parse(description, dict(TIMM_OPTIONS))
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class LossSection:
    """The loss of classifiers, cross entropy. Detectors and segmenters have the losses of their heads."""

    smoothing: float = setting(0.1, "Label smoothing.", at_least=0, below=1)


class Objective:
    """Cross entropy with label smoothing, on mixed images until `off_epoch` (0: always) if there is a `mixup`."""

    def __init__(self, *, smoothing: float = 0.0, mixup: SeededMixup | None = None, off_epoch: int = 0):
        self._smoothing, self._mixup, self._off_epoch = smoothing, mixup, off_epoch

    def __call__(self, runnable: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        images, targets = self.mixed(batch)
        return self.loss(runnable(images), targets)

    def mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return images `[B, C, H, W]` and class indices `[B]`, or shares `[B, K]` if the images are mixed."""
        if self._mixup is None or (self._off_epoch and batch.epoch >= self._off_epoch):
            return batch.images, batch.targets
        return self._mixup(batch)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of class indices `[B]`, or of class shares `[B, K]`, which are smoothed."""
        smoothing = self._smoothing if targets.dim() == 1 else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


@dataclass(frozen=True)
class ClassificationMetrics(Metrics):
    """Accuracy in percent, mean cross entropy, and number of samples; `top5` is of all classes if they are fewer."""

    top1: float
    top5: float
    loss: float
    count: int

    def __str__(self) -> str:
        return f"top-1 {self.top1:.3f} %, top-5 {self.top5:.3f} %, loss {self.loss:.4f} of {self.count} images"


class ClassificationEvaluator:
    """Counts right answers; see `Evaluator`."""

    def __init__(self, device: torch.device):
        # Samples right at once and right among five, sum of losses, number of samples.
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Classify a batch."""
        logits, targets = model(batch.images).float(), batch.targets
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        counts = torch.stack([hits[:, 0].sum(), hits.any(1).sum(), loss, loss.new_tensor(len(targets))])
        self._totals += counts.to(torch.float64)

    def compute(self, collectives: Collectives) -> ClassificationMetrics:
        """Compute the metrics over all ranks."""
        top1, top5, loss, count = collectives.sum(self._totals.clone()).tolist()
        if count == 0:
            raise ValueError("there is no sample to evaluate on; check the data's validation split")
        return ClassificationMetrics(100 * top1 / count, 100 * top5 / count, loss / count, int(count))


class ClassificationTask(Task):
    """Image classification."""

    name = "classification"
    metrics: Mapping[str, bool] = {"top1": True, "top5": True, "loss": False}

    def __init__(
        self,
        data: DataSection,
        model: ModelSection,
        augmentation: AugmentationSection | None = None,
        *,
        smoothing: float = 0.0,
        seed: int = 0,
    ):
        """Choose data and model; `seed` is that of mixup and CutMix."""
        self._data, self._model, self._augmentation = data, model, augmentation or AugmentationSection()
        self._smoothing, self._seed = smoothing, seed
        self._preparation: dict[str, Any] = {}

    def open(self) -> TaskData:
        """Open and check both splits."""
        settings = self._data
        opened = open_and_check(
            settings.dataset,
            settings.dir,
            train_split=settings.train_split,
            validation_split=settings.val_split,
            num_classes=self._model.num_classes,
        )
        if opened.problems or opened.train is None or opened.validation is None:
            raise ConfigError([Problem("data", problem) for problem in opened.problems], "the data")
        if settings.class_map is None:
            return TaskData(opened.train, opened.validation)
        try:
            lines = read_bounded(settings.class_map, 2**24).decode().splitlines()
            names = [line.strip() for line in lines if line.strip()]
            return TaskData(opened.train.with_classes(names), opened.validation.with_classes(names))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem("data.class_map", str(error))], "the data") from error

    def build_model(self, class_names: Sequence[str]) -> nn.Module:
        """Build the model, with a new head if the initial checkpoint has another number of classes."""
        arguments, described = self._model.model_arguments(len(class_names)), self._described(class_names)
        # Arguments that a file may not hold are the user's own.
        own = {name: value for name, value in arguments.items() if name not in described}
        file, conversion, later_conversion = self._model.initial_weights()
        model = create_described_model(self._model.name, described, conversion, **own)
        if file is not None:
            other_classes = (number_of_classes(file.weights, model) or 0) != getattr(model, "num_classes", 0)
            load_checkpoint(model, file, reinitialize_head=other_classes)
            if file.metadata.get("model") == self._model.name:  # images as the weights know them
                self._preparation = preparation_of(file)
                note_preparation(model, self._preparation)
            self.start = f"all of {file.path}" + (" but the head, which is of other classes" if other_classes else "")
        if later_conversion is not None:
            later_conversion.apply(model)
        return model

    def training_loader(
        self, source: ImageSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[Batch]:
        """Return augmented images, from files or from memory."""
        described, settings = self.image_settings(model), self._augmentation
        size, statistics = described["input_size"][1:], {"mean": described["mean"], "std": described["std"]}
        options: dict[str, Any] = {
            "hflip": settings.hflip,
            "vflip": settings.vflip,
            "color_jitter": settings.color_jitter,
            "auto_augment": settings.auto_augment,
            "re_prob": settings.reprob,
            "re_mode": settings.remode,
            "re_count": settings.recount,
            **statistics,
        }
        if self._data.in_memory:
            images = _decoded(source, described, reading, broken)
            augmentation = training_augmentation(size, crop_padding=settings.crop_padding, **options)
            batches = reading.training_batches(len(images))
            return MemoryLoader(images, batches, augmentation=augmentation, device=reading.device, seed=reading.seed)
        options |= {"scale": settings.scale, "ratio": settings.ratio, "interpolation": described["interpolation"]}
        transform, batches = training_transform(size, **options), reading.training_batches(len(source))
        loading = {"normalize": Normalize(**statistics), "broken": broken, **reading.loading}
        return ImageLoader(source, transform, batches, replace_broken=True, **loading)

    def validation_loader(
        self, source: ImageSource, model: nn.Module, reading: Reading, broken: BrokenImages
    ) -> Loader[Batch]:
        """Return resized and cropped images, from files or from memory."""
        described = self.image_settings(model)
        normalize = Normalize(described["mean"], described["std"])
        if self._data.in_memory:
            images = _decoded(source, described, reading, broken)
            batches = reading.evaluation_batches(len(images))
            return MemoryLoader(images, batches, augmentation=BatchAugmentation([], normalize), device=reading.device)
        transform = evaluation_transform(described["input_size"][1:], **evaluation_options(described))
        batches, loading = reading.evaluation_batches(len(source)), {"broken": broken, **reading.loading}
        return ImageLoader(source, transform, batches, normalize=normalize, replace_broken=False, **loading)

    def objective(self, class_names: Sequence[str], rank: int) -> Objective:
        """Return cross entropy."""
        settings, mixup = self._augmentation, None
        if settings.mixup or settings.cutmix:
            mixup = Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                prob=settings.mixup_prob,
                switch_prob=settings.mixup_switch_prob,
                mode=settings.mixup_mode,
                label_smoothing=self._smoothing,
                num_classes=self._model.num_classes or len(class_names),
            )
            mixup = SeededMixup(mixup, seed=self._seed, rank=rank)
        return Objective(smoothing=self._smoothing, mixup=mixup, off_epoch=settings.mixup_off_epoch)

    def evaluator(self, source: ImageSource, device: torch.device) -> ClassificationEvaluator:
        """Return an evaluator of accuracy and loss."""
        del source
        return ClassificationEvaluator(device)

    def metadata(self, class_names: Sequence[str]) -> dict[str, str]:
        """Return the model's name and arguments, class names, and the crop of evaluation."""
        notes = {
            "model": self._model.name,
            "model_arguments": json.dumps(self._described(class_names)),
            "class_names": json.dumps(list(class_names)),
            **{name: json.dumps(value) for name, value in self._preparation.items()},
        }
        if self._data.crop_pct is not None:
            notes["crop_pct"] = json.dumps(self._data.crop_pct)
        return notes

    def image_settings(self, model: nn.Module) -> dict[str, Any]:
        """Return timm's data settings: size, crop, interpolation, mean and standard deviation."""
        own = {"input_size": self._model.input_size(model), "crop_pct": self._data.crop_pct}
        return resolve_data_config(own, model=model)

    def _described(self, class_names: Sequence[str]) -> dict[str, Any]:
        return describable(self._model.name, self._model.model_arguments(len(class_names)))


def _decoded(source: ImageSource, described: Mapping[str, Any], reading: Reading, broken: BrokenImages) -> MemoryImages:
    size, interpolation = described["input_size"][1:], described["interpolation"]
    return decode_to_memory(source, size, broken=broken, workers=reading.workers, interpolation=interpolation)
