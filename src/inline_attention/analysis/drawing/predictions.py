"""A page of pictures with what the model takes them for."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes

from inline_attention.analysis.predictions import PredictedPicture, Predictions
from inline_attention.support.figures import ALARM, INK, as_picture, new_figure, save, without_ticks
from inline_attention.support.text import printable

COLUMNS = 8
CELL = 1.45  # inches
FONT_SIZE = 9.5
LONGEST_NAME = 13  # letters that fit above a cell
SHORT_NAME = 5  # letters that leave room for a probability beside them
SMALL_SIDE = 64  # pixels; below it they are shown as squares, which is what the model gets


def draw_predictions(
    predictions: Predictions, label: str, dataset: str, folder: Path, *, name: str = "predictions"
) -> list[Path]:
    """Draw the hardest pictures, each with the model's guess and its probability; wrong ones are framed.

    Args:
        predictions: Of `predict_dataset`, with at least one picture kept.
        label: What the model is called.
        dataset: What the pictures are called.
        folder: Where `NAME.png` and `NAME.svg` go.
        name: Of the files.
    """
    rows = math.ceil(len(predictions.hardest) / COLUMNS)
    names_are_short = all(len(picture.guess) <= SHORT_NAME for picture in predictions.hardest)
    cell_height = CELL + (0.5 if names_are_short else 0.65)
    title = f"{label} on {dataset}: {100 * predictions.right / predictions.images:.1f} % right"
    with new_figure(COLUMNS * CELL, rows * cell_height + 1.2, title, _small_print(predictions)) as figure:
        panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for axes, picture in zip(panels, predictions.hardest, strict=False):
            _draw_picture(axes, picture, names_are_short=names_are_short)
        for axes in panels[len(predictions.hardest) :]:
            axes.set_axis_off()
        return save(figure, folder, name)


def _draw_picture(axes: Axes, picture: PredictedPicture, *, names_are_short: bool) -> None:
    pixels = as_picture(picture.pixels)
    axes.imshow(pixels, interpolation="nearest" if max(pixels.shape) < SMALL_SIDE else "antialiased")
    without_ticks(axes)
    separator = "  " if names_are_short else "\n"
    lines = f"{_short(picture.guess)}{separator}{100 * picture.probability:.0f} %"
    if picture.is_right:
        axes.set_title(lines, color=INK, fontsize=FONT_SIZE)
        return
    # Not by colour alone: the last line says what it is.
    axes.set_title(f"{lines}\nis {_short(picture.truth)}", color=ALARM, fontsize=FONT_SIZE)
    for spine in axes.spines.values():
        spine.set(visible=True, color=ALARM, linewidth=3)


def _small_print(predictions: Predictions) -> str:
    shown = predictions.hardest
    wrong, wrong_shown = predictions.images - predictions.right, sum(not picture.is_right for picture in shown)
    lines = [
        f"The {len(shown)} hardest of {predictions.images:,}: those whose true class got the smallest probability, the "
        "smallest first. Above each, the model's guess and its probability.",
        f"Framed: the guess is wrong; {wrong_shown} of the {wrong:,} wrong ones are here.",
    ]
    if predictions.broken:
        lines.append(f"{predictions.broken:,} pictures could not be read and count nowhere.")
    return "\n".join(lines)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
