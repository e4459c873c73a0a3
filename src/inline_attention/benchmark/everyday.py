"""Speed as most users see it: ordinary training loops, pretrained ViTs, every head dim, masks.

A cell is one case with the bounds it has to keep. Each is measured against softmax in the same run, after a check of
its results. `everyday_cells` holds the cells; what was not reached in time, or failed, is said in the tables.
"""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from inline_attention.benchmark import attention, block_cost, models
from inline_attention.benchmark.compile_cache import run_compile_jobs, time_limit
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.results import Measurement, ratio
from inline_attention.benchmark.timing import measure_copy_rate, release_memory

Section = Literal["models", "attention", "blocks"]
Figure = Literal["times_softmax", "over_floor", "over_base"]
Reached = Literal["goal", "accepted", "no"]
REACHED: tuple[Reached, ...] = get_args(Reached)  # best first
SOFTMAX_CONTESTANTS = {"cuda": ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient"), "cpu": ("sdpa",)}
NOT_REACHED = "not reached: the time was up"
COMPILING_SHARE = 0.45  # of the budget, at most
LONGEST_PREPARATION = 120.0  # seconds for compiling and checking one contestant
SHORTEST_PREPARATION = 15.0  # seconds, even when the time is almost up
JobTable = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Bound:
    """What a figure has to reach: at least for `times_softmax`, at most for the others."""

    figure: Figure
    accepted: float
    goal: float | None = None

    def reached(self, value: float) -> Reached:
        """Which of the two a value reaches."""

        def keeps(limit: float) -> bool:
            return value >= limit if self.figure == "times_softmax" else value <= limit

        if self.goal is not None and keeps(self.goal):
            return "goal"
        return "accepted" if keeps(self.accepted) else "no"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: Cell.
        step: Pass or mode.
        ours: Images per second, milliseconds or host microseconds of InLine, as the section has it.
        softmax: The same of the best softmax.
        figures: Ratios by name, and counts.
        bounds: Bounds of the figures.
        note: Why something is missing.
    """

    name: str
    step: str
    ours: float | None = None
    softmax: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()
    note: str = ""

    @property
    def reached(self) -> Reached | None:
        """The worst over all bounds; None where nothing was measured."""
        figures = ((bound, self.figures.get(bound.figure)) for bound in self.bounds)
        outcomes = {bound.reached(value) for bound, value in figures if value is not None}
        return next((worst for worst in reversed(REACHED) if worst in outcomes), None)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """The row that `asdict` wrote."""
        return cls(**{**content, "bounds": tuple(Bound(**bound) for bound in content["bounds"])})


@dataclass(frozen=True)
class Cell(ABC):
    """One case.

    Attributes:
        section: The table it belongs to.
        name: Unique.
        bounds: Bounds by pass or mode; only the passes named here are measured.
        base: The cell whose time is the unit of `over_base`: the same without the option that this one is about.
    """

    section: ClassVar[Section]
    name: str
    bounds: Mapping[str, tuple[Bound, ...]]
    base: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def measure(self, report: EverydayReport, seconds_left: float) -> list[Row]:
        """Check, then time."""

    def compile_jobs(self, settings: EverydaySettings) -> JobTable:
        """What other processes can compile ahead, by description."""
        del settings
        return {}

    def empty_rows(self, note: str) -> list[Row]:
        """Rows that say why there are no figures."""
        return [Row(self.name, step, bounds=bounds, note=note) for step, bounds in self.bounds.items()]


@dataclass(frozen=True)
class ModelCell(Cell):
    """A whole model against the faster of its rivals."""

    case: models.ModelCase

    section: ClassVar[Section] = "models"

    def measure(self, report: EverydayReport, seconds_left: float) -> list[Row]:
        """Images per second."""
        settings = replace(self._settings(report.settings), preparation_limit=seconds_left)
        result = models.measure_case(self.case, settings, lambda _: None)
        ours, *rivals = (result.images_per_second(item) for item in result.measurements)
        softmax = max((speed for speed in rivals if speed is not None), default=None)
        note = "; ".join(f"{item.contestant}: {item.note}" for item in result.measurements if item.note)
        figures: dict[str, float | None] = {
            "times_softmax": ratio(ours, softmax),
            "milliseconds": result.measurements[0].milliseconds,
            "error": result.measurements[0].error,
        }
        return [Row(self.name, step, ours, softmax, figures, bounds, note) for step, bounds in self.bounds.items()]

    def compile_jobs(self, settings: EverydaySettings) -> JobTable:
        """One per contestant, unless the case is eager."""
        return models.compile_jobs(replace(self._settings(settings), cases=(self.case,)))

    def _settings(self, settings: EverydaySettings) -> models.ModelSettings:
        return models.ModelSettings(settings.device, settings.dtype, (), seconds=4 * settings.seconds)


@dataclass(frozen=True)
class AttentionCell(Cell):
    """Attention from packed qkv against the fastest softmax kernel, the copy floor and another cell."""

    case: attention.AttentionCase
    dtype: torch.dtype | None = None
    tf32: bool = False

    section: ClassVar[Section] = "attention"

    def measure(self, report: EverydayReport, seconds_left: float) -> list[Row]:
        """Milliseconds of GPU time."""
        settings = self._settings(report.settings)
        with time_limit(seconds_left), _tf32_allowed(self.tf32):
            result = attention.measure_case(self.case, settings, report.copy_rate)
        return [self._row(result, pass_, report) for pass_ in settings.passes]

    def compile_jobs(self, settings: EverydaySettings) -> JobTable:
        """One, for both passes."""
        return {f"{self.section} {self.name}": functools.partial(self._compile, settings)}

    def _compile(self, settings: EverydaySettings) -> None:
        with _tf32_allowed(self.tf32):
            attention.compile_kernels(self.case, self._settings(settings))

    def _settings(self, settings: EverydaySettings) -> attention.AttentionSettings:
        return attention.AttentionSettings(
            settings.device,
            self.dtype or settings.dtype,
            (),
            passes=tuple(pass_ for pass_ in attention.PASSES if pass_ in self.bounds),
            contestants=(*SOFTMAX_CONTESTANTS[settings.device.type], "auto"),
            seconds=settings.seconds,
        )

    def _row(self, result: attention.CaseResult, pass_: str, report: EverydayReport) -> Row:
        ours, softmax = result.milliseconds(pass_, "auto"), result.best_softmax(pass_)
        items = {item.contestant: item for item in result.measurements[pass_]}
        figures = {
            "times_softmax": ratio(softmax, ours),
            "over_floor": ratio(ours, result.floor) if pass_ == "forward" else None,
            "over_base": None if self.base is None else ratio(ours, report.time_of(self.base, pass_)),
            "floor_milliseconds": result.floor,
            "error": items["auto"].error,
        }
        notes = [items["auto"]] if softmax is not None else list(items.values())
        note = "; ".join(f"{item.contestant}: {item.note}" for item in notes if item.note)
        return Row(self.name, pass_, ours, softmax, figures, self.bounds[pass_], note)


@dataclass(frozen=True)
class BlockCell(Cell):
    """Host time and launches of one transformer block in a training step."""

    case: models.ModelCase

    section: ClassVar[Section] = "blocks"

    def measure(self, report: EverydayReport, seconds_left: float) -> list[Row]:
        """Microseconds of the host."""
        with time_limit(seconds_left):
            costs = block_cost.measure_blocks(self.case, report.settings.device, report.settings.dtype)
        rows: list[Row] = []
        for step, bounds in self.bounds.items():
            ours = costs[models.OURS][step]
            softmax = min((costs[rival][step] for rival in self.case.rivals), key=lambda cost: cost.microseconds)
            figures: dict[str, float | None] = {
                "launches": ours.launches,
                "softmax_launches": softmax.launches,
                "times_softmax": ratio(softmax.microseconds, ours.microseconds),
            }
            rows.append(Row(self.name, step, ours.microseconds, softmax.microseconds, figures, bounds))
        return rows

    def compile_jobs(self, settings: EverydaySettings) -> JobTable:
        """One for all contestants, unless the case is eager."""
        if self.case.execution == "eager":
            return {}
        job = functools.partial(block_cost.compile_blocks, self.case, settings.device, settings.dtype)
        return {f"{self.section} {self.name}": job}


@dataclass(frozen=True)
class MissingCell(Cell):
    """Something that the library cannot do yet."""

    reason: str

    section: ClassVar[Section] = "attention"

    def measure(self, report: EverydayReport, seconds_left: float) -> list[Row]:
        """Say so."""
        del report, seconds_left
        return self.empty_rows(f"not available: {self.reason}")


@dataclass(frozen=True)
class EverydaySettings:
    """What to measure.

    Attributes:
        device: Where.
        dtype: Dtype of attention, of autocast and of half weights.
        cells: All cells of the tables, the most important first.
        only: Text in the section or name of the cells to measure; empty for all.
        budget: Seconds after which no further cell is begun.
        processes: Processes that compile ahead; 0 to compile each cell in its turn.
        seconds: Time spent on measuring each pass of attention; models get four times as much.
    """

    device: torch.device
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    budget: float = math.inf
    processes: int = 0
    seconds: float = 0.25
    only: str = ""


@dataclass
class EverydayReport:
    """Everything measured so far.

    Attributes:
        environment: Where.
        settings: What was asked for.
        copy_rate: Bytes per second, read and written, of a large copy: what floors are computed from.
        rows: By cell.
        seconds: Time spent so far.
    """

    environment: dict[str, str]
    settings: EverydaySettings
    copy_rate: float
    rows: dict[str, list[Row]] = field(default_factory=dict)
    seconds: float = 0.0

    def time_of(self, cell: str, step: str) -> float | None:
        """What InLine took in a cell, None where it was not measured."""
        return next((row.ours for row in self.rows.get(cell, ()) if row.step == step), None)

    def section(self, name: Section) -> list[Row]:
        """All rows of a table."""
        return [row for cell in self.settings.cells if cell.section == name for row in self.rows.get(cell.name, ())]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "copy_bytes_per_second": self.copy_rate,
            "seconds": self.seconds,
            "cells": {name: [asdict(row) for row in rows] for name, rows in self.rows.items()},
        }


def measure_everyday(
    settings: EverydaySettings,
    *,
    earlier: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
    on_result: Callable[[EverydayReport], None] | None = None,
) -> EverydayReport:
    """Compile ahead, then measure every cell that the budget allows.

    Args:
        settings: What to measure.
        earlier: What `EverydayReport.as_json` gave before: cells measured there are kept and not measured again.
        on_progress: Called with a line after every cell and everything compiled ahead.
        on_result: Called with the report after every cell.
    """
    begin = time.monotonic()
    advance = on_progress or (lambda _: None)
    report = EverydayReport(describe_environment(), settings, measure_copy_rate(settings.device))
    report.rows = {cell.name: cell.empty_rows(NOT_REACHED) for cell in settings.cells}
    if earlier is not None:
        report.environment = combined_environment([earlier["environment"], report.environment])
        report.rows |= {name: [Row.from_json(row) for row in rows] for name, rows in earlier["cells"].items()}
    release_memory(settings.device)  # which other processes need to compile
    chosen = choose_cells(settings.cells, settings.only)
    to_do = [cell for cell in chosen if all(row.ours is None for row in report.rows[cell.name])]
    if settings.processes:
        run_compile_jobs(_bounded_jobs(to_do, settings), settings.processes, on_progress=advance)
    for cell in to_do:
        left = settings.budget - (time.monotonic() - begin)
        if left <= 0:
            advance(f"{cell.section} {cell.name}: {NOT_REACHED}")
            continue
        try:
            limit = max(SHORTEST_PREPARATION, min(LONGEST_PREPARATION, left))
            report.rows[cell.name] = cell.measure(report, limit)
        except Exception as failure:  # whatever one cell may raise, the others are to be measured
            report.rows[cell.name] = cell.empty_rows(Measurement.failure(models.OURS, failure).note)
        release_memory(settings.device)
        report.seconds = time.monotonic() - begin
        advance(f"{report.seconds:4.0f} s {cell.section} {_describe(report.rows[cell.name])}")
        if on_result is not None:
            on_result(report)
    return report


def count_steps(settings: EverydaySettings) -> int:
    """How often `measure_everyday` reports progress, unless cells are kept."""
    cells = choose_cells(settings.cells, settings.only)
    return len(cells) + (sum(len(cell.compile_jobs(settings)) for cell in cells) if settings.processes else 0)


def choose_cells(cells: Sequence[Cell], pattern: str) -> tuple[Cell, ...]:
    """The cells whose section and name contain the pattern, and those that these are compared with."""
    chosen = {cell.name for cell in cells if pattern in f"{cell.section} {cell.name}"}
    chosen |= {cell.base for cell in cells if cell.name in chosen and cell.base is not None}
    return tuple(cell for cell in cells if cell.name in chosen)


def _bounded_jobs(cells: Sequence[Cell], settings: EverydaySettings) -> JobTable:
    """All compile jobs, each with a time limit; what takes longest comes first."""
    sections: tuple[Section, ...] = ("models", "blocks", "attention")
    deadline = time.time() + COMPILING_SHARE * settings.budget
    return {
        name: functools.partial(_run_job, job, deadline)
        for section in sections
        for cell in cells
        if cell.section == section
        for name, job in cell.compile_jobs(settings).items()
    }


def _run_job(job: Callable[[], object], deadline: float) -> None:
    left = min(LONGEST_PREPARATION, deadline - time.time())
    if left <= 0:
        raise TimeoutError("left to the benchmark itself")
    with time_limit(left):
        job()


@contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if allowed:
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _describe(rows: Sequence[Row]) -> str:
    def figures(row: Row) -> str:
        parts = [f"{key} {value:.3g}" for key, value in row.figures.items() if value is not None]
        return f"{row.step}: {', '.join(parts) or row.note}"

    return f"{rows[0].name} | {' | '.join(map(figures, rows))}"
