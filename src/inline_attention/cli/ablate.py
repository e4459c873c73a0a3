"""`inline ablate`: train variants of a recipe with several seeds and compare them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from inline_attention.ablation.grid import Cell, grid, parse_axis
from inline_attention.ablation.runs import collect, train_cells, train_side_by_side
from inline_attention.ablation.tables import draw_ablation, text_table, write_ablation
from inline_attention.cli.flags import overrides_of, read_settings
from inline_attention.cli.printing import draw_if_possible, fail, make_console, make_table, progress_bar, say, warn
from inline_attention.engine.config import ConfigError, TrainConfig, check
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.support.signals import StoppedError

NAME = "ablation"


def run_ablate(
    recipe: str,
    axes: Sequence[str],
    seeds: int,
    output: Path,
    settings: Sequence[str],
    flags: Sequence[str],
    at_once: int = 1,
) -> None:
    """Train the grid, or the rest of it, and write the table after every run; see `inline ablate --help`."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    console = make_console()
    try:
        config = read_settings(recipe, [*overrides_of(flags), *settings])
        cells = _cells(config, axes)
        numbers = range(config.training.seed, config.training.seed + seeds)
        failed = _train_with_progress(console, cells, numbers, output, recipe, at_once)
    except (InterruptedBySignalError, StoppedError) as error:
        say(f"{error}; saved. The same command resumes", err=True)
        raise typer.Exit(error.exit_code) from error
    except OSError as error:
        fail(f"{error}; make room or make it writable, then give the same command again")
    files = _write_tables(cells, numbers, output, recipe)
    trained = collect([cell for cell in cells if cell.problem is None], numbers, output)  # the others were named before
    title, small_print = f"Ablation of {recipe}", _described(cells, recipe)
    header, rows = text_table(trained)
    console.print(make_table(header, rows, texts=len(trained[0].values), title=title))
    drawn = draw_if_possible(lambda: draw_ablation(trained, output, NAME, title=title, small_print=small_print))
    files += drawn or []
    say(f"Ablation written to {output}: {', '.join(path.name for path in files)}")
    if failed:
        fail(f"{failed} of the runs failed, as said above; the same command tries them again")


def _cells(config: TrainConfig, axes: Sequence[str]) -> list[Cell]:
    chosen = dict(parse_axis(text) for text in axes)
    wrong = [problem for problem in check(config) if not problem.path.startswith("model.arguments")]
    if wrong:
        raise ConfigError(wrong)  # wrong in every cell
    cells = grid(config, chosen)
    for cell in cells:
        if cell.problem is not None:
            warn(f"skipped {cell.label}: {cell.problem}")
    if all(cell.problem is not None for cell in cells):
        fail(f"nothing is left to train: {config.model.name} takes none of these; choose other axes or another model")
    return cells


def _train_with_progress(
    console: Console, cells: Sequence[Cell], seeds: Sequence[int], output: Path, recipe: str, at_once: int
) -> int:
    """Train; return how many parallel runs failed. Without parallel runs a failure raises."""
    valid = [cell for cell in cells if cell.problem is None]
    epochs = valid[0].config.training.epochs + valid[0].config.schedule.cooldown_epochs
    with progress_bar(console) as progress:
        task = progress.add_task(recipe, total=len(valid) * len(seeds) * epochs)

        def show(cell: Cell, seed: int, row: Mapping[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{cell.label}, seed {seed}, epoch {row['epoch']}")

        failed = 0

        def trouble(text: str) -> None:
            nonlocal failed
            failed += 1
            console.print(text, style="yellow")

        if at_once == 1:
            finished = train_cells(valid, seeds, output, on_epoch=show)
        else:
            finished = train_side_by_side(valid, seeds, output, at_once=at_once, on_trouble=trouble)
        for number, (cell, seed, outcome) in enumerate(finished, start=1):
            progress.update(task, completed=number * epochs)
            found = outcome.failure if outcome.top1 is None else f"{outcome.top1:.2f} %"
            console.print(f"{cell.label}, seed {seed}: {found}, {outcome.seconds:.0f} s")
            _write_tables(cells, seeds, output, recipe)
        return failed


def _write_tables(cells: Sequence[Cell], seeds: Sequence[int], output: Path, recipe: str) -> list[Path]:
    about = f"{_described(cells, recipe)} Mean and sample standard deviation over seeds {', '.join(map(str, seeds))}."
    settings, title = {"recipe": recipe, "seeds": list(seeds)}, f"Ablation of {recipe}"
    return write_ablation(output, NAME, collect(cells, seeds, output), title=title, about=about, settings=settings)


def _described(cells: Sequence[Cell], recipe: str) -> str:
    config = cells[0].config
    return (
        f"{config.model.name} by the recipe {Path(recipe).stem}, {config.training.epochs} epochs each; top-1 of the "
        "validation images after the last."
    )
