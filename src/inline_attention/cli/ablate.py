"""`inline ablate`: train a recipe with some things varied, over several seeds, and compare."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from inline_attention.ablation.grid import Cell, grid, parse_axis
from inline_attention.ablation.runs import collect, train_cells, train_side_by_side
from inline_attention.ablation.tables import CellResult, draw_ablation, plain_results, text_table, write_ablation
from inline_attention.cli.flags import overrides_of, read_settings
from inline_attention.cli.printing import fail, make_console, progress_bar, say, warn
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
    """Train the grid, or what is left of it, and write the table after every run.

    Args:
        recipe: Name of a recipe, or a YAML file of settings.
        axes: `NAME` or `NAME=VALUE,VALUE` each; several give their product.
        seeds: Runs of every cell; the first has the recipe's seed, the others those after it.
        output: Folder of runs and results.
        settings: Overrides `key=value` for all runs.
        flags: timm's flags, for all runs.
        at_once: Runs at a time, each in a process of its own if there are several.

    Raises:
        typer.Exit: 1 for what is wrong with axes, settings or data, 130 or 143 after SIGINT or SIGTERM.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    console = make_console()
    try:
        config = read_settings(recipe, [*overrides_of(flags), *settings])
        cells = _cells(config, axes)
        numbers = range(config.training.seed, config.training.seed + seeds)
        failed = _train_with_progress(console, cells, numbers, output, recipe, at_once)
    except (InterruptedBySignalError, StoppedError) as error:
        say(f"{error}; saved. The same command goes on", err=True)
        raise typer.Exit(error.exit_code) from error
    except OSError as error:
        fail(f"{error}; make room or make it writable, then give the same command again")
    results = collect(cells, numbers, output)
    console.print(_table(results, recipe))
    for path in _write(results, numbers, output, recipe):
        say(path)
    if failed:
        fail(f"{failed} of the runs failed, as said above; the same command tries them again")


def _cells(config: TrainConfig, axes: Sequence[str]) -> list[Cell]:
    """The grid, with what cannot be trained named."""
    chosen = dict(parse_axis(text) for text in axes)
    wrong = [problem for problem in check(config) if not problem.path.startswith("model.arguments")]
    if wrong:
        raise ConfigError(wrong)  # with every cell, so not with any of them
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
    """Train; how many runs failed beside others. One that fails alone raises."""
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
            _write_tables(collect(cells, seeds, output), seeds, output, recipe)
        return failed


def _write_tables(results: Sequence[CellResult], seeds: Sequence[int], output: Path, recipe: str) -> list[Path]:
    about = f"{_described(results, recipe)} Mean and sample standard deviation over seeds {', '.join(map(str, seeds))}."
    settings = {"recipe": recipe, "seeds": list(seeds)}
    return write_ablation(output, NAME, results, title=f"Ablation of {recipe}", about=about, settings=settings)


def _write(results: Sequence[CellResult], seeds: Sequence[int], output: Path, recipe: str) -> list[Path]:
    files = _write_tables(results, seeds, output, recipe)
    title, small_print = f"Ablation of {recipe}", _described(results, recipe)
    trained = plain_results([result for result in results if result.cell.problem is None])
    try:
        return files + draw_ablation(trained, output, NAME, title=title, small_print=small_print)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        warn("no picture without matplotlib: pip install 'inline-attention[plots]'")
        return files


def _described(results: Sequence[CellResult], recipe: str) -> str:
    training = results[0].cell.config.training
    model = results[0].cell.config.model.name
    return (
        f"{model} by the recipe {Path(recipe).stem}, {training.epochs} epochs each; top-1 of the validation images "
        "after the last."
    )


def _table(results: Sequence[CellResult], recipe: str) -> Table:
    """Of the cells that were trained: the others have been named before."""
    trained = [result for result in results if result.cell.problem is None]
    header, rows = text_table(trained)
    table = Table(title=f"Ablation of {recipe}", box=box.SIMPLE_HEAD)
    axes = len(trained[0].cell.values)
    for number, name in enumerate(header):
        is_text = number < axes or name == "note"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=number <= axes)
    for row in rows:
        table.add_row(*row)
    return table
