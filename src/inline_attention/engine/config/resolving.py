"""Values that follow from the settings and the number of devices, and arguments for timm's factories."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import get_optimizer_class, get_optimizer_info  # pyright: ignore[reportPrivateImportUsage]

from inline_attention.engine.config.schema import TrainConfig
from inline_attention.support.settings import ConfigError, Problem
from inline_attention.support.text import counted


@dataclass(frozen=True)
class ResolvedValues:
    """Values that a run uses: the settings, and what follows from them for a number of devices.

    `world_size` is the number of devices, or of groups of devices that share the rows of their images. `batch_size` is
    per forward pass and device, `total_batch_size` per update. `ema_decay` is None without averaging.
    """

    config: TrainConfig
    world_size: int
    batch_size: int
    grad_accum_steps: int
    total_batch_size: int
    lr: float
    min_lr: float
    warmup_lr: float
    ema_decay: float | None

    def total_updates(self, updates_per_epoch: int) -> int:
        """Return the number of updates, cool-down included. Without epochs there is no cool-down."""
        training, schedule = self.config.training, self.config.schedule
        if training.updates is not None:
            return training.updates
        return updates_per_epoch * (training.epochs + schedule.cooldown_epochs if training.epochs else 0)

    def total_epochs(self, updates_per_epoch: int) -> int:
        """Return the number of epochs, cool-down and a last incomplete epoch included."""
        return -(-self.total_updates(updates_per_epoch) // max(updates_per_epoch, 1))

    def compile_mode(self, device: torch.device) -> tuple[str, str]:
        """Return the mode of torch.compile on a device, and why it is not another."""
        mode = self.config.training.compile_mode
        if mode != "auto":
            return mode, "as given"
        if device.type != "cuda":
            return "default", "reduce-overhead needs a CUDA device"
        if self.grad_accum_steps > 1:  # the next forward pass would overwrite the gradients of the last one
            return "default", "reduce-overhead does not work with gradient accumulation"
        if self.world_size > 1:
            return "default", "reduce-overhead is for one process; --torchcompile-mode reduce-overhead tries it anyway"
        return "reduce-overhead", "CUDA graphs: one process, every update is one pass; max-autotune compiles for long"

    def describe(self, device: torch.device | None = None) -> list[str]:
        """Return lines that explain each number, and the mode of compilation if a device is given."""
        config, total = self.config, self.total_batch_size
        training, schedule, base_size = config.training, config.schedule, config.optimizer.lr_base_size
        rule = "as given" if base_size is None else f"{config.optimizer.lr:g} × {total}/{base_size}"
        if schedule.warmup_updates is not None:
            warmup = f", {schedule.warmup_updates} updates of warm-up from {self.warmup_lr:g}"
        else:
            warmup = f", {schedule.warmup_epochs} of warm-up from {self.warmup_lr:g}" if schedule.warmup_epochs else ""
            if schedule.warmup_epochs > training.epochs and training.updates is None:
                warmup += ", longer than the run"
        cooldown = f" + {schedule.cooldown_epochs} of cool-down" if schedule.cooldown_epochs else ""
        length = f"epochs: {training.epochs}{cooldown}" if training.updates is None else f"updates: {training.updates}"
        rates = "in steps" if "step" in schedule.name else f"{schedule.name} down to {self.min_lr:g}"
        devices, steps = _devices(config, self.world_size), self.grad_accum_steps
        lines = [
            f"batch: {self.batch_size} images × {devices} × {steps} accumulated = {total} per update",
            f"learning rate: {self.lr:g} ({rule}), {rates}",
            f"{length}{warmup}",
        ]
        if self.ema_decay is not None:
            base_size = config.ema.decay_base_size
            rule = "as given" if base_size is None else f"{config.ema.decay:g} ^ ({total}/{base_size})"
            lines.append(f"averaged weights: decay {self.ema_decay:.6g} ({rule})")
        if device is not None and training.compile:
            mode, reason = self.compile_mode(device)
            lines.append(f"torch.compile: mode {mode} ({reason})")
        return lines


def resolve(config: TrainConfig, world_size: int = 1) -> ResolvedValues:
    """Compute the values that follow from the settings.

    Raises:
        ConfigError: If the devices cannot share the total batch.
    """
    world_size = max(1, world_size // config.distributed.context_parallel)
    batch, steps, total = _batches(config, world_size)
    base_size, ema = config.optimizer.lr_base_size, config.ema
    factor = 1.0 if base_size is None else total / base_size
    power = 1.0 if ema.decay_base_size is None else total / ema.decay_base_size
    rates = (config.optimizer.lr, config.schedule.min_lr, config.schedule.warmup_lr)
    lr, min_lr, warmup_lr = (rate * factor for rate in rates)
    ema_decay = ema.decay**power if ema.enabled else None
    return ResolvedValues(config, world_size, batch, steps, total, lr, min_lr, warmup_lr, ema_decay)


def _batches(config: TrainConfig, world_size: int) -> tuple[int, int, int]:
    """Return images per forward pass, forward passes per update, and images per update."""
    training = config.training
    limit, total, steps = training.batch_size, training.total_batch_size, training.grad_accum_steps
    if total is None:
        steps = steps or 1
        return limit, steps, limit * steps * world_size
    devices = _devices(config, world_size)
    if steps is not None and total != limit * steps * world_size:
        message = (
            f"expected batch_size {limit} × {devices} × grad_accum_steps {steps} = {limit * steps * world_size}, "
            f"got {total}; set one to null: --set training.total_batch_size=null or training.grad_accum_steps=null"
        )
        raise ConfigError([Problem("training.total_batch_size", message)])
    share, rest = divmod(total, world_size)
    batch = max((size for size in range(1, min(limit, share) + 1) if share % size == 0), default=0)
    if rest or 2 * batch <= min(limit, share):  # half empty batches would take twice the time
        whole = max(1, round(total / (limit * world_size))) * limit * world_size
        message = f"expected what {devices} can share in equal batches of up to {limit}, got {total}; try {whole}"
        raise ConfigError([Problem("training.total_batch_size", message)])
    return batch, share // batch, total


def _devices(config: TrainConfig, count: int) -> str:
    context = config.distributed.context_parallel
    return counted(count, "devices") if context == 1 else f"{counted(count, 'groups')} of {context} devices"


def optimizer_arguments(resolved: ResolvedValues, device: torch.device | None = None) -> dict[str, Any]:
    """Return the arguments of `timm.optim.create_optimizer_v2` besides the model; on a GPU, fused if possible."""
    settings = resolved.config.optimizer
    described = get_optimizer_info(settings.name)
    is_on_gpu = device is not None and device.type == "cuda"
    known = inspect.signature(get_optimizer_class(settings.name, bind_defaults=False)).parameters if is_on_gpu else ()
    # A recipe's betas must not prevent `--opt sgd`.
    optional = {
        "betas": settings.betas if described.has_betas else None,
        "eps": settings.eps if described.has_eps else None,
        "layer_decay": settings.layer_decay,
        "fused": True if "fused" in known else None,
    }
    return {
        "opt": settings.name,
        "lr": resolved.lr,
        "weight_decay": settings.weight_decay,
        "momentum": settings.momentum,
        **{name: value for name, value in optional.items() if value is not None},
    }


def schedule_arguments(resolved: ResolvedValues, updates_per_epoch: int) -> dict[str, Any]:
    """Return the arguments of `timm.scheduler.create_scheduler_v2`, for a schedule in updates."""
    settings, training = resolved.config.schedule, resolved.config.training
    warmup, updates = settings.warmup_updates, training.updates
    # For timm an epoch is one update here, so that warm-up and length may be given in updates.
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
