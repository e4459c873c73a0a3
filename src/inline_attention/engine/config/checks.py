"""Check that settings fit together, as far as that is known before any file is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

from inline_attention.data.on_device import TIMM_OPTIONS, unsupported_policy
from inline_attention.engine.config.reading import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.resolving import (
    ResolvedValues,
    input_size,
    model_arguments,
    optimizer_arguments,
    resolve,
)
from inline_attention.engine.config.schema import SETTINGS, TrainConfig
from inline_attention.models.described import create_described_model
from inline_attention.models.registry import create_model
from inline_attention.support.settings import shown
from inline_attention.support.text import did_you_mean
from inline_attention.tasks.classification.task import AugmentationSection, ClassificationTask
from inline_attention.tasks.detection.evaluation import metric_names
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.pyramid import SHORTEST_SIDE, unfit_reason
from inline_attention.tasks.segmentation.task import SegmentationTask

DENSE_DATASETS = {"detection": "coco", "segmentation": "pairs"}
METRIC_LIBRARIES = {"detection": "faster_coco_eval", "segmentation": "torchmetrics"}
DATASETS_WITHOUT_FOLDER = ("digits", "hfds/", "wds/")
KNOWN_DATASETS = ("folder", "digits", "cifar10", "hfds/NAME", "wds/PATTERN")
METRICS = {
    "classification": tuple(ClassificationTask.metrics),
    "detection": tuple(metric_names(masks=True)),
    "segmentation": tuple(SegmentationTask.metrics),
}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
# Model arguments that are settings of their own.
ARGUMENT_SETTINGS = {
    "num_classes": "model.num_classes",
    "img_size": "model.img_size",
    "in_chans": "model.in_chans",
    "drop_path_rate": "model.drop_path",
}


def check(config: TrainConfig, *, world_size: int = 1) -> list[Problem]:
    """Return all problems of the settings for a number of devices, without reading any file.

    The model is built and run on the meta device, where nothing is computed.
    """
    try:
        from_mapping(to_mapping(config))
    except ConfigError as error:
        return list(error.problems)  # wrong types would only cause further complaints
    problems = [*_check_each(config), *_check_training(config), *_check_optimizer(config)]
    try:
        problems += _check_batches(resolve(config, world_size))
    except ConfigError as error:
        problems += error.problems
    match config.task.name:
        case "classification":
            problems += [*_check_classification_data(config), *_check_classifier(config)]
        case "detection":
            problems += [*_check_dense(config), *_check_detection(config.detection)]
        case "segmentation":
            problems += [*_check_dense(config), *_check_segmentation(config)]
    return problems


def _check_each(config: TrainConfig) -> Iterator[Problem]:
    """Refuse empty text and NULs, folder names that safetensors cannot open, and changes without effect."""
    defaults, task = to_mapping(TrainConfig()), config.task.name
    for section, values in to_mapping(config).items():
        for name, value in values.items():
            path = f"{section}.{name}"
            tasks = SETTINGS[path].tasks
            if tasks and task not in tasks and value != defaults[section][name]:
                message = f"has no effect on {task}, only on {' and '.join(tasks)}, got {shown(value)}"
                yield Problem(path, f"{message}; leave it out")
            if value == "" or (isinstance(value, str) and "\0" in value):
                yield Problem(path, f"expected text without NUL characters, got {shown(value)}")
            elif path in ("run.output", "run.experiment") and value is not None and not _is_utf8(value):
                yield Problem(path, f"expected a name in UTF-8, in which weights can be read back, got {shown(value)}")


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_training(config: TrainConfig) -> Iterator[Problem]:
    """Check what is the same for all tasks."""
    training, model, milestones = config.training, config.model, config.schedule.decay_milestones
    if training.compile_mode != "default" and not training.compile:
        message = f"has no effect without training.compile, got {training.compile_mode}"
        yield Problem("training.compile_mode", f"{message}; leave it out, or set training.compile=true")
    if config.schedule.name == "multistep" and (not milestones or list(milestones) != sorted(set(milestones))):
        message = f"expected the epochs of the steps in ascending order, such as [8, 11], got {shown(milestones)}"
        yield Problem("schedule.decay_milestones", f"{message}; set them, or another schedule.name")
    metric, known = config.checkpoints.metric, METRICS[config.task.name]
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known) or f"; {', '.join(known)} are there"
        yield Problem("checkpoints.metric", f"expected a figure of {config.task.name}, got {metric!r}{hint}")
    elif metric is not None and metric.startswith("mask_") and config.detection.head == "retinanet":
        yield Problem("checkpoints.metric", f"expected a figure of boxes, as retinanet finds no masks, got {metric!r}")
    if model.require_checkpoint and model.initial_checkpoint is None:
        message = "expected a file of trained weights, from which this recipe starts, got null"
        yield Problem("model.initial_checkpoint", f"{message}; add --initial-checkpoint FILE")
    for name, path in ARGUMENT_SETTINGS.items():
        if name in model.arguments:
            yield Problem(f"model.arguments.{name}", f"expected it as {path}; set {path}={model.arguments[name]}")


def _check_optimizer(config: TrainConfig) -> Iterator[Problem]:
    name = config.optimizer.name
    known = [str(optimizer) for optimizer in list_optimizers()]
    if name.lower() not in known:
        hint = did_you_mean(name.lower(), known) or "; adamw, lamb, lion and sgd are some"
        yield Problem("optimizer.name", f"expected an optimizer of timm, got {name!r}{hint}")
        return
    # On one device and without accumulation: this only checks that it can be created.
    training = replace(config.training, total_batch_size=None)
    arguments = optimizer_arguments(resolve(replace(config, training=training)))
    arguments.pop("layer_decay", None)  # needs a model
    try:
        create_optimizer_v2([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:
        yield Problem("optimizer.name", f"{name} cannot be created: {error}")


def _check_batches(resolved: ResolvedValues) -> Iterator[Problem]:
    config, batch = resolved.config, resolved.batch_size
    if config.training.compile_mode in CUDA_GRAPH_MODES and resolved.grad_accum_steps > 1:
        # The next forward pass would overwrite the gradients of the last one.
        message = f"expected default where gradients are accumulated, got {config.training.compile_mode}"
        yield Problem("training.compile_mode", f"{message}; set it so, or training.grad_accum_steps=1")
    is_mixed = config.augmentation.mixup or config.augmentation.cutmix
    if config.task.name == "classification" and is_mixed and batch % 2:
        message = f"expected an even number, since mixup pairs the images of a batch, got {batch}"
        yield Problem("training.batch_size", f"{message}; try {batch + 1}, or set augmentation.mixup and cutmix to 0")
    if config.task.name == "segmentation" and config.segmentation.head == "upernet" and batch < 2:
        message = "expected at least 2: the batch norm of upernet needs two images"
        yield Problem("training.batch_size", f"{message}; use 2, or segmentation.head=semantic_fpn")


def _check_classification_data(config: TrainConfig) -> Iterator[Problem]:
    dataset, settings = config.data.dataset, config.augmentation
    if dataset not in KNOWN_DATASETS[:3] and not dataset.startswith(("hfds/", "wds/")):
        hint = did_you_mean(dataset, KNOWN_DATASETS) or "; for a folder of your own use --dataset folder --data-dir DIR"
        yield Problem("data.dataset", f"expected {', '.join(KNOWN_DATASETS)}, got {dataset!r}{hint}")
    elif not dataset.startswith(DATASETS_WITHOUT_FOLDER):
        yield from _check_folder(config)
    for name in ("scale", "ratio"):
        yield from _check_order(f"augmentation.{name}", getattr(settings, name))
    policy = settings.auto_augment
    is_known = policy is None or _is_known_policy(policy)
    if not is_known:
        message = f"expected timm's description of a policy, such as rand-m9-mstd0.5-inc1, got {policy!r}"
        yield Problem("augmentation.auto_augment", f"{message}; null turns it off")
    if not config.data.in_memory:
        if settings.crop == "padded":
            message = "expected resized, got padded, which only data kept in memory offers"
            yield Problem("augmentation.crop", f"{message}; set it so, or data.in_memory=true")
        return
    needed = {"data.crop_pct": (config.data.crop_pct, 1.0), "augmentation.crop": (settings.crop, "padded")}
    for path, (value, expected) in needed.items():
        if value != expected:
            message = f"expected {expected} with data.in_memory, got {shown(value)}"
            yield Problem(path, f"{message}; set it so, or data.in_memory=false")
    for name in ("scale", "ratio"):
        if getattr(settings, name) != getattr(AugmentationSection(), name):
            message = f"has no effect with data.in_memory, where crops are padded, got {shown(getattr(settings, name))}"
            yield Problem(f"augmentation.{name}", f"{message}; leave it out, or set data.in_memory=false")
    if policy is not None and is_known and (reason := unsupported_policy(policy)) is not None:
        message = f"expected what data.in_memory can do; {policy} {reason}, or data.in_memory=false"
        yield Problem("augmentation.auto_augment", message)


def _is_known_policy(description: str) -> bool:
    # The same choice by prefix that timm's create_transform makes; its parsers assert.
    parsers = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform, "": auto_augment_transform}
    parse = next(parser for prefix, parser in parsers.items() if description.startswith(prefix))
    try:
        parse(description, dict(TIMM_OPTIONS))
    except Exception:
        return False
    return True


def _check_folder(config: TrainConfig) -> Iterator[Problem]:
    if config.data.dir is None:
        yield Problem("data.dir", "expected the folder of the data, got null; add --data-dir DIR")


def _check_order(path: str, limits: tuple[float, float]) -> Iterator[Problem]:
    low, high = limits
    if low > high:
        yield Problem(path, f"expected the smaller number first, got [{low:g}, {high:g}]")


def _check_classifier(config: TrainConfig) -> Iterator[Problem]:
    settings = config.model
    if settings.in_chans != 3:
        message = f"expected 3, got {settings.in_chans}"
        yield Problem("model.in_chans", f"{message}; images are read in color, gray ones as three equal channels")
    if not settings.arguments.keys().isdisjoint(ARGUMENT_SETTINGS):
        return  # reported elsewhere
    try:
        with torch.device("meta"):
            model: Any = create_model(settings.name, **model_arguments(config))
    except Exception as error:
        if timm.is_model(settings.name):
            yield Problem("model.arguments", f"{settings.name} cannot be built with these: {error}")
        else:
            yield Problem("model.name", str(error))
        return
    channels, height, width = input_size(config, model)
    try:
        with torch.no_grad(), torch.device("meta"):
            model(torch.empty(2, channels, height, width))
    except Exception as error:
        yield Problem("model.img_size", f"{settings.name} cannot take images of {height}×{width}: {error}")


def _check_dense(config: TrainConfig) -> Iterator[Problem]:
    """Check data, metrics and backbone of a detector or a segmenter."""
    task, name = config.task.name, config.model.name
    dataset, library = DENSE_DATASETS[task], METRIC_LIBRARIES[task]
    if config.data.dataset != dataset:
        message = f"expected {dataset}, the kind of data for {task}, got {config.data.dataset!r}"
        yield Problem("data.dataset", f"{message}; set it so")
    yield from _check_folder(config)
    if importlib.util.find_spec(library) is None:
        message = f"{task} is measured by {library}, which is not installed"
        yield Problem("task.name", f"{message}; pip install 'inline-attention[{task}]'")
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


def _check_detection(settings: DetectionOptions) -> Iterator[Problem]:
    default = DetectionOptions().sampled_boxes
    if settings.head == "retinanet" and settings.sampled_boxes != default:
        message = f"has no effect on retinanet, which takes all boxes, got {settings.sampled_boxes}"
        yield Problem("detection.sampled_boxes", f"{message}; set it to {default}")
    limits = {"multi_scale_from": settings.shorter_side, "shorter_side": settings.longest_side}
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and value > limit:
            yield Problem(f"detection.{name}", f"expected at most {limit}, the size it grows to, got {value}")


def _check_segmentation(config: TrainConfig) -> Iterator[Problem]:
    settings = config.segmentation
    yield from _check_order("segmentation.scale", settings.scale)
    if settings.window_step is not None and settings.window_step > settings.crop:
        message = f"expected at most the {settings.crop} pixels of a window, got {settings.window_step}"
        yield Problem("segmentation.window_step", f"{message}; pixels between windows would be missed")
