"""What most users do, on a GPU: ordinary training, converted ViTs, every head dim, masks, host time.

    python benchmarks/gpu_everyday.py [--output DIR] [--only PATTERN] [--budget 420] [--add] [--smoke]

Every cell is measured in bf16 against softmax in the same run, and compared with its bounds. Several processes compile
ahead. The most important cells come first; the tables name those that the budget did not reach, and a second run with
`--add` measures them. `--smoke` runs tiny cells on a CPU. Results: benchmarks/results/gpu_everyday.{json,md}, rewritten
after every cell.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from inline_attention.cli.bench import report_everyday

RESULTS = Path(__file__).parent / "results"


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    only: Annotated[str, typer.Option(help="Measure cells whose section or name contains this.")] = "",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further cell is started.")] = math.inf,
    processes: Annotated[int, typer.Option(min=0, help="Processes that compile ahead; 0 for none.")] = 12,
    add: Annotated[bool, typer.Option("--add", help="Keep cells already measured in the output folder.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny cells on a CPU, as a test.")] = False,
) -> None:
    report_everyday(
        output, name="gpu_everyday", only=only, budget=budget, processes=processes, add=add, smoke=smoke
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
