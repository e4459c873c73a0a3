"""Train: check the settings and the data, lock the run's folder, then train or resume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from inline_attention.data.loading import named_worker_error
from inline_attention.engine.checkpoint_format import STATE, find_weights
from inline_attention.engine.checkpoints import (
    CheckpointError,
    CheckpointStore,
    TrainingCheckpoint,
    open_training_checkpoint,
)
from inline_attention.engine.config import (
    ConfigError,
    Problem,
    ResolvedValues,
    TrainConfig,
    check,
    model_arguments,
    resolve,
)
from inline_attention.engine.interruption import InterruptedBySignalError, noted_interruptions
from inline_attention.engine.processes import Processes, joined_processes
from inline_attention.engine.reporting import SUMMARY, RunReport
from inline_attention.engine.run_folder import CHECKPOINTS, check_output, claimed
from inline_attention.engine.trainer import Trainer
from inline_attention.models.described import describable
from inline_attention.tasks.classification.task import ClassificationTask
from inline_attention.tasks.detection.task import DetectionTask
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import Metrics, ModelChoice, Task, TaskData, UnusableDataError


def open_sources(config: TrainConfig) -> TaskData:
    """Open and check the data of a run.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    return _open(build_task(config))


def _open(task: Task) -> TaskData:
    try:
        return task.open()
    except UnusableDataError as error:
        problems = [Problem(error.setting, problem) for problem in error.problems]
        raise ConfigError(problems, source="the data", advice=error.advice) from error


def build_task(config: TrainConfig) -> Task:
    """Build the task that the settings describe."""
    start, flip = config.model.initial_checkpoint, config.augmentation.hflip
    arguments = model_arguments(config)
    described = describable(config.model.name, arguments)
    model = ModelChoice(
        config.model.name,
        described,
        None if start is None else str(find_weights(Path(start))),
        config.training.grad_checkpointing,
        {name: value for name, value in arguments.items() if name not in described},
        config.model.num_classes,
    )
    if config.task.name == "classification":
        size = config.model.img_size
        return ClassificationTask(
            config.data,
            model,
            config.augmentation,
            image_size=(size, size) if isinstance(size, int) else size,
            channels=config.model.in_chans,
            smoothing=config.loss.smoothing,
            seed=config.training.seed,
        )
    # The head around a backbone has the classes.
    backbone = replace(
        model, arguments={name: value for name, value in arguments.items() if name != "num_classes"}, own_arguments={}
    )
    if config.task.name == "detection":
        return DetectionTask(config.data, backbone, config.detection, flip=flip)
    return SegmentationTask(config.data, backbone, config.segmentation, flip=flip)


