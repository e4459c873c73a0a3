"""From settings to the parts of a run: model, loaders, optimiser, schedule, average."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data.config import resolve_data_config
from timm.data.mixup import Mixup
from torch import Tensor, nn

from inline_attention.data.augmentation import SeededMixup
from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.checks import open_and_check
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.memory import MemoryLoader, decode_to_memory
from inline_attention.data.sampling import EvaluationBatches, TrainingBatches
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.data.transforms import evaluation_transform, training_transform
from inline_attention.engine.config import ConfigError, Problem, ResolvedValues, TrainConfig
from inline_attention.engine.config.timm_arguments import input_size, model_arguments
from inline_attention.engine.processes import Processes
from inline_attention.models.checkpoints import load_checkpoint, number_of_classes, open_checkpoint


@dataclass(frozen=True)
class Sources:
    """The pictures of a run, checked."""

    train: ImageSource
    validation: ImageSource


def open_sources(config: TrainConfig) -> Sources:
    """Open the data.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    settings = config.data
    opened = open_and_check(
        settings.dataset,
        settings.dir,
        train_split=settings.train_split,
        validation_split=settings.val_split,
        num_classes=config.model.num_classes,
    )
    if opened.problems or opened.train is None or opened.validation is None:
        raise ConfigError([Problem("data", problem) for problem in opened.problems], source="the data")
    if settings.class_map is None:
        return Sources(opened.train, opened.validation)
    try:
        names = [line.strip() for line in Path(settings.class_map).read_text().splitlines() if line.strip()]
        return Sources(opened.train.with_classes(names), opened.validation.with_classes(names))
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise ConfigError([Problem("data.class_map", str(error))]) from error


def build_model(config: TrainConfig, num_classes: int) -> nn.Module:
    """The model on the CPU, from its seed, with the weights it starts from."""
    torch.manual_seed(config.training.seed)
    model = timm.create_model(config.model.name, **model_arguments(config, num_classes))
    if config.model.initial_checkpoint is not None:
        file = open_checkpoint(config.model.initial_checkpoint)
        other_classes = number_of_classes(file.weights, model) != getattr(model, "num_classes", None)
        load_checkpoint(model, file, reinitialize_head=other_classes)
    if config.training.grad_checkpointing:
        model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
    return model


@dataclass(frozen=True)
class Loaders:
    """Batches for training and validation, and what could not be read of either."""

    train: Loader
    validation: Loader
    broken: BrokenImages
    broken_validation: BrokenImages


def build_loaders(resolved: ResolvedValues, sources: Sources, model: nn.Module, processes: Processes) -> Loaders:
    """Loaders of this process's share."""
    config = resolved.config
    limit = BrokenImageLimit(config.limits.broken_image_count, config.limits.broken_image_share)
    broken, broken_validation = (BrokenImages(len(source), limit) for source in (sources.train, sources.validation))
    size = input_size(config, model)
    described = resolve_data_config({"input_size": size, "crop_pct": config.data.crop_pct}, model=model)
    normalize = Normalize(described["mean"], described["std"])
    validation_batch = config.training.validation_batch_size or resolved.batch_size
    share = {"rank": processes.rank, "world_size": processes.world_size}
    settings = config.augmentation
    if config.data.in_memory:
        decoding: dict[str, Any] = {"workers": config.data.workers, "interpolation": described["interpolation"]}
        train_images = decode_to_memory(sources.train, size[1:], broken=broken, **decoding)
        validation_images = decode_to_memory(sources.validation, size[1:], broken=broken_validation, **decoding)
        placing: dict[str, Any] = {"normalize": normalize, "device": processes.device}
        return Loaders(
            MemoryLoader(
                train_images,
                TrainingBatches(len(train_images), resolved.batch_size, seed=config.training.seed, **share),
                seed=config.training.seed,
                crop_padding=settings.crop_padding,
                flip=settings.hflip > 0,
                **placing,
            ),
            MemoryLoader(
                validation_images, EvaluationBatches(len(validation_images), validation_batch, **share), **placing
            ),
            broken,
            broken_validation,
        )
    reading: dict[str, Any] = {
        "normalize": normalize,
        "workers": config.data.workers,
        "device": processes.device,
        "seed": config.training.seed,
    }
    return Loaders(
        ImageLoader(
            sources.train,
            training_transform(size[1:], **_training_options(config, described)),
            TrainingBatches(len(sources.train), resolved.batch_size, seed=config.training.seed, **share),
            broken=broken,
            replace_broken=True,
            **reading,
        ),
        ImageLoader(
            sources.validation,
            evaluation_transform(size[1:], **evaluation_options(described)),
            EvaluationBatches(len(sources.validation), validation_batch, **share),
            broken=broken_validation,
            replace_broken=False,
            **reading,
        ),
        broken,
        broken_validation,
    )


def evaluation_options(described: dict[str, Any]) -> dict[str, Any]:
    """Options of `evaluation_transform` from timm's data settings of a model."""
    return {name: described[name] for name in ("interpolation", "crop_pct", "crop_mode") if name in described}


def _training_options(config: TrainConfig, described: dict[str, Any]) -> dict[str, Any]:
    settings = config.augmentation
    return {
        "mean": described["mean"],
        "std": described["std"],
        "scale": settings.scale,
        "ratio": settings.ratio,
        "hflip": settings.hflip,
        "vflip": settings.vflip,
        "color_jitter": settings.color_jitter,
        "auto_augment": settings.auto_augment,
        "interpolation": described["interpolation"],
        "re_prob": settings.reprob,
        "re_mode": settings.remode,
        "re_count": settings.recount,
    }


class Objective:
    """The loss of a batch: cross entropy, on mixed images where mixing is on."""

    def __init__(self, config: TrainConfig, num_classes: int, rank: int):
        settings = config.augmentation
        self._smoothing = config.loss.smoothing
        self._off_epoch = settings.mixup_off_epoch
        self._mixup = None
        if settings.mixup or settings.cutmix:
            mixup = Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                prob=settings.mixup_prob,
                switch_prob=settings.mixup_switch_prob,
                mode=settings.mixup_mode,
                label_smoothing=self._smoothing,
                num_classes=num_classes,
            )
            self._mixup = SeededMixup(mixup, seed=config.training.seed, rank=rank)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images, and class numbers `[B]` or shares of classes `[B, K]`."""
        if self._mixup is None or (self._off_epoch and batch.epoch >= self._off_epoch):
            return batch.images, batch.targets
        return self._mixup(batch)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy; shares of classes are smoothed already."""
        smoothing = self._smoothing if targets.dim() == 1 else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
