"""Time, memory and multiply-adds against resolution and window, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from inline_attention.analysis.scaling import KINDS, ScalingPoint
from inline_attention.support.figures import (
    COLORS,
    KIND_LABELS,
    MARKERS,
    light_grid,
    new_figure,
    save,
    shared_legend,
)

Quantity = tuple[str, Callable[[ScalingPoint], float | None]]
QUANTITIES: tuple[Quantity, ...] = (
    ("Time of a forward pass (ms)", lambda point: point.milliseconds),
    ("Peak memory of tensors (MiB)", lambda point: None if point.peak_bytes is None else point.peak_bytes / 2**20),
    ("Multiply-adds (billions)", lambda point: point.macs / 1e9),
)


def draw_scaling(points: Sequence[ScalingPoint], machine: str, folder: Path) -> list[Path]:
    """Draw a row per axis (resolution, window) and a column per quantity.

    Args:
        points: Of one model and its twins.
        machine: Where they were measured, for the small print.
        folder: Where `scaling.png` and `.svg` go.
    """
    name = points[0].model.partition("_")[2]
    axes_of = [axis for axis in ("resolution", "window") if any(point.axis == axis for point in points)]
    small_print = (
        f"{machine}. Batch {points[0].batch}, float32, random weights and images. Memory without weights and images. "
        "Median times."
    )
    title = f"What {name} costs with each attention"
    with new_figure(12.5, 3.7 * len(axes_of) + 1.1, title, small_print) as figure:
        panels = figure.subplots(len(axes_of), len(QUANTITIES), squeeze=False)
        for axis, row in zip(axes_of, panels, strict=True):
            for (label, value_of), axes in zip(QUANTITIES, row, strict=True):
                _draw_quantity(axes, [point for point in points if point.axis == axis], value_of)
                axes.set_title(label, fontsize=11, fontweight="bold")
        shared_legend(figure, *panels[0, 0].get_legend_handles_labels())
        return save(figure, folder, "scaling")


def _draw_quantity(
    axes: Axes, points: Sequence[ScalingPoint], value_of: Callable[[ScalingPoint], float | None]
) -> None:
    for kind in KINDS:
        measured = [(point, value) for point in points if point.attention == kind and (value := value_of(point))]
        steps = [_step(point) for point, _ in measured]
        values = [value for _, value in measured]
        axes.plot(
            steps, values, color=COLORS[kind], marker=MARKERS[kind], linewidth=2, markersize=6.5,
            label=KIND_LABELS[kind],
        )  # fmt: skip
    steps = sorted({_step(point) for point in points})
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:.0f}²"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    by_window = points[0].axis == "window"
    axes.set_xlabel(f"window (tokens), image of {points[0].size}² pixels" if by_window else "image (pixels)")
    axes.margins(x=0.08)
    light_grid(axes)


def _step(point: ScalingPoint) -> int:
    return point.size if point.window is None else point.window
