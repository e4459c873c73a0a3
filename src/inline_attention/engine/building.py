"""From settings to the task of a run, with its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inline_attention.engine.checkpoint_format import find_weights
from inline_attention.engine.config import ConfigError, Problem, TrainConfig, model_arguments
from inline_attention.models.described import describable
from inline_attention.tasks.classification.task import ClassificationTask, Mixing, Preparation
from inline_attention.tasks.detection.task import DetectionOptions, DetectionTask
from inline_attention.tasks.segmentation.task import SegmentationOptions, SegmentationTask
from inline_attention.tasks.task import DataChoice, ModelChoice, Task, TaskData, UnusableDataError


def open_sources(config: TrainConfig) -> TaskData:
    """Open the data.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    try:
        return build_task(config).open()
    except UnusableDataError as error:
        problems = [Problem(error.setting, problem) for problem in error.problems]
        raise ConfigError(problems, source="the data", advice=error.advice) from error


def build_task(config: TrainConfig) -> Task:
    """The task that settings describe."""
    settings = config.data
    data = DataChoice(
        settings.dataset,
        settings.dir,
        settings.train_split,
        settings.val_split,
        settings.class_map,
        config.model.num_classes,
        settings.repair,
        settings.reduce_zero_label,
        settings.image_folder,
        settings.map_folder,
        settings.allow_outside_files,
    )
    start = config.model.initial_checkpoint
    arguments = model_arguments(config)
    described = describable(config.model.name, arguments)
    model = ModelChoice(
        config.model.name,
        described,
        None if start is None else str(find_weights(Path(start))),
        config.training.grad_checkpointing,
        own_arguments={name: value for name, value in arguments.items() if name not in described},
    )
    if config.task.name == "detection":
        return DetectionTask(data, _backbone(model), _detection_options(config))
    if config.task.name == "segmentation":
        return SegmentationTask(data, _backbone(model), _segmentation_options(config))
    return ClassificationTask(data, model, _preparation(config), _mixing(config))


def _backbone(model: ModelChoice) -> ModelChoice:
    """Classes are those of the head around it."""
    every = {**model.arguments, **model.own_arguments}
    arguments = {name: value for name, value in every.items() if name != "num_classes"}
    return ModelChoice(model.name, arguments, model.initial_checkpoint, model.grad_checkpointing)


def _detection_options(config: TrainConfig) -> DetectionOptions:
    settings = config.detection
    return DetectionOptions(
        settings.head,
        settings.width,
        settings.sampled_boxes,
        settings.smallest_anchor,
        settings.shorter_side,
        settings.longest_side,
        settings.multi_scale_from,
        config.augmentation.hflip,
    )


def _segmentation_options(config: TrainConfig) -> SegmentationOptions:
    settings = config.segmentation
    return SegmentationOptions(
        settings.head,
        settings.width,
        settings.crop,
        settings.scale,
        settings.inference,
        settings.window_step,
        config.augmentation.hflip,
    )


def _preparation(config: TrainConfig) -> Preparation:
    settings, size = config.augmentation, config.model.img_size
    augmentation: dict[str, Any] = {
        "hflip": settings.hflip,
        "vflip": settings.vflip,
        "color_jitter": settings.color_jitter,
        "auto_augment": settings.auto_augment,
        "re_prob": settings.reprob,
        "re_mode": settings.remode,
        "re_count": settings.recount,
    }
    return Preparation(
        image_size=(size, size) if isinstance(size, int) else size,
        channels=config.model.in_chans,
        crop_pct=config.data.crop_pct,
        in_memory=config.data.in_memory,
        crop_padding=settings.crop_padding,
        crop={"scale": settings.scale, "ratio": settings.ratio},
        augmentation=augmentation,
    )


def _mixing(config: TrainConfig) -> Mixing:
    settings = config.augmentation
    return Mixing(
        smoothing=config.loss.smoothing,
        seed=config.training.seed,
        off_epoch=settings.mixup_off_epoch,
        options={
            "mixup_alpha": settings.mixup,
            "cutmix_alpha": settings.cutmix,
            "prob": settings.mixup_prob,
            "switch_prob": settings.mixup_switch_prob,
            "mode": settings.mixup_mode,
        },
    )
