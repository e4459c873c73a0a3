"""Picture files in, named objects out: a detector from a file of weights.

Shapes: `n` objects, `M` side of a mask as the model gives it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.dense import fitted_size
from inline_attention.data.images import ImageError, load_image
from inline_attention.models.reading import Checkpoint
from inline_attention.tasks.dense import normalization
from inline_attention.tasks.detection.evaluation import at_original_size
from inline_attention.tasks.detection.models import DetectionOptions, Detector
from inline_attention.tasks.detection.task import load_detector

DEFAULT_LEAST_SCORE = 0.5


@dataclass(frozen=True)
class FoundObject:
    """One object.

    Attributes:
        label: Class index, from 1.
        name: Class name.
        score: Score from 0 to 1.
        box: Left, top, right and bottom in pixels of the picture.
        mask: `[1, M, M]` probabilities over the box; None of a model that finds no masks.
    """

    label: int
    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: Tensor | None = None


@dataclass(frozen=True)
class DetectionResult:
    """What became of one file: objects, the best first, or the reason why there are none."""

    path: Path
    objects: tuple[FoundObject, ...] = ()
    error: str = ""


class ObjectFinder:
    """A detector that takes picture files of any size."""

    def __init__(
        self,
        model: Detector,
        class_names: list[str],
        options: DetectionOptions,
        *,
        shorter_side: int | None = None,
        least_score: float = DEFAULT_LEAST_SCORE,
        device: torch.device | str = "cpu",
    ):
        """Set up.

        Args:
            model: The detector.
            class_names: Class names, from label 1.
            options: Options of its training.
            shorter_side: Shorter image side in pixels; None for the options'.
            least_score: Hide detections below this score.
            device: Device of the model.
        """
        self._device = torch.device(device)
        self._model, self._class_names = model.eval().to(self._device), class_names
        self._normalize = normalization(model.backbone).to(self._device)
        self._least_score = least_score
        options = options if shorter_side is None else options.at_size(shorter_side)
        self._sides = options.shorter_side, options.longest_side

    @classmethod
    def from_checkpoint(
        cls,
        file: Checkpoint,
        *,
        shorter_side: int | None = None,
        least_score: float = DEFAULT_LEAST_SCORE,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build the detector of a file of weights. Arguments: see the constructor.

        Raises:
            CheckpointError: If the file is not a detector's, or does not fit.
        """
        model, options, class_names = load_detector(file)
        return cls(model, class_names, options, shorter_side=shorter_side, least_score=least_score, device=device)

    def predict_files(self, paths: Iterable[str | os.PathLike[str]]) -> Iterator[DetectionResult]:
        """Look at files one after the other; broken ones say so and do no harm."""
        for path in map(Path, paths):
            try:
                image = load_image(path)
            except ImageError as error:
                yield DetectionResult(path, error=error.reason)
                continue
            original = (image.height, image.width)
            size = fitted_size(original, *self._sides)
            pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
            with torch.inference_mode():
                (found,) = self._model([self._normalize(pixels[None].to(self._device))[0]])
            moved = {name: value.cpu() for name, value in at_original_size(found, size, original).items()}
            yield DetectionResult(path, tuple(self._objects(moved)))

    def _objects(self, found: dict[str, Tensor]) -> Iterator[FoundObject]:
        masks = found.get("masks")
        for place, score in enumerate(found["scores"].tolist()):
            if score < self._least_score:
                continue
            left, top, right, bottom = found["boxes"][place].tolist()
            label = int(found["labels"][place])
            mask = None if masks is None else masks[place].clone()
            yield FoundObject(label, self._class_names[label - 1], score, (left, top, right, bottom), mask)
