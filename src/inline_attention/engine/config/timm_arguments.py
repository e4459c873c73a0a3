"""Settings as the arguments of the factories that take them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from timm.optim import get_optimizer_class, get_optimizer_info  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from inline_attention.engine.config.resolving import ResolvedValues
from inline_attention.engine.config.schema import TrainConfig


def model_arguments(config: TrainConfig, num_classes: int | None = None) -> dict[str, Any]:
    """Arguments of `create_model` besides the name.

    Args:
        config: The settings.
        num_classes: Classes of the data, for where the settings name no number.
    """
    settings = config.model
    named = {
        "num_classes": settings.num_classes or num_classes,
        "img_size": settings.img_size,
        "drop_path_rate": settings.drop_path,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {"in_chans": settings.in_chans} | given | dict(settings.arguments)


def input_size(config: TrainConfig, model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images for `model`, which `model_arguments` describe."""
    size = config.model.img_size
    if size is None:
        size = getattr(model, "pretrained_cfg")["input_size"][1:]  # noqa: B009 - every timm model has one
    height, width = (size, size) if isinstance(size, int) else size
    return config.model.in_chans, height, width


def optimizer_arguments(resolved: ResolvedValues) -> dict[str, Any]:
    """Arguments of `timm.optim.create_optimizer_v2` besides the model."""
    settings = resolved.config.optimizer
    described = get_optimizer_info(settings.name)
    # A recipe's betas must not keep anyone from `--opt sgd`.
    optional = {
        "betas": settings.betas if described.has_betas else None,
        "eps": settings.eps if described.has_eps else None,
        "layer_decay": settings.layer_decay,
    }
    return {
        "opt": settings.name,
        "lr": resolved.lr,
        "weight_decay": settings.weight_decay,
        "momentum": settings.momentum,
        **{name: value for name, value in optional.items() if value is not None},
    }


def fused_optimizer(resolved: ResolvedValues, device: torch.device) -> dict[str, Any]:
    """A further argument for the optimiser: one kernel for all weights, where it offers that for the device."""
    optimizer = get_optimizer_class(resolved.config.optimizer.name, bind_defaults=False)
    return {"fused": True} if device.type == "cuda" and "fused" in inspect.signature(optimizer).parameters else {}


def schedule_arguments(resolved: ResolvedValues, updates_per_epoch: int) -> dict[str, Any]:
    """Arguments of `timm.scheduler.create_scheduler_v2` besides the optimiser: a schedule in updates, not epochs."""
    settings, training = resolved.config.schedule, resolved.config.training
    warmup, updates = settings.warmup_updates, training.updates
    # To timm an epoch is one update here: a run may be as long as some epochs, and its warm-up as some updates.
    return {
        "sched": settings.name,
        "num_epochs": training.epochs * updates_per_epoch if updates is None else updates,
        "warmup_epochs": settings.warmup_epochs * updates_per_epoch if warmup is None else warmup,
        "warmup_lr": resolved.warmup_lr,
        "min_lr": resolved.min_lr,
        "cooldown_epochs": settings.cooldown_epochs * updates_per_epoch,
        "decay_epochs": settings.decay_epochs * updates_per_epoch,
        "decay_milestones": [epoch * updates_per_epoch for epoch in settings.decay_milestones],
        "decay_rate": settings.decay_rate,
        "step_on_epochs": False,
        "updates_per_epoch": 1,
    }
