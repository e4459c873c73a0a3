"""Linearize: measure a softmax teacher and its conversion, distill, and measure again. Training is `engine.train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.engine.config import ConfigError, Problem, TrainConfig, check
from inline_attention.engine.config.reading import read_config
from inline_attention.engine.evaluate import evaluate_task
from inline_attention.engine.processes import Processes, joined_processes
from inline_attention.engine.run_folder import CHECKPOINTS, SETTINGS_FILE
from inline_attention.engine.train import build_task, checkpoint_to_resume, run_folder, settings_of_model, train
from inline_attention.models.checkpoints import image_side_of, number_of_classes, save_weights
from inline_attention.models.described import (
    Conversion,
    check_description,
    conversion_of,
    create_described_model,
    read_description,
)
from inline_attention.models.reading import find_weights, open_checkpoint
from inline_attention.support.files import read_bounded, write_atomically
from inline_attention.support.text import counted
from inline_attention.support.untrusted import MAX_TEXT_BYTES, UntrustedDataError, parse_json
from inline_attention.tasks.classification.distillation import DistillationTask
from inline_attention.tasks.task import Task

TEACHER, CONVERTED, LINEARIZED = "teacher", "converted", "linearized"
TEACHER_FILE, RESULTS, FIRST_PHASE = "teacher.safetensors", "linearize.json", "attention"
Figures = dict[str, float]


@dataclass
class Linearized:
    """The outcome: figures of each stage by name, parameters, and the models for a comparison of speed."""

    folder: Path
    is_main: bool  # False on all ranks but 0
    figures: dict[str, Figures] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    weights: Path | None = None  # of the linearized model
    teacher: nn.Module | None = None
    student: nn.Module | None = None

    def first_figures(self) -> tuple[str, float, float]:
        """Return the name of the figure that counts (higher is better), without training and at the end."""
        name, after = next(iter(self.figures[LINEARIZED].items()))
        return name, self.figures[CONVERTED].get(name, after), after

    @property
    def has_head(self) -> bool:
        """True if the linearized model classifies."""
        return self.student is not None and number_of_classes(self.student.state_dict(), self.student) is not None


def describe_teacher(path: Path, model_name: str | None = None) -> list[str]:
    """Return the settings `key=value` of the model in a run, checkpoint or file of weights, as teacher and start.

    Raises:
        CheckpointError: If the weights cannot be used.
        ValueError: If the model's attention is converted already.
    """
    weights = find_weights(path)
    file = open_checkpoint(weights)
    if conversion_of(file) is not None:
        raise ValueError(f"{file.path} has converted attention already; give the softmax model it was made from")
    described = read_description(file, model_name)
    settings = {"model.initial_checkpoint": json.dumps(str(weights))}
    if described.image_size is not None:
        settings["distillation.teacher_size"] = json.dumps(described.image_size)
    else:
        with torch.device("meta"):
            model: Any = create_described_model(described.name, described.arguments)
        if hasattr(model, "set_input_size"):  # others have no image size
            usual = model.pretrained_cfg["input_size"][1:]
            if (side := image_side_of(file.weights, model)) in (None, max(usual)):
                settings["distillation.teacher_size"] = json.dumps(usual)
            else:
                settings |= {"model.img_size": f"{side}", "distillation.teacher_size": f"{side}"}
    if described.crop_pct is not None:
        settings["data.crop_pct"] = json.dumps(described.crop_pct)
    return [*settings_of_model(described), *(f"{key}={value}" for key, value in settings.items())]


def fetch_teacher(name: str, path: Path) -> None:
    """Write timm's pretrained weights of a model to a file, unless it is there from an earlier start.

    Raises:
        ValueError: If there are none, they cannot be downloaded, or the model has no attention to convert.
    """
    if path.exists():
        return
    check_description(name, {}, conversion=Conversion(options={"drop_position_bias": True}))  # before the download
    try:
        model: Any = create_described_model(name, {}, pretrained=True)
    except Exception as error:  # of networks, caches and hubs
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the pretrained weights of {name} cannot be loaded ({reason}); give them with --initial-checkpoint FILE"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    notes = {"model": name, "model_arguments": json.dumps({"num_classes": model.num_classes})}
    save_weights(model, path, metadata=notes)


def check_linearization(config: TrainConfig) -> None:
    """Refuse what `linearize` would refuse, without training or measuring (`ConfigError`)."""
    with joined_processes(config.run.device, config.distributed.timeout_minutes) as processes:
        if problems := check(config, world_size=processes.world_size):
            raise ConfigError(problems)
        checkpoint_to_resume(config, run_folder(config, processes))
        _distillation_task(config).open()


def blocks_kept_before(config: TrainConfig) -> list[int] | None:
    """Return the blocks that the run to resume keeps softmax in; None if nothing is resumed."""
    with joined_processes(config.run.device, config.distributed.timeout_minutes) as processes:
        settings = run_folder(config, processes) / SETTINGS_FILE
    is_there = config.run.resume is not None and settings.is_file()
    return list(read_config(settings).model.keep_softmax) if is_there else None


def linearize(
    config: TrainConfig, *, attention_epochs: int = 0, on_note: Callable[[str], None] = lambda _: None
) -> Linearized:
    """Measure teacher and untrained conversion, distill, and measure the best checkpoint.

    Figures of the start are kept in the run's folder, so that a resumed run does not measure them again.

    Args:
        config: Settings with `distillation.match` and the teacher's weights.
        attention_epochs: Epochs of a first phase that matches each attention's output, a run in the run's folder.
        on_note: Called on rank 0 with what is done next.

    Raises:
        ConfigError: With all problems of settings and data, before anything is trained or written.
        InterruptedBySignalError: After SIGTERM or SIGINT, and a checkpoint.
    """
    with joined_processes(config.run.device, config.distributed.timeout_minutes) as processes:
        say = on_note if processes.is_main else (lambda _: None)
        source = config.distillation.teacher or config.model.initial_checkpoint
        config = replace(config, distillation=replace(config.distillation, teacher=source))
        phase = _first_phase(config, attention_epochs)
        for settings in filter(None, (phase, config)):
            if problems := check(settings, world_size=processes.world_size):
                raise ConfigError(problems)
        folder = run_folder(config, processes)
        is_resumed = checkpoint_to_resume(config, folder) is not None
        result = Linearized(folder, processes.is_main, figures=_read_figures(folder) if config.run.resume else {})
        task = _distillation_task(config)
        data = task.open()
        for stage, measured in ((TEACHER, task.teacher_task()), (CONVERTED, task)):
            if stage not in result.figures and (stage == CONVERTED or config.distillation.uses_labels):
                say(f"measuring the {'teacher' if stage == TEACHER else 'untrained conversion'}")
                result.figures[stage] = _measure(measured, data, config, processes)
        _write(result)
        if phase is not None and not is_resumed:
            say(f"first phase: {counted(attention_epochs, 'epochs')} on the output of each attention")
            first, _ = train(replace(phase, run=replace(phase.run, output=str(folder), experiment=FIRST_PHASE)))
            weights = str(find_weights(first))
            config = replace(config, model=replace(config.model, initial_checkpoint=weights))
        updates, epochs = config.training.updates, config.training.epochs
        say(f"distillation: {counted(updates, 'updates') if updates is not None else counted(epochs, 'epochs')}")
        train(replace(config, run=replace(config.run, output=str(folder.parent), experiment=folder.name)))
        if (folder / CHECKPOINTS).is_dir():
            result.weights = find_weights(folder)
            config = replace(config, model=replace(config.model, initial_checkpoint=str(result.weights)))
        task = _distillation_task(config)
        say("measuring the result")
        result.figures[LINEARIZED] = _measure(task, data, config, processes)
        result.teacher, result.student = task.teacher, task.student
        models = {TEACHER: task.teacher, CONVERTED: task.student, LINEARIZED: task.student}
        result.parameters = {
            stage: sum(weight.numel() for weight in model.parameters()) for stage, model in models.items()
        }
        _write(result)
        return result


def _first_phase(config: TrainConfig, epochs: int) -> TrainConfig | None:
    """Return the settings of the first phase: no labels, each attention by itself, at the teacher's size."""
    if not epochs:
        return None
    size = config.distillation.teacher_size or config.model.img_size
    return replace(
        config,
        model=replace(config.model, img_size=size),
        run=replace(config.run, resume="auto" if config.run.resume else None),
        distillation=replace(config.distillation, match="attention"),
        augmentation=replace(config.augmentation, mixup=0.0, cutmix=0.0),
        training=replace(config.training, epochs=epochs, updates=None),
        checkpoints=replace(config.checkpoints, metric=None),
    )


