"""Train: check the settings and the data, lock the run's folder, then train or resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from inline_attention.data.loading import named_worker_error
from inline_attention.engine.checkpoint_format import STATE
from inline_attention.engine.checkpoints import (
    CheckpointError,
    CheckpointStore,
    TrainingCheckpoint,
    open_training_checkpoint,
)
from inline_attention.engine.config import ConfigError, Problem, ResolvedValues, TrainConfig, check, resolve
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption, noted_interruptions
from inline_attention.engine.processes import Processes, joined_processes, lost_rank_error
from inline_attention.engine.reporting import SUMMARY, RunReport
from inline_attention.engine.run_folder import CHECKPOINTS, check_output, claimed, find_run
from inline_attention.engine.trainer import Trainer
from inline_attention.models.described import Description, read_description
from inline_attention.models.reading import find_weights, open_checkpoint
from inline_attention.tasks.classification.distillation import DistillationTask
from inline_attention.tasks.classification.task import ClassificationTask
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import ARGUMENT_SETTINGS, Metrics, Task, TaskData


def open_sources(config: TrainConfig) -> TaskData:
    """Open and check the data of a run. `ConfigError` has everything that is wrong with it."""
    return build_task(config).open()


def build_task(config: TrainConfig) -> Task:
    """Build the task that the settings describe."""
    model, flip = config.model, config.augmentation.hflip
    if model.initial_checkpoint is not None:
        model = replace(model, initial_checkpoint=str(find_weights(Path(model.initial_checkpoint))))
    if config.task.name == "detection":
        return DetectionTask(config.data, model, config.detection, flip=flip)
    if config.task.name == "segmentation":
        return SegmentationTask(config.data, model, config.segmentation, flip=flip)
    options = {"smoothing": config.loss.smoothing, "seed": config.training.seed}
    distillation = config.distillation
    if distillation.match == "off":
        return ClassificationTask(config.data, model, config.augmentation, **options)
    if distillation.teacher is not None:
        distillation = replace(distillation, teacher=str(find_weights(Path(distillation.teacher))))
    return DistillationTask(config.data, model, config.augmentation, distillation, **options)


def settings_of_model(described: Description) -> list[str]:
    """Return the settings `key=value` of a model that a file describes: name, arguments, image channels and size."""
    further = {name: value for name, value in described.arguments.items() if name not in ARGUMENT_SETTINGS}
    settings: dict[str, Any] = {"name": described.name, "arguments": further}
    settings |= {name: described.arguments[name] for name in ("in_chans", "img_size") if name in described.arguments}
    return [f"model.{name}={json.dumps(value)}" for name, value in settings.items()]


def settings_of_start(path: Path) -> list[str]:
    """Return the settings `key=value` of the model in a run, checkpoint or file of weights; none if it does not say."""
    file = open_checkpoint(find_weights(path))
    return settings_of_model(read_description(file)) if "model" in file.metadata else []


def train(
    config: TrainConfig, *, fit_batch: bool = False, on_epoch: Callable[[Mapping[str, Any]], None] | None = None
) -> tuple[Path, Metrics | None]:
    """Train or resume a run, on this rank and its peers.

    Args:
        config: Settings.
        fit_batch: Drop a total batch that is larger than the dataset, if single batches fit.
        on_epoch: Called on rank 0 with each row of summary.csv, instead of console output.

    Returns:
        Folder of the run, and the last evaluation if there was one.

    Raises:
        ConfigError: With all problems of settings and data, before anything is trained or written.
        InterruptedBySignalError: After SIGTERM or SIGINT, and a checkpoint.
    """
    with joined_processes(config.run.device, config.distributed.timeout_minutes) as processes:
        _refuse(check(config, world_size=processes.world_size))
        resolved = resolve(config, processes.world_size)
        task = build_task(config)
        data = task.open()
        config, resolved, dropped = _fit_batch(config, resolved, len(data.train), processes.world_size, drop=fit_batch)
        folder = run_folder(config, processes)
        _refuse(check_output(folder))
        with claimed(folder, processes):
            checkpoint = checkpoint_to_resume(config, folder)
            trainer = Trainer(resolved, task, data, folder, processes)
            _refuse(check_output(folder, trainer.bytes_still_to_write()))
            _check_alike(processes, trainer, checkpoint)
            notes = _resume(trainer, checkpoint)
            if checkpoint is None and processes.is_main:
                _set_aside(folder, checkpoints=config.run.start_anew)
            report = RunReport(
                folder, config, is_main=processes.is_main, total_updates=trainer.total_updates, on_epoch=on_epoch
            )
            sizes = f"data: {len(data.train)} images to train on, {len(data.validation)} to evaluate on"
            if config.distillation.uses_labels:
                origin = "taken from the data" if config.model.num_classes is None else "set by model.num_classes"
                sizes = f"{sizes}, {len(trainer.class_names)} classes ({origin})"
            with report, noted_interruptions() as interruption, closing(trainer):
                plan = resolved.describe(processes.device)
                for line in (*data.notes, f"run: {folder}", sizes, *dropped, *plan, *task.notes, *notes):
                    report.say(line)
                return folder, _run(trainer, report, interruption)


def _fit_batch(
    config: TrainConfig, resolved: ResolvedValues, images: int, world_size: int, *, drop: bool
) -> tuple[TrainConfig, ResolvedValues, list[str]]:
    """Refuse a total batch of more images than there are, or drop it if single batches fit. Returns a note on it."""
    total = resolved.total_batch_size
    if total <= images:
        return config, resolved, []
    smaller = replace(config, training=replace(config.training, total_batch_size=None))
    fitting = resolve(smaller, world_size)
    if drop and fitting.total_batch_size <= images:
        note = f"training.total_batch_size {total} is not used: there are {images} images, fewer than one update takes"
        return smaller, fitting, [note]
    batch = max(1, min(config.training.batch_size, images // world_size))
    advice = f"add -b {batch} --set training.total_batch_size=null"
    message = f"expected at most the {images} images there are, got {total}; {advice}"
    raise ConfigError([Problem("training.total_batch_size", message)])


def _run(trainer: Trainer, report: RunReport, interruption: Interruption) -> Metrics | None:
    try:
        return trainer.run(report, interruption)
    except InterruptedBySignalError as error:
        error.folder = trainer.folder
        raise
    except RuntimeError as error:
        # Torch reports a dead worker wherever the program happens to be, not only in the loader.
        if (named := named_worker_error(error) or lost_rank_error(error, trainer.folder)) is not None:
            raise named from error
        raise


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _check_alike(processes: Processes, trainer: Trainer, checkpoint: TrainingCheckpoint | None) -> None:
    """Refuse ranks, all of them, that differ: folders that they do not share, images that not all can read."""
    found = processes.gather(None if checkpoint is None else (checkpoint.step, checkpoint.files[STATE].sha256))
    updates = processes.gather(trainer.updates_per_epoch)
    if len(set(found)) > 1:
        steps = ", ".join("none" if item is None else f"update {item[0]}" for item in found)
        message = f"processes find different checkpoints in {trainer.folder} ({steps})"
        _refuse([Problem("run.output", f"{message}; use a folder that all machines share")])
    if min(updates) == 0:
        message = f"expected enough readable images for an update, got {len(trainer.data.train)}"
        _refuse([Problem("training.total_batch_size", f"{message}; set it to less")])
    if len(set(updates)) > 1:
        message = f"processes find different numbers of images: an epoch has {', '.join(map(str, updates))} updates"
        _refuse([Problem("data.dir", f"{message}; use a folder that all machines can read")])


def _resume(trainer: Trainer, checkpoint: TrainingCheckpoint | None) -> list[str]:
    """Resume, if there is a checkpoint, before anything is overwritten. Returns notes for the user."""
    config, folder = trainer.config, trainer.folder
    if checkpoint is None:
        notes = [f"nothing to resume in {folder}: the run starts"] if config.run.resume == "auto" else []
        return notes if trainer.task.start is None else [*notes, f"weights: {trainer.task.start}"]
    notes = trainer.resume(checkpoint)
    position = trainer.position
    unit, done, wanted = "epochs", position.epoch, trainer.total_epochs
    if config.training.updates is not None:
        unit, done, wanted = "updates", position.updates, trainer.total_updates
    if done > wanted:
        message = f"expected at least the {done} {unit} that {folder} has done, got {wanted}"
        _refuse([Problem(f"training.{unit}", f"{message}; nothing is left to do; raise it to continue")])
    is_done, place = done == wanted, f"epoch {position.epoch + 1}, update {position.updates}"
    return [f"resumed from {checkpoint.path}: {f'all {done} {unit} are done' if is_done else place}", *notes]


def run_folder(config: TrainConfig, processes: Processes) -> Path:
    """Return the folder of a run, the same on all ranks."""
    settings = config.run
    resumed, name = settings.resume, settings.experiment
    if resumed not in (None, "auto"):
        if (folder := find_run(Path(resumed))) is not None:
            return folder
        message = f"expected auto, a run or one of its checkpoints, got {resumed}, which holds none"
        raise ConfigError([Problem("run.resume", message)])
    if name is None:
        name = config.model.name if resumed == "auto" else time.strftime(f"%Y%m%d-%H%M%S-{config.model.name}")
    return processes.gather(Path(settings.output) / name)[0]  # clocks differ


def checkpoint_to_resume(config: TrainConfig, folder: Path) -> TrainingCheckpoint | None:
    """Return the checkpoint that the run continues; None to start from zero, unless that would overwrite something."""
    resumed, path = config.run.resume, Path(config.run.resume or "")
    is_named = resumed not in (None, "auto")
    if is_named and path.absolute() != folder.absolute() and path.name != CHECKPOINTS:
        return open_training_checkpoint(path)
    store = CheckpointStore(folder / CHECKPOINTS)
    try:
        checkpoint = None if resumed is None else store.latest_valid()
        names = store.names()
        reason = f"none of the {len(names)} checkpoints in {folder} is intact" if names else ""
    except CheckpointError as error:
        checkpoint, reason = None, str(error)
    if checkpoint is None and is_named:
        raise ConfigError([Problem("run.resume", reason or f"there is no checkpoint in {folder}")])
    if checkpoint is not None or not reason or config.run.start_anew:
        return checkpoint
    if resumed is None:
        message = f"{folder} holds checkpoints already; resume them with --resume auto, choose another name"
        raise ConfigError([Problem("run.experiment", f"{message}, or set them aside with --start-anew")])
    message = f"{reason}, and a start from zero would overwrite the results; repair that, choose another --experiment"
    raise ConfigError([Problem("run.resume", f"{message}, or set it all aside with --start-anew")])


def _set_aside(folder: Path, *, checkpoints: bool) -> None:
    """Move the table of an earlier run, and its checkpoints if asked, into a folder of their own."""
    held = [name for name in (CHECKPOINTS, SUMMARY)[not checkpoints :] if os.path.lexists(folder / name)]
    if not held:
        return
    place = next(path for number in count(1) if not os.path.lexists(path := folder / f"previous-{number}"))
    place.mkdir()
    for name in held:
        (folder / name).rename(place / name)
