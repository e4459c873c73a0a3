"""Whether settings of detection and segmentation fit together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from inline_attention.engine.config.parsing import ConfigError, Problem
from inline_attention.engine.config.resolving import resolve
from inline_attention.engine.config.schema import DetectionSection, TrainConfig
from inline_attention.engine.config.timm_arguments import model_arguments
from inline_attention.models.described import create_described_model
from inline_attention.tasks.padding import SHORTEST_SIDE
from inline_attention.tasks.pyramid import unfit_reason

DATASETS = {"detection": "coco", "segmentation": "pairs"}
LIBRARIES = {"detection": "faster_coco_eval", "segmentation": "torchmetrics"}  # that measure, at the end of an epoch


def check_dense(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    """All but what every task has; arguments as for `check`."""
    task = config.task.name
    if config.data.dataset != DATASETS[task]:
        message = f"expected {DATASETS[task]}, the kind of data for {task}, got {config.data.dataset!r}"
        yield Problem("data.dataset", f"{message}; set it so")
    if config.data.dir is None:
        yield Problem("data.dir", "expected the folder of the data, got null; add --data-dir DIR")
    if importlib.util.find_spec(LIBRARIES[task]) is None:
        message = f"{task} is measured by {LIBRARIES[task]}, which is not installed"
        yield Problem("task.name", f"{message}; pip install 'inline-attention[{task}]'")
    if task == "detection":
        yield from _check_detection(config)
    else:
        yield from _check_segmentation(config, world_size)
    yield from _check_backbone(config)


def _check_detection(config: TrainConfig) -> Iterator[Problem]:
    settings = config.detection
    if settings.head == "retinanet" and settings.sampled_boxes != DetectionSection().sampled_boxes:
        message = f"has no effect on retinanet, which takes all boxes, got {settings.sampled_boxes}"
        yield Problem("detection.sampled_boxes", f"{message}; set it to {DetectionSection().sampled_boxes}")
    for name in ("multi_scale_from", "shorter_side"):
        limit = settings.shorter_side if name == "multi_scale_from" else settings.longest_side
        value = getattr(settings, name)
        if value is not None and value > limit:
            yield Problem(f"detection.{name}", f"expected at most {limit}, the size it grows to, got {value}")


def _check_segmentation(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    settings = config.segmentation
    low, high = settings.scale
    if low > high:
        yield Problem("segmentation.scale", f"expected the smaller number first, got [{low:g}, {high:g}]")
    if settings.window_step is not None and settings.window_step > settings.crop:
        message = f"expected at most the {settings.crop} pixels of a window, got {settings.window_step}"
        yield Problem("segmentation.window_step", f"{message}; pixels between windows would be missed")
    try:
        batch = resolve(config, world_size).batch_size
    except ConfigError:
        return  # reported elsewhere
    if settings.head == "upernet" and batch < 2:
        message = "expected at least 2: upernet normalises means over whole images, of which one has no spread"
        yield Problem("training.batch_size", f"{message}; use 2, or segmentation.head=semantic_fpn")


def _check_backbone(config: TrainConfig) -> Iterator[Problem]:
    name = config.model.name
    if (reason := unfit_reason(name)) is not None:
        yield Problem("model.name", reason)
        return
    arguments = {key: value for key, value in model_arguments(config).items() if key != "num_classes"}
    try:
        with torch.no_grad(), torch.device("meta"):
            model = create_described_model(name, arguments, features_only=True)
            model(torch.empty(1, 3, 2 * SHORTEST_SIDE, 2 * SHORTEST_SIDE))
    except Exception as error:
        yield Problem("model.arguments", f"{name} cannot be built with these: {error}")
