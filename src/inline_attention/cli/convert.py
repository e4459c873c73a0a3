"""`inline convert`: a file of weights as safetensors, in the names of the model that it is of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from inline_attention.cli.printing import fail, say, warn
from inline_attention.models import create_model
from inline_attention.models.checkpoints import convert_checkpoint
from inline_attention.models.reading import EMA_KEYS


def run_convert(
    source: Path, output: Path, *, model_name: str, use_ema: bool | None, num_classes: int | None, force: bool
) -> None:
    """Convert and print what was converted, where it is, and the line that loads it.

    Raises:
        typer.Exit: With code 1 where the file cannot be read, does not fit or cannot be written; the reason is printed.
    """
    if output.exists() and not force:
        fail(f"{output} exists already; choose another --output, or --force to replace it")
    head: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    with torch.device("meta"):
        model = create_model(model_name, **head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not finite: the report has them
        report = convert_checkpoint(source, output, model=model, use_ema=use_ema)
    kind = "averaged (EMA)" if report.origin in EMA_KEYS else "raw" if report.origin else "the only"
    where = f"{report.origin!r} of {source}" if report.origin else source
    say(f"{len(report.loaded)} tensors, {kind} weights, from {where}")
    if report.nonfinite:
        warn(f"warning: NaN or infinite values in {', '.join(report.nonfinite)}")
    say(f"written to {output} ({output.stat().st_size / 2**20:.1f} MiB). To use it:\n")
    say("    from inline_attention import create_model\n")
    say(f"    {_loading_line(model_name, output, head)}")


def _loading_line(model_name: str, output: Path, head: dict[str, Any]) -> str:
    classes = "".join(f", {key}={value}" for key, value in head.items())
    overlay = f"pretrained_cfg_overlay=dict(file={str(output)!r})"
    return f"model = create_model({model_name!r}, pretrained=True{classes}, {overlay})"
