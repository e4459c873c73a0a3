"""Pictures of benchmark results. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from inline_attention.benchmark.attention import AttentionReport, CaseResult
from inline_attention.benchmark.models import ModelReport, ModelResult
from inline_attention.benchmark.tables import label_of
from inline_attention.support.figures import DOTS_PER_INCH, FAINT, INK, MUTED, STYLE

# Okabe and Ito's palette, told apart with every common form of colour blindness; markers repeat the distinction.
SOFTMAX_STYLES = {"sdpa": ("#0072B2", "s"), "sdpa-flash": ("#56B4E9", "D"), "sdpa-cudnn": ("#0072B2", "s")}
INLINE_STYLES = {"eager": ("#999999", "v"), "eager-compiled": ("#E69F00", "^"), "auto": ("#D55E00", "o")}
FUSED_STYLES = (("#009E73", "P"), ("#CC79A7", "X"), ("#F0E442", "*"))
MODEL_STYLES = {
    "inline": ("#D55E00", "o"),
    "timm": ("#0072B2", "s"),
    "softmax": ("#56B4E9", "D"),
    "plain": ("#E69F00", "^"),
}
MODEL_LABELS = {
    "inline": "InLine",
    "timm": "softmax, timm",
    "softmax": "softmax, this library",
    "plain": "InLine, plain PyTorch",
}
PANEL_WIDTH, PANEL_HEIGHT = 4.3, 3.7  # inches
MOST_COLUMNS = 4


def draw_attention(report: AttentionReport, path: Path) -> None:
    """Draw time against the number of tokens, both logarithmic: a row per pass, a column per C and D.

    Args:
        report: With at least one case.
        path: The PNG to write.
    """
    passes = [name for name in report.settings.passes if any(name in result.measurements for result in report.results)]
    widths = list(dict.fromkeys((result.case.channels, result.case.head_dim) for result in report.results))
    tokens = sorted({result.case.tokens for result in report.results})
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(PANEL_WIDTH * len(widths) + 0.6, PANEL_HEIGHT * len(passes) + 1.5), layout="constrained"
        )
        panels = figure.subplots(len(passes), len(widths), squeeze=False, sharex=True, sharey="row")
        for pass_, row in zip(passes, panels, strict=True):
            for (channels, head_dim), axes in zip(widths, row, strict=True):
                _logarithmic(axes, tokens)  # panels share their axis, and the last one's ticks would be everyone's
                results = [
                    result
                    for result in report.results
                    if (result.case.channels, result.case.head_dim) == (channels, head_dim)
                ]
                _draw_times(axes, pass_, results, report.contestants)
                axes.set_title(f"{pass_}, C = {channels}, head dim {head_dim}", fontweight="bold")
            row[0].set_ylabel("time of one call (ms)")
        for axes in panels[-1]:
            axes.set_xlabel("tokens N")
        _finish(figure, panels[0][0], "Attention from packed qkv", _attention_small_print(report), path)


def draw_models(report: ModelReport, path: Path) -> None:
    """Draw images per second against the size of images, both logarithmic: a panel per model, mode and execution.

    Args:
        report: With at least one case.
        path: The PNG to write.
    """
    groups: dict[tuple[str, str], list[ModelResult]] = {}
    for result in report.results:
        groups.setdefault((result.case.model, f"{result.case.mode}, {result.case.execution}"), []).append(result)
    rows = math.ceil(len(groups) / MOST_COLUMNS)
    columns = math.ceil(len(groups) / rows)
    with mpl.rc_context(STYLE):
        size = (max(7.0, PANEL_WIDTH * columns + 0.6), PANEL_HEIGHT * rows + 1.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, ((model, how), results) in zip(panels, groups.items(), strict=False):
            _draw_speeds(axes, results)
            axes.set_title(f"{model}\n{how}", fontweight="bold")
        for axes in panels[len(groups) :]:
            axes.set_axis_off()
        _finish(figure, panels, "Images per second of whole models", _model_small_print(report), path)


def _draw_times(axes: Axes, pass_: str, results: Sequence[CaseResult], contestants: Sequence[str]) -> None:
    results = sorted(results, key=lambda result: result.case.tokens)
    fused = iter(FUSED_STYLES * len(contestants))
    for name in contestants:
        colour, marker = {**SOFTMAX_STYLES, **INLINE_STYLES}.get(name) or next(fused)
        is_ours = name == "auto"  # a band beneath the others, one of which it is
        times = [(result.case.tokens, result.milliseconds(pass_, name)) for result in results]
        measured = [(tokens, time) for tokens, time in times if time is not None]
        # Drawn also where it is empty: the legend is taken from one panel and holds for all.
        axes.plot(
            [tokens for tokens, _ in measured], [time for _, time in measured],
            color=colour, marker=marker, label=label_of(name), linewidth=4 if is_ours else 1.5,
            markersize=9 if is_ours else 5.5, zorder=3 if is_ours else 4,
        )  # fmt: skip
    if pass_ == "forward":
        axes.plot(
            [result.case.tokens for result in results], [result.floor for result in results],
            color=INK, linewidth=1.2, linestyle=(0, (5, 3)), label="floor: copying q, k, v, out", zorder=2,
        )  # fmt: skip
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_speeds(axes: Axes, results: Sequence[ModelResult]) -> None:
    """Lines over several sizes, bars at one."""
    results = sorted(results, key=lambda result: result.case.size)
    sizes = sorted({result.case.size for result in results})
    speeds = {
        name: [
            (result.case.size, speed)
            for result in results
            for item in result.measurements
            if item.contestant == name and (speed := result.images_per_second(item)) is not None
        ]
        for name in MODEL_STYLES
    }
    speeds = {name: points for name, points in speeds.items() if points}
    axes.set_ylabel("images per second")
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(sizes) == 1:
        for position, (name, points) in enumerate(speeds.items()):
            bar = axes.bar(position, points[0][1], width=0.7, color=MODEL_STYLES[name][0], label=MODEL_LABELS[name])
            axes.bar_label(bar, fmt="{:,.0f}", padding=2, color=INK)
        axes.set(xticks=[], xlabel=f"images of {sizes[0]}² pixels", xlim=(-0.9, len(speeds) - 0.1))
        axes.margins(y=0.12)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return
    for name, points in speeds.items():
        colour, marker = MODEL_STYLES[name]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=MODEL_LABELS[name], linewidth=2)
    _logarithmic(axes, sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.0f}²"))
    axes.set_xlabel("image (pixels)")


def _logarithmic(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.margins(x=0.08)


def _finish(figure: Figure, labelled: Axes | Sequence[Axes], title: str, small_print: str, path: Path) -> None:
    handles = {}
    for axes in [labelled] if isinstance(labelled, Axes) else labelled:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower left", ncols=4, title=small_print, alignment="left"
    )
    figure.legends[0].get_title().set(fontsize=8.5, color=MUTED)
    figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white")


def _attention_small_print(report: AttentionReport) -> str:
    elements = [result.case.elements for result in report.results]
    dtype = str(report.settings.dtype).removeprefix("torch.")
    return (
        f"{_place(report.environment)}, {dtype}, B·N·C = {min(elements) / 1e6:.3g}–{max(elements) / 1e6:.3g} million. "
        f"InLine with its 3×3 residual, softmax without.\nFloor at the copy rate of {report.copy_rate / 1e12:.3g} TB/s."
    )


def _model_small_print(report: ModelReport) -> str:
    dtype = str(report.settings.dtype).removeprefix("torch.")
    return f"{_place(report.environment)}, {dtype}, random weights and images."


def _place(environment: dict[str, str]) -> str:
    machine = environment["machine"] if environment["gpu"] == "none" else environment["gpu"]
    versions = "" if "torch" in machine else f", torch {environment['torch']}"
    return f"{machine}{versions}, {environment['date']}"
