"""Picture files in, a class for every pixel out: a segmenter from a file of weights.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from inline_attention.data.dense import segmentation_evaluation_transform
from inline_attention.data.images import ImageError, load_image
from inline_attention.models.reading import Checkpoint
from inline_attention.tasks.dense import normalization
from inline_attention.tasks.segmentation.inference import labels_at, scores_of
from inline_attention.tasks.segmentation.models import SegmentationOptions, Segmenter
from inline_attention.tasks.segmentation.task import load_segmenter


@dataclass(frozen=True)
class SegmentationResult:
    """The result for one file, or the reason why there is none.

    Attributes:
        path: The file.
        labels: `[H, W]` number of the class of each pixel.
        shares: Names of classes and the share of the picture that each has, the largest first.
        error: Problem with the file; empty if there is none.
    """

    path: Path
    labels: np.ndarray | None = None
    shares: tuple[tuple[str, float], ...] = ()
    error: str = ""


class PixelClassifier:
    """A segmenter that takes picture files of any size.

    Attributes:
        class_names: Name of each class; its place is its label.
    """

    def __init__(
        self,
        model: Segmenter,
        class_names: list[str],
        options: SegmentationOptions,
        *,
        shorter_side: int | None = None,
        device: torch.device | str = "cpu",
    ):
        """Set up.

        Args:
            model: The segmenter.
            class_names: Name of each class.
            options: Options of its training.
            shorter_side: Shorter image side in pixels; None for the options'.
            device: Device of the model.
        """
        self._device, self.class_names = torch.device(device), class_names
        self._model, self._windows = model.eval().to(self._device), options.windows
        self._normalize = normalization(model.backbone).to(self._device)
        self._resize = segmentation_evaluation_transform(shorter_side or options.crop)

    @classmethod
    def from_checkpoint(
        cls, file: Checkpoint, *, shorter_side: int | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Build the segmenter of a file of weights. Arguments: see the constructor.

        Raises:
            CheckpointError: If the file is not a segmenter's, or does not fit.
        """
        model, options, class_names = load_segmenter(file)
        return cls(model, class_names, options, shorter_side=shorter_side, device=device)

    def predict_files(self, paths: Iterable[str | os.PathLike[str]]) -> Iterator[SegmentationResult]:
        """Look at files one after the other; broken ones say so and do no harm."""
        for path in map(Path, paths):
            try:
                image = load_image(path)
            except ImageError as error:
                yield SegmentationResult(path, error=error.reason)
                continue
            pixels, _ = self._resize(image, np.zeros((1, 1), dtype=np.uint8))
            with torch.inference_mode():
                normalized = self._normalize(pixels[None].to(self._device))[0]
                (scores,) = scores_of(self._model, [normalized], self._windows)
                labels = labels_at(scores, (image.height, image.width)).cpu().numpy()
            counts = np.bincount(labels.ravel(), minlength=len(self.class_names))
            order = [int(place) for place in np.argsort(-counts) if counts[place]]
            shares = tuple((self.class_names[place], float(counts[place] / labels.size)) for place in order)
            yield SegmentationResult(path, labels, shares)
