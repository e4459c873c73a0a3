"""What a classifier takes the pictures of a dataset for, and the pictures it finds hardest.

Shapes: `B` batch, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from inline_attention.analysis.subjects import PictureSample, Subject, check_has_head
from inline_attention.data.batch import Batch
from inline_attention.data.sources import ImageSource
from inline_attention.support.figures import ALARM, INK, Axes, Chart, Panel, draw_picture
from inline_attention.support.text import printable, shortened

COLUMNS = 8
CELL = 1.45  # inches
LONGEST_NAME = 13  # letters that fit above a cell
SHORT_NAME = 5  # letters that leave room for a probability beside them
SMALL_SIDE = 64  # pixels; smaller pictures are shown as squares


@dataclass(frozen=True)
class Answer:
    """What the model takes one picture for; probabilities are from 0 to 1."""

    index: int  # of the picture in its dataset
    name: str
    truth: str
    truth_probability: float
    guess: str
    probability: float  # of the guess
    is_right: bool  # different classes may have equal names


@dataclass(frozen=True)
class PredictedPicture(Answer):
    """An answer with the picture itself, uint8 `[3, H, W]`, as the model sees it."""

    pixels: Tensor


@dataclass(frozen=True)
class Predictions:
    """Predictions on a whole dataset."""

    images: int  # that could be read
    right: int
    broken: int  # could not be read
    hardest: tuple[PredictedPicture, ...]  # by the probability of their true class, the smallest first


def predict_dataset(subject: Subject, source: ImageSource, *, keep: int, batch_size: int = 64) -> Predictions:
    """Classify every picture of a dataset whose classes the subject knows, and keep the pixels of the hardest."""
    sample = PictureSample(source.with_classes(_class_names(subject)), batch_size=batch_size)
    images = right = 0
    hardest: list[PredictedPicture] = []
    for batch, answers in answer_batches(subject, sample):
        images += len(answers)
        right += sum(answer.is_right for answer in answers)
        # A copy of the pixels: a view would keep the whole batch.
        pairs = zip(answers, batch.images, strict=True)
        found = [PredictedPicture(**vars(answer), pixels=pixels.clone()) for answer, pixels in pairs]
        hardest = heapq.nsmallest(keep, [*hardest, *found], key=lambda picture: picture.truth_probability)
    if not images:
        raise ValueError(f"there is no readable picture in {source.location}; check the dataset and its split")
    return Predictions(images, right, len(sample.skipped), tuple(hardest))


def answer_batches(subject: Subject, sample: PictureSample) -> Iterator[tuple[Batch, list[Answer]]]:
    """Yield batches of uint8 pictures with the model's answers; a class that the model does not know gets 0."""
    names = _class_names(subject)
    numbers = {name: number for number, name in enumerate(names)}
    for batch in sample.batches(subject):
        with torch.inference_mode():
            probabilities = subject.model(subject.normalize(batch.images)).float().softmax(-1).cpu()
        if probabilities.isnan().any():
            raise ValueError(f"{subject.label} gives NaN; are there NaN in the weights?")
        answers: list[Answer] = []
        for index, target, row in zip(batch.indices.tolist(), batch.targets.tolist(), probabilities, strict=True):
            name, truth, guess = sample.source.name(index), sample.source.class_names[target], int(row.argmax())
            known = numbers.get(truth)
            of_truth, of_guess = 0.0 if known is None else row[known].item(), row[guess].item()
            answers.append(Answer(index, name, truth, of_truth, names[guess], of_guess, guess == known))
        yield batch, answers


def draw_predictions(predictions: Predictions, label: str, dataset: str, folder: Path) -> list[Path]:
    """Write `predictions.png` and `.svg`: the hardest pictures with the model's guess; wrong ones have a frame."""
    shown = predictions.hardest
    names_are_short = all(len(picture.guess) <= SHORT_NAME for picture in shown)
    wrong, wrong_shown = predictions.images - predictions.right, sum(not picture.is_right for picture in shown)
    small_print = (
        f"The {len(shown)} hardest of {predictions.images:,} pictures: those whose true class got the smallest "
        "probability, the smallest first. Above each, the model's guess and its probability. Framed: the guess is "
        f"wrong; {wrong_shown} of the {wrong:,} wrong ones are here."
    )
    if predictions.broken:
        small_print += f" {predictions.broken:,} pictures could not be read and are not counted."
    title = f"{label} on {dataset}: {100 * predictions.right / predictions.images:.1f} % right"
    draw = partial(_draw_picture, names_are_short=names_are_short)
    height = CELL + (-0.1 if names_are_short else 0.05)  # a longer name takes a line of its own
    panels = [Panel("", partial(draw, picture=picture), height=height) for picture in shown]
    return Chart(panels).save(folder, "predictions", title=title, small_print=small_print, columns=COLUMNS, width=CELL)


def _draw_picture(axes: Axes, picture: PredictedPicture, *, names_are_short: bool) -> None:
    pixels = picture.pixels.permute(1, 2, 0).cpu().numpy()
    draw_picture(axes, pixels, interpolation="nearest" if max(pixels.shape) < SMALL_SIDE else "antialiased")
    guess, truth = (shortened(printable(name), LONGEST_NAME) for name in (picture.guess, picture.truth))
    lines = f"{guess}{'  ' if names_are_short else chr(10)}{100 * picture.probability:.0f} %"
    # The last line says what it is: color alone is not enough.
    text = lines if picture.is_right else f"{lines}\nis {truth}"
    axes.set_title(text, color=INK if picture.is_right else ALARM, fontsize=9.5)
    if not picture.is_right:
        axes.spines[:].set(visible=True, color=ALARM, linewidth=3)


def _class_names(subject: Subject) -> tuple[str, ...]:
    check_has_head(subject)
    if subject.class_names is None:
        raise ValueError(f"expected a classifier with named classes, got {subject.label} with {subject.note}")
    return subject.class_names
