"""A training run from its settings to its end: check everything first, then train, and say where things are."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from inline_attention.data.loading import named_worker_error
from inline_attention.engine.building import open_sources
from inline_attention.engine.checkpoints import CheckpointStore, TrainingCheckpoint, open_training_checkpoint
from inline_attention.engine.config import ConfigError, Problem, TrainConfig, check, resolve
from inline_attention.engine.evaluation import Metrics
from inline_attention.engine.interruption import noted_interruptions
from inline_attention.engine.processes import Processes, joined_processes
from inline_attention.engine.reporting import RunReport
from inline_attention.engine.trainer import CHECKPOINTS, Trainer


def train(config: TrainConfig) -> tuple[Path, Metrics | None]:
    """Run, or resume, a training run in this process and its peers.

    Args:
        config: The settings.

    Returns:
        The run's folder, and the last evaluation if there was one.

    Raises:
        ConfigError: With all that is wrong with settings or data, before anything is trained or written.
        InterruptedBySignalError: After SIGTERM or SIGINT, and a last checkpoint.
    """
    with joined_processes(config.run.device, config.distributed.timeout_minutes) as processes:
        problems = check(config, world_size=processes.world_size)
        if config.distributed.strategy == "fsdp2" and config.ema.enabled:
            message = "expected ddp with ema.enabled, got fsdp2: the average is not divided among devices"
            problems.append(Problem("distributed.strategy", message))
        if problems:
            raise ConfigError(problems)
        resolved = resolve(config, processes.world_size)
        sources = open_sources(config)
        folder = _run_folder(config, processes)
        checkpoint = _checkpoint_to_resume(config, folder)
        if resolved.total_batch_size > len(sources.train):
            message = f"expected at most the {len(sources.train)} images there are, got {resolved.total_batch_size}"
            raise ConfigError([Problem("training.total_batch_size", f"{message}; use a smaller batch")])
        trainer = Trainer(resolved, sources, folder, processes)
        total_updates = resolved.total_epochs * trainer.updates_per_epoch
        report = RunReport(folder, config, is_main=processes.is_main, total_updates=total_updates)
        with report, noted_interruptions() as interruption:
            for line in (f"run: {folder}", f"data: {len(sources.train)} images to train on, "
                         f"{len(sources.validation)} to evaluate on, {len(trainer.class_names)} classes",
                         *resolved.describe()):  # fmt: skip
                report.say(line)
            if checkpoint is not None:
                notes = trainer.resume(checkpoint)
                where = f"epoch {trainer.position.epoch + 1}, update {trainer.position.updates}"
                report.say(f"resumed from {checkpoint.path}: {where}")
                for note in notes:
                    report.say(note)
            try:
                metrics = trainer.run(report, interruption)
            except RuntimeError as error:
                # Torch tells of a dead data worker wherever the program happens to be, not only in the loader.
                if (named := named_worker_error(error)) is not None:
                    raise named from error
                raise
        return folder, metrics


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
    """The run that a checkpoint, or anything inside a run, belongs to."""
    for folder in (path, *path.absolute().parents):
        if (folder / CHECKPOINTS).is_dir():
            return folder
    message = f"expected auto, a run or one of its checkpoints, got {path}, which holds none"
    raise ConfigError([Problem("run.resume", message)])


def _checkpoint_to_resume(config: TrainConfig, folder: Path) -> TrainingCheckpoint | None:
    resumed = config.run.resume
    if resumed is None:
        if any((folder / CHECKPOINTS).glob("step-*")):
            message = f"{folder} holds checkpoints already; resume them with --resume auto, or choose another name"
            raise ConfigError([Problem("run.experiment", message)])
        return None
    path = Path(resumed)
    if resumed != "auto" and path.absolute() != folder.absolute() and path.name != CHECKPOINTS:
        return open_training_checkpoint(path)
    checkpoint = CheckpointStore(folder / CHECKPOINTS).latest_valid()
    if checkpoint is None and resumed != "auto":
        raise ConfigError([Problem("run.resume", f"there is no valid checkpoint in {folder}")])
    return checkpoint
