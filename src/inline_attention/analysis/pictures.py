"""The pictures to analyse: a sample of a dataset or of a folder, read one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from inline_attention.analysis.subjects import Subject
from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImageLimit, BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.images import find_images, load_image
from inline_attention.data.loading import ImageLoader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import BatchKey
from inline_attention.data.sources import DataError, ImageSource


class UnlabelledPictures(ImageSource):
    """Picture files of no class, for analyses that need none."""

    def __init__(self, location: Path, files: Sequence[Path]):
        """Take the files as they are."""
        super().__init__(str(location), [""], np.zeros(len(files)))
        self._files = list(files)

    def load(self, index: int) -> Image.Image:
        """Read the file."""
        return load_image(self._files[index])

    def name(self, index: int) -> str:
        """The file's path."""
        return str(self._files[index])


def open_pictures(dataset: str, data_dir: Path | None, split: str) -> ImageSource:
    """Pictures without regard to their classes: a folder need not be sorted by class.

    Args:
        dataset: As for `open_dataset`.
        data_dir: Its folder; for "folder", any folder with pictures below it, or a single picture.
        split: As for `open_dataset`; of no matter to "folder".

    Raises:
        DataError: If there are none.
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
        """Draw.

        Args:
            length: Samples in the dataset.
            count: How many to draw; all for None.
            batch_size: Samples of a batch; the last may have fewer.
            seed: Of the draw.
        """
        self._indices = torch.arange(length)
        if count is not None and count < length:
            generator = torch.Generator().manual_seed(derived_seed("sampled pictures", seed))
            self._indices = torch.randperm(length, generator=generator)[:count].sort().values
        self._batch_size = batch_size

    @property
    def samples(self) -> int:
        """How many samples there are in all batches."""
        return len(self._indices)

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """The batches in order; the same in every epoch."""
        for number in range(start_batch, len(self)):
            first = number * self._batch_size
            yield BatchKey(epoch, number, self._indices[first : first + self._batch_size])


def picture_loader(
    source: ImageSource,
    subject: Subject,
    *,
    images: int | None,
    seed: int,
    batch_size: int,
    workers: int = 0,
    normalized: bool = False,
) -> tuple[ImageLoader, SampledBatches, BrokenImages]:
    """A loader of pictures as a subject wants them; unreadable ones are left out and counted.

    Args:
        source: The pictures.
        subject: Whose size and crop they get.
        images: How many, drawn at random; all for None.
        seed: Of the draw.
        batch_size: Pictures at once.
        workers: Processes that read them.
        normalized: Give model inputs on the subject's device instead of uint8 pixels.

    Returns:
        The loader, what it draws, and the broken pictures it has met so far.
    """
    batches = SampledBatches(len(source), images, batch_size, seed)
    broken = BrokenImages(batches.samples, BrokenImageLimit())
    config = subject.data_config
    loader = ImageLoader(
        source,
        subject.transform(),
        batches,
        normalize=Normalize(config["mean"], config["std"]) if normalized else None,
        broken=broken,
        replace_broken=False,
        workers=workers,
        device=subject.device if normalized else "cpu",
    )
    return loader, batches, broken


class PictureSample:
    """Some pictures of a source, drawn at random, read anew for every model that is analysed.

    Attributes:
        source: The pictures to draw from.
        skipped: Those that could not be read so far, with the reason, by name.
    """

    def __init__(
        self, source: ImageSource, *, images: int | None = None, seed: int = 0, batch_size: int = 8, workers: int = 0
    ):
        """Plan the draw. Arguments: see `picture_loader`."""
        self.source = source
        self.skipped: dict[str, str] = {}
        self._images, self._seed, self._batch_size, self._workers = images, seed, batch_size, workers

    def __len__(self) -> int:
        """How many pictures, unreadable ones included."""
        return len(self.source) if self._images is None else min(self._images, len(self.source))

    def batches(self, subject: Subject, *, normalized: bool = False) -> Iterator[Batch]:
        """The pictures in the size and crop that a model wants; unreadable ones are left out and noted.

        Args:
            subject: The model.
            normalized: Give model inputs on the model's device, with classes numbered as the model does, instead of
                uint8 pixels.

        Raises:
            BrokenImagesError: If more are broken than allowed.
            DataError: If the model does not know their classes.
        """
        loader, _, broken = picture_loader(
            _with_classes_of(subject, self.source) if normalized else self.source,
            subject,
            images=self._images,
            seed=self._seed,
            batch_size=self._batch_size,
            workers=self._workers,
            normalized=normalized,
        )
        try:
            yield from loader.epoch()
        finally:
            loader.close()
            self.skipped |= {image.name: image.reason for image in broken}


def _with_classes_of(subject: Subject, source: ImageSource) -> ImageSource:
    """The pictures with classes numbered as the model numbers them."""
    if subject.class_names is not None:
        return source.with_classes(subject.class_names)
    classes = getattr(subject.model, "num_classes", len(source.class_names))
    if classes != len(source.class_names):
        raise DataError(
            f"{subject.label} has {classes} classes and does not name them, {source.location} has "
            f"{len(source.class_names)}; give it the data it was trained for"
        )
    return source
