"""The table of an ablation: a row per cell, with mean and spread over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inline_attention.ablation.grid import Cell, shown
from inline_attention.ablation.runs import RunOutcome
from inline_attention.benchmark.model_size import ModelSize, measure_model_size
from inline_attention.benchmark.results import markdown_table
from inline_attention.engine.config import model_arguments

NOTHING = "–"


@dataclass(frozen=True)
class CellResult:
    """What is known of one cell.

    Attributes:
        cell: The combination.
        outcomes: Of its runs that are over, by seed.
        size: Of its model; None if it cannot be built.
    """

    cell: Cell
    outcomes: Mapping[int, RunOutcome]
    size: ModelSize | None

    @property
    def top1(self) -> list[float]:
        """Percent, of the seeds that did not diverge."""
        return [outcome.top1 for outcome in self.outcomes.values() if outcome.top1 is not None]

    @property
    def mean(self) -> float | None:
        """Of top-1 over the seeds."""
        return statistics.fmean(self.top1) if self.top1 else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of top-1 over the seeds; None with fewer than two."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None

    @property
    def images_per_second(self) -> float | None:
        """In training, the median over the seeds."""
        speeds = [outcome.images_per_second for outcome in self.outcomes.values() if outcome.images_per_second]
        return statistics.median(speeds) if speeds else None

    @property
    def note(self) -> str:
        """Why there are fewer figures than seeds; empty if there are as many."""
        if self.cell.problem is not None:
            return f"skipped: {self.cell.problem}"
        failed = [f"seed {seed}: {outcome.failure}" for seed, outcome in self.outcomes.items() if outcome.failure]
        return "; ".join(failed)


def cell_result(cell: Cell, outcomes: Mapping[int, RunOutcome]) -> CellResult:
    """Put together what is known of a cell; its model is measured without computing anything."""
    size = None
    if cell.problem is None:
        pixels = cell.config.model.img_size
        sides = (pixels, pixels) if isinstance(pixels, int) else pixels
        image = None if sides is None else (cell.config.model.in_chans, *sides)
        size = measure_model_size(cell.config.model.name, input_size=image, **model_arguments(cell.config))
    return CellResult(cell, outcomes, size)


def rows(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Plain rows, for files: a column per axis, then the figures."""
    return [
        {
            **result.cell.values,
            "top1_mean": result.mean,
            "top1_std": result.spread,
            "seeds": len(result.top1),
            "parameters": None if result.size is None else result.size.parameters,
            "macs": None if result.size is None else result.size.macs,
            "images_per_second": result.images_per_second,
            "note": result.note,
        }
        for result in results
    ]


def text_table(results: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text; the column of notes only where there are any."""
    axes = list(results[0].cell.values)
    header = [*(axis.replace("_", " ") for axis in axes),
              "top-1 %, mean ± std", "seeds", "parameters (M)", "MACs (M)", "training images/s", "note"]  # fmt: skip
    body = [
        [
            *(shown(value) for value in result.cell.values.values()),
            mean_and_spread(result),
            str(len(result.top1)),
            NOTHING if result.size is None else f"{result.size.parameters / 1e6:.2f}",
            NOTHING if result.size is None else f"{result.size.macs / 1e6:,.1f}",
            NOTHING if result.images_per_second is None else f"{result.images_per_second:,.0f}",
            result.note,
        ]
        for result in results
    ]
    if not any(result.note for result in results):
        header.pop()
        for row in body:
            row.pop()
    return header, body


def mean_and_spread(result: CellResult) -> str:
    """Such as "71.70 ± 0.21"."""
    if result.mean is None:
        return NOTHING
    return f"{result.mean:.2f}" + ("" if result.spread is None else f" ± {result.spread:.2f}")


def as_markdown(results: Sequence[CellResult]) -> str:
    """The table in Markdown; bars inside notes would be taken for columns."""
    header, body = text_table(results)
    return markdown_table(header, [[text.replace("|", "\\|") for text in row] for row in body])