def _distillation_task(config: TrainConfig) -> DistillationTask:
    task = build_task(config)
    assert isinstance(task, DistillationTask)
    if task.other_teacher is not None:
        message = f"expected {config.model.name}, which is compared with its conversion, got {task.other_teacher.name}"
        advice = "`inline train linearize_classifier` learns from another model"
        raise ConfigError([Problem("distillation.teacher", f"{message}; {advice}")])
    return task


def _measure(task: Task, data: Any, config: TrainConfig, processes: Processes) -> Figures:
    training = config.training
    batch = training.validation_batch_size or training.batch_size
    metrics = evaluate_task(task, data.validation, data.class_names, processes, config.data, batch, training.amp)
    return metrics.figures


def _write(result: Linearized, further: Mapping[str, Any] | None = None) -> None:
    if not result.is_main:
        return
    result.folder.mkdir(parents=True, exist_ok=True)
    content = {
        "figures": result.figures,
        "parameters": result.parameters,
        "weights": None if result.weights is None else str(result.weights),
        **(further or {}),
    }
    write_atomically(result.folder / RESULTS, (json.dumps(content, indent=2) + "\n").encode())


def write_speed(result: Linearized, cells: list[dict[str, Any]], environment: Mapping[str, str]) -> None:
    """Add the comparison of speed to the run's results."""
    _write(result, {"speed": cells, "environment": environment})


def _read_figures(folder: Path) -> dict[str, Figures]:
    """Return the figures of the start that an earlier process has written; empty if there are none, or damaged ones."""
    try:
        content = parse_json(read_bounded(folder / RESULTS, MAX_TEXT_BYTES).decode())
        return {
            stage: {str(name): float(value) for name, value in content["figures"][stage].items()}
            for stage in (TEACHER, CONVERTED)
            if stage in content["figures"]
        }
    except (OSError, UntrustedDataError, ValueError, TypeError, KeyError, AttributeError):
        return {}
