"""The training loop: updates, evaluations, checkpoints and exact resuming.

A run's position is (epoch, updates in it). A checkpoint holds everything that decides what comes next: weights,
averages, optimizer, random states, counters and the rows of summary.csv. Samples depend on (seed, epoch, index) alone,
and learning rates on the number of updates, so a run that was stopped and resumed on a CPU ends in the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.distributed.tensor import DTensor

from inline_attention.data.broken import BrokenImageLimit, BrokenImages, BrokenImagesError
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import TooFewSamplesError
from inline_attention.engine.checkpoint_format import LARGEST_NUMBER, LoadedCheckpoint
from inline_attention.engine.checkpoints import (
    CheckpointError,
    CheckpointStore,
    CheckpointWriteError,
    TrainingCheckpoint,
)
from inline_attention.engine.config import ConfigError, Problem, ResolvedValues, schedule_arguments
from inline_attention.engine.evaluate import evaluate
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption
from inline_attention.engine.optimizers import create_optimizer
from inline_attention.engine.processes import BrokenReport, Precision, Processes, RankSync
from inline_attention.engine.reporting import RunReport
from inline_attention.engine.run_folder import CHECKPOINTS
from inline_attention.engine.strategies import Replicated, Sharded
from inline_attention.models.checkpoints import model_metadata
from inline_attention.models.described import parse_class_names
from inline_attention.parallel import parallelize_context
from inline_attention.support.text import printable, show_difference
from inline_attention.tasks.task import Metrics, Task, TaskData

# Entries of an optimizer's groups that settings decide, beside the learning rate; other entries may be its state.
OPTIMIZER_SETTINGS = ("weight_decay", "betas", "eps", "momentum", "lr_scale")


class DivergedError(RuntimeError):
    """Too many consecutive losses or gradients are not finite."""


@dataclass
class Position:
    """Position and counters of a run."""

    epoch: int = 0
    updates_in_epoch: int = 0  # all of them, if only its evaluation is missing
    updates: int = 0
    skipped: int = 0  # because loss or gradients were not finite
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0  # of the epoch, without skipped updates
    losses: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # of summary.csv

    @classmethod
    def from_state(cls, content: Mapping[str, Any]) -> Position:
        """Read what a checkpoint says, which a stranger may have written."""
        position = cls(**content)
        for name, value in vars(position).items():
            if name == "loss_sum":
                is_valid = type(value) is float and math.isfinite(value)
            elif name == "rows":
                is_valid = isinstance(value, list) and all(_is_row(row) for row in value)
            else:
                is_valid = type(value) is int and 0 <= value <= LARGEST_NUMBER
            if not is_valid:
                raise ValueError(f"the position's {name} is impossible")
        return position

    def start_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.updates_in_epoch, self.loss_sum, self.losses = epoch, 0, 0.0, 0


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(key, str) and type(row[key]) in (int, float) for key in row)


class Trainer:
    """A run, on one of its ranks."""

    def __init__(self, resolved: ResolvedValues, task: Task, data: TaskData, folder: Path, processes: Processes):
        config = resolved.config
        self.resolved, self.config, self.folder, self.processes = resolved, config, folder, processes
        self.task, self.data, self.class_names = task, data, data.class_names
        torch.use_deterministic_algorithms(config.training.deterministic)
        torch.manual_seed(config.training.seed)
        model: Any = task.build_model(self.class_names)
        if config.training.grad_checkpointing:
            model.set_grad_checkpointing(True)
        if processes.world_size > 1 and processes.device.type == "cuda":
            # One device has few images in dense tasks: batch norms use those of all.
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(processes.device)
        task.prepare(self.model)
        distributed = config.distributed
        # Ranks that share the rows of their images read the same images and draw the same random numbers.
        self.images, mesh = processes.divided(distributed.context_parallel, distributed.timeout_minutes)
        if mesh is not None:
            parallelize_context(self.model, mesh)
        reading = self.images.reading(config.data, resolved.batch_size, config.training.seed)
        validation = replace(reading, batch_size=config.training.validation_batch_size or resolved.batch_size)
        limit = BrokenImageLimit(config.limits.broken_image_count, config.limits.broken_image_share)
        broken = [BrokenImages(len(images), limit) for images in (data.train, data.validation)]
        try:
            self.training_loader = task.training_loader(data.train, self.model, reading, broken[0])
            self.validation_loader = task.validation_loader(data.validation, self.model, validation, broken[1])
        except TooFewSamplesError as error:  # images in memory have been read, and some may be broken
            raise ConfigError([Problem("training.batch_size", str(error))]) from error
        self.broken = BrokenReport(broken, processes, folder)
        sharded = config.distributed.strategy == "fsdp2" and processes.world_size > 1
        self.strategy = Sharded(processes) if sharded else Replicated(processes)
        self.ema = None
        if resolved.ema_decay is not None:  # copied while the model is whole
            # Faster, but not possible with whole buffers beside sharded parameters.
            at_once = not (sharded and any(buffer.is_floating_point() for buffer in self.model.buffers()))
            self.ema = ModelEmaV3(self.model, resolved.ema_decay, use_warmup=config.ema.warmup, foreach=at_once)
            self.strategy.prepare(self.ema.module)
        self.strategy.prepare(self.model)
        self.updates_per_epoch = len(self.training_loader) // resolved.grad_accum_steps
        self.optimizer = create_optimizer(self.model, resolved, processes.device)
        self.total_updates = resolved.total_updates(self.updates_per_epoch)
        self.total_epochs = resolved.total_epochs(self.updates_per_epoch)
        self.scheduler = None
        if self.total_updates > 0:  # timm asserts that there are updates
            schedule = schedule_arguments(resolved, self.updates_per_epoch)
            self.scheduler, _ = create_scheduler_v2(self.optimizer, **schedule)
        self.precision = Precision(config.training.amp, processes.device)
        self.wrapped = self.strategy.wrap(self.model)
        self.runnable = self.wrapped
        if config.training.compile:
            mode, _ = resolved.compile_mode(processes.device)
            self.runnable = cast(nn.Module, torch.compile(self.wrapped, mode=mode))
            task.compile(mode)
        self.objective = task.objective(self.class_names, self.images.rank)
        self.best_metric = config.checkpoints.metric or next(iter(task.metrics))
        self.store = CheckpointStore(
            folder / CHECKPOINTS,
            keep_last=config.checkpoints.keep_last,
            keep_best=config.checkpoints.keep_best,
            higher_is_better=task.metrics[self.best_metric],
        )
        self.position = Position()
        self._saved_at: tuple[int, int] | None = None
        self._statistics = [
            buffer
            for module in self.model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]
            for buffer in module.buffers(recurse=False)
        ]
        torch.manual_seed(derived_seed("model", config.training.seed, self.images.rank))

    def run(self, report: RunReport, interruption: Interruption) -> Metrics | None:
        """Train to the end, or to a signal. Returns the last evaluation, or None if there was nothing to do."""
        metrics = None
        sync = RankSync(self.processes, interruption, self.broken)
        try:
            # By updates: the last epoch of a resumed run may be incomplete.
            while self.position.updates < self.total_updates or self.position.updates_in_epoch > 0:
                self._train_epoch(report, sync)
                metrics = self._end_epoch(report, sync)
        except InterruptedBySignalError:
            # If nothing is new, the existing checkpoint may have a metric, which this one would not.
            if self._saved_at != (self.position.epoch, self.position.updates):
                self.save()
            raise
        return metrics

    def close(self) -> None:
        """End the worker processes."""
        self.training_loader.close()
        self.validation_loader.close()

    def bytes_still_to_write(self) -> int:
        """Estimate the bytes of the run's checkpoints, besides existing ones, with two moments per weight as in Adam.

        While the newest is written, all others exist.
        """
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        copies = 3 if self.ema is None else 4
        settings = self.config.checkpoints
        there = len(list(self.store.folder.glob("step-*")))
        return copies * weights * max(1, settings.keep_last + settings.keep_best + 1 - there)

    def resume(self, checkpoint: TrainingCheckpoint) -> list[str]:
        """Resume from a checkpoint. Returns notes on what has changed."""
        loaded = checkpoint.load()
        if not loaded.state.keys() >= {"deal", "optimizer_name"}:
            message = f"{checkpoint.path} is of an earlier version of inline-attention"
            raise ConfigError([Problem("run.resume", f"{message}; start another run with --initial-checkpoint")])
        self._check_fits(checkpoint.path, loaded)
        try:
            position = Position.from_state(loaded.state["position"])
            if (position.epoch, position.updates) != (checkpoint.epoch, checkpoint.step):
                raise ValueError("its position is not the manifest's")
            return self._restore(loaded, position)
        except BrokenImagesError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            raise CheckpointError(f"{checkpoint.path} holds a state that cannot be resumed ({reason})") from error

    def _restore(self, loaded: LoadedCheckpoint, position: Position) -> list[str]:
        """Restore everything from a checkpoint. Returns notes on what has changed."""
        state, notes = loaded.state, []
        self.strategy.load_weights(self.model, loaded.weights)
        groups = self.optimizer.param_groups
        current = [{name: group[name] for name in OPTIMIZER_SETTINGS if name in group} for group in groups]
        self.strategy.load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, current, strict=True):
            group.update(settings)  # not those of the checkpoint
        if self.ema is not None:
            self.strategy.load_weights(self.ema.module, loaded.ema_weights or loaded.weights)
            if loaded.ema_weights is None:
                notes.append("the run had no averaged weights: averaging starts here")
        self.broken.restore(state["broken"])
        if state["scaler"]:  # empty if the run did not scale losses
            self.precision.scaler.load_state_dict(state["scaler"])
        self.position = position
        self._saved_at = self.position.epoch, self.position.updates
        generators = state["generators"]
        if len(generators) == self.processes.world_size:
            context = self.config.distributed.context_parallel
            own = generators[self.processes.rank // context * context]  # equal in all ranks that share images
            torch.set_rng_state(own["cpu"])
            if "cuda" in own and self.processes.device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda"], self.processes.device)
        else:
            counts = f"the run had {len(generators)} processes, now {self.processes.world_size}"
            notes.append(f"{counts}: training continues, but not bit for bit")
        return notes + self._restart_changed_epoch(state["deal"])

    def _sampling(self) -> dict[str, int]:
        """What decides which samples an update gets; saved as "deal"."""
        return {
            "images": len(self.data.train),
            "seed": self.config.training.seed,
            "images per update": self.resolved.total_batch_size,
            "updates per epoch": self.updates_per_epoch,
            **self.task.sampling_options(self.resolved.batch_size),
        }

    def _restart_changed_epoch(self, theirs: Mapping[str, int]) -> list[str]:
        """Restart the epoch if its samples are in another order than before. Returns a note on it."""
        ours, position = self._sampling(), self.position
        changed = [f"{name} {theirs[name]} before, {ours[name]} now" for name in ours if ours[name] != theirs[name]]
        is_resized = ours["updates per epoch"] != theirs["updates per epoch"]
        if not is_resized and not (changed and position.updates_in_epoch > 0):
            return []
        by_epochs = self.config.training.updates is None
        done = position.epoch * self.updates_per_epoch if by_epochs else position.updates - position.updates_in_epoch
        position.updates = done
        position.start_epoch(position.epoch)  # its samples are in another order now: repeat some rather than miss some
        self._saved_at = None
        return [f"{'; '.join(changed)}: epoch {position.epoch + 1} begins again"]

    def _check_fits(self, path: Path, loaded: LoadedCheckpoint) -> None:
        """Refuse a checkpoint of another model, other classes or another optimizer."""
        class_names, optimizer = parse_class_names(loaded), loaded.state["optimizer_name"]
        if class_names not in (None, self.class_names):
            before, now = show_difference([printable(name) for name in class_names], self.class_names)
            message = f"{path} was trained on the classes {before}, the data has {now}"
            advice = "resume with the data of the run, or start another with --initial-checkpoint"
            raise ConfigError([Problem("run.resume", f"{message}; {advice}")])
        if optimizer != self.config.optimizer.name:
            message = f"expected {optimizer}, as in {path}, got {self.config.optimizer.name}"
            advice = "an optimizer cannot load another's state; start another run with --initial-checkpoint"
            raise ConfigError([Problem("optimizer.name", f"{message}; {advice}")])
        ours = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in loaded.weights.items()}
        if ours != theirs:
            name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
            shapes = f"{theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} in the model that is asked for"
            message = f"{path} is of another model ({name}: {shapes})"
            advice = "resume with the settings of the run, or start another with --initial-checkpoint"
            raise ConfigError([Problem("run.resume", f"{message}; {advice}")])

    def save(self, metric: float | None = None) -> None:
        """Write a checkpoint. All ranks must call it."""
        own = {"cpu": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.processes.device)
        generators = self.processes.gather(own)
        weights = self.strategy.weights(self.model)
        ema_weights = None if self.ema is None else self.strategy.weights(self.ema.module)
        optimizer_state = self.strategy.optimizer_state(self.model, self.optimizer)
        trouble = None
        if self.processes.is_main:
            try:
                self.store.save(
                    step=self.position.updates,
                    epoch=self.position.epoch,
                    weights=weights,
                    ema_weights=ema_weights,
                    state={
                        "optimizer": optimizer_state,
                        "optimizer_name": self.config.optimizer.name,
                        "scaler": self.precision.scaler.state_dict(),
                        "position": vars(self.position),
                        "broken": self.broken.state(),
                        "generators": generators,
                        "deal": self._sampling(),
                    },
                    metric=metric,
                    metadata={**model_metadata(self.model), **self.task.metadata(self.class_names)},
                )
            except CheckpointWriteError as error:
                trouble = error
        (has_failed,) = self.processes.any(trouble is not None)  # else the other ranks would wait
        if has_failed:
            raise trouble or CheckpointWriteError("rank 0 could not write a checkpoint; see its message")
        self._saved_at = self.position.epoch, self.position.updates

    def _train_epoch(self, report: RunReport, sync: RankSync) -> None:
        position, accumulated = self.position, self.resolved.grad_accum_steps
        self.runnable.train()
        batches = self.training_loader.epoch(position.epoch, position.updates_in_epoch * accumulated)
        fetched = sync.read(batches, accumulated) if self._updates_left_in_epoch() > 0 else []
        while (left := self._updates_left_in_epoch()) > 0:
            sync.agree()
            assert self.scheduler is not None
            self.scheduler.step_update(position.updates)  # the learning rate depends on the number of updates only
            lr = self.optimizer.param_groups[0]["lr"]
            statistics = [buffer.clone() for buffer in self._statistics]
            total = self._accumulate_gradients(fetched)
            # Read ahead while the device computes.
            fetched = sync.read(batches, accumulated) if left > 1 else []
            loss, is_made = self._apply_gradients(total)
            position.updates += 1
            position.updates_in_epoch += 1
            if is_made:
                position.loss_sum += loss
                position.losses += 1
            else:  # the forward pass has written non-finite values to the running means of batch norms
                for buffer, before in zip(self._statistics, statistics, strict=True):
                    buffer.copy_(before)
            report.update_done(position.updates, position.epoch, self.resolved.total_batch_size, loss, lr)
            interval = self.config.checkpoints.interval_steps
            if interval is not None and position.updates % interval == 0:
                self.save()

    def _updates_left_in_epoch(self) -> int:
        in_epoch = self.updates_per_epoch - self.position.updates_in_epoch
        return min(in_epoch, self.total_updates - self.position.updates)

    def _end_epoch(self, report: RunReport, sync: RankSync) -> Metrics | None:
        position, settings = self.position, self.config
        is_last = position.updates >= self.total_updates
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "train_loss": position.loss_sum / position.losses if position.losses else math.nan,
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        metrics = chosen = None
        if is_last or (position.epoch + 1) % settings.training.validation_interval == 0:
            metrics = chosen = self._evaluate(self.model, sync)
            row |= {"val_loss" if name == "loss" else name: value for name, value in metrics.figures.items()}
            if self.ema is not None:
                chosen = self._evaluate(self.ema.module, sync)
                row |= {f"ema_{name}": value for name, value in chosen.figures.items()}
        row |= {"skipped_updates": position.skipped, "broken_images": len(self.broken)}
        position.rows.append(row)
        position.start_epoch(position.epoch + 1)
        report.epoch_done(position.rows)
        if is_last or position.epoch % settings.checkpoints.interval_epochs == 0:
            self.save(None if chosen is None else chosen.figures[self.best_metric])
        return chosen

    def _evaluate(self, model: nn.Module, sync: RankSync) -> Metrics:
        # Statistics of batch norms: evaluate what rank 0 saves.
        self.processes.adopt_main(model.buffers())
        with self.strategy.gathered(model):
            evaluator = self.task.evaluator(self.data.validation, self.processes.device)
            return evaluate(model, self.validation_loader, evaluator, self.precision, sync, self.images)

    def _accumulate_gradients(self, batches: list[Any]) -> torch.Tensor:
        """Accumulate gradients over batches. Returns their mean loss on this rank."""
        if self.config.training.compile:  # or this would import the compiler, which takes seconds
            torch.compiler.cudagraph_mark_step_begin()  # outputs of the previous update may be overwritten
        total = torch.zeros((), device=self.processes.device)
        for number, batch in enumerate(batches):
            is_last = number + 1 == len(batches)
            with nullcontext() if is_last else self.strategy.without_exchange(self.wrapped):
                with self.precision.autocast():
                    loss = self.objective(self.runnable, batch) / len(batches)
                self.precision.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _apply_gradients(self, loss: torch.Tensor) -> tuple[float, bool]:
        """Update the weights, unless loss or gradients are not finite. Returns the mean loss, and if it was updated.

        Gradients are the same on all ranks, so all decide alike.
        """
        scaler = self.precision.scaler
        mean = self.processes.sum(loss) / self.processes.world_size
        scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([weight.grad for weight in self.model.parameters() if weight.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found = torch.stack([mean, norm.to(mean)]).tolist()  # one synchronization with the device
        is_made = all(map(math.isfinite, found))
        if is_made:
            self._update_weights(norm)
            self.position.skipped_in_a_row = 0
        else:
            if scaler.is_enabled():  # lower the scale on all ranks: each knows only its own gradients
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            self._skip()
        self.optimizer.zero_grad(set_to_none=True)
        return found[0], is_made

    def _update_weights(self, norm: torch.Tensor) -> None:
        scaler, clip = self.precision.scaler, self.config.training.clip_grad
        if clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
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
                f"{position.skipped_in_a_row} losses or gradients in a row were NaN or infinite, the last at update "
                f"{position.updates + 1}; lower optimizer.lr, use training.amp=bf16 or off, or set training.clip_grad. "
                f"The last checkpoint in {self.folder / CHECKPOINTS} is from before"
            )
