"""Picture files in, objects or a class for every pixel out: a detector or segmenter from a file of weights.

Shapes: `M` side of a mask as the model gives it, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.dense import fitted_size
from inline_attention.data.images import ImageError, load_image
from inline_attention.models.reading import Checkpoint
from inline_attention.tasks.dense import DenseTask, normalization
from inline_attention.tasks.detection.task import DetectionTask, at_original_size
from inline_attention.tasks.segmentation.models import labels_at, scores_of
from inline_attention.tasks.segmentation.task import SegmentationTask

DEFAULT_LEAST_SCORE = 0.5


@dataclass(frozen=True)
class FoundObject:
    """One object."""

    label: int  # class index, from 1
    name: str
    score: float  # from 0 to 1
    box: tuple[float, float, float, float]  # left, top, right and bottom in pixels of the picture
    mask: Tensor | None = None  # [1, M, M] probabilities over the box


@dataclass(frozen=True)
class DetectionResult:
    """Objects in one file, the best first, or the reason why it could not be used."""

    path: Path
    objects: tuple[FoundObject, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class SegmentationResult:
    """Classes of one file, or the reason why it could not be used."""

    path: Path
    labels: np.ndarray | None = None  # [H, W] class index of each pixel
    shares: tuple[tuple[str, float], ...] = ()  # class names and their shares of the picture, the largest first
    error: str = ""


Result = TypeVar("Result", DetectionResult, SegmentationResult)


class DensePredictor(ABC, Generic[Result]):
    """A detector or segmenter that takes picture files of any size."""

    task_type: ClassVar[type[DenseTask[Any]]]
    result_type: type[Result]

    def __init__(self, file: Checkpoint, *, shorter_side: int | None = None, device: torch.device | str = "cpu"):
        """Build the model of a file of weights, for images with a shorter side in pixels; None for that of training."""
        task, model, self.class_names = self.task_type.load(file)
        self._device, self._options = torch.device(device), task.options
        self._model = model.eval().to(self._device)
        self._normalize = normalization(model).to(self._device)
        self._sides: tuple[int, int] = task.options.evaluation_sides(shorter_side)

    def predict_files(self, paths: Iterable[str | os.PathLike[str]]) -> Iterator[Result]:
        """Yield the result of each file, in order."""
        for path in map(Path, paths):
            try:
                image = load_image(path)
            except ImageError as error:
                yield self.result_type(path, error=error.reason)
                continue
            original = (image.height, image.width)
            size = fitted_size(original, *self._sides)
            pixels = transforms.resize(transforms.pil_to_tensor(image), list(size), antialias=True)
            with torch.inference_mode():
                result = self._predict(path, self._normalize(pixels[None].to(self._device))[0], original)
            yield result

    @abstractmethod
    def _predict(self, path: Path, image: Tensor, original: tuple[int, int]) -> Result: ...


class ObjectFinder(DensePredictor[DetectionResult]):
    """A detector that takes picture files."""

    task_type, result_type = DetectionTask, DetectionResult

    def __init__(self, file: Checkpoint, *, least_score: float = DEFAULT_LEAST_SCORE, **options: Any):
        """Build the detector, which hides objects below `least_score`. Options: see `DensePredictor`."""
        super().__init__(file, **options)
        self._least_score = least_score

    def _predict(self, path: Path, image: Tensor, original: tuple[int, int]) -> DetectionResult:
        (found,) = self._model([image])
        found = at_original_size(found, (image.shape[-2], image.shape[-1]), original)
        found = {name: value.cpu() for name, value in found.items()}
        objects = []
        for place, score in enumerate(found["scores"].tolist()):
            if score >= self._least_score:
                label, box = int(found["labels"][place]), tuple(found["boxes"][place].tolist())
                mask = found["masks"][place].clone() if "masks" in found else None
                objects.append(FoundObject(label, self.class_names[label - 1], score, box, mask))
        return DetectionResult(path, tuple(objects))


class PixelClassifier(DensePredictor[SegmentationResult]):
    """A segmenter that takes picture files."""

    task_type, result_type = SegmentationTask, SegmentationResult

    def _predict(self, path: Path, image: Tensor, original: tuple[int, int]) -> SegmentationResult:
        (scores,) = scores_of(self._model, [image], self._options.windows)
        labels = labels_at(scores, original).cpu().numpy()
        counts = np.bincount(labels.ravel(), minlength=len(self.class_names))
        order = [int(place) for place in np.argsort(-counts) if counts[place]]
        shares = tuple((self.class_names[place], float(counts[place] / labels.size)) for place in order)
        return SegmentationResult(path, labels, shares)
