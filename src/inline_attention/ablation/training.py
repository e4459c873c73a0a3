"""Training a grid: all cells with one seed, then all with the next, so that half a grid is a fair comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inline_attention.ablation import one_run
from inline_attention.ablation.grid import Cell
from inline_attention.ablation.runs import RunOutcome, finish_run, read_outcome, run_folder
from inline_attention.ablation.tables import CellResult, cell_result
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.engine.config import to_yaml

OnEpoch = Callable[[Cell, int, Mapping[str, Any]], None]


class FinishedRun(NamedTuple):
    """A cell's run with one seed, and what came of it."""

    cell: Cell
    seed: int
    outcome: RunOutcome


def train_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    output: Path,
    *,
    stop_at: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> Iterator[FinishedRun]:
    """Train what is not trained yet; finished runs come back at once, cells that cannot be trained not at all.

    Args:
        cells: The combinations.
        seeds: One run each.
        output: Under which every run has its folder.
        stop_at: Time on `time.monotonic`'s clock after which nothing is begun, and what runs is stopped and saved.
        on_epoch: Called with cell, seed and each row of its summary.csv.

    Raises:
        UnusableRunError: If a folder holds a run with other settings.
        ConfigError: With all that is wrong with settings or data.
        InterruptedBySignalError: After SIGTERM, SIGINT or, in mid-run, `stop_at`. The same call goes on.
    """
    for seed in seeds:
        for cell in cells:
            if cell.problem is not None:
                continue
            config = cell.run(str(output), seed)
            outcome = read_outcome(config)
            if outcome is None:
                if stop_at is not None and time.monotonic() > stop_at:
                    return

                def report(row: Mapping[str, Any], cell: Cell = cell, seed: int = seed) -> None:
                    if on_epoch is not None:
                        on_epoch(cell, seed, row)

                outcome = finish_run(config, stop_at=stop_at, on_epoch=report)
            yield FinishedRun(cell, seed, outcome)


def train_side_by_side(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    output: Path,
    *,
    at_once: int,
    time_limit: float | None = None,
    on_trouble: Callable[[str], None],
) -> Iterator[FinishedRun]:
    """As `train_cells`, but several runs at a time, each in a process of its own; speeds are noted of one at a time.

    Args:
        cells: The combinations.
        seeds: One run each.
        output: Under which every run has its folder, its settings and what it wrote to the console.
        at_once: Runs at a time.
        time_limit: Seconds after which runs are stopped and saved. The same call goes on.
        on_trouble: Called with what became of a run that did not come to its end.

    Raises:
        UnusableRunError: If a folder holds a run with other settings.
    """
    jobs: dict[Command, tuple[Cell, int]] = {}
    for seed in seeds:
        for cell in cells:
            if cell.problem is not None:
                continue
            config = cell.run(str(output), seed)
            outcome = read_outcome(config)
            if outcome is not None:
                yield FinishedRun(cell, seed, outcome)
                continue
            settings = run_folder(config).with_suffix(".yaml")
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text(to_yaml(config), encoding="utf-8")
            arguments = (sys.executable, "-m", one_run.__name__, str(settings), *(["--alone"] if at_once == 1 else []))
            jobs[Command(f"{cell.label}, seed {seed}", arguments, settings.with_suffix(".log"))] = cell, seed
    for ended in run_side_by_side(list(jobs), at_once=at_once, time_limit=time_limit):
        cell, seed = jobs[ended.command]
        outcome = read_outcome(cell.run(str(output), seed))
        if outcome is not None:
            yield FinishedRun(cell, seed, outcome)
        elif ended.outcome == "failed":
            on_trouble(f"{ended.command.name}: failed; the end of its output:\n{ended.command.last_lines()}")
        else:
            on_trouble(f"{ended.command.name}: {ended.outcome}, the time was over")


def collect(cells: Sequence[Cell], seeds: Sequence[int], output: Path) -> list[CellResult]:
    """What is known of each cell, from the folders of its runs; nothing is trained."""
    results = []
    for cell in cells:
        outcomes = {}
        if cell.problem is None:
            found = {seed: read_outcome(cell.run(str(output), seed)) for seed in seeds}
            outcomes = {seed: outcome for seed, outcome in found.items() if outcome is not None}
        results.append(cell_result(cell, outcomes))
    return results
