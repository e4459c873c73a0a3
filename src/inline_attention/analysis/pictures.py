"""The pictures to analyze: a sample of a dataset or of a folder, read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image

from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.probes import capture_attention
from inline_attention.analysis.subjects import Subject
from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.images import find_images, load_image
from inline_attention.data.loading import ImageLoader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import BatchKey
from inline_attention.data.sources import DataError, ImageSource

OnProgress: TypeAlias = Callable[[float], None]  # called with the share of the work just done; shares sum to one


class UnlabelledPictures(ImageSource):
    """Picture files without classes."""

    def __init__(self, location: Path, files: Sequence[Path]):
        """Keep the list of files."""
        super().__init__(str(location), [""], np.zeros(len(files)))
        self._files = list(files)

    def load(self, index: int) -> Image.Image:
        """Read a file."""
        return load_image(self._files[index])

    def name(self, index: int) -> str:
        """Return a file's path."""
        return str(self._files[index])


def open_pictures(dataset: str, data_dir: Path | None, split: str) -> ImageSource:
    """Open pictures whose classes do not matter: a folder need not be sorted by class.

    Args:
        dataset: Dataset name, as for `open_dataset`.
        data_dir: Folder of the dataset; for "folder", any folder with pictures below it, or a single picture.
        split: Split, as for `open_dataset`; ignored for "folder".

    Raises:
        DataError: If there are no pictures.
    """
    if dataset not in ("", "folder") or data_dir is None:
        return open_dataset(dataset, data_dir, split)
    files = find_images([data_dir])
    if not files or not data_dir.exists():
        what = "holds no picture" if data_dir.exists() else "does not exist"
        raise DataError(f"{data_dir} {what}; give a folder of pictures with --data-dir, or --dataset digits")
    return UnlabelledPictures(data_dir, files)


class SampledBatches:
    """Batches of samples drawn at random without repetition, in the order of the dataset."""

    def __init__(self, length: int, count: int | None, batch_size: int, seed: int):
        """Draw the samples.

        Args:
            length: Samples in the dataset.
            count: Samples to draw; None for all.
            batch_size: Samples per batch; the last batch may have fewer.
            seed: Random seed.
        """
        self._indices = torch.arange(length)
        if count is not None and count < length:
            generator = torch.Generator().manual_seed(derived_seed("sampled pictures", seed))
            self._indices = torch.randperm(length, generator=generator)[:count].sort().values
        self._batch_size = batch_size

    @property
    def samples(self) -> int:
        """Number of samples in all batches."""
        return len(self._indices)

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """Yield the batches in order, the same in every epoch."""
        for number in range(start_batch, len(self)):
            first = number * self._batch_size
            yield BatchKey(epoch, number, self._indices[first : first + self._batch_size])


class PictureSample:
    """Some pictures of a source, drawn at random and read again for every model that is analyzed.

    Attributes:
        source: Pictures to draw from.
        skipped: Pictures that could not be read so far: reasons by name.
    """

    def __init__(
        self, source: ImageSource, *, images: int | None = None, seed: int = 0, batch_size: int = 8, workers: int = 0
    ):
        """Plan the draw.

        Args:
            source: Pictures to draw from.
            images: Number of pictures; None for all.
            seed: Random seed.
            batch_size: Pictures per batch.
            workers: Processes that read pictures.
        """
        self.source = source
        self.skipped: dict[str, str] = {}
        self._images, self._seed, self._batch_size, self._workers = images, seed, batch_size, workers

    def __len__(self) -> int:
        """Number of pictures, unreadable ones included."""
        return len(self.source) if self._images is None else min(self._images, len(self.source))

    def batches(self, subject: Subject, *, normalized: bool = False) -> Iterator[Batch]:
        """Yield the pictures in a model's size and crop; unreadable ones are left out and recorded.

        Args:
            subject: The model.
            normalized: Yield model inputs on the model's device, with classes numbered as in the model, instead of
                uint8 pixels.

        Raises:
            BrokenImagesError: If too many pictures are broken.
            DataError: If the model does not know their classes.
        """
        batches = SampledBatches(len(self.source), self._images, self._batch_size, self._seed)
        broken = BrokenImages(batches.samples, BrokenImageLimit())
        config = subject.data_config
        loader = ImageLoader(
            _with_classes_of(subject, self.source) if normalized else self.source,
            subject.transform(),
            batches,
            normalize=Normalize(config["mean"], config["std"]) if normalized else None,
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


def captured_batches(
    subject: Subject, sample: PictureSample, layers: Sequence[int] | None, on_progress: OnProgress | None
) -> Iterator[tuple[Batch, list[LayerAttention]]]:
    """Yield batches of uint8 pictures with what the attention layers did with them, one batch in memory at a time."""
    for batch in sample.batches(subject):
        yield batch, capture_attention(subject.model, subject.normalize(batch.images), layers=layers)
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
