"""Figures of benchmark results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from inline_attention.benchmark.attention import AttentionReport, CaseResult
from inline_attention.benchmark.models import ModelReport, ModelResult
from inline_attention.benchmark.results import dtype_name
from inline_attention.benchmark.tables import label_of
from inline_attention.support import figures
from inline_attention.support.figures import INK, Chart, LegendEntry, Panel, Style, draw_line, light_grid, log_axes

CONTESTANT_STYLES = {
    "sdpa": Style("softmax"),
    "sdpa-cudnn": Style("softmax"),
    "sdpa-flash": Style("softmax", 1, 0.35, "D"),
    "auto": Style("inline"),
    "eager": Style("inline", 2, 0.6, "v"),
    "eager-compiled": Style("inline", 1, 0.45, "^"),
}
BACKEND_STYLES = (Style("inline", 3, 0.3, "P"), Style("inline", 1, 0.3, "X"), Style("inline", 2, 0.3, "*"))
MODEL_STYLES = {
    "inline": (Style("inline"), "InLine"),
    "timm": (Style("softmax"), "softmax, timm"),
    "softmax": (Style("softmax", 1, 0.35, "D"), "softmax, this library"),
    "plain": (Style("inline", 1, 0.45, "^"), "InLine, plain PyTorch"),
}
FLOOR = LegendEntry("floor: copying q, k, v, out", Style("uniform"))
MOST_COLUMNS = 4


def draw_attention(report: AttentionReport, path: Path, *, only: tuple[int, int] | None = None) -> list[Path]:
    """Write a PNG of time by the number of tokens, both logarithmic: a row per pass, a column per C and D.

    `only` draws one C and D, its passes side by side.
    """
    backends = iter(BACKEND_STYLES * len(report.contestants))
    styles = {name: CONTESTANT_STYLES.get(name) or next(backends) for name in report.contestants}
    passes, widths = report.settings.passes, dict[tuple[int, int], list[CaseResult]]()
    for result in sorted(report.results, key=lambda result: result.case.tokens):
        width = result.case.channels, result.case.head_dim
        if only in (None, width):
            widths.setdefault(width, []).append(result)
    panels = [
        Panel(
            f"{pass_}, C = {width}, head dim {head_dim}",
            partial(_draw_times, pass_=pass_, results=results, styles=styles),
        )
        for pass_ in passes
        for (width, head_dim), results in sorted(widths.items())
        if any(pass_ in result.measurements for result in results)
    ]
    elements = [result.case.elements / 1e6 for result in report.results]
    small_print = (
        f"B·N·C = {min(elements):.3g}–{max(elements):.3g} million. InLine with its 3×3 residual, softmax without. "
        f"Floor at the copy rate of {report.copy_rate / 1e12:.3g} TB/s."
    )
    drawn = list(itertools.chain(*widths.values()))
    legend = [
        LegendEntry(label_of(name), style)
        for name, style in styles.items()
        if any(result.milliseconds(pass_, name) is not None for result in drawn for pass_ in passes)
    ]
    columns = MOST_COLUMNS if only else len(widths)
    return _save(report, Chart(panels, [*legend, FLOOR]), path, "Time of one attention call", small_print, columns)


def draw_models(report: ModelReport, path: Path) -> list[Path]:
    """Write a PNG of images per second by image size, both logarithmic: a panel per model, mode and execution.

    Of several batch sizes at one image size, the smallest is drawn.
    """
    groups: dict[str, list[ModelResult]] = {}
    for result in report.results:
        case = result.case
        groups.setdefault(f"{case.model}\n{case.mode}, {case.execution}", []).append(result)
    panels = [Panel(title, partial(_draw_speeds, results=results)) for title, results in groups.items()]
    columns = math.ceil(len(groups) / math.ceil(len(groups) / MOST_COLUMNS))
    measured = {item.contestant for result in report.results for item in result.measurements}
    legend = [LegendEntry(label, style) for name, (style, label) in MODEL_STYLES.items() if name in measured]
    title = "Images per second of whole models"
    return _save(report, Chart(panels, legend), path, title, "Random weights and images.", columns)


def _draw_times(axes: figures.Axes, pass_: str, results: Sequence[CaseResult], styles: dict[str, Style]) -> None:
    for name, style in styles.items():
        times = [(result.case.tokens, result.milliseconds(pass_, name)) for result in results]
        draw_line(axes, style, [(tokens, time) for tokens, time in times if time is not None])
        if name == "auto":  # a wide line under the backend that it selects
            axes.lines[-1].set(linewidth=5, markersize=10, zorder=1.9)
    if pass_ == "forward":
        draw_line(axes, FLOOR.style, [(result.case.tokens, result.floor) for result in results])
    axes.set(xlabel="tokens N", ylabel="time of one call (ms)")
    log_axes(axes, [result.case.tokens for result in results])


def _draw_speeds(axes: figures.Axes, results: Sequence[ModelResult]) -> None:
    """Draw lines for several sizes, bars for one."""
    sizes = sorted({result.case.size for result in results})
    position = 0
    for name, (style, _) in MODEL_STYLES.items():
        speeds = {
            result.case.size: speed
            for result in sorted(results, key=lambda result: -result.case.batch)
            for item in result.measurements
            if item.contestant == name and (speed := result.images_per_second(item)) is not None
        }
        points = sorted(speeds.items())
        if len(sizes) > 1:
            draw_line(axes, style, points)
        elif points:
            axes.bar_label(axes.bar(position, points[0][1], width=0.7, color=style.color), fmt="{:,.0f}", color=INK)
            position += 1
    if len(sizes) > 1:
        log_axes(axes, sizes, "{x:.0f}²")
        axes.set(xlabel="image (pixels)", ylabel="images per second")
    else:
        axes.set(xticks=[], xlabel=f"images of {sizes[0]}² pixels", ylabel="images per second")
        axes.margins(x=0.15, y=0.12)
        axes.yaxis.set_major_formatter("{x:,g}")
        light_grid(axes)


def _save(
    report: AttentionReport | ModelReport, chart: Chart, path: Path, title: str, small_print: str, columns: int
) -> list[Path]:
    environment = report.environment
    machine = environment["machine"] if environment["gpu"] == "none" else environment["gpu"]
    versions = "" if "torch" in machine else f", torch {environment['torch']}"
    place = f"{machine}{versions}, {environment['date']}, {dtype_name(report.settings.dtype)}."
    return chart.save(
        path.parent, path.stem, title=title, small_print=f"{place} {small_print}", columns=columns, formats=("png",)
    )
