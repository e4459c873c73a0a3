"""Check that settings fit together, as far as that is known before any file is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.layers.helpers import to_2tuple
from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

from inline_attention.data.on_device import unsupported_policy
from inline_attention.engine.config.reading import from_mapping, to_mapping
from inline_attention.engine.config.resolving import ResolvedValues, optimizer_arguments, resolve
from inline_attention.engine.config.schema import SECTION_TASKS, SETTINGS, TrainConfig
from inline_attention.models.described import ModelDescriptionError
from inline_attention.models.registry import create_model
from inline_attention.parallel import unsupported_reason
from inline_attention.support.settings import ConfigError, Problem, shown
from inline_attention.support.text import did_you_mean, install_command
from inline_attention.tasks.classification.distillation import DistillationSection, FeatureMetrics
from inline_attention.tasks.classification.task import AugmentationSection, ClassificationTask, is_known_policy
from inline_attention.tasks.dense import DenseTask
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.pyramid import SHORTEST_SIDE, PyramidBackbone, pad_images, unfit_reason
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import ARGUMENT_SETTINGS

DENSE_TASKS: dict[str, type[DenseTask[Any]]] = {task.name: task for task in (DetectionTask, SegmentationTask)}
KNOWN_DATASETS = ("folder", "digits", "cifar10", "pictures", "hfds/NAME", "wds/PATTERN")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def check(config: TrainConfig, *, world_size: int = 1) -> list[Problem]:
    """Return all problems of the settings for a number of devices, without reading any file.

    The model is built and run on the meta device, where nothing is computed.
    """
    try:
        from_mapping(to_mapping(config))
    except ConfigError as error:
        return list(error.problems)  # wrong types would only cause further complaints
    task = config.task.name
    problems = [
        Problem(f"{name}.{field}", message)
        for name, section in vars(config).items()
        if hasattr(section, "problems") and task in SECTION_TASKS.get(name, (task,))
        for field, message in section.problems()
    ]
    problems += [*_check_each(config), *_check_metric(config), *_check_optimizer(config)]
    problems += _check_context(config, world_size)
    try:
        problems += _check_batches(resolve(config, world_size))
    except ConfigError as error:
        problems += error.problems
    if task == "classification":
        problems += [*_check_classification_data(config), *_check_distillation(config)]
        return [*problems, *_check_classifier(config)]
    return [*problems, *_check_dense(config)]


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
            elif path in ("run.output", "run.experiment") and value and value.encode(errors="ignore").decode() != value:
                yield Problem(path, f"expected a name in UTF-8, in which weights can be read back, got {shown(value)}")


def _check_metric(config: TrainConfig) -> Iterator[Problem]:
    metric, known = config.checkpoints.metric, DENSE_TASKS.get(config.task.name, ClassificationTask).metrics
    if config.task.name == "classification" and not config.distillation.uses_labels:
        known = FeatureMetrics.NAMES
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known) or f"; {', '.join(known)} are there"
        yield Problem("checkpoints.metric", f"expected a figure of {config.task.name}, got {metric!r}{hint}")
    elif metric is not None and metric.startswith("mask_") and not config.detection.finds_masks:
        message = f"expected a figure of boxes, as {config.detection.head} finds no masks, got {metric!r}"
        yield Problem("checkpoints.metric", message)


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


def _check_context(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    context, path = config.distributed.context_parallel, "distributed.context_parallel"
    if world_size % context:
        message = f"expected a divisor of the number of ranks, {world_size}, got {context}"
        yield Problem(path, f"{message}; start the run with torchrun --nproc-per-node {context}")
    if context > 1 and config.training.compile:
        yield Problem(path, f"expected 1 with training.compile, got {context}; set training.compile=false")


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
    dataset, settings, policy = config.data.dataset, config.augmentation, config.augmentation.auto_augment
    if dataset not in KNOWN_DATASETS[:4] and not dataset.startswith(("hfds/", "wds/")):
        hint = did_you_mean(dataset, KNOWN_DATASETS) or "; for a folder of your own use --dataset folder --data-dir DIR"
        yield Problem("data.dataset", f"expected {', '.join(KNOWN_DATASETS)}, got {dataset!r}{hint}")
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
        value, default = getattr(settings, name), getattr(AugmentationSection(), name)
        if value != default:
            message = f"has no effect with data.in_memory, where crops are padded, got {shown(value)}"
            yield Problem(f"augmentation.{name}", f"{message}; set it to {shown(default)}, or data.in_memory=false")
    if policy is not None and is_known_policy(policy) and (reason := unsupported_policy(policy)) is not None:
        message = f"expected what data.in_memory can do; {policy} {reason}, or data.in_memory=false"
        yield Problem("augmentation.auto_augment", message)


def _check_distillation(config: TrainConfig) -> Iterator[Problem]:
    settings = config.distillation
    if settings.match == "off":
        changed = [name for name, value in vars(settings).items() if value != getattr(DistillationSection(), name)]
        for name in changed[:1]:
            yield Problem(f"distillation.{name}", "has no effect without distillation.match; set it, or leave it out")
        if config.data.dataset == "pictures":
            message = "has no classes to learn; use folder, with one folder per class"
            yield Problem("data.dataset", f"{message}, or set distillation.match=features")
        return
    if config.model.attention is None and settings.teacher is None:
        message = "expected inline or linear, the student's attention, got null"
        yield Problem("model.attention", f"{message}; add --set model.attention=inline")
    if settings.teacher is None and config.model.initial_checkpoint is None and not config.model.require_checkpoint:
        message = "expected the teacher's weights, got null"
        yield Problem("distillation.teacher", f"{message}; add --initial-checkpoint FILE")
    if settings.match == "logits" and config.data.dataset == "pictures":
        yield Problem("data.dataset", "has no classes; use folder, or set distillation.match=features")
    if not settings.uses_labels and (config.augmentation.mixup or config.augmentation.cutmix):
        message = "expected mixup and cutmix to be 0, since there are no labels to mix"
        yield Problem("augmentation.mixup", f"{message}; add --mixup 0 --cutmix 0")
    if settings.match == "attention":
        sizes = (settings.teacher_size, config.model.img_size)
        if None not in sizes and to_2tuple(sizes[0]) != to_2tuple(sizes[1]):
            message = f"expected the student's size, since single layers are compared, got {sizes[0]} and {sizes[1]}"
            yield Problem("distillation.teacher_size", f"{message}; leave it out")
        if config.distributed.strategy == "fsdp2":
            yield Problem("distributed.strategy", "expected ddp with distillation.match=attention, got fsdp2")


def _check_classifier(config: TrainConfig) -> Iterator[Problem]:
    settings = config.model
    if settings.in_chans != 3:
        message = f"expected 3, got {settings.in_chans}"
        yield Problem("model.in_chans", f"{message}; images are read in color, gray ones as three equal channels")
    if not settings.arguments.keys().isdisjoint(ARGUMENT_SETTINGS):
        return  # reported elsewhere
    try:
        with torch.device("meta"):
            model: Any = create_model(settings.name, **settings.model_arguments())
    except Exception as error:
        if timm.is_model(settings.name):
            yield Problem("model.arguments", f"{settings.name} cannot be built with these: {error}")
        else:
            yield Problem("model.name", str(error))
        return
    try:
        if settings.conversion is not None:
            settings.conversion.apply(model)
    except ModelDescriptionError:
        return  # reported elsewhere
    except ValueError as error:
        yield Problem("model.attention", str(error))
        return
    if config.distributed.context_parallel > 1 and (reason := unsupported_reason(model)) is not None:
        yield Problem("distributed.context_parallel", reason)
    channels, height, width = settings.input_size(model)
    try:
        with torch.no_grad(), torch.device("meta"):
            model(torch.empty(2, channels, height, width))
    except Exception as error:
        yield Problem("model.img_size", f"{settings.name} cannot take images of {height}×{width}: {error}")


def _check_dense(config: TrainConfig) -> Iterator[Problem]:
    task, name = config.task.name, config.model.name
    dataset, library = DENSE_TASKS[task].dataset, DENSE_TASKS[task].library
    if config.data.dataset != dataset:
        message = f"expected {dataset}, the kind of data for {task}, got {config.data.dataset!r}"
        yield Problem("data.dataset", f"{message}; set it so")
    if importlib.util.find_spec(library) is None:
        message = f"{task} is measured by {library}, which is not installed"
        yield Problem("task.name", f"{message}; {install_command(task)}")
    if (reason := unfit_reason(name)) is not None:
        yield Problem("model.name", reason)
        return
    arguments = {key: value for key, value in config.model.model_arguments().items() if key != "num_classes"}
    path = "model.arguments"
    try:
        with torch.no_grad(), torch.device("meta"):
            backbone = PyramidBackbone(name, arguments)
            if config.model.conversion is not None:
                path = "model.attention"
                config.model.conversion.apply(backbone.model)
            backbone(pad_images([torch.empty(3, 2 * SHORTEST_SIDE, 2 * SHORTEST_SIDE)]))
    except Exception as error:
        yield Problem(path, f"{name} cannot be built with these: {error}")
