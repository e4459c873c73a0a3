"""Results of an ablation: a row per cell with mean and spread over seeds, as table, files and figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inline_attention.ablation.grid import Cell, shown
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.model_size import measure_model_size
from inline_attention.benchmark.results import markdown_table, write_csv, write_json, write_markdown
from inline_attention.support.figures import Chart, DotRow, Panel, Style, dot_panel
from inline_attention.support.text import number, printable
from inline_attention.support.untrusted import UntrustedDataError


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
class AblationResult:
    """The results of one cell over its seeds: a row of the table, and an entry of `ablation.json`."""

    top1_mean: float | None  # percent, over the seeds that have a top-1
    top1_std: float | None  # sample standard deviation; None with fewer than two seeds
    seeds: int  # that have a top-1
    parameters: float | None  # None if the model cannot be built
    macs: float | None
    images_per_second: float | None  # in training, median over the seeds
    note: str  # why there are fewer results than seeds; empty if there are as many
    label: str
    values: dict[str, bool | int | float | str]  # by axis
    runs: dict[str, RunOutcome]  # of finished runs, by seed


@dataclass(frozen=True)
class AblationFile:
    """The part of an `ablation.json` that a report shows."""

    title: str
    environment: dict[str, str]
    results: list[AblationResult]

    def __post_init__(self) -> None:
        if not self.results or any(result.values.keys() != self.results[0].values.keys() for result in self.results):
            raise UntrustedDataError("results must have at least one row, all with the same axes")


def summarize(cell: Cell, outcomes: Mapping[int, RunOutcome]) -> AblationResult:
    """Return the results of a cell from those of its finished runs, by seed."""
    top1 = [outcome.top1 for outcome in outcomes.values() if outcome.top1 is not None]
    speeds = [outcome.images_per_second for outcome in outcomes.values() if outcome.images_per_second]
    if cell.problem is not None:
        size, note = None, f"skipped: {cell.problem}"
    else:
        model = cell.config.model
        side = model.img_size
        image = None if side is None else (model.in_chans, *((side, side) if isinstance(side, int) else side))
        size = measure_model_size(model.name, input_size=image, **model.model_arguments())
        note = "; ".join(f"seed {seed}: {run.failure}" for seed, run in outcomes.items() if run.failure)
    return AblationResult(
        top1_mean=statistics.fmean(top1) if top1 else None,
        top1_std=statistics.stdev(top1) if len(top1) > 1 else None,
        seeds=len(top1),
        parameters=None if size is None else size.parameters,
        macs=None if size is None else size.macs,
        images_per_second=statistics.median(speeds) if speeds else None,
        note=note,
        label=cell.label,
        values=dict(cell.values),
        runs={str(seed): outcome for seed, outcome in outcomes.items()},
    )


def text_rows(results: Sequence[AblationResult]) -> list[list[str]]:
    """Return rows of text: the values, top-1, seeds, parameters, MACs, training speed and note."""
    return [
        [
            *(shown(value) for value in result.values.values()),
            mean_and_spread(result.top1_mean, result.top1_std),
            str(result.seeds),
            number(result.parameters, 2, 1e6),
            number(result.macs, 1, 1e6),
            number(result.images_per_second, 0),
            result.note,
        ]
        for result in results
    ]


def text_table(results: Sequence[AblationResult]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text; the column of notes only if there are any."""
    header = [axis.replace("_", " ") for axis in results[0].values]
    header += ["top-1 %, mean ± std", "seeds", "parameters (M)", "MACs (M)", "training images/s", "note"]
    shown = None if any(result.note for result in results) else -1
    return header[:shown], [row[:shown] for row in text_rows(results)]


def mean_and_spread(mean: float | None, spread: float | None) -> str:
    """Return a text such as "71.70 ± 0.21"."""
    return number(mean, 2) + ("" if spread is None else f" ± {spread:.2f}")


def as_markdown(results: Sequence[AblationResult]) -> str:
    """Return the table in Markdown, with bars inside notes escaped."""
    header, body = text_table(results)
    return markdown_table(header, [[text.replace("|", "\\|") for text in row] for row in body])


def write_ablation(
    folder: Path, name: str, results: Sequence[AblationResult], *, title: str, about: str, settings: Mapping[str, Any]
) -> list[Path]:
    """Write `NAME.json` with every run, `NAME.csv` and `NAME.md` with the table, and `about` below its title."""
    environment = latest_environment(results)
    content = {"analysis": "ablation", "title": title, "environment": environment, "settings": dict(settings)}
    files = [folder / f"{name}.{ending}" for ending in ("json", "csv", "md")]
    rows = plain_results(results)
    write_json(files[0], {**content, "results": rows})
    write_csv(files[1], [{key: row[key] for key in row if key not in ("label", "values", "runs")} for row in rows])
    write_markdown(files[2], title, environment, f"{about}\n\n{as_markdown(results)}")
    return files


def latest_environment(results: Sequence[AblationResult]) -> dict[str, str]:
    """Return the environment of the last run, or of this process if there is none."""
    found = [outcome.environment for result in results for outcome in result.runs.values()]
    return combined_environment(found) if found else describe_environment()


def plain_results(results: Sequence[AblationResult]) -> list[dict[str, Any]]:
    """Return the results for JSON, with the value of each axis also as an entry of its own."""
    return [{**result.values, **asdict(result)} for result in results]


def draw_ablation(
    results: Sequence[AblationResult], folder: Path, name: str, *, title: str, small_print: str
) -> list[Path]:
    """Write `NAME.png` and `.svg`: a row of dots per result, one dot per seed and a bar at the mean."""
    small_print += " Each dot is a run with its own seed; the bar is the mean."
    for result in results:
        if result.top1_mean is None:
            small_print += f" {result.label}: {result.note or 'not trained yet'}."
    return Chart([ablation_panel(results)]).save(folder, name, title=title, small_print=small_print, width=8.0)


def ablation_panel(results: Sequence[AblationResult]) -> Panel:
    """Return a row of dots per result that has a mean."""
    rows = [
        DotRow(
            printable(result.label),
            Style("inline"),
            [run.top1 for run in result.runs.values() if run.top1 is not None],
            result.top1_mean,
            mean_and_spread(result.top1_mean, result.top1_std),
        )
        for result in results
        if result.top1_mean is not None
    ]
    return dot_panel(rows, "top-1 (%)", "Top-1 of every row and seed.")
