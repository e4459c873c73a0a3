"""Evaluate a model: over a validation loader during training, or from a finished checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.data.broken import BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import Loader
from inline_attention.engine.checkpoint_format import open_training_checkpoint
from inline_attention.engine.config.checks import DENSE_TASKS
from inline_attention.engine.config.reading import read_config
from inline_attention.engine.interruption import Interruption
from inline_attention.engine.processes import BrokenReport, Precision, Processes, RankSync, joined_processes
from inline_attention.engine.run_folder import SETTINGS_FILE, find_run
from inline_attention.models.checkpoints import CheckpointError, load_checkpoint
from inline_attention.models.described import Description, read_description
from inline_attention.models.reading import Checkpoint, find_weights, open_checkpoint
from inline_attention.tasks.classification.task import ClassificationTask
from inline_attention.tasks.dense import TASK
from inline_attention.tasks.pyramid import DenseModel
from inline_attention.tasks.segmentation.task import SegmentationTask
from inline_attention.tasks.task import Collectives, DataSection, Evaluator, Metrics, ModelSection, Task


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader[Any],
    evaluator: Evaluator,
    precision: Precision,
    sync: RankSync,
    collectives: Collectives | None = None,
) -> Metrics:
    """Evaluate in eval mode, then restore the mode. Signals and too many broken images end it.

    `collectives` are over the ranks that have different images, if some have the same.
    """
    processes = sync.processes
    was_training = model.training
    model.eval()
    batches = loader.epoch()
    for _ in range(max(processes.gather(len(loader)))):  # one process may have a batch more than another
        fetched = sync.read(batches)
        sync.agree()
        for batch in fetched:
            with precision.autocast():
                evaluator.add(model, batch)
    model.train(was_training)
    return evaluator.compute(collectives or processes)


def data_of_run(path: Path) -> DataSection | None:
    """Return the data that a run was trained on, by its args.yaml (`ConfigError`); None if `path` is in no run.

    A stranger's run must not make us download anything (`ValueError`), or read files outside of the data folder.
    """
    run = find_run(path)
    if run is None or not (run / SETTINGS_FILE).is_file():
        return None
    data = read_config(run / SETTINGS_FILE).data
    if data.dataset.startswith("hfds/"):
        advice = f"if you trust it, add --dataset {data.dataset}"
        raise ValueError(f"{run} was trained on {data.dataset}, which would be downloaded; {advice}")
    dataset = "folder" if data.dataset in {task.dataset for task in DENSE_TASKS.values()} else data.dataset
    kept = ("dir", "val_split", "repair", "image_folder", "map_folder")
    return DataSection(dataset, **{name: getattr(data, name) for name in kept})


def describe_weights(file: Path) -> str:
    """Return the name of a file of weights, with its epoch if it is in a checkpoint of a run."""
    try:
        return f"{file} (epoch {open_training_checkpoint(file.parent).epoch})"
    except CheckpointError:
        return str(file)


CLASSIFIERS_BATCH, OTHERS_BATCH = 64, 4  # images per forward pass; a detector's are about twenty times as large


def evaluate_checkpoint(
    path: Path,
    data: DataSection,
    *,
    model_name: str | None = None,
    size: int | None = None,
    use_ema: bool = False,
    batch_size: int | None = None,
    amp: str = "off",
    device: str = "auto",
    on_note: Callable[[str], None] | None = None,
) -> Metrics | None:
    """Evaluate the model of a file of weights, a run or a training checkpoint. Returns None on all ranks but 0.

    Args:
        path: File, run or checkpoint.
        data: Validation data. Detectors and segmenters know its kind.
        model_name: Model of a classifier; None for the file's.
        size: Image side, or shorter side for detectors and segmenters; None for the model's own.
        use_ema: Require averaged weights.
        batch_size: Images per forward pass; None for 64 (classifiers) or 4.
        amp: "bf16", "fp16", "auto" or "off".
        device: "auto", "cpu", "cuda" or "cuda:N".
        on_note: Called on rank 0 with each note on repairs.

    Raises:
        CheckpointError: If the file cannot be read or does not fit.
        DataError: If there is no such data.
        ValueError: If the file does not say which model it is of, or no data is named.
    """
    if not path.is_file():
        path = find_weights(path, averaged=use_ema)
        use_ema = False  # the file has no others
    file = open_checkpoint(path, use_ema=use_ema or None)
    kind = file.metadata.get(TASK)  # None for classifiers
    if kind is None:
        if data.dataset == "folder" and data.dir is None:
            message = f"{path} is of a classifier and in no run"
            raise ValueError(f"{message}: name the data with --data-dir, or with --dataset digits")
    elif data.dataset != "folder" or model_name:
        raise ValueError(f"{path} is of a model for {kind}, which knows its model and kind of data; give --data-dir")
    elif data.dir is None:
        raise ValueError(f"{path} is of a model for {kind}: name the data with --data-dir")
    elif (data.image_folder or data.map_folder) and kind != SegmentationTask.name:
        message = f"{path} is of a model for {kind}, whose data says where its images are"
        raise ValueError(f"{message}; leave out --image-folder and --map-folder")
    with joined_processes(device) as processes:
        described = None
        if kind is None:
            batch_size = batch_size or CLASSIFIERS_BATCH
            described, task, source, class_names = _classification(file, data, model_name, size)
        else:
            batch_size = batch_size or OTHERS_BATCH
            task, class_names = DENSE_TASKS.get(kind, SegmentationTask).of_checkpoint(file, data)
            task.evaluation_side = size
            source, notes = task.open_validation(class_names)
            if on_note is not None and processes.is_main:
                for note in notes:
                    on_note(note)
        metrics = evaluate_task(
            task, source, class_names, processes, data, batch_size, amp, file=file, described=described
        )
        return metrics if processes.is_main else None


def evaluate_task(
    task: Task,
    source: Any,
    class_names: Sequence[str],
    processes: Processes,
    data: DataSection,
    batch_size: int,
    amp: str,
    *,
    file: Checkpoint | None = None,
    described: Description | None = None,
) -> Metrics:
    """Build a task's model, with weights and preparation of a file if given, and evaluate it, on all ranks."""
    model = task.build_model(class_names)
    if file is not None:
        load_checkpoint(model, file)
    if described is not None:
        described.note_preparation(model)
    model, precision = model.to(processes.device), Precision(amp, processes.device)
    if file is None:
        task.prepare(model)
    # float16 has too small a range for the sums of blocks.
    if precision.dtype == torch.bfloat16 and isinstance(model, DenseModel):
        model.backbone.to(torch.bfloat16)
    broken = BrokenImages(len(source))
    reading = processes.reading(data, batch_size)
    with closing(task.validation_loader(source, model, reading, broken)) as loader:
        sync = RankSync(processes, Interruption(), BrokenReport([broken], processes))
        return evaluate(model, loader, task.evaluator(source, processes.device), precision, sync)


def _classification(
    file: Checkpoint, data: DataSection, model_name: str | None, size: int | None
) -> tuple[Description, Task, Any, list[str]]:
    """Return the model's description, the task, its validation data and its class names."""
    described = read_description(file, model_name)
    described.needed_classes_in(file)  # or its features would count as scores
    source = open_dataset(data.dataset, data.dir, data.val_split)
    if described.class_names is not None:
        source = source.with_classes(described.class_names)
    arguments = described.arguments if size is None else described.arguments | {"img_size": size}
    model = ModelSection.of(described.name, arguments, described.conversion)
    task = ClassificationTask(replace(data, crop_pct=described.crop_pct), model)
    return described, task, source, list(source.class_names)
