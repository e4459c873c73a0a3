"""Whole models on a GPU, compiled: images per second and peak memory against timm's softmax and plain PyTorch.

    python benchmarks/gpu_models.py [--output DIR] [--processes 8] [--time-limit 200]

bf16 weights for inference, bf16 autocast for training, as many pixels per batch as 256 images of 224². It takes four
minutes, most of which is compiling, in several processes. Results: benchmarks/results/gpu_models.{json,md,png},
rewritten after every case.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from inline_attention.benchmark.models import ModelCase, ModelSettings, compile_jobs, constant_pixel_batch
from inline_attention.benchmark.side_by_side import run_compile_jobs
from inline_attention.cli.bench import report, resolve_device

RESULTS = Path(__file__).parent / "results"


def cases_on(device: torch.device) -> tuple[ModelCase, ...]:
    def batch(size: int) -> int:
        return constant_pixel_batch(size, device)

    return (
        ModelCase("inline_deit_tiny", 224, batch(224), rivals=("timm",)),
        ModelCase("inline_swin_tiny", 224, batch(224), rivals=("timm",)),
        ModelCase("inline_deit_tiny", 224, batch(224), "training", rivals=("timm",)),
        *(ModelCase("inline_deit_tiny", size, batch(size), rivals=("timm",)) for size in (1024, 2048)),
        ModelCase("inline_pvt_small", 224, batch(224), rivals=("plain",)),
        ModelCase("inline_deit_tiny", 1024, batch(1024), "training", rivals=("timm",)),
        ModelCase("inline_cswin_tiny", 224, batch(224), rivals=("plain",)),
        ModelCase("inline_deit_tiny", 512, batch(512), rivals=("timm",)),
    )


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    processes: Annotated[int, typer.Option(min=0, help="Processes that compile ahead; 0 for none.")] = 8,
    compile_mode: Annotated[str, typer.Option(help="Mode of torch.compile.")] = "reduce-overhead",
    time_limit: Annotated[float, typer.Option(help="Seconds after which no further case is started.")] = math.inf,
) -> None:
    start = time.monotonic()
    device = resolve_device("cuda")
    settings = ModelSettings(device, torch.bfloat16, cases_on(device), compile_mode, seconds=1.0)
    if processes:
        run_compile_jobs(compile_jobs(settings), processes, on_progress=lambda line: print(line, flush=True))
    left = time_limit - (time.monotonic() - start)
    report(dataclasses.replace(settings, time_limit=left), output, "gpu_models")


if __name__ == "__main__":
    typer.run(main)
