"""Predictors of `inline predict`, one per task: run a model, print or draw what it found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from inline_attention.engine.checkpoint_format import find_weights
from inline_attention.models.checkpoints import open_checkpoint
from inline_attention.tasks.classification.prediction import ImageClassifier, ImageResult, find_device
from inline_attention.tasks.dense import TASK
from inline_attention.tasks.dense_prediction import (
    DetectionResult,
    ObjectFinder,
    PixelClassifier,
    SegmentationResult,
)
from inline_attention.tasks.drawing import annotate, annotate_objects, annotate_pixels


@dataclass(frozen=True)
class PredictOptions:
    """Options of the command line.

    Attributes:
        model_name: Model name, for a classifier.
        top: Number of classes or objects to print.
        size: Shorter side in pixels, or (height, width).
        least_score: Smallest score of an object.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: Images per batch.
    """

    model_name: str | None
    top: int
    size: int | tuple[int, int] | None
    least_score: float
    device: str
    batch_size: int


class Result(Protocol):
    """The result of one file."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def error(self) -> str:
        """Why the file could not be used, or ""."""
        ...


class Predictor(Protocol):
    """A model for picture files."""

    def results(self, files: Sequence[Path]) -> Iterator[Any]:
        """Yield the result of each file, in order."""
        ...

    def lines(self, result: Any) -> list[str]:
        """Return what was found as lines of text."""
        ...

    def content(self, result: Any) -> dict[str, Any]:
        """Return what was found as JSON content."""
        ...

    def annotated(self, image: Image.Image, result: Any) -> Image.Image:
        """Return a copy of the picture with what was found drawn on it."""
        ...


def build_predictor(checkpoint: Path, options: PredictOptions) -> Predictor:
    """Build the predictor of a weights file, a run or a training checkpoint.

    Raises:
        CheckpointError: If the file cannot be used.
        ValueError: If the options do not fit the model, or there is no such device.
    """
    path = find_weights(checkpoint)
    file = open_checkpoint(path)
    task = file.metadata.get(TASK)
    if task is None:
        classifier = ImageClassifier.from_checkpoint(
            path, model_name=options.model_name, size=options.size, device=options.device
        )
        return _Classifying(classifier, options)
    if options.model_name is not None or isinstance(options.size, tuple):
        raise ValueError(f"{path} is for {task}: it knows its model, and --size is one number, of the shorter side")
    arguments: dict[str, Any] = {"shorter_side": options.size, "device": find_device(options.device)}
    if task == "detection":
        return _Detecting(ObjectFinder(file, least_score=options.least_score, **arguments), options)
    return _Segmenting(PixelClassifier(file, **arguments), options)


class _Classifying:
    def __init__(self, classifier: ImageClassifier, options: PredictOptions):
        self._classifier, self._options = classifier, options

    def results(self, files: Sequence[Path]) -> Iterator[ImageResult]:
        return self._classifier.classify_files(files, top=self._options.top, batch_size=self._options.batch_size)

    def lines(self, result: ImageResult) -> list[str]:
        return [f"{prediction.probability:6.1%}  {prediction.name}" for prediction in result.predictions]

    def content(self, result: ImageResult) -> dict[str, Any]:
        return {"predictions": [asdict(prediction) for prediction in result.predictions]}

    def annotated(self, image: Image.Image, result: ImageResult) -> Image.Image:
        return annotate(image, result.predictions)


class _Detecting:
    def __init__(self, finder: ObjectFinder, options: PredictOptions):
        self._finder, self._top = finder, options.top

    def results(self, files: Sequence[Path]) -> Iterator[DetectionResult]:
        return self._finder.predict_files(files)

    def lines(self, result: DetectionResult) -> list[str]:
        found = [f"{item.score:6.1%}  {item.name}  at {_corners(item.box)}" for item in result.objects[: self._top]]
        more = len(result.objects) - len(found)
        return [*found, f"and {more} more"] if more else found or ["nothing found; a lower --least-score shows more"]

    def content(self, result: DetectionResult) -> dict[str, Any]:
        return {"objects": [{"name": item.name, "score": item.score, "box": item.box} for item in result.objects]}

    def annotated(self, image: Image.Image, result: DetectionResult) -> Image.Image:
        return annotate_objects(image, result.objects)


class _Segmenting:
    def __init__(self, classifier: PixelClassifier, options: PredictOptions):
        self._classifier, self._top = classifier, options.top

    def results(self, files: Sequence[Path]) -> Iterator[SegmentationResult]:
        return self._classifier.predict_files(files)

    def lines(self, result: SegmentationResult) -> list[str]:
        return [f"{share:6.1%}  {name}" for name, share in result.shares[: self._top]]

    def content(self, result: SegmentationResult) -> dict[str, Any]:
        return {"shares": dict(result.shares)}

    def annotated(self, image: Image.Image, result: SegmentationResult) -> Image.Image:
        return annotate_pixels(image, result, self._classifier.class_names)


def _corners(box: Sequence[float]) -> str:
    left, top, right, bottom = (round(value) for value in box)
    return f"({left}, {top})–({right}, {bottom})"