def train(
    config: TrainConfig, *, on_epoch: Callable[[Mapping[str, Any]], None] | None = None
) -> tuple[Path, Metrics | None]:
    """Train or resume a run, on this rank and its peers.

    Args:
        config: Settings.
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
        data = _open(task)
        if resolved.total_batch_size > len(data.train):
            message = f"expected at most the {len(data.train)} images there are, got {resolved.total_batch_size}"
            raise ConfigError(
                [Problem("training.total_batch_size", f"{message}; set it to less, or to null and use -b alone")]
            )
        folder = _run_folder(config, processes)
        _refuse(check_output(folder))
        with claimed(folder, processes):
            return folder, _train_in(folder, resolved, task, data, processes, on_epoch)


def _train_in(
    folder: Path,
    resolved: ResolvedValues,
    task: Task,
    data: TaskData,
    processes: Processes,
    on_epoch: Callable[[Mapping[str, Any]], None] | None,
) -> Metrics | None:
    """Train in a folder that no other run uses."""
    config = resolved.config
    checkpoint = _checkpoint_to_resume(config, folder)
    trainer = Trainer(resolved, task, data, folder, processes)
    _refuse(check_output(folder, trainer.bytes_still_to_write()))
    _check_alike(processes, trainer, checkpoint)
    notes = _resume(trainer, checkpoint, config, folder)
    if config.run.start_anew and checkpoint is None and processes.is_main:
        _set_aside(folder)
    report = RunReport(
        folder, config, is_main=processes.is_main, total_updates=trainer.total_updates, on_epoch=on_epoch
    )
    with report, noted_interruptions() as interruption:
        for line in (*data.notes, f"run: {folder}", f"data: {len(data.train)} images to train on, "
                     f"{len(data.validation)} to evaluate on, {len(trainer.class_names)} classes",
                     *resolved.describe()):  # fmt: skip
            report.say(line)
        for note in notes:
            report.say(note)
        try:
            return trainer.run(report, interruption)
        except InterruptedBySignalError as error:
            error.folder = folder
            raise
        except RuntimeError as error:
            # Torch reports a dead worker wherever the program happens to be, not only in the loader.
            if (named := named_worker_error(error)) is not None:
                raise named from error
            raise
        finally:
            trainer.close()


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _check_alike(processes: Processes, trainer: Trainer, checkpoint: TrainingCheckpoint | None) -> None:
    """Refuse ranks that differ: folders that they do not share, images that not all can read.

    Raises:
        ConfigError: On all ranks.
    """
    found = processes.gather(None if checkpoint is None else (checkpoint.step, checkpoint.files[STATE].sha256))
    if len(set(found)) > 1:
        steps = ", ".join("none" if item is None else f"update {item[0]}" for item in found)
        message = f"processes find different checkpoints in {trainer.folder} ({steps})"
        raise ConfigError([Problem("run.output", f"{message}; use a folder that all machines share")])
    updates = processes.gather(trainer.updates_per_epoch)
    if min(updates) == 0:
        message = f"expected enough readable images for an update, got {len(trainer.data.train)}"
        raise ConfigError([Problem("training.total_batch_size", f"{message}; set it to less")])
    if len(set(updates)) > 1:
        message = f"processes find different numbers of images: an epoch has {', '.join(map(str, updates))} updates"
        raise ConfigError([Problem("data.dir", f"{message}; use a folder that all machines can read")])


def _resume(trainer: Trainer, checkpoint: TrainingCheckpoint | None, config: TrainConfig, folder: Path) -> list[str]:
    """Resume, if there is a checkpoint, before anything is overwritten. Returns notes for the user."""
    if checkpoint is None:
        notes = [f"nothing to resume in {folder}: the run starts"] if config.run.resume == "auto" else []
        return notes if trainer.task.start is None else [*notes, f"weights: {trainer.task.start}"]
    notes = trainer.resume(checkpoint)
    position = trainer.position
    unit, done, wanted = ("epochs", position.epoch, trainer.total_epochs)
    if config.training.updates is not None:
        unit, done, wanted = ("updates", position.updates, trainer.total_updates)
    if done > wanted:
        message = f"expected at least the {done} {unit} that {folder} has done, got {wanted}"
        raise ConfigError([Problem(f"training.{unit}", f"{message}; nothing is left to do; raise it to continue")])
    where = (
        f"all {done} {unit} are done" if done == wanted else f"epoch {position.epoch + 1}, update {position.updates}"
    )
    return [f"resumed from {checkpoint.path}: {where}", *notes]


def _run_folder(config: TrainConfig, processes: Processes) -> Path:
    settings = config.run
    resumed = settings.resume
    if resumed not in (None, "auto"):
        return _folder_of(Path(resumed))
    name = settings.experiment
    if name is None:
        name = config.model.name if resumed == "auto" else time.strftime(f"%Y%m%d-%H%M%S-{config.model.name}")
    chosen = [str(Path(settings.output) / name)]
    if processes.world_size > 1:
        dist.broadcast_object_list(chosen)  # clocks differ
    return Path(chosen[0])


def _folder_of(path: Path) -> Path:
    """Return the run that a checkpoint, or anything inside a run, belongs to."""
    for folder in (path, *path.absolute().parents):
        if (folder / CHECKPOINTS).is_dir():
            return folder
    message = f"expected auto, a run or one of its checkpoints, got {path}, which holds none"
    raise ConfigError([Problem("run.resume", message)])


def _checkpoint_to_resume(config: TrainConfig, folder: Path) -> TrainingCheckpoint | None:
    """Return the checkpoint that the run continues; None if it starts from zero.

    Raises:
        ConfigError: If a start from zero would overwrite what is there.
    """
    resumed, path = config.run.resume, Path(config.run.resume or "")
    if resumed not in (None, "auto") and path.absolute() != folder.absolute() and path.name != CHECKPOINTS:
        return open_training_checkpoint(path)
    store = CheckpointStore(folder / CHECKPOINTS)
    try:
        checkpoint = None if resumed is None else store.latest_valid()
        names = store.names()
        reason = f"none of the {len(names)} checkpoints in {folder} is intact" if names else ""
    except CheckpointError as error:
        checkpoint, reason = None, str(error)
    if checkpoint is None and resumed not in (None, "auto"):
        raise ConfigError([Problem("run.resume", reason or f"there is no checkpoint in {folder}")])
    if checkpoint is not None or not reason or config.run.start_anew:
        return checkpoint
    if resumed is None:
        message = f"{folder} holds checkpoints already; resume them with --resume auto, choose another name"
        raise ConfigError([Problem("run.experiment", f"{message}, or set them aside with --start-anew")])
    message = f"{reason}, and a start from zero would overwrite the results; repair that, choose another --experiment"
    raise ConfigError([Problem("run.resume", f"{message}, or set it all aside with --start-anew")])


def _set_aside(folder: Path) -> None:
    """Move the checkpoints and the table of an earlier run into a folder of their own."""
    if not os.path.lexists(folder / CHECKPOINTS):
        return
    place = next(path for number in count(1) if not (path := folder / f"previous-{number}").exists())
    place.mkdir()
    for name in (CHECKPOINTS, SUMMARY):
        with suppress(FileNotFoundError):
            (folder / name).rename(place / name)
