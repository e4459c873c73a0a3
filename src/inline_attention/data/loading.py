"""From pictures in files to batches on a device, prepared by worker processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImage, BrokenImages
from inline_attention.data.extreme_shapes import without_far_ends
from inline_attention.data.images import ImageError
from inline_attention.data.randomness import kept_global_generators, seed_global_generators
from inline_attention.data.sampling import Batches, BatchKey
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import Transform

DEFAULT_TIMEOUT = 180.0


class DataWorkerError(RuntimeError):
    """A process that prepares images died or hangs."""


class Loader(Protocol):
    """What training and evaluation ask of a loader."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on."""
        ...


class ImageLoader:
    """Reads, transforms and batches pictures; the same ones, bit for bit, with any number of workers.

    A sample depends on (seed, epoch, index) and nothing else, so an epoch can be taken up at any batch.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Transform,
        batches: Batches,
        *,
        normalize: Normalize | None = None,
        broken: BrokenImages,
        replace_broken: bool,
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        """Set up; worker processes start with the first epoch and stay until `close`.

        Args:
            source: The pictures.
            transform: Makes a `[C, H, W]` tensor of an RGB picture, uint8 or already normalised; random numbers from
                the global generators.
            batches: Which samples make up which batch.
            normalize: Applied on the device to batches of uint8; None leaves them as they are.
            broken: Where broken images are noted.
            replace_broken: True puts the next readable image in place of a broken one, which keeps the size of
                batches; False leaves it out, which keeps figures honest.
            seed: Of the transform's random numbers.
            workers: Worker processes; 0 prepares images in this one.
            prefetch: Batches that each worker prepares ahead.
            device: Where batches go.
            timeout: Seconds after which a worker that gives no batch is taken to hang.
        """
        self._device = torch.device(device)
        self._normalize = normalize.to(self._device) if normalize is not None else None
        self._batches = batches
        self._broken = broken
        self._keys = _PendingKeys()
        options: dict[str, Any] = {}
        if workers:
            options = {
                "persistent_workers": True,
                "prefetch_factor": prefetch,
                "timeout": timeout,
                "worker_init_fn": _leave_process_group,
            }
        self._loader: DataLoader[Batch] = DataLoader(
            _SampleReader(source, transform, seed, broken.allowed, replace_broken),
            batch_size=None,  # a key is a batch
            sampler=self._keys,  # pyright: ignore[reportArgumentType] (any iterable is one)
            num_workers=workers,
            collate_fn=_as_it_is,  # pyright: ignore[reportArgumentType] (of a key there is one batch, not a list)
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # torch draws a seed per epoch, from the global generator unless told
            **options,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on, on the device.

        Batches in which no image is readable are left out, which happens only if broken ones are not replaced.

        Raises:
            BrokenImagesError: If more images are broken than allowed.
            DataWorkerError: If a worker dies or hangs.
        """
        self._keys.keys = self._batches.keys(epoch, start_batch)
        try:
            for batch in self._loader:
                self._broken.add(batch.broken)
                if len(batch):
                    moved = batch.to(self._device)
                    yield moved if self._normalize is None else replace(moved, images=self._normalize(moved.images))
        except RuntimeError as error:
            if (named := named_worker_error(error)) is None:
                raise
            self.close()
            raise named from error

    def close(self) -> None:
        """End the worker processes."""
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:  # only a loader with workers keeps one
            # Not left to the garbage collector: until then torch raises the death of a worker again and again.
            iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


def named_worker_error(error: BaseException) -> DataWorkerError | None:
    """What torch's error says of a worker that died or hangs; None if it is about something else.

    Torch raises it wherever the program happens to be when a worker dies, so a training loop may meet it in mid-step.
    """
    causes = (error.__cause__, error)  # of the two, the first knows the signal, if any did
    messages = [str(cause).strip().rstrip(".") for cause in causes if isinstance(cause, RuntimeError)]
    reason = next((message for message in messages if re.match(r"DataLoader (worker|timed out)", message)), None)
    if reason is None:
        return None
    return DataWorkerError(
        f"a process that prepares images died or hangs: {reason}. If the system ended it for want of memory, use fewer "
        "workers; if the disk is slow, allow more time"
    )


class _PendingKeys:
    """The batches that torch's loader is to ask for next; workers outlive an epoch, so they travel as keys."""

    def __init__(self):
        self.keys: Iterator[BatchKey] = iter(())

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys


class _SampleReader(Dataset[Batch]):
    """Runs in the workers: turns the key of a batch into the batch, and never fails on account of an image."""

    def __init__(
        self,
        source: ImageSource,
        transform: Transform,
        seed: int,
        allowed_broken: int,
        replace_broken: bool,
    ):
        self._source, self._transform, self._seed = source, transform, seed
        self._allowed_broken, self._replace_broken = allowed_broken, replace_broken

    def __getitem__(self, key: BatchKey) -> Batch:
        images: list[Tensor] = []
        indices: list[int] = []
        broken: dict[int, BrokenImage] = {}
        with kept_global_generators():
            for index in key.indices.tolist():
                found = self._first_readable(index, key.epoch, broken)
                if found is not None:
                    images.append(found[0])
                    indices.append(found[1])
                if len(broken) > self._allowed_broken:
                    break  # the main process will stop: there is no need to try the rest
        return Batch(
            key.epoch,
            key.number,
            _stack(images),
            torch.from_numpy(self._source.targets[indices]),
            torch.tensor(indices, dtype=torch.int64),
            tuple(broken.values()),
        )

    def _first_readable(self, index: int, epoch: int, broken: dict[int, BrokenImage]) -> tuple[Tensor, int] | None:
        """The sample, or else the next one that can be read; broken ones are added to `broken`."""
        while True:
            if index not in broken:
                try:
                    return self._sample(index, epoch), index
                except ImageError as error:
                    broken[index] = BrokenImage(self._source.name(index), error.reason)
            if not self._replace_broken or len(broken) > self._allowed_broken:
                return None
            index = (index + 1) % len(self._source)

    def _sample(self, index: int, epoch: int) -> Tensor:
        image = without_far_ends(self._source.load(index))
        seed_global_generators("sample", self._seed, epoch, index)
        return self._transform(image)


def _stack(images: list[Tensor]) -> Tensor:
    """`[B, C, H, W]`; bytes in channels-last order, as pictures are decoded: they are copied, not rearranged."""
    if not images:
        return torch.empty(0, 3, 0, 0)
    if images[0].is_floating_point():
        return torch.stack(images)
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _leave_process_group(_worker: int) -> None:
    """Keep Ctrl-C and torchrun's signals to the group from the workers: the main process decides when they end.

    They end by themselves when it is gone.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
