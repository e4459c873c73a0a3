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

from inline_attention.data.on_device.rand_augment import TIMM_OPTIONS, unsupported_policy
from inline_attention.engine.config.reading import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.resolving import input_size, model_arguments, optimizer_arguments, resolve
from inline_attention.engine.config.schema import SETTINGS, TrainConfig
from inline_attention.models.described import create_described_model
from inline_attention.models.registry import create_model
from inline_attention.support.settings import shown
from inline_attention.support.text import did_you_mean
from inline_attention.tasks.classification.task import AugmentationSection, ClassificationTask
from inline_attention.tasks.detection.evaluation import FIGURES, KINDS_OF_FIGURES
from inline_attention.tasks.detection.models import DetectionOptions
from inline_attention.tasks.pyramid import SHORTEST_SIDE, unfit_reason
from inline_attention.tasks.segmentation.task import SegmentationTask


def check_relevance(config: TrainConfig) -> Iterator[Problem]:
    """Refuse settings that were changed but that the task does not use."""
    given, defaults, task = to_mapping(config), to_mapping(TrainConfig()), config.task.name
    for section, values in given.items():
        for name, value in values.items():
            path = f"{section}.{name}"
            tasks = SETTINGS[path].tasks
            if tasks and task not in tasks and value != defaults[section][name]:
                message = f"has no effect on {task}, only on {' and '.join(tasks)}, got {shown(value)}"
                yield Problem(path, f"{message}; leave it out")


DATASETS = {"detection": "coco", "segmentation": "pairs"}
LIBRARIES = {"detection": "faster_coco_eval", "segmentation": "torchmetrics"}  # of their metrics


