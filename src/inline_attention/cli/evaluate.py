"""`inline eval`: top-1 and top-5 of a checkpoint on a dataset."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer

from inline_attention.cli.printing import fail
from inline_attention.data.broken import BrokenImagesError
from inline_attention.data.sources import DataError
from inline_attention.engine.measuring import evaluate_checkpoint
from inline_attention.engine.processes import DeviceError
from inline_attention.models.checkpoints import CheckpointError


def run_eval(checkpoint: Path, results_file: Path | None, **options: Any) -> None:
    """Evaluate, print and, if asked, write the figures as JSON.

    Raises:
        typer.Exit: With code 1 and a reason where that is not possible.
    """
    try:
        metrics = evaluate_checkpoint(checkpoint, **options)
    except (CheckpointError, DataError, DeviceError, BrokenImagesError, ValueError) as error:
        fail(error)
    if metrics is None:
        return  # another process speaks
    typer.echo(
        f"top-1 {metrics.top1:.3f} %, top-5 {metrics.top5:.3f} %, loss {metrics.loss:.4f}, {metrics.count} images"
    )
    if results_file is not None:
        results_file.write_text(
            json.dumps({"checkpoint": str(checkpoint), **dataclasses.asdict(metrics)}, indent=2) + "\n"
        )
