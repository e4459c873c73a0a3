"""Attention on a GPU: every backend of InLine with its local residual against softmax, and the copy floor.

    python benchmarks/gpu_attention.py [--output DIR] [--seconds 0.3] [--latency]

The cases of `inline bench attention` on a GPU: bf16, B·N·C ≈ 25 million, N = 196 … 65536, C = 192 and 768, head dim 32
and 64, one 1024² image, and the host's overhead. It takes five minutes, one of them to compile plain PyTorch for
C = 192, head dim 32. Results: benchmarks/results/gpu_attention.{json,md,png}, rewritten after every case.

`--latency` measures only the one image and the host's overhead, which takes seconds. Results: gpu_latency.{json,md}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from inline_attention.benchmark.attention import AttentionSettings, default_cases, measure_attention
from inline_attention.benchmark.results import write_json, write_markdown
from inline_attention.benchmark.tables import as_markdown, attention_tables
from inline_attention.cli.bench import report, resolve_device

RESULTS = Path(__file__).parent / "results"


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    seconds: Annotated[float, typer.Option(help="Seconds of timing per pass and case.")] = 1.0,
    latency: Annotated[bool, typer.Option("--latency", help="Only one image and the host's overhead.")] = False,
) -> None:
    device = resolve_device("cuda")
    if not latency:
        settings = AttentionSettings(device, torch.bfloat16, default_cases(device), seconds=seconds)
        report(settings, output, "gpu_attention")
        return
    settings = AttentionSettings(device, torch.bfloat16, (), seconds=seconds)
    measured = measure_attention(settings, lambda _, line: print(line))
    tables = as_markdown(attention_tables(measured))
    write_json(output / "gpu_latency.json", measured.as_json())
    write_markdown(output / "gpu_latency.md", "Latency of attention, bfloat16", measured.environment, tables)
    print(tables)


if __name__ == "__main__":
    typer.run(main)
