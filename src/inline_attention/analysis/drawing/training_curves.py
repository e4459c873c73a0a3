"""How runs learned: loss and accuracy against epochs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from inline_attention.analysis.training_curves import EpochFigures, TrainingCurves
from inline_attention.support.figures import (
    COLORS,
    LINE_STYLES,
    MARKERS,
    MUTED,
    LineStyle,
    light_grid,
    new_figure,
    save,
)

OTHER_COLORS = ("#009E73", "#CC79A7", "#56B4E9", "#999999")  # for models that are not of this library
MARKS = 9  # per line: enough to tell lines apart in black and white
LABEL_HEIGHT = 0.045  # of the axes
LARGEST_LOSS_RATIO = 20  # beyond it a linear axis hides the end of training


def draw_training_curves(runs: Sequence[TrainingCurves], folder: Path, *, name: str = "curves") -> list[Path]:
    """Draw loss (training dashed, validation solid) and top-1 against epochs, a colour per run.

    Args:
        runs: Of `read_training_curves`.
        folder: Where `NAME.png` and `NAME.svg` go.
        name: Of the files.
    """
    styles = _styles(runs)
    with new_figure(12, 5.4, _title(runs), _small_print(runs)) as figure:
        loss_axes, accuracy_axes = figure.subplots(1, 2)
        for run, style in zip(runs, styles, strict=True):
            _draw(loss_axes, run, style, lambda row: row.train_loss, is_main=False)
            _draw(loss_axes, run, style, lambda row: row.validation_loss)
            _draw(accuracy_axes, run, style, lambda row: row.averaged_top1, is_main=False)
            _draw(accuracy_axes, run, style, lambda row: row.top1)
        _label_ends(accuracy_axes, runs, styles)
        rows = [row for run in runs for row in run.epochs]
        losses = [value for row in rows for value in (row.train_loss, row.validation_loss) if value]
        if losses and max(losses) > LARGEST_LOSS_RATIO * min(losses):
            loss_axes.set_yscale("log")
            loss_axes.yaxis.set_major_formatter("{x:g}")
        else:
            loss_axes.set_ylim(bottom=0)
        loss_axes.set_title("Loss (cross entropy)", fontsize=11, fontweight="bold")
        accuracy_axes.set_title("Top-1 on the validation images (%)", fontsize=11, fontweight="bold")
        for axes in (loss_axes, accuracy_axes):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            light_grid(axes)
        handles = [
            Line2D([], [], color=style.color, marker=style.marker, linestyle=style.dashes, label=run.label)
            for run, style in zip(runs, styles, strict=True)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=min(len(runs), 4), fontsize=10)
        return save(figure, folder, name)


def _draw(
    axes: Axes,
    run: TrainingCurves,
    style: LineStyle,
    value_of: Callable[[EpochFigures], float | None],
    *,
    is_main: bool = True,
) -> None:
    points = [(row.epoch, value) for row in run.epochs if (value := value_of(row)) is not None]
    if not points:
        return
    epochs, values = zip(*points, strict=True)
    if is_main:
        every = max(1, len(points) // MARKS)
        axes.plot(
            epochs, values, color=style.color, linestyle=style.dashes, linewidth=2, marker=style.marker, markersize=5.5,
            markevery=every,
        )  # fmt: skip
    else:
        axes.plot(epochs, values, color=style.color, linestyle=(0, (3, 2)), linewidth=1.3, alpha=0.8)


def _label_ends(axes: Axes, runs: Sequence[TrainingCurves], styles: Sequence[LineStyle]) -> None:
    """Write the last accuracy of each run beside its line, the lowest first, each clear of the one below."""
    lowest, highest = axes.get_ylim()
    ends = []
    for run, style in zip(runs, styles, strict=True):
        measured = [(row.epoch, row.top1) for row in run.epochs if row.top1 is not None]
        if measured:
            epoch, top1 = measured[-1]
            ends.append((top1, epoch, style.color))
    if not ends:
        axes.text(0.5, 0.5, "not evaluated yet", transform=axes.transAxes, ha="center", color=MUTED)
    height = -math.inf
    for top1, epoch, color in sorted(ends):
        height = max(top1, height + LABEL_HEIGHT * (highest - lowest))
        axes.annotate(
            f"{top1:.1f}", (epoch, height), (9, 0), textcoords="offset points", va="center", color=color, fontsize=10,
            annotation_clip=False,
        )  # fmt: skip


def _styles(runs: Sequence[TrainingCurves]) -> list[LineStyle]:
    """Colour and marker by attention, dashes by number among those of one attention."""
    seen: Counter[str] = Counter()
    others = {}
    styles = []
    for run in runs:
        kind = run.model_name.partition("_")[0]
        color = COLORS.get(kind) or others.setdefault(kind, OTHER_COLORS[len(others) % len(OTHER_COLORS)])
        styles.append(LineStyle(color, MARKERS.get(kind, "D"), LINE_STYLES[seen[kind] % len(LINE_STYLES)]))
        seen[kind] += 1
    return styles


def _title(runs: Sequence[TrainingCurves]) -> str:
    datasets = list(dict.fromkeys(run.dataset for run in runs))
    # Of "folder" the name says nothing, and the path is on one machine only.
    return "Learning curves" if len(datasets) > 1 or datasets == ["folder"] else f"Learning curves on {datasets[0]}"


def _small_print(runs: Sequence[TrainingCurves]) -> str:
    lines = ["Loss: solid on the validation images, dashed the mean over the epoch's updates, on augmented images."]
    if any(row.averaged_top1 is not None for run in runs for row in run.epochs):
        lines.append("Top-1: solid the weights themselves, dashed their moving average.")
    unfinished = [
        f"{run.label} after {run.epochs[-1].epoch} of {run.planned_epochs} epochs"
        for run in runs
        if run.epochs[-1].epoch < run.planned_epochs
    ]
    if unfinished:
        lines.append(f"Not finished: {', '.join(unfinished)}.")
    return "\n".join(lines)
