"""`inline convert`: convert weights to safetensors, under the names of our models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from inline_attention.cli.printing import fail, say, warn


def convert(
    file: Annotated[Path, Argument(help="Weights file, such as the authors' .pth.", show_default=False)],
    model: Annotated[str, Option(help="Model name.", show_default=False)],
    output: Annotated[Path, Option("--output", "-o", help="The .safetensors file to write.", show_default=False)],
    use_ema: Annotated[
        bool | None,
        Option("--use-ema/--no-ema", help="Require averaged or raw weights.", show_default="averaged if present"),
    ] = None,
    num_classes: Annotated[
        int | None, Option(min=0, help="Number of classes in the file.", show_default="the model's 1000")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the output if it exists.")] = False,
) -> None:
    """Convert weights to safetensors. No code in the file is run."""
    if output.exists() and not force:
        fail(f"{output} exists already; choose another --output, or --force to replace it")
    import torch

    from inline_attention.models import create_model
    from inline_attention.models.checkpoints import convert_checkpoint
    from inline_attention.models.reading import EMA_KEYS

    head: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    with torch.device("meta"):
        built = create_model(model, **head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values that are not finite are in the report
        report = convert_checkpoint(file, output, model=built, use_ema=use_ema)
    kind = "averaged (EMA)" if report.origin in EMA_KEYS else "raw" if report.origin else "the only"
    source = f"{report.origin!r} of {file}" if report.origin else file
    say(f"{len(report.loaded)} tensors, {kind} weights, from {source}")
    if report.nonfinite:
        warn(f"warning: NaN or infinite values in {', '.join(report.nonfinite)}")
    classes = "".join(f", {key}={value}" for key, value in head.items())
    overlay = f"pretrained_cfg_overlay=dict(file={str(output)!r})"
    say(f"Weights written to {output} ({output.stat().st_size / 2**20:.1f} MiB). To use it:\n")
    say("    from inline_attention import create_model\n")
    say(f"    model = create_model({model!r}, pretrained=True{classes}, {overlay})")
