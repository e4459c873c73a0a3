"""Results of an ablation: a row per cell with mean and spread over seeds, as table, files and figure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inline_attention.ablation.grid import Cell, shown
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.model_size import ModelSize, measure_model_size
from inline_attention.benchmark.results import markdown_table, write_csv, write_json, write_markdown
from inline_attention.support.figures import Chart, DotRow, Panel, Style, dot_panel
from inline_attention.support.text import printable

NOTHING = "–"


@dataclass(frozen=True)
class RunOutcome:
    """The result of one run.

    The speed is the training images of an epoch over the median time from one epoch's end to the next, which includes
    evaluation or checkpoints only if most epochs have them. It is None after a single epoch, and if other runs shared
    the machine.
    """

    top1: float | None  # percent after the last epoch, with averaged weights if there are any
    epochs: int
    seconds: float  # from settings to last checkpoint, over all attempts
    images_per_second: float | None
    environment: dict[str, str]  # of the last attempt
    failure: str = ""  # why there is no top-1


@dataclass(frozen=True)
class CellResult:
    """The outcomes of a cell's finished runs, by seed."""

    cell: Cell
    outcomes: Mapping[int, RunOutcome]

    @cached_property
    def size(self) -> ModelSize | None:
        """Size of the model, computed on the meta device; None if it cannot be built."""
        if self.cell.problem is not None:
            return None
        model, side = self.cell.config.model, self.cell.config.model.img_size
        sides = (side, side) if isinstance(side, int) else side
        image = None if sides is None else (model.in_chans, *sides)
        return measure_model_size(model.name, input_size=image, **model.model_arguments())

    @property
    def top1(self) -> list[float]:
        """Top-1 in percent of the seeds that did not diverge."""
        return [outcome.top1 for outcome in self.outcomes.values() if outcome.top1 is not None]

    @property
    def mean(self) -> float | None:
        """Mean of top-1 over the seeds."""
        return statistics.fmean(self.top1) if self.top1 else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of top-1 over the seeds; None with fewer than two."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None

    @property
    def images_per_second(self) -> float | None:
        """Training speed, median over the seeds."""
        speeds = [outcome.images_per_second for outcome in self.outcomes.values() if outcome.images_per_second]
        return statistics.median(speeds) if speeds else None

    @property
    def note(self) -> str:
        """Why there are fewer results than seeds; empty if there are as many."""
        if self.cell.problem is not None:
            return f"skipped: {self.cell.problem}"
        return "; ".join(f"seed {seed}: {run.failure}" for seed, run in self.outcomes.items() if run.failure)


def rows(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return plain rows for files: a column per axis, then the results."""
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
    """Return header and rows as text; the column of notes only if there are any."""
    header = [axis.replace("_", " ") for axis in results[0].cell.values]
    header += ["top-1 %, mean ± std", "seeds", "parameters (M)", "MACs (M)", "training images/s", "note"]
    body = [
        [
            *(shown(value) for value in result.cell.values.values()),
            mean_and_spread(result.mean, result.spread),
            str(len(result.top1)),
            NOTHING if result.size is None else f"{result.size.parameters / 1e6:.2f}",
            NOTHING if result.size is None else f"{result.size.macs / 1e6:,.1f}",
            NOTHING if result.images_per_second is None else f"{result.images_per_second:,.0f}",
            result.note,
        ]
        for result in results
    ]
    if any(result.note for result in results):
        return header, body
    return header[:-1], [row[:-1] for row in body]


def mean_and_spread(mean: float | None, spread: float | None) -> str:
    """Return a text such as "71.70 ± 0.21"."""
    if mean is None:
        return NOTHING
    return f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def as_markdown(results: Sequence[CellResult]) -> str:
    """Return the table in Markdown, with bars inside notes escaped."""
    header, body = text_table(results)
    return markdown_table(header, [[text.replace("|", "\\|") for text in row] for row in body])


def write_ablation(
    folder: Path, name: str, results: Sequence[CellResult], *, title: str, about: str, settings: Mapping[str, Any]
) -> list[Path]:
    """Write `NAME.json` with every run, `NAME.csv` and `NAME.md` with the table, and `about` below its title."""
    environment = latest_environment(results)
    content = {"analysis": "ablation", "title": title, "environment": environment, "settings": dict(settings)}
    files = [folder / f"{name}.{ending}" for ending in ("json", "csv", "md")]
    write_json(files[0], {**content, "results": plain_results(results)})
    write_csv(files[1], rows(results))
    write_markdown(files[2], title, environment, f"{about}\n\n{as_markdown(results)}")
    return files


def latest_environment(results: Sequence[CellResult]) -> dict[str, str]:
    """Return the environment of the last run, or of this process if there is none."""
    found = [outcome.environment for result in results for outcome in result.outcomes.values()]
    return combined_environment(found) if found else describe_environment()


def plain_results(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return rows of the table, each with its values by axis and all of its runs, for JSON."""
    return [
        {
            **row,
            "label": result.cell.label,
            "values": dict(result.cell.values),
            "runs": {str(seed): dataclasses.asdict(outcome) for seed, outcome in result.outcomes.items()},
        }
        for row, result in zip(rows(results), results, strict=True)
    ]


def draw_ablation(
    results: Sequence[Mapping[str, Any]], folder: Path, name: str, *, title: str, small_print: str
) -> list[Path]:
    """Write `NAME.png` and `.svg`: a row of dots per row of `plain_results`, one dot per seed and a bar at the mean."""
    small_print += " Each dot is a run with its own seed; the bar is the mean."
    for result in results:
        if result["top1_mean"] is None:
            small_print += f" {result['label']}: {result['note'] or 'not trained yet'}."
    return Chart([ablation_panel(results)]).save(folder, name, title=title, small_print=small_print, width=8.0)


def ablation_panel(results: Sequence[Mapping[str, Any]]) -> Panel:
    """Return a row of dots per result that has a mean."""
    rows = [
        DotRow(
            printable(result["label"]),
            Style("inline"),
            [run["top1"] for run in result["runs"].values() if run["top1"] is not None],
            result["top1_mean"],
            mean_and_spread(result["top1_mean"], result["top1_std"]),
        )
        for result in results
        if result["top1_mean"] is not None
    ]
    return dot_panel(rows, "top-1 (%)", "Top-1 of every row and seed.")
