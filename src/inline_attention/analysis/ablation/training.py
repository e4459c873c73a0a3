"""Training a grid: all cells with one seed, then all with the next, so that half a grid is a fair comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inline_attention.analysis.ablation.grid import Cell
from inline_attention.analysis.ablation.runs import RunOutcome, finish_run, read_outcome
from inline_attention.analysis.ablation.tables import CellResult, cell_result

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
        OtherSettingsError: If a folder holds a run with other settings.
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
