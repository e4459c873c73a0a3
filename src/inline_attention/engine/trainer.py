"""The training loop: updates, evaluations, checkpoints, and going on exactly where a run stopped.

A run's position is (epoch, updates done in it). Everything that decides what comes next is in a checkpoint: weights,
average, optimiser, random numbers, counters, the table of epochs. Samples depend on (seed, epoch, index) alone, and
learning rates on the number of updates, so a run that was stopped and resumed on a CPU ends in the same bits.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from inline_attention.data.batch import Batch
from inline_attention.data.randomness import derived_seed
from inline_attention.engine.building import Loaders, Objective, Sources, build_loaders, build_model
from inline_attention.engine.checkpoints import CheckpointStore, TrainingCheckpoint
from inline_attention.engine.config import ResolvedValues, model_arguments, optimizer_arguments, schedule_arguments
from inline_attention.engine.evaluation import Metrics, evaluate
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption
from inline_attention.engine.precision import Precision
from inline_attention.engine.processes import Processes
from inline_attention.engine.reporting import RunReport
from inline_attention.engine.strategies import Replicated, Sharded, Strategy

CHECKPOINTS = "checkpoints"
HIGHER_IS_BETTER = {"top1": True, "top5": True, "loss": False}


class DivergedError(RuntimeError):
    """Too many losses in a row that are not finite."""


@dataclass
class Position:
    """Where a run is, and what it has counted.

    Attributes:
        epoch: The epoch it is in, from 0.
        updates_in_epoch: Updates done in it; all of them, if only its evaluation is missing.
        updates: Updates done since the start.
        skipped: Updates left out because their loss was not finite.
        skipped_in_a_row: The last of them without one that was made.
        loss_sum: Of the epoch's updates.
        rows: The table of epochs.
    """

    epoch: int = 0
    updates_in_epoch: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0
    rows: list[dict[str, Any]] | None = None

    def start_next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch += 1
        self.updates_in_epoch, self.loss_sum = 0, 0.0


class Trainer:
    """One run, in one of its processes."""

    def __init__(self, resolved: ResolvedValues, sources: Sources, folder: Path, processes: Processes):
        """Build all parts.

        Args:
            resolved: The settings, and what follows from them.
            sources: The data.
            folder: Of the run.
            processes: This one among the others.
        """
        config = resolved.config
        self.resolved, self.config, self.folder, self.processes = resolved, config, folder, processes
        self.class_names = list(sources.train.class_names)
        num_classes = config.model.num_classes or len(self.class_names)
        torch.use_deterministic_algorithms(config.training.deterministic)
        self.model = build_model(config, num_classes).to(processes.device)
        self.loaders: Loaders = build_loaders(resolved, sources, self.model, processes)
        sharded = config.distributed.strategy == "fsdp2" and processes.world_size > 1
        self.strategy: Strategy = Sharded() if sharded else Replicated(processes)
        self.strategy.prepare(self.model)
        self.updates_per_epoch = len(self.loaders.train) // resolved.grad_accum_steps
        self.optimizer = create_optimizer_v2(self.model, **optimizer_arguments(resolved))
        self.scheduler = None
        if resolved.total_epochs > 0:  # timm asserts that there is something to schedule
            self.scheduler, _ = create_scheduler_v2(
                self.optimizer, **schedule_arguments(resolved, self.updates_per_epoch)
            )
        self.ema = None
        if resolved.ema_decay is not None:
            self.ema = ModelEmaV3(self.model, decay=resolved.ema_decay, use_warmup=config.ema.warmup)
        self.precision = Precision(config.training.amp, processes.device)
        self.objective = Objective(config, num_classes, processes.rank)
        self.wrapped = self.strategy.wrap(self.model)
        self.runnable = cast(nn.Module, torch.compile(self.wrapped)) if config.training.compile else self.wrapped
        self.store = CheckpointStore(
            folder / CHECKPOINTS,
            keep_last=config.checkpoints.keep_last,
            keep_best=config.checkpoints.keep_best,
            higher_is_better=HIGHER_IS_BETTER[config.checkpoints.metric],
        )
        self.position = Position(rows=[])
        torch.manual_seed(derived_seed("model", config.training.seed, processes.rank))

    def run(self, report: RunReport, interruption: Interruption) -> Metrics | None:
        """Train to the end; the last evaluation, or None if there was nothing to do.

        Raises:
            InterruptedBySignalError: After saving, if told to stop.
            DivergedError: If the loss stays NaN or infinite.
        """
        metrics = None
        while self.position.epoch < self.resolved.total_epochs:
            self._train_epoch(report, interruption)
            metrics = self._end_epoch(report)
        return metrics

    def resume(self, checkpoint: TrainingCheckpoint) -> list[str]:
        """Take up a run; the notes say what is not as it was."""
        loaded = checkpoint.load()
        state, notes = loaded.state, []
        self.strategy.restore(self.model, self.optimizer, loaded.weights, state["optimizer"])
        if self.ema is not None and loaded.ema_weights is not None:
            self.ema.module.load_state_dict(loaded.ema_weights)
        self.precision.scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])
        generators = state["generators"]
        if len(generators) == self.processes.world_size:
            self._restore_generators(generators[self.processes.rank])
        else:
            notes.append(
                f"the run had {len(generators)} processes, now {self.processes.world_size}: it goes on, but not in the "
                "same bits"
            )
        if state["updates_per_epoch"] != self.updates_per_epoch:
            # The samples of the epoch are dealt out otherwise: begin it again rather than miss some.
            self.position.updates_in_epoch, self.position.loss_sum = 0, 0.0
            self.position.updates = self.position.epoch * self.updates_per_epoch
            notes.append(
                f"an epoch had {state['updates_per_epoch']} updates, now {self.updates_per_epoch}: epoch "
                f"{self.position.epoch + 1} begins again"
            )
        return notes

    def save(self, metric: float | None = None) -> None:
        """Write a checkpoint of this moment; all processes take part."""
        generators = self._gather_generators()
        weights, optimizer_state = self.strategy.capture(self.model, self.optimizer)
        if self.processes.is_main:
            self.store.save(
                step=self.position.updates,
                epoch=self.position.epoch,
                weights=weights,
                ema_weights=None if self.ema is None else self.ema.module.state_dict(),
                state={
                    "optimizer": optimizer_state,
                    "scaler": self.precision.scaler.state_dict(),
                    "position": vars(self.position),
                    "generators": generators,
                    "updates_per_epoch": self.updates_per_epoch,
                },
                metric=metric,
                metadata=self._metadata(),
            )
        self.processes.wait()

    def _metadata(self) -> dict[str, str]:
        """What the files of weights need to say to be used elsewhere."""
        config = self.config
        notes = {
            "model": config.model.name,
            "model_arguments": json.dumps(model_arguments(config, len(self.class_names))),
            "class_names": json.dumps(self.class_names),
        }
        if config.data.crop_pct is not None:
            notes["crop_pct"] = json.dumps(config.data.crop_pct)
        return notes

    def _train_epoch(self, report: RunReport, interruption: Interruption) -> None:
        position, accumulated = self.position, self.resolved.grad_accum_steps
        self.runnable.train()
        batches = self.loaders.train.epoch(position.epoch, position.updates_in_epoch * accumulated)
        while position.updates_in_epoch < self.updates_per_epoch:
            lr = self._set_learning_rate()
            loss = self._update([next(batches) for _ in range(accumulated)])
            position.updates += 1
            position.updates_in_epoch += 1
            position.loss_sum += loss if math.isfinite(loss) else 0.0
            report.update_done(position.updates, position.epoch, self.resolved.total_batch_size, loss, lr)
            interval = self.config.checkpoints.interval_steps
            if self.processes.any(interruption.number is not None):
                self.save()
                raise InterruptedBySignalError(interruption.number or 15)
            if interval is not None and position.updates % interval == 0:
                self.save()

    def _end_epoch(self, report: RunReport) -> Metrics | None:
        position, settings = self.position, self.config
        is_last = position.epoch + 1 == self.resolved.total_epochs
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "train_loss": position.loss_sum / max(self.updates_per_epoch, 1),
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        metrics = chosen = None
        if is_last or (position.epoch + 1) % settings.training.validation_interval == 0:
            metrics = chosen = evaluate(self.model, self.loaders.validation, self.precision, self.processes)
            row |= {"val_loss": metrics.loss, "top1": metrics.top1, "top5": metrics.top5}
            if self.ema is not None:
                chosen = evaluate(self.ema.module, self.loaders.validation, self.precision, self.processes)
                row |= {"ema_loss": chosen.loss, "ema_top1": chosen.top1, "ema_top5": chosen.top5}
        row |= {"skipped_updates": position.skipped, "broken_images": len(self.loaders.broken)}
        assert position.rows is not None
        position.rows.append(row)
        position.start_next_epoch()
        report.epoch_done(position.rows)
        if self.processes.is_main and len(self.loaders.broken):
            self.loaders.broken.write_report(self.folder)
        if is_last or position.epoch % settings.checkpoints.interval_epochs == 0:
            self.save(None if chosen is None else getattr(chosen, settings.checkpoints.metric))
        return chosen

    def _update(self, batches: list[Batch]) -> float:
        """One update of the weights from the gradients of several batches; its mean loss over all processes.

        Nothing is updated if the loss is not finite in any process.
        """
        total = torch.zeros((), device=self.processes.device)
        for number, batch in enumerate(batches):
            images, targets = self.objective.inputs(batch)
            is_last = number + 1 == len(batches)
            with nullcontext() if is_last else self.strategy.without_exchange(self.wrapped):
                with self.precision.autocast():
                    logits = self.runnable(images)
                loss = self.objective.loss(logits, targets) / len(batches)
                self.precision.scaler.scale(loss).backward()
            total += loss.detach()
        mean = (self.processes.sum(total) / self.processes.world_size).item()
        if math.isfinite(mean):
            self._apply_gradients()
            self.position.skipped_in_a_row = 0
        else:
            self._skip()
        self.optimizer.zero_grad(set_to_none=True)
        return mean

    def _apply_gradients(self) -> None:
        scaler, clip = self.precision.scaler, self.config.training.clip_grad
        if clip is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        scaler.step(self.optimizer)
        scaler.update()
        if self.ema is not None:
            self.ema.update(self.model, step=self.position.updates)

    def _skip(self) -> None:
        position, limit = self.position, self.config.limits.nan_losses_in_a_row
        position.skipped += 1
        position.skipped_in_a_row += 1
        if position.skipped_in_a_row > limit:
            raise DivergedError(
                f"{position.skipped_in_a_row} losses in a row were NaN or infinite, the last at update "
                f"{position.updates + 1}; lower optimizer.lr, use training.amp=bf16 or off, or set training.clip_grad. "
                f"The last checkpoint in {self.folder / CHECKPOINTS} is from before"
            )

    def _set_learning_rate(self) -> float:
        """That of the update to come, which depends on the number of those before alone."""
        assert self.scheduler is not None
        self.scheduler.step_update(self.position.updates)
        return self.optimizer.param_groups[0]["lr"]

    def _gather_generators(self) -> list[dict[str, torch.Tensor]]:
        """The states of the random number generators of all processes."""
        own = {"cpu": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.processes.device)
        if self.processes.world_size == 1:
            return [own]
        everyone: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(everyone, own)
        return everyone

    def _restore_generators(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.processes.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self.processes.device)
