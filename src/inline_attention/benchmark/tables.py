"""The tables of benchmarks as rows of text, for the terminal and for Markdown pages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from inline_attention.benchmark.attention import AttentionReport, CaseResult
from inline_attention.benchmark.everyday import EverydayReport, Row
from inline_attention.benchmark.models import OURS, ModelReport
from inline_attention.benchmark.results import Measurement, markdown_table, notes_of, ratio
from inline_attention.support.text import NOTHING, number

LABELS = {
    "sdpa": "softmax, SDPA",
    "sdpa-flash": "softmax, flash",
    "sdpa-cudnn": "softmax, cuDNN",
    "sdpa-efficient": "softmax, memory-efficient",
    "eager": "InLine, eager",
    "eager-compiled": "InLine, compiled",
    "auto": "InLine",
}
FIGURE_LABELS = {"times_softmax": "× softmax", "over_floor": "÷ floor", "over_base": "÷ base"}


class ResultTable(NamedTuple):
    """A table with its title and notes."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


def label_of(contestant: str) -> str:
    """Return the name of a contestant in tables and pictures."""
    return LABELS.get(contestant, f"InLine, {contestant}")


def attention_tables(report: AttentionReport) -> list[ResultTable]:
    """Return a table per pass, then the single image and the host's overhead if they were measured."""
    passes = report.settings.passes
    tables = [_pass_table(f"{pass_}, ms", pass_, report.results, report.contestants) for pass_ in passes]
    if report.latency is not None:
        title = f"one image of {report.latency.case.tokens} tokens, forward, ms of GPU time"
        tables.append(_pass_table(title, "forward", [report.latency], report.contestants))
    header = ["one call on four tokens", *(f"{pass_} (µs)" for pass_ in passes)]
    rows: list[list[str]] = []
    notes: list[str] = []
    for name, by_pass in report.host_overhead.items():
        values = [by_pass.get(pass_) for pass_ in passes]
        rows.append([label_of(name), *(f"{value:.1f}" if isinstance(value, float) else NOTHING for value in values)])
        notes += [f"{label_of(name)}: {value}" for value in dict.fromkeys(values) if isinstance(value, str)]
    tables.append(ResultTable("time of the host per call, µs", header, rows, notes))
    return [table for table in tables if table.rows]


def model_tables(report: ModelReport) -> list[ResultTable]:
    """Return one table, with a row per case and contestant."""
    header = ["model", "image", "batch", "mode", "contestant", "images/s", "ms", "peak MiB", "speed-up by InLine"]
    rows: list[list[str]] = []
    for result in report.results:
        case = result.case
        for item in result.measurements:
            speed = result.images_per_second(item)
            row = [case.model, f"{case.size}²", str(case.batch), f"{case.mode}, {case.execution}", item.contestant]
            row += [item.status if speed is None else f"{speed:,.0f}", _number(item.milliseconds)]
            row.append(number(item.peak_bytes, 0, 2**20))
            row.append(NOTHING if item.contestant == OURS else _times(result.speedup(item)))
            rows.append(row)
    notes = _notes([item for result in report.results for item in result.measurements])
    notes.append("Peak memory: weights, optimizer and one step, without the images.")
    return [ResultTable("models", header, rows, notes)]


def everyday_tables(report: EverydayReport) -> list[ResultTable]:
    """Return the tables of models, attention and blocks; empty ones are left out."""
    models, attention, blocks = (report.section(name) for name in ("models", "attention", "blocks"))
    bounds = ["accepted", "goal", "reached"]
    floor_note = f"Floor: reading q, k, v and writing the output at {report.copy_rate / 1e12:.3g} TB/s, as measured."
    base_note = "Base: the same attention without a mask, with the identity map and subtraction."
    tables = [
        ResultTable(
            "whole models, images/s",
            ["model", "mode", "InLine", "softmax", "× softmax", *bounds],
            [[*_everyday_cells(row, "times_softmax"), *_bound_cells(row)] for row in models],
            _everyday_notes(models),
        ),
        ResultTable(
            "attention from packed qkv, ms",
            ["case", "pass", "InLine", "softmax", *FIGURE_LABELS.values(), *bounds],
            [[*_everyday_cells(row, *FIGURE_LABELS), *_bound_cells(row)] for row in attention],
            [floor_note, base_note, *_everyday_notes(attention)],
        ),
        ResultTable(
            "one transformer block in training, µs of the host and launches",
            ["block", "pass", "InLine", "softmax", "× softmax", "launches, InLine", "launches, softmax"],
            [_everyday_cells(row, "times_softmax", "launches", "softmax_launches") for row in blocks],
            _everyday_notes(blocks),
        ),
    ]
    return [table for table in tables if table.rows]