def check_dense(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    """Check the settings of detection and segmentation."""
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
    if settings.head == "retinanet" and settings.sampled_boxes != DetectionOptions().sampled_boxes:
        message = f"has no effect on retinanet, which takes all boxes, got {settings.sampled_boxes}"
        yield Problem("detection.sampled_boxes", f"{message}; set it to {DetectionOptions().sampled_boxes}")
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
        message = "expected at least 2: the batch norm of upernet needs two images"
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


DATASETS_WITHOUT_FOLDER = ("digits", "hfds/", "wds/")
# Arguments that are settings of their own.
ARGUMENTS_WITH_FIELDS = {
    "num_classes": "model.num_classes",
    "img_size": "model.img_size",
    "in_chans": "model.in_chans",
    "drop_path_rate": "model.drop_path",
}
METRICS = {
    "classification": tuple(ClassificationTask.metrics),
    "detection": tuple(f"{kind}_{figure}" for kind in KINDS_OF_FIGURES for figure in FIGURES),
    "segmentation": tuple(SegmentationTask.metrics),
}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
KNOWN_DATASETS = ("folder", "digits", "cifar10", "hfds/NAME", "wds/PATTERN")


def check(config: TrainConfig, *, world_size: int = 1) -> list[Problem]:
    """Return all problems of the settings, without reading any file.

    The model is built and run on the meta device, where nothing is computed.

    Args:
        config: Settings from any source; their types are checked too.
        world_size: Number of devices.
    """
    try:
        from_mapping(to_mapping(config))
    except ConfigError as error:
        return list(error.problems)  # wrong types would only cause further complaints
    if config.task.name == "classification":
        of_task = (
            *_check_data(config),
            *_check_memory(config),
            *_check_augmentation(config),
            *_check_mixing(config, world_size),
            *_check_model(config),
        )
    else:
        of_task = (*check_dense(config, world_size), *_check_arguments(config))
    return [
        *_check_text(config),
        *check_relevance(config),
        *of_task,
        *_check_batches(config, world_size),
        *_check_compiling(config),
        *_check_schedule(config),
        *_check_metric(config),
        *_check_optimizer(config),
    ]


def _check_text(config: TrainConfig) -> Iterator[Problem]:
    """No name and no path is empty or has a NUL in it, and a run's folder has a name that safetensors can open."""
    for section, values in to_mapping(config).items():
        for name, value in values.items():
            path = f"{section}.{name}"
            if value == "" or (isinstance(value, str) and "\0" in value):
                yield Problem(path, f"expected text without NUL characters, got {shown(value)}")
            elif path in ("run.output", "run.experiment") and value is not None and not _is_utf8(value):
                yield Problem(path, f"expected a name in UTF-8, in which weights can be read back, got {shown(value)}")


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_data(config: TrainConfig) -> Iterator[Problem]:
    dataset = config.data.dataset
    if dataset not in ("folder", "digits", "cifar10") and not dataset.startswith(("hfds/", "wds/")):
        hint = did_you_mean(dataset, KNOWN_DATASETS) or "; for a folder of your own use --dataset folder --data-dir DIR"
        yield Problem("data.dataset", f"expected {', '.join(KNOWN_DATASETS)}, got {dataset!r}{hint}")
    elif config.data.dir is None and not dataset.startswith(DATASETS_WITHOUT_FOLDER):
        yield Problem("data.dir", "expected the folder of the data, got null; add --data-dir DIR")


def _check_memory(config: TrainConfig) -> Iterator[Problem]:
    """Refuse augmentation that images in memory, or images from files, do not support."""
    settings = config.augmentation
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
    if settings.auto_augment is not None and _is_known_policy(settings.auto_augment):
        reason = unsupported_policy(settings.auto_augment)
        if reason is not None:
            message = f"expected what data.in_memory can do; {settings.auto_augment} {reason}, or data.in_memory=false"
            yield Problem("augmentation.auto_augment", message)


def _check_augmentation(config: TrainConfig) -> Iterator[Problem]:
    settings = config.augmentation
    for name in ("scale", "ratio"):
        low, high = getattr(settings, name)
        if low > high:
            yield Problem(f"augmentation.{name}", f"expected the smaller number first, got [{low:g}, {high:g}]")
    if settings.auto_augment is not None and not _is_known_policy(settings.auto_augment):
        message = (
            f"expected timm's description of a policy, such as rand-m9-mstd0.5-inc1, got {settings.auto_augment!r}"
        )
        yield Problem("augmentation.auto_augment", f"{message}; null turns it off")


def _check_batches(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    try:
        resolved = resolve(config, world_size)
    except ConfigError as error:
        yield from error.problems
        return
    if config.training.compile_mode in CUDA_GRAPH_MODES and resolved.grad_accum_steps > 1:
        # The next forward pass would overwrite the gradients of the last one.
        message = f"expected default where gradients are accumulated, got {config.training.compile_mode}"
        yield Problem("training.compile_mode", f"{message}; set it so, or training.grad_accum_steps=1")


def _check_compiling(config: TrainConfig) -> Iterator[Problem]:
    settings = config.training
    if settings.compile_mode != "default" and not settings.compile:
        message = f"has no effect without training.compile, got {settings.compile_mode}"
        yield Problem("training.compile_mode", f"{message}; leave it out, or set training.compile=true")


def _check_schedule(config: TrainConfig) -> Iterator[Problem]:
    settings = config.schedule
    milestones = settings.decay_milestones
    if settings.name == "multistep" and (not milestones or list(milestones) != sorted(set(milestones))):
        message = f"expected the epochs of the steps in ascending order, such as [8, 11], got {shown(list(milestones))}"
        yield Problem("schedule.decay_milestones", f"{message}; set them, or another schedule.name")


def _check_metric(config: TrainConfig) -> Iterator[Problem]:
    metric, known = config.checkpoints.metric, METRICS[config.task.name]
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known) or f"; {', '.join(known)} are there"
        yield Problem("checkpoints.metric", f"expected a figure of {config.task.name}, got {metric!r}{hint}")
    if metric is not None and metric.startswith("mask_") and config.detection.head == "retinanet":
        yield Problem("checkpoints.metric", f"expected a figure of boxes, as retinanet finds no masks, got {metric!r}")


def _check_mixing(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    try:
        batch = resolve(config, world_size).batch_size
    except ConfigError:
        return  # reported elsewhere
    if (config.augmentation.mixup or config.augmentation.cutmix) and batch % 2:
        message = f"expected an even number, since mixup pairs the images of a batch, got {batch}"
        yield Problem("training.batch_size", f"{message}; try {batch + 1}, or set augmentation.mixup and cutmix to 0")


def _is_known_policy(description: str) -> bool:
    # The same choice by prefix that timm's create_transform makes; its parsers assert.
    if description.startswith("rand"):
        parse = rand_augment_transform
    elif description.startswith("augmix"):
        parse = augment_and_mix_transform
    else:
        parse = auto_augment_transform
    try:
        parse(description, dict(TIMM_OPTIONS))
    except Exception:
        return False
    return True


def _check_arguments(config: TrainConfig) -> Iterator[Problem]:
    settings = config.model
    if settings.require_checkpoint and settings.initial_checkpoint is None:
        message = "expected a file of trained weights, from which this recipe starts, got null"
        yield Problem("model.initial_checkpoint", f"{message}; add --initial-checkpoint FILE")
    for name, path in ARGUMENTS_WITH_FIELDS.items():
        if name in settings.arguments:
            yield Problem(f"model.arguments.{name}", f"expected it as {path}; set {path}={settings.arguments[name]}")


def _check_model(config: TrainConfig) -> Iterator[Problem]:
    if config.model.in_chans != 3:
        message = f"expected 3, got {config.model.in_chans}"
        yield Problem("model.in_chans", f"{message}; images are read in color, gray ones as three equal channels")
    problems, settings = list(_check_arguments(config)), config.model
    yield from problems
    if any(problem.path.startswith("model.arguments.") for problem in problems):
        return
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
