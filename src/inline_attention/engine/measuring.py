"""Evaluation of a finished checkpoint, apart from any run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
from timm.data.config import resolve_data_config

from inline_attention.data.batch import Normalize
from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import EvaluationBatches
from inline_attention.data.transforms import evaluation_transform
from inline_attention.engine.building import evaluation_options
from inline_attention.engine.evaluation import Metrics, evaluate
from inline_attention.engine.precision import Precision
from inline_attention.engine.processes import joined_processes
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.reading import open_checkpoint


def evaluate_checkpoint(
    path: Path,
    *,
    dataset: str = "folder",
    data_dir: Path | None = None,
    split: str = "validation",
    model_name: str | None = None,
    model_arguments: dict[str, Any] | None = None,
    size: int | None = None,
    use_ema: bool = False,
    batch_size: int = 64,
    workers: int = 4,
    amp: Any = "off",
    device: str = "auto",
) -> Metrics | None:
    """Top-1, top-5 and loss; None in all but the main process.

    Args:
        path: A file of weights, or a folder of a training checkpoint.
        dataset: As `open_dataset` names it.
        data_dir: Its folder.
        split: Split or subfolder.
        model_name: The model; as the file says, if None.
        model_arguments: Further arguments of the model, besides those that the file names.
        size: Side of the images in pixels; the model's own, if None.
        use_ema: Take the averaged weights of a training checkpoint.
        batch_size: Images of a forward pass.
        workers: Processes that read images.
        amp: "bf16", "fp16" or "off".
        device: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        CheckpointError: If the file cannot be read or does not fit.
        DataError: If there is no such data.
        ValueError: If the file does not say which model it is of.
    """
    if path.is_dir():
        path = path / ("model_ema.safetensors" if use_ema else "model.safetensors")
    metadata = open_checkpoint(path).metadata
    name = model_name or metadata.get("model")
    if not name:
        raise ValueError(f"{path} does not say which model it is of; name it with --model")
    with joined_processes(device) as processes:
        source = open_dataset(dataset, data_dir, split)
        classes = metadata.get("class_names")
        if classes is not None:
            source = source.with_classes(json.loads(classes))
        arguments: dict[str, Any] = json.loads(metadata.get("model_arguments", "{}"))
        arguments = {"num_classes": len(source.class_names), **arguments, **(model_arguments or {})}
        if size is not None:
            arguments["img_size"] = size
        model = timm.create_model(name, **arguments)
        load_checkpoint(model, path)
        model = model.to(processes.device)
        wanted: dict[str, Any] = {"crop_pct": json.loads(metadata.get("crop_pct", "null"))}
        pixels = arguments.get("img_size")
        if pixels is not None:
            height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
            wanted["input_size"] = (3, height, width)
        described = resolve_data_config(wanted, model=model)
        loader = ImageLoader(
            source,
            evaluation_transform(described["input_size"][1:], **evaluation_options(described)),
            EvaluationBatches(len(source), batch_size, rank=processes.rank, world_size=processes.world_size),
            normalize=Normalize(described["mean"], described["std"]),
            broken=BrokenImages(len(source), BrokenImageLimit()),
            replace_broken=False,
            workers=workers,
            device=processes.device,
        )
        metrics = evaluate(model, loader, Precision(amp, processes.device), processes)
        return metrics if processes.is_main else None
