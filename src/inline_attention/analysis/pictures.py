"""The pictures to analyze: a sample of a dataset or of a folder, read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.probes import capture_attention, choose_heads
from inline_attention.analysis.subjects import Subject
from inline_attention.data.batch import Batch
from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.images import find_images, load_image
from inline_attention.data.loading import ImageLoader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import EvaluationBatches
from inline_attention.data.sources import DataError, ImageSource

OnProgress: TypeAlias = Callable[[float], None]  # called with the share of the work just done; shares sum to one
HeadOfImage: TypeAlias = tuple[LayerAttention, int, int]  # a layer, and the numbers of an image and a head in it


class Chosen(TypedDict, total=False):
    """What a survey looks at, all by default; see `captured_images`."""

    layers: Sequence[int] | None
    heads: Sequence[int] | None
    on_progress: OnProgress | None


class UnlabelledPictures(ImageSource):
    """Picture files without classes."""

    def __init__(self, location: Path, files: Sequence[Path]):
        super().__init__(str(location), [""], np.zeros(len(files)))
        self._files = list(files)

    def load(self, index: int) -> Image.Image:
        """Read a file."""
        return load_image(self._files[index])

    def name(self, index: int) -> str:
        """Return a file's path."""
        return str(self._files[index])


def open_pictures(dataset: str, data_dir: Path | None, split: str) -> ImageSource:
    """Open pictures whose classes do not matter: a folder need not be sorted by class, and may be a single picture."""
    if dataset not in ("", "folder") or data_dir is None:
        return open_dataset(dataset, data_dir, split)
    files = find_images([data_dir])
    if not files or not data_dir.exists():
        what = "holds no picture" if data_dir.exists() else "does not exist"
        raise DataError(f"{data_dir} {what}; give a folder of pictures with --data-dir, or --dataset digits")
    return UnlabelledPictures(data_dir, files)


class SampledBatches(EvaluationBatches):
    """Batches of `count` samples drawn at random without repetition, in the order of the dataset; None draws all."""

    def __init__(self, length: int, count: int | None, batch_size: int, seed: int):
        super().__init__(length, batch_size)
        if count is not None and count < length:
            generator = torch.Generator().manual_seed(derived_seed("sampled pictures", seed))
            self._indices = torch.randperm(length, generator=generator)[:count].sort().values


class PictureSample:
    """Some pictures of a source, drawn at random and read again for every model that is analyzed."""

    def __init__(
        self, source: ImageSource, *, images: int | None = None, seed: int = 0, batch_size: int = 8, workers: int = 0
    ):
        """Plan to draw so many images, or all, and to read them with so many worker processes."""
        self.source = source
        self.skipped: dict[str, str] = {}  # pictures that could not be read so far: reasons by name
        self._images, self._seed, self._batch_size, self._workers = images, seed, batch_size, workers

    def __len__(self) -> int:
        """Number of pictures, unreadable ones included."""
        return len(self.source) if self._images is None else min(self._images, len(self.source))

    def batches(self, subject: Subject, *, normalized: bool = False) -> Iterator[Batch]:
        """Yield uint8 pictures in a model's size and crop; unreadable ones are left out and recorded.

        Normalized, they are inputs on the model's device, with classes numbered as in the model. Raises
        `BrokenImagesError` if too many are broken, `DataError` if the model does not know their classes.
        """
        broken = BrokenImages(len(self), BrokenImageLimit())
        loader = ImageLoader(
            _with_classes_of(subject, self.source) if normalized else self.source,
            subject.transform(),
            SampledBatches(len(self.source), self._images, self._batch_size, self._seed),
            normalize=subject.normalization() if normalized else None,
            broken=broken,
            replace_broken=False,
            workers=self._workers,
            device=subject.device if normalized else "cpu",
        )
        try:
            yield from loader.epoch()
        finally:
            loader.close()
            self.skipped |= {image.name: image.reason for image in broken}


def captured_images(
    subject: Subject,
    sample: PictureSample,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[str, Tensor, list[HeadOfImage]]]:
    """Yield the name of each picture, its uint8 pixels, and its place in what the chosen heads did with its batch."""
    for batch in sample.batches(subject):
        captured = capture_attention(subject.model, subject.normalize(batch.images), layers=layers)
        for image, index in enumerate(batch.indices.tolist()):
            places = [(layer, image, head) for layer in captured for head in choose_heads(layer, heads)]
            yield sample.source.name(index), batch.images[image], places
        if on_progress is not None:
            on_progress(len(batch) / len(sample))


def _with_classes_of(subject: Subject, source: ImageSource) -> ImageSource:
    """Return the pictures with classes numbered as in the model."""
    if subject.class_names is not None:
        return source.with_classes(subject.class_names)
    classes = getattr(subject.model, "num_classes", len(source.class_names))
    if classes != len(source.class_names):
        raise DataError(
            f"{subject.label} has {classes} classes without names, {source.location} has "
            f"{len(source.class_names)} classes; give the data that the model was trained on"
        )
    return source
