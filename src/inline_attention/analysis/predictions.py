"""What a classifier makes of a dataset: how many it gets right, and the pictures it finds hardest.

Shapes: `B` batch, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.analysis.pictures import picture_loader
from inline_attention.analysis.subjects import Subject
from inline_attention.data.batch import Batch
from inline_attention.data.sources import ImageSource


@dataclass(frozen=True)
class PredictedPicture:
    """A picture, what it shows, and what the model takes it for.

    Attributes:
        pixels: uint8 `[3, H, W]`, as the model sees them.
        name: The picture's path, or what else it can be found by.
        truth: Name of its class.
        truth_probability: That the model gives this class, from 0 to 1.
        guess: Name of the likeliest class.
        probability: That the model gives to its guess, from 0 to 1.
        is_right: Whether the guess is the truth; equal names of different classes are not.
    """

    pixels: Tensor
    name: str
    truth: str
    truth_probability: float
    guess: str
    probability: float
    is_right: bool


@dataclass(frozen=True)
class Predictions:
    """Of a whole dataset.

    Attributes:
        images: How many were read.
        right: How many of them were named correctly.
        broken: How many could not be read.
        hardest: Those whose true class got the smallest probability, the smallest first.
    """

    images: int
    right: int
    broken: int
    hardest: tuple[PredictedPicture, ...]


def predict_dataset(
    subject: Subject,
    source: ImageSource,
    *,
    keep: int,
    batch_size: int = 64,
    workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Predictions:
    """Classify every picture of a dataset, keeping the pixels of the hardest alone.

    Args:
        subject: The classifier; its classes must be named.
        source: Labelled pictures of these classes, in any order.
        keep: How many of the hardest to keep.
        batch_size: Pictures at once.
        workers: Processes that read them.
        on_progress: Called with the number of pictures of each batch.

    Raises:
        ValueError: If the subject's classes have no names, or there is no readable picture.
        DataError: If the dataset has classes that the subject does not know.
        BrokenImagesError: If too many pictures cannot be read.
    """
    if subject.class_names is None:
        raise ValueError(f"expected a trained classifier, got {subject.label} with {subject.note}")
    names = subject.class_names
    source = source.with_classes(names)
    loader, _, broken = picture_loader(source, subject, images=None, seed=0, batch_size=batch_size, workers=workers)
    images = right = 0
    hardest: list[PredictedPicture] = []
    try:
        for batch in loader.epoch():
            probabilities = _probabilities(subject, batch)
            images += len(batch)
            right += int((probabilities.argmax(-1) == batch.targets).sum())
            found = _hardest_of(batch, probabilities, keep, names, source)
            hardest = heapq.nsmallest(keep, [*hardest, *found], key=lambda picture: picture.truth_probability)
            if on_progress is not None:
                on_progress(len(batch))
    finally:
        loader.close()
    if not images:
        raise ValueError(f"there is no readable picture in {source.location}; check the dataset and its split")
    return Predictions(images, right, len(broken), tuple(hardest))


@torch.inference_mode()
def _probabilities(subject: Subject, batch: Batch) -> Tensor:
    """`[B, K]` on the CPU."""
    probabilities = subject.model(subject.normalize(batch.images)).float().softmax(-1).cpu()
    if probabilities.isnan().any():
        raise ValueError(f"{subject.label} gives NaN; are there NaN in the weights?")
    return probabilities


def _hardest_of(
    batch: Batch, probabilities: Tensor, keep: int, names: tuple[str, ...], source: ImageSource
) -> Iterator[PredictedPicture]:
    truth_probabilities = probabilities.gather(1, batch.targets[:, None])[:, 0]
    for place in truth_probabilities.argsort()[:keep].tolist():
        target, guess = int(batch.targets[place]), int(probabilities[place].argmax())
        yield PredictedPicture(
            pixels=batch.images[place].clone(),  # a view would keep the whole batch alive
            name=source.name(int(batch.indices[place])),
            truth=names[target],
            truth_probability=truth_probabilities[place].item(),
            guess=names[guess],
            probability=probabilities[place, guess].item(),
            is_right=guess == target,
        )
