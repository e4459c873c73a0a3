"""Time what most users do: ordinary training loops, pretrained ViTs, every head dim, masks.

A cell is one case with its bounds. It is checked, then measured against softmax in the same run. `everyday_cells` lists
the cells. The tables name cells that failed, or that the budget did not reach.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from inline_attention.benchmark import attention, models
from inline_attention.benchmark.environment import combined_environment, describe_environment
from inline_attention.benchmark.results import Measurement, dtype_name, ratio
from inline_attention.benchmark.side_by_side import run_compile_jobs, time_limit
from inline_attention.benchmark.timing import Call, measure_copy_rate, release_memory
from inline_attention.support.untrusted import build_value

Section = Literal["models", "attention", "blocks"]
Figure = Literal["times_softmax", "over_floor", "over_base"]
REACHED = ("goal", "accepted", "no")  # best first
SOFTMAX_CONTESTANTS = {"cuda": ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient"), "cpu": ("sdpa",)}
NOT_REACHED = "not reached: the time was up"
COMPILING_SHARE = 0.45  # of the budget, at most
LONGEST_PREPARATION = 120.0  # seconds for compiling and checking one contestant
SHORTEST_PREPARATION = 15.0  # seconds, even when the time is almost up


@dataclass(frozen=True)
class Bound:
    """Limits of a figure: lower limits of `times_softmax`, upper limits of the others."""

    figure: Figure
    accepted: float
    goal: float | None = None

    def reached(self, value: float) -> str:
        """Return the best limit that a value keeps."""
        for name, limit in (("goal", self.goal), ("accepted", self.accepted)):
            if limit is not None and (value >= limit if self.figure == "times_softmax" else value <= limit):
                return name
        return "no"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    step: str  # pass or mode
    ours: float | None = None  # figure of InLine: images per second, milliseconds or host microseconds, by section
    softmax: float | None = None  # the same of the fastest softmax
    figures: dict[str, int | float | None] = field(default_factory=dict)  # ratios and counts by name
    bounds: tuple[Bound, ...] = ()
    note: str = ""  # reason for missing values

    @property
    def reached(self) -> str | None:
        """The worst over all bounds; None if nothing was measured."""
        figures = ((bound, self.figures.get(bound.figure)) for bound in self.bounds)
        outcomes = [bound.reached(value) for bound, value in figures if value is not None]
        return max(outcomes, key=REACHED.index, default=None)


@dataclass(frozen=True)
class Cell:
    """One case of a section; only the passes or modes with bounds are measured."""

    section: Section
    name: str  # unique
    bounds: Mapping[str, tuple[Bound, ...]]  # by pass or mode
    case: Any = None  # an AttentionCase, or a ModelCase of models and blocks; None if the library cannot do it yet
    base: str | None = None  # the cell without the option that this one is about; its time is the unit of `over_base`
    dtype: torch.dtype | None = None
    tf32: bool = False
    missing: str = ""  # what the library cannot do yet

    def empty_rows(self, note: str) -> list[Row]:
        """Return rows without figures."""
        return [Row(self.name, step, bounds=bounds, note=note) for step, bounds in self.bounds.items()]

    def measure(self, report: EverydayReport, seconds: float) -> list[Row]:
        """Check, then time; preparing a contestant may take so many seconds."""
        if self.missing:
            return self.empty_rows(f"not available: {self.missing}")
        measure = {"models": _measure_model, "attention": _measure_attention, "blocks": _measure_blocks}[self.section]
        return measure(self, report, seconds)

    def compile_jobs(self, settings: EverydaySettings) -> dict[str, Call]:
        """Return what other processes can compile ahead, by description."""
        if self.section == "models":
            return models.compile_jobs(_model_settings(self, settings))
        if self.missing or (self.section == "blocks" and self.case.execution == "eager"):
            return {}
        return {f"{self.section} {self.name}": functools.partial(_compile, self, settings)}


@dataclass(frozen=True)
class EverydaySettings:
    """What to measure."""

    device: torch.device
    dtype: torch.dtype  # of attention, autocast and half weights
    cells: tuple[Cell, ...]  # the most important first
    budget: float = math.inf  # seconds after which no further cell is started
    processes: int = 0  # that compile ahead; 0 to compile each cell in its turn
    seconds: float = 0.25  # of timing per pass of attention; models get four times as much
    only: str = ""  # text in the section or name of the cells to measure; empty for all


@dataclass
class EverydayReport:
    """The results so far: rows by cell, seconds spent, and the copy rate in bytes per second."""

    environment: dict[str, str]
    settings: EverydaySettings
    copy_rate: float
    rows: dict[str, list[Row]] = field(default_factory=dict)
    seconds: float = 0.0

    def section(self, name: Section) -> list[Row]:
        """Return all rows of a table."""
        return [row for cell in self.settings.cells if cell.section == name for row in self.rows.get(cell.name, ())]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": dtype_name(self.settings.dtype),
            "copy_bytes_per_second": self.copy_rate,
            "seconds": self.seconds,
            "cells": {name: [asdict(row) for row in rows] for name, rows in self.rows.items()},
        }


def measure_everyday(
    settings: EverydaySettings,
    on_step: Callable[[EverydayReport, str], None] = lambda *_: None,
    *,
    earlier: Mapping[str, Any] | None = None,
) -> EverydayReport:
    """Compile ahead, then measure every cell that the budget allows.

    `on_step` is called with the report so far and a line after every compile job and every cell. `earlier` is a result
    of `EverydayReport.as_json`: cells measured there are kept and not measured again.
    """
    start = time.monotonic()
    report = EverydayReport(describe_environment(), settings, measure_copy_rate(settings.device))
    report.rows = {cell.name: cell.empty_rows(NOT_REACHED) for cell in settings.cells}
    if earlier is not None:
        report.environment = combined_environment([earlier["environment"], report.environment])
        report.rows |= build_value(dict[str, list[Row]], earlier["cells"])
    release_memory(settings.device)  # the compiling processes need it
    chosen = choose_cells(settings.cells, settings.only)
    to_do = [cell for cell in chosen if all(row.ours is None for row in report.rows[cell.name])]
    if settings.processes:
        jobs = _bounded_jobs(to_do, settings)
        run_compile_jobs(jobs, settings.processes, on_progress=lambda line: on_step(report, line))
    for cell in to_do:
        left = settings.budget - (time.monotonic() - start)
        if left <= 0:
            on_step(report, f"{cell.section} {cell.name}: {NOT_REACHED}")
            continue
        try:
            limit = max(SHORTEST_PREPARATION, min(LONGEST_PREPARATION, left))
            report.rows[cell.name] = cell.measure(report, limit)
        except Exception as failure:  # measure the other cells
            report.rows[cell.name] = cell.empty_rows(Measurement.failure(models.OURS, failure).note)
        release_memory(settings.device)
        report.seconds = time.monotonic() - start
        on_step(report, f"{report.seconds:4.0f} s {cell.section} {_describe(report.rows[cell.name])}")
    return report


def count_steps(settings: EverydaySettings) -> int:
    """Return the number of steps of `measure_everyday`, if no earlier cells are kept."""
    cells = choose_cells(settings.cells, settings.only)
    return len(cells) + (sum(len(cell.compile_jobs(settings)) for cell in cells) if settings.processes else 0)


def choose_cells(cells: Sequence[Cell], pattern: str) -> tuple[Cell, ...]:
    """Return the cells whose section and name contain the pattern, and the bases that these are compared with."""
    chosen = {cell.name for cell in cells if pattern in f"{cell.section} {cell.name}"}
    chosen |= {cell.base for cell in cells if cell.name in chosen and cell.base is not None}
    return tuple(cell for cell in cells if cell.name in chosen)


def _bounded_jobs(cells: Sequence[Cell], settings: EverydaySettings) -> dict[str, Call]:
    """Return all compile jobs, each with a time limit; those that take longest come first."""
    deadline = time.time() + COMPILING_SHARE * settings.budget
    return {
        name: functools.partial(_run_job, job, deadline)
        for section in ("models", "blocks", "attention")
        for cell in cells
        if cell.section == section
        for name, job in cell.compile_jobs(settings).items()
    }


def _model_settings(cell: Cell, settings: EverydaySettings) -> models.ModelSettings:
    return models.ModelSettings(settings.device, settings.dtype, (cell.case,), seconds=4 * settings.seconds)


def _attention_settings(cell: Cell, settings: EverydaySettings) -> attention.AttentionSettings:
    return attention.AttentionSettings(
        settings.device,
        cell.dtype or settings.dtype,
        (),
        passes=tuple(pass_ for pass_ in attention.PASSES if pass_ in cell.bounds),
        contestants=(*SOFTMAX_CONTESTANTS[settings.device.type], "auto"),
        seconds=settings.seconds,
    )


def _compile(cell: Cell, settings: EverydaySettings) -> None:
    if cell.section == "blocks":
        models.prepare_blocks(cell.case, settings.device, settings.dtype)
    else:
        with _tf32_allowed(cell.tf32):
            attention.compile_kernels(cell.case, _attention_settings(cell, settings))


def _measure_model(cell: Cell, report: EverydayReport, seconds: float) -> list[Row]:
    """Compare a whole model with the faster of its rivals, in images per second."""
    settings = replace(_model_settings(cell, report.settings), preparation_limit=seconds)
    result = models.measure_case(cell.case, settings)
    ours, *rivals = (result.images_per_second(item) for item in result.measurements)
    softmax = max((speed for speed in rivals if speed is not None), default=None)
    figures: dict[str, float | None] = {
        "times_softmax": ratio(ours, softmax),
        "milliseconds": result.measurements[0].milliseconds,
        "error": result.measurements[0].error,
    }
    note = _notes(result.measurements)
    return [Row(cell.name, step, ours, softmax, figures, bounds, note) for step, bounds in cell.bounds.items()]


def _measure_attention(cell: Cell, report: EverydayReport, seconds: float) -> list[Row]:
    """Compare attention with the fastest softmax kernel, the copy floor and the base cell, in milliseconds."""
    settings = _attention_settings(cell, report.settings)
    result = attention.CaseResult(cell.case, cell.case.floor(settings.dtype, report.copy_rate))
    with time_limit(seconds), _tf32_allowed(cell.tf32):
        for pass_ in settings.passes:
            attention.measure_pass(result, pass_, settings)
    rows: list[Row] = []
    for pass_ in settings.passes:
        *others, auto = result.measurements[pass_]
        ours, softmax = auto.milliseconds, result.best_softmax(pass_)
        base = next((row.ours for row in report.rows.get(cell.base or "", ()) if row.step == pass_), None)
        figures = {
            "times_softmax": ratio(softmax, ours),
            "over_floor": ratio(ours, result.floor) if pass_ == "forward" else None,
            "over_base": ratio(ours, base),
            "floor_milliseconds": result.floor,
            "error": auto.error,
        }
        note = _notes([auto] if softmax is not None else [*others, auto])
        rows.append(Row(cell.name, pass_, ours, softmax, figures, cell.bounds[pass_], note))
    return rows


def _measure_blocks(cell: Cell, report: EverydayReport, seconds: float) -> list[Row]:
    """Compare host microseconds and launches of one transformer block in a training step."""
    with time_limit(seconds):
        costs = models.measure_blocks(cell.case, report.settings.device, report.settings.dtype)
    rows: list[Row] = []
    for step, bounds in cell.bounds.items():
        ours = costs[models.OURS][step]
        softmax = min((costs[rival][step] for rival in cell.case.rivals), key=lambda cost: cost.microseconds)
        figures: dict[str, float | None] = {
            "launches": ours.launches,
            "softmax_launches": softmax.launches,
            "times_softmax": ratio(softmax.microseconds, ours.microseconds),
        }
        rows.append(Row(cell.name, step, ours.microseconds, softmax.microseconds, figures, bounds))
    return rows


def _run_job(job: Call, deadline: float) -> None:
    left = min(LONGEST_PREPARATION, deadline - time.time())
    if left <= 0:
        raise TimeoutError("left to the benchmark itself")
    with time_limit(left):
        job()


@contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _notes(measurements: Sequence[Measurement]) -> str:
    return "; ".join(f"{item.contestant}: {item.note}" for item in measurements if item.note)


def _describe(rows: Sequence[Row]) -> str:
    def figures(row: Row) -> str:
        parts = [f"{key} {value:.3g}" for key, value in row.figures.items() if value is not None]
        return f"{row.step}: {', '.join(parts) or row.note}"

    return f"{rows[0].name} | {' | '.join(map(figures, rows))}"
