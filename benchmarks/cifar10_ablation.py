"""What makes InLine work on CIFAR-10: feature map, normalization and local residual, all else equal.

    python benchmarks/cifar10_ablation.py --data-dir DIR [--runs out/cifar10_ablation] [--epochs 20] [--at-once 3]
        [--time-limit 560]

{identity, relu, leaky_relu, exp} × {divide, subtract} × {with, without} the local residual, with the recipe `cifar10`
and two seeds. Cells with the residual and the method without it come first, so that a short budget covers them. Runs
are in the folder --runs; after a stop or a kill, the same command resumes. Several runs in parallel keep the GPU busy.
Results: benchmarks/results/cifar10_ablation.{json,csv,md,png,svg}, rewritten after every run.

`inline ablate cifar10 --axis feature_map --axis normalization --axis local_residual` trains the same grid.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cifar10 import cifar10_settings
from inline_attention.ablation.grid import AXES, Cell, grid
from inline_attention.ablation.runs import FinishedRun, UnusableRunError, collect, read_outcome, train_side_by_side
from inline_attention.ablation.tables import AblationResult, draw_ablation, write_ablation
from inline_attention.engine.config import ConfigError, TrainConfig

RESULTS = Path(__file__).parent / "results"
NAME, TITLE = "cifar10_ablation", "CIFAR-10: what makes InLine work"
AXIS_NAMES = ("local_residual", "feature_map", "normalization")


def comes_first(cell: Cell) -> bool:
    """Return True if a cell has the local residual, or is the method without it."""
    is_method = cell.values["feature_map"] == "identity" and cell.values["normalization"] == "subtract"
    return bool(cell.values["local_residual"]) or is_method


def train(
    groups: Sequence[Sequence[Cell]], seeds: int, runs: Path, at_once: int, time_limit: float | None
) -> Iterator[FinishedRun]:
    """Train the unfinished runs of each group of cells in turn, with all seeds, within the time limit."""
    start = time.monotonic()
    for cells in groups:
        left = None if time_limit is None else time_limit - (time.monotonic() - start)
        if left is not None and left <= 0:
            return
        finished_before = {
            (cell.label, seed) for cell in cells for seed in range(seeds) if read_outcome(cell.run(str(runs), seed))
        }
        for run in train_side_by_side(cells, range(seeds), runs, at_once=at_once, time_limit=left, on_trouble=print):
            if (run.cell.label, run.seed) not in finished_before:
                yield run


def write_results(
    output: Path, collected: Sequence[AblationResult], config: TrainConfig, seeds: int, overrides: Sequence[str]
) -> None:
    """Write the results of the cells that have a finished run."""
    results = [result for result in collected if result.runs]
    if not results:
        return
    training = config.training
    of_all = "" if all(len(result.runs) == seeds for result in results) else "up to "
    about = (
        f"InLine-DeiT-T with patches of 2×2 pixels, {training.epochs} epochs, batch {training.batch_size}, "
        f"{training.amp}, {config.optimizer.name}, {of_all}{seeds} seeds; top-1 of the test pictures after the last "
        "epoch."
    )
    if not any(result.images_per_second for result in results):
        about += " Several runs shared the machine, so there are no speeds."
    settings = {"recipe": "cifar10", "seeds": list(range(seeds)), "overrides": list(overrides)}
    command = shlex.join(["inline", "train", "cifar10", *(word for text in overrides for word in ("--set", text))])
    write_ablation(output, NAME, results, title=TITLE, about=f"{about}\n\n`{command}`", settings=settings)
    draw_ablation(results, output, NAME, title=TITLE, small_print=about)


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder of CIFAR-10.", exists=True, file_okay=False)],
    runs: Annotated[Path, typer.Option(help="Folder of the runs. Existing ones are resumed.")] = Path(f"out/{NAME}"),
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per cell.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per run.")] = 20,
    compile_model: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = True,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which runs are saved and stopped.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs in parallel.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting as key=value; repeatable.")] = None,
) -> None:
    overrides = [f"training.epochs={epochs}", *(set_ or ())]
    try:
        config = cifar10_settings(data_dir, compile_model, overrides, at_once)
        cells = grid(config, {name: AXES[name].values for name in AXIS_NAMES})
        first = [cell for cell in cells if comes_first(cell)]
        rest = [cell for cell in cells if not comes_first(cell)]
        write_results(output, collect(cells, range(seeds), runs), config, seeds, overrides)
        for cell, seed, outcome in train([first, rest], seeds, runs, at_once, time_limit):
            found = outcome.failure if outcome.top1 is None else f"{outcome.top1:.2f} %"
            print(f"finished {cell.label}, seed {seed}: {found}, {outcome.seconds:.0f} s", flush=True)
            write_results(output, collect(cells, range(seeds), runs), config, seeds, overrides)
    except (ConfigError, UnusableRunError) as error:
        raise typer.BadParameter(str(error)) from error
    print(output / f"{NAME}.md")


if __name__ == "__main__":
    typer.run(main)
