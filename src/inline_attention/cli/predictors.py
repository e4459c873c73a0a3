"""What `inline predict` does with the models of each task: run, print, draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from inline_attention.models.checkpoints import open_checkpoint
from inline_attention.models.reading import find_weights
from inline_attention.tasks.classification.prediction import ImageClassifier, Streaming
from inline_attention.tasks.dense import TASK
from inline_attention.tasks.dense_prediction import DetectionResult, ObjectFinder, PixelClassifier
from inline_attention.tasks.drawing import annotate, annotate_objects, annotate_pixels
from inline_attention.tasks.task import find_device


class Predictor(NamedTuple):
    """A model for picture files. A result has a `path` and an `error`, which is "" if the picture could be used."""

    results: Callable[[Sequence[Path]], Iterator[Any]]  # in the order of the files
    lines: Callable[[Any], list[str]]  # a result as lines of text
    content: Callable[[Any], dict[str, Any]]  # a result as JSON content
    annotated: Callable[[Image.Image, Any], Image.Image]  # a copy of the picture with the result drawn on it


def build_predictor(
    checkpoint: Path,
    *,
    model_name: str | None,
    top: int,
    size: int | tuple[int, int] | None,
    least_score: float,
    device: str,
    batch_size: int,
    streaming: Streaming,
) -> Predictor:
    """Build the predictor of a weights file, a run or a training checkpoint.

    `CheckpointError` if the file cannot be used, `ValueError` if the options do not fit the model or the machine.
    """
    path = find_weights(checkpoint)
    file = open_checkpoint(path)
    task = file.metadata.get(TASK)
    if task is None:
        classifier = ImageClassifier.from_checkpoint(file, model_name=model_name, size=size, device=device)
        return Predictor(
            lambda files: classifier.classify_files(files, top=top, batch_size=batch_size, streaming=streaming),
            lambda result: [f"{item.probability:6.1%}  {item.name}" for item in result.predictions],
            lambda result: {"predictions": [asdict(item) for item in result.predictions]},
            lambda image, result: annotate(image, result.predictions),
        )
    if model_name is not None or isinstance(size, tuple):
        raise ValueError(f"{path} is for {task}: it knows its model, and --size is one number, of the shorter side")
    if streaming.level is not None:
        raise ValueError(f"{path} is for {task}: --level is for classifiers")
    if task == "detection":
        finder = ObjectFinder(file, least_score=least_score, shorter_side=size, device=find_device(device))
        return Predictor(
            finder.predict_files,
            lambda result: _object_lines(result, top),
            lambda result: {
                "objects": [{"name": item.name, "score": item.score, "box": item.box} for item in result.objects]
            },
            lambda image, result: annotate_objects(image, result.objects),
        )
    segmenter = PixelClassifier(file, shorter_side=size, device=find_device(device))
    return Predictor(
        segmenter.predict_files,
        lambda result: [f"{share:6.1%}  {name}" for name, share in result.shares[:top]],
        lambda result: {"shares": dict(result.shares)},
        lambda image, result: annotate_pixels(image, result, segmenter.class_names),
    )


def _object_lines(result: DetectionResult, top: int) -> list[str]:
    lines: list[str] = []
    for item in result.objects[:top]:
        left, upper, right, lower = (round(value) for value in item.box)
        lines.append(f"{item.score:6.1%}  {item.name}  at ({left}, {upper})–({right}, {lower})")
    more = len(result.objects) - len(lines)
    return [*lines, f"and {more} more"] if more else lines or ["nothing found; a lower --least-score shows more"]
