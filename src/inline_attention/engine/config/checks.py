"""Whether settings fit together: everything that can be known before any file is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.optim import create_optimizer_v2, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

from inline_attention.engine.config.parsing import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.resolving import resolve
from inline_attention.engine.config.schema import TrainConfig
from inline_attention.engine.config.settings import did_you_mean, shown
from inline_attention.engine.config.timm_arguments import input_size, model_arguments, optimizer_arguments
from inline_attention.models.registry import create_model

DATASETS_WITHOUT_FOLDER = ("digits", "hfds/", "wds/")
# What else reads these must find them in one place.
ARGUMENTS_WITH_FIELDS = {
    "num_classes": "model.num_classes",
    "img_size": "model.img_size",
    "in_chans": "model.in_chans",
    "drop_path_rate": "model.drop_path",
}
KNOWN_DATASETS = ("folder", "digits", "cifar10", "hfds/NAME", "wds/PATTERN")


def check(config: TrainConfig, *, world_size: int = 1) -> list[Problem]:
    """Everything that is wrong with settings, as far as no file tells.

    The model is built and run on the meta device, where nothing is computed.

    Args:
        config: The settings, from whatever source: their types are checked too.
        world_size: Number of devices.
    """
    try:
        from_mapping(to_mapping(config))
    except ConfigError as error:
        return list(error.problems)  # wrong types would only cause further complaints
    return [
        *_check_data(config),
        *_check_memory(config),
        *_check_augmentation(config),
        *_check_batches(config, world_size),
        *_check_model(config),
        *_check_optimizer(config),
    ]


def _check_data(config: TrainConfig) -> Iterator[Problem]:
    dataset = config.data.dataset
    if dataset not in ("folder", "digits", "cifar10") and not dataset.startswith(("hfds/", "wds/")):
        hint = did_you_mean(dataset, KNOWN_DATASETS) or "; for a folder of your own use --dataset folder --data-dir DIR"
        yield Problem("data.dataset", f"expected {', '.join(KNOWN_DATASETS)}, got {dataset!r}{hint}")
    elif config.data.dir is None and not dataset.startswith(DATASETS_WITHOUT_FOLDER):
        yield Problem("data.dir", "expected the folder of the data, got null; add --data-dir DIR")


def _check_memory(config: TrainConfig) -> Iterator[Problem]:
    """Images kept on the device take a plain path: what it leaves out must not be asked for."""
    settings = config.augmentation
    offered: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "data.crop_pct": (config.data.crop_pct, (1.0,)),
        "augmentation.crop": (settings.crop, ("padded",)),
        "augmentation.hflip": (settings.hflip, (0.5, 0.0)),
        "augmentation.vflip": (settings.vflip, (0.0,)),
        "augmentation.auto_augment": (settings.auto_augment, (None,)),
        "augmentation.color_jitter": (settings.color_jitter, (0.0,)),
        "augmentation.reprob": (settings.reprob, (0.0,)),
    }
    for path, (value, choices) in offered.items():
        if config.data.in_memory and value not in choices:
            expected = " or ".join("null" if choice is None else str(choice) for choice in choices)
            message = f"expected {expected} with data.in_memory, got {shown(value)}"
            yield Problem(path, f"{message}; set it so, or data.in_memory=false")
    if not config.data.in_memory and settings.crop == "padded":
        message = "expected resized, got padded, which only data kept in memory offers"
        yield Problem("augmentation.crop", f"{message}; set it so, or data.in_memory=true")


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
        batch = resolve(config, world_size).batch_size
    except ConfigError as error:
        yield from error.problems
        return
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
        parse(description, {})
    except Exception:
        return False
    return True


def _check_model(config: TrainConfig) -> Iterator[Problem]:
    settings = config.model
    if settings.require_checkpoint and settings.initial_checkpoint is None:
        message = "expected a file of trained weights, from which this recipe starts, got null"
        yield Problem("model.initial_checkpoint", f"{message}; add --initial-checkpoint FILE")
    doubled = [name for name in ARGUMENTS_WITH_FIELDS if name in settings.arguments]
    for name in doubled:
        path = ARGUMENTS_WITH_FIELDS[name]
        yield Problem(f"model.arguments.{name}", f"expected it as {path}; set {path}={settings.arguments[name]}")
    if doubled:
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
        yield Problem("optimizer.name", f"expected an optimiser of timm, got {name!r}{hint}")
        return
    # On one device and without accumulation: only whether it can be created matters here.
    training = replace(config.training, total_batch_size=None)
    arguments = optimizer_arguments(resolve(replace(config, training=training)))
    arguments.pop("layer_decay", None)  # needs a model
    try:
        create_optimizer_v2([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:
        yield Problem("optimizer.name", f"{name} cannot be created: {error}")