def as_markdown(tables: Sequence[ResultTable]) -> str:
    """Return all tables as Markdown."""
    parts: list[str] = []
    for table in tables:
        parts += [f"## {table.title[0].upper()}{table.title[1:]}", markdown_table(table.header, table.rows)]
        if table.notes:
            parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts)


def _everyday_cells(row: Row, *figures: str) -> list[str]:
    values = (row.ours, row.softmax, *(row.figures.get(figure) for figure in figures))
    return [row.name, row.step, *(str(value) if isinstance(value, int) else _number(value) for value in values)]


def _bound_cells(row: Row) -> list[str]:
    limits: dict[str, list[str]] = {"accepted": [], "goal": []}
    for bound in row.bounds:
        sign = "≥" if bound.figure == "times_softmax" else "≤"
        for kind, limit in (("accepted", bound.accepted), ("goal", bound.goal)):
            limits[kind] += [] if limit is None else [f"{sign} {limit:g} {FIGURE_LABELS[bound.figure]}"]
    return [*(", ".join(texts) or NOTHING for texts in limits.values()), row.reached or NOTHING]


def _everyday_notes(rows: Sequence[Row]) -> list[str]:
    cells_by_note: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            cells_by_note.setdefault(row.note, []).append(row.name)
    return [f"{'; '.join(dict.fromkeys(names))}: {note}" for note, names in cells_by_note.items()]


def _pass_table(title: str, pass_: str, results: Sequence[CaseResult], contestants: Sequence[str]) -> ResultTable:
    with_floor = pass_ == "forward"
    header = ["N", "C", "D", "B", *map(label_of, contestants)]
    header += ["floor", "InLine ÷ floor"] if with_floor else []
    header.append("best softmax ÷ InLine")
    rows: list[list[str]] = []
    measurements: list[Measurement] = []
    for result in results:
        if pass_ not in result.measurements:
            continue
        by_name = {item.contestant: item for item in result.measurements[pass_]}
        ours = result.milliseconds(pass_, "auto")
        case = result.case
        row = [str(case.tokens), str(case.channels), str(case.head_dim), str(case.batch)]
        row += [_cell(by_name.get(name)) for name in contestants]
        row += [_number(result.floor), _number(ratio(ours, result.floor))] if with_floor else []
        row.append(_times(ratio(result.best_softmax(pass_), ours)))
        rows.append(row)
        measurements += by_name.values()
    notes = _notes(measurements)
    errors = [item.error for item in measurements if item.error is not None]
    if errors:
        notes.append(f"Largest relative error against float64, found before timing: {max(errors):.1e}.")
    return ResultTable(title, header, rows, notes)


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    notes = notes_of(measurements)
    spreads = [item.timing.spread for item in measurements if item.timing is not None]
    if spreads:
        notes.append(
            "Medians; contestants take turns. Spread (10th to 90th percentile): "
            f"{statistics.median(spreads):.1%} in the median, {max(spreads):.1%} at most."
        )
    return notes


def _cell(item: Measurement | None) -> str:
    if item is None:
        return NOTHING
    if item.timing is None:
        return item.status
    return _number(item.milliseconds) + ("*" if item.timing.method == "events" else "")


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{_number(value)}×"


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    decimals = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{decimals}f}"
