"""Evaluate a model: over a validation loader during training, or from a finished checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import Loader
from inline_attention.engine.checkpoint_format import find_weights
from inline_attention.engine.config.checks import DENSE_TASKS
from inline_attention.engine.interruption import Interruption
from inline_attention.engine.processes import BrokenReport, Precision, RankSync, joined_processes
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.described import read_description
from inline_attention.models.reading import Checkpoint, open_checkpoint
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
    if path.is_dir():
        path = find_weights(path, averaged=use_ema)
        use_ema = False  # the file has no others
    file = open_checkpoint(path, use_ema=use_ema or None)
    kind = file.metadata.get(TASK)  # None for classifiers
    if kind is None:
        if data.dataset == "folder" and data.dir is None:
            raise ValueError(f"{path} is of a classifier: name the data with --data-dir, or with --dataset digits")
    elif data.dataset != "folder" or model_name:
        raise ValueError(f"{path} is of a model for {kind}, which knows its model and kind of data; give --data-dir")
    elif data.dir is None:
        raise ValueError(f"{path} is of a model for {kind}: name the data with --data-dir")
    elif (data.image_folder or data.map_folder) and kind != SegmentationTask.name:
        message = f"{path} is of a model for {kind}, whose data says where its images are"
        raise ValueError(f"{message}; leave out --image-folder and --map-folder")
    with joined_processes(device) as processes:
        if kind is None:
            task, source, class_names = _classification(file, data, model_name, size)
        else:
            task, source, class_names, notes = _dense(file, data, size)
            if on_note is not None and processes.is_main:
                for note in notes:
                    on_note(note)
        model = task.build_model(class_names)
        load_checkpoint(model, file)
        model, precision = model.to(processes.device), Precision(amp, processes.device)
        # float16 has too small a range for the sums of blocks.
        if precision.dtype == torch.bfloat16 and isinstance(model, DenseModel):
            model.backbone.to(torch.bfloat16)
        broken = BrokenImages(len(source), BrokenImageLimit())
        reading = processes.reading(data, batch_size or (CLASSIFIERS_BATCH if kind is None else OTHERS_BATCH))
        with closing(task.validation_loader(source, model, reading, broken)) as loader:
            sync = RankSync(processes, Interruption(), BrokenReport([broken], processes))
            evaluator = task.evaluator(source, processes.device)
            metrics = evaluate(model, loader, evaluator, precision, sync)
        return metrics if processes.is_main else None


def _classification(
    file: Checkpoint, data: DataSection, model_name: str | None, size: int | None
) -> tuple[Task, Any, list[str]]:
    """Return the task, its validation data and its class names."""
    described = read_description(file, model_name)
    source = open_dataset(data.dataset, data.dir, data.val_split)
    if described.class_names is not None:
        source = source.with_classes(described.class_names)
    arguments = described.arguments if size is None else described.arguments | {"img_size": size}
    task = ClassificationTask(replace(data, crop_pct=described.crop_pct), ModelSection(described.name, arguments))
    return task, source, list(source.class_names)


def _dense(file: Checkpoint, data: DataSection, size: int | None) -> tuple[Task, Any, list[str], tuple[str, ...]]:
    """Return the task, its validation data, its class names and repair notes."""
    kind = DENSE_TASKS.get(file.metadata[TASK], SegmentationTask)
    task, class_names = kind.of_checkpoint(file, data)
    task.evaluation_side = size
    source, notes = task.open_validation(class_names)
    return task, source, class_names, notes
