"""Whole models on a CPU, as they are, against timm's softmax: images per second.

    python benchmarks/cpu_models.py [--output DIR]

float32, two threads, inference without compilation: InLine-DeiT-T, InLine-Swin-T and timm's ViT-S after
`convert_attention`. Five minutes on an idle machine. Results: benchmarks/results/cpu_models.{json,md,png}, rewritten
after every case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from inline_attention.benchmark.models import ModelCase, ModelSettings
from inline_attention.cli.bench import report

RESULTS = Path(__file__).parent / "results"
THREADS = 2
SIZES_AND_BATCHES = ((224, 1), (224, 16), (448, 1), (896, 1))
CASES = tuple(
    ModelCase(name, size, batch, execution="eager", converted=name.startswith("vit"))
    for name in ("vit_small_patch16_224", "inline_deit_tiny", "inline_swin_tiny")
    for size, batch in SIZES_AND_BATCHES
)


def main(output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS) -> None:
    torch.set_num_threads(THREADS)
    report(ModelSettings(torch.device("cpu"), torch.float32, CASES, seconds=12.0), output, "cpu_models")


if __name__ == "__main__":
    typer.run(main)
