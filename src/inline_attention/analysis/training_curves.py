"""Loss and accuracy of training runs by epoch: read from the run folders, and drawn."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inline_attention.engine.config import ConfigError, TrainConfig, read_config
from inline_attention.engine.reporting import SUMMARY
from inline_attention.support import figures
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style
from inline_attention.support.files import read_bounded
from inline_attention.support.text import printable

SETTINGS = "args.yaml"
OPTIONAL = ("val_loss", "top1", "ema_top1")  # columns of summary.csv
MAX_SUMMARY_BYTES = 2**25
LABEL_HEIGHT = 0.085  # of the axes
LARGEST_LOSS_RATIO = 20  # beyond it a linear axis hides the end of training


class RunFolderError(ValueError):
    """A folder is not a run, or the run has not finished an epoch."""


@dataclass(frozen=True)
class EpochFigures:
    """One row of a run's summary.csv; None for values that were not measured or not finite."""

    epoch: int  # from 1
    train_loss: float | None  # mean over the epoch's updates, with augmentation
    validation_loss: float | None
    top1: float | None  # of the validation images, in percent
    averaged_top1: float | None  # of the averaged weights

    @property
    def best_known_top1(self) -> float | None:
        """Top-1 of the averaged weights where there are any."""
        return self.top1 if self.averaged_top1 is None else self.averaged_top1


@dataclass(frozen=True)
class TrainingCurves:
    """The epochs of a run."""

    label: str
    model_name: str
    dataset: str
    planned_epochs: int
    epochs: tuple[EpochFigures, ...]  # those that are finished


def read_training_curves(folders: Sequence[Path]) -> list[TrainingCurves]:
    """Read runs of `inline train`, labelled as by `run_labels`.

    Raises `RunFolderError` if a folder is not a run, or has not finished an epoch.
    """
    settings = [_read_settings(folder) for folder in folders]
    labels = run_labels([config.model.name for config in settings], folders)
    return [
        TrainingCurves(
            label=label,
            model_name=config.model.name,
            dataset=config.data.dataset,
            planned_epochs=config.training.epochs + config.schedule.cooldown_epochs,
            epochs=_read_epochs(folder / SUMMARY),
        )
        for label, folder, config in zip(labels, folders, settings, strict=True)
    ]


def run_labels(model_names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return distinct labels of runs: the model, or the folder where several runs are of one model."""
    named = zip(model_names, folders, strict=True)
    labels = [printable(name if model_names.count(name) == 1 else folder.resolve().name) for name, folder in named]
    earlier = [labels[:number].count(label) for number, label in enumerate(labels)]
    return [f"{label} (#{1 + count})" if count else label for label, count in zip(labels, earlier, strict=True)]


def curves_chart(styles: Mapping[str, Style], runs: Sequence[TrainingCurves]) -> Chart:
    """Return two panels: top-1 with averaged weights dashed, and loss with the training loss dashed."""

    def draw(axes: Axes, label: str, dashed: str, solid: str) -> None:
        for name in (dashed, solid):
            for run in runs:
                points = [(row.epoch, value) for row in run.epochs if (value := getattr(row, name)) is not None]
                if points:
                    figures.draw_line(axes, styles[run.label], points, secondary=name == dashed)
        axes.set_ylabel(label)
        figures.whole_numbers(axes, "epoch")

    def draw_accuracy(axes: Axes) -> None:
        draw(axes, "top-1 (%)", dashed="averaged_top1", solid="top1")
        axes.set_ylim(bottom=0)
        _label_ends(axes, styles, runs)

    def draw_loss(axes: Axes) -> None:
        draw(axes, "cross entropy", dashed="train_loss", solid="validation_loss")
        rows = [row for run in runs for row in run.epochs]
        losses = [value for row in rows for value in (row.train_loss, row.validation_loss) if value]
        if losses and max(losses) > LARGEST_LOSS_RATIO * min(losses):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(bottom=0)

    panels = [
        Panel("Top-1 of the validation images (%)", draw_accuracy, "Top-1 of the validation images by epoch."),
        Panel("Loss, dashed in training", draw_loss, "Training and validation loss by epoch."),
    ]
    return Chart(panels, [LegendEntry(run.label, styles[run.label]) for run in runs])


def draw_training_curves(
    runs: Sequence[TrainingCurves], folder: Path, *, name: str = "curves", formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write `NAME.png` and `.svg`: top-1 and loss by epoch, a color per attention."""
    styles = figures.numbered_styles({run.label: run.model_name.partition("_")[0] for run in runs})
    datasets = {run.dataset for run in runs}
    # The name "folder" says nothing, and a path exists on one machine only.
    title = "Learning curves" if len(datasets) > 1 or "folder" in datasets else f"Learning curves on {datasets.pop()}"
    small_print = "Loss: solid on the validation images; dashed the mean over the epoch's updates, on augmented images."
    if any(row.averaged_top1 is not None for run in runs for row in run.epochs):
        small_print += " Top-1: solid the weights themselves, dashed their moving average."
    unfinished = [
        f"{run.label} after {run.epochs[-1].epoch} of {run.planned_epochs} epochs"
        for run in runs
        if run.epochs[-1].epoch < run.planned_epochs
    ]
    if unfinished:
        small_print += f" Not finished: {', '.join(unfinished)}."
    chart = curves_chart(styles, runs)
    return chart.save(folder, name, title=title, small_print=small_print, width=6.0, formats=formats)


def _label_ends(axes: Axes, styles: Mapping[str, Style], runs: Sequence[TrainingCurves]) -> None:
    """Write the last accuracy of each run beside its line, each above the one below."""
    ends: list[tuple[float, int, str]] = []
    for run in runs:
        measured = [(row.top1, row.epoch) for row in run.epochs if row.top1 is not None]
        ends += [(*place, styles[run.label].color) for place in measured[-1:]]
    if not ends:
        axes.text(0.5, 0.5, "not evaluated yet", transform=axes.transAxes, ha="center")
    lowest, highest = axes.get_ylim()
    heights: list[float] = []
    for top1, _, _ in sorted(ends):
        heights.append(max(top1, heights[-1] + LABEL_HEIGHT * (highest - lowest)) if heights else top1)
    for (top1, epoch, color), height in zip(sorted(ends), heights, strict=True):
        # Half of what the labels were raised by in total is taken back, so that they stay near their lines.
        place = (epoch, height - (heights[-1] - max(ends)[0]) / 2)
        axes.annotate(
            f"{top1:.1f}", place, (7, 0), textcoords="offset points", va="center", color=color, fontsize=9,
            annotation_clip=False,
        )  # fmt: skip


def _read_settings(folder: Path) -> TrainConfig:
    try:
        return read_config(folder / SETTINGS)
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunFolderError(
            f"{folder} is not a run folder of this version ({SETTINGS}: {reason}); expected one of `inline train`"
        ) from error


def _read_epochs(path: Path) -> tuple[EpochFigures, ...]:
    try:
        text = read_bounded(path, MAX_SUMMARY_BYTES).decode()
        rows = [
            EpochFigures(int(row["epoch"]), _number(row["train_loss"]), *(_number(row.get(name)) for name in OPTIONAL))
            for row in csv.DictReader(io.StringIO(text, newline=""))
        ]
    except FileNotFoundError:
        rows = []
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RunFolderError(f"{path} cannot be read as a table of epochs ({error}); was it edited?") from error
    if not rows:
        raise RunFolderError(f"the run in {path.parent} has not finished an epoch yet; try again when it has")
    return tuple(rows)


def _number(text: str | None) -> float | None:
    value = float(text) if text else None
    return value if value is not None and math.isfinite(value) else None
