"""From images in files to batches on a device, prepared by worker processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from inline_attention.data.batch import AnyBatch, Batch, Normalize, UnequalBatch
from inline_attention.data.broken import BrokenImage, BrokenImages
from inline_attention.data.images import ImageError, limit_aspect_ratio
from inline_attention.data.randomness import preserve_global_generators, seed_global_generators
from inline_attention.data.sampling import Batches, BatchKey
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import Transform

DEFAULT_TIMEOUT = 180.0
# Seconds. Torch raises the death of a worker wherever the program is, even where exceptions are swallowed: look again.
CHECK_INTERVAL = 10.0
TIMED_OUT = "DataLoader timed out"  # how torch's message begins


class DataWorkerError(RuntimeError):
    """A process that prepares images died or hangs."""


BatchType = TypeVar("BatchType", bound=AnyBatch[Any, Any], covariant=True)


class Loader(ABC, Generic[BatchType]):
    """Base of loaders for training and evaluation."""

    _batches: Batches

    def __len__(self) -> int:
        return len(self._batches)

    @abstractmethod
    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[BatchType]:
        """Yield the batches of an epoch, from `start_batch` on."""

    def close(self) -> None:
        """End its processes, if it has any."""


class Samples(ABC):
    """Images of a source with their targets, transformed for a model."""

    equal_sizes: ClassVar[bool] = False  # images are stacked in a `Batch`, otherwise collated to an `UnequalBatch`

    def __init__(self, source: Any, transform: Any):
        self._source, self._transform = source, transform

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        """Return the image's path or another name to find it by."""
        return self._source.name(index)

    @abstractmethod
    def read(self, index: int) -> tuple[Tensor, Any]:
        """Return an image and its target, or raise `ImageError`. The loader has seeded the global generators."""


class SampleLoader(Loader[BatchType]):
    """Reads, transforms and batches samples; the same ones, bit for bit, with any number of workers.

    A sample depends on (seed, epoch, index) and nothing else, so an epoch can be taken up at any batch.
    """

    def __init__(
        self,
        samples: Samples,
        batches: Batches,
        *,
        normalize: Normalize | None = None,
        broken: BrokenImages,
        replace_broken: bool,
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        """Set up; worker processes start with the first epoch and stay until `close`.

        Args:
            samples, batches: Samples to read, and which of them make up each batch.
            normalize: Applied on the device to batches of uint8; None leaves them as they are.
            broken: Collects broken images.
            replace_broken: Put the next readable image in place of a broken one, which keeps the size of batches;
                otherwise it is left out, which keeps figures honest.
            seed: Random seed of the samples.
            workers: Worker processes; 0 prepares images in this one.
            device: Device of batches.
            timeout: Seconds without a batch after which a worker is taken to hang.
        """
        self._device = torch.device(device)
        self._normalize = normalize.to(self._device) if normalize is not None else None
        self._batches, self._broken, self._timeout = batches, broken, timeout
        self._keys: list[BatchKey] = []  # of the epoch; workers outlive it, so batches travel as keys
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(workers, cores)
        self._loader: DataLoader[BatchType] = DataLoader(
            _SampleReader(samples, seed, broken.allowed, replace_broken),
            batch_size=None,  # a key is a batch
            sampler=self._keys,
            num_workers=workers,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # torch draws a seed per epoch, from the global generator unless told
            persistent_workers=workers > 0,
            timeout=min(timeout, CHECK_INTERVAL) if workers else 0,
            worker_init_fn=_ignore_signals,
        )

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[BatchType]:
        """Yield the batches of an epoch, from `start_batch` on, on the device.

        Batches in which no image is readable are left out, which happens only if broken ones are not replaced. Raises
        `BrokenImagesError` if more images are broken than allowed, `DataWorkerError` if a worker dies or hangs.
        """
        self._keys[:] = self._batches.keys(epoch, start_batch)
        try:
            iterator = self._iterator()
            while (batch := self._next(iterator)) is not None:
                self._broken.add(batch.broken)
                if len(batch):
                    moved = batch.to(self._device)
                    yield moved if self._normalize is None else moved.normalized(self._normalize)
        except RuntimeError as error:
            if (named := named_worker_error(error)) is None:
                raise
            self.close()
            raise named from error

    def _iterator(self) -> Iterator[BatchType]:
        """Return an iterator over the keys. Running workers first finish the batches of the epoch before."""
        kept: Any = self._loader._iterator
        if kept is not None:  # torch would wait for them too, but not notice at once that one has died
            kept._sampler_iter = iter(())
            while self._next(kept) is not None:
                pass
        return iter(self._loader)

    def _next(self, iterator: Iterator[BatchType]) -> BatchType | None:
        """Return the next batch, None after the last. Wait as long as the workers live and the timeout allows."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return next(iterator, None)
            except RuntimeError as error:
                if not str(error).startswith(TIMED_OUT):
                    raise
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{TIMED_OUT} after {self._timeout:g} seconds") from None

    def close(self) -> None:
        """End the worker processes, also if one of them died or hangs."""
        iterator: Any = self._loader._iterator
        if iterator is None:  # only a loader with workers keeps one
            return
        if iterator._worker_pids_set:  # else torch raises each death below, wherever the program is
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        self._loader._iterator = None
        # A worker that died may have held a lock for which torch would wait forever.
        if all(worker.is_alive() for worker in iterator._workers):
            iterator._shutdown_workers()
        iterator._shutdown = True
        if hasattr(iterator, "_pin_memory_thread_done_event"):
            iterator._pin_memory_thread_done_event.set()
        for worker in iterator._workers:
            worker.kill()  # they ignore the signal by which torch would end one that hangs
            worker.join()


class ImageLoader(SampleLoader[Batch]):
    """A `SampleLoader` of labeled images."""

    def __init__(self, source: ImageSource, transform: Transform, batches: Batches, **options: Any):
        """Set up with options of `SampleLoader` and a transform of an RGB image to a `[C, H, W]` tensor."""
        super().__init__(_LabeledImages(source, transform), batches, **options)


def named_worker_error(error: BaseException) -> DataWorkerError | None:
    """Return a clear error if torch's is about a worker that died or hangs, None otherwise.

    Torch raises it wherever the program happens to be when a worker dies, so a training loop may meet it in mid-step.
    """
    causes = (error.__cause__, error)  # of the two, the first knows the signal, if any did
    for reason in (str(cause).strip().rstrip(".") for cause in causes if isinstance(cause, RuntimeError)):
        if reason.startswith(("DataLoader worker", TIMED_OUT)):
            return DataWorkerError(
                f"a process that prepares images died or hangs: {reason}. If the system ended it for want of memory, "
                "use fewer workers; if the disk is slow, data.timeout gives a training run more time"
            )
    return None


class _LabeledImages(Samples):
    """Images and their classes; the far ends of very long ones are cut off before anything is resized."""

    equal_sizes = True

    def read(self, index: int) -> tuple[Tensor, int]:
        image = self._transform(limit_aspect_ratio(self._source.load(index)))
        return image, int(self._source.targets[index])


class _SampleReader(Dataset[Any]):
    """Runs in the workers: turns the key of a batch into the batch, and never fails on account of an image."""

    def __init__(self, samples: Samples, seed: int, allowed_broken: int, replace_broken: bool):
        self._samples, self._seed = samples, seed
        self._allowed_broken, self._replace_broken = allowed_broken, replace_broken

    def __getitem__(self, key: BatchKey) -> Batch | UnequalBatch:
        found: list[tuple[int, Tensor, Any]] = []
        broken: dict[int, BrokenImage] = {}
        with preserve_global_generators():
            for index in key.indices.tolist():
                sample = self._first_readable(index, key.epoch, broken)
                if sample is not None:
                    found.append(sample)
                if len(broken) > self._allowed_broken:
                    break  # the main process will stop
        indices, images, targets = zip(*found, strict=True) if found else ((), (), ())
        kept = torch.tensor(indices, dtype=torch.int64), tuple(broken.values())
        if not self._samples.equal_sizes:
            return UnequalBatch(key.epoch, key.number, images, targets, *kept)
        return Batch(key.epoch, key.number, _stack(images), torch.tensor(targets, dtype=torch.int64), *kept)

    def _first_readable(self, index: int, epoch: int, broken: dict[int, BrokenImage]) -> tuple[int, Tensor, Any] | None:
        """Return the sample, or else the next one that can be read; broken ones are added to `broken`."""
        while True:
            if index not in broken:
                seed_global_generators("sample", self._seed, epoch, index)
                try:
                    return index, *self._samples.read(index)
                except ImageError as error:
                    broken[index] = BrokenImage(self._samples.name(index), error.reason)
            if not self._replace_broken or len(broken) > self._allowed_broken:
                return None
            index = (index + 1) % len(self._samples)


def _stack(images: Sequence[Tensor]) -> Tensor:
    """Return `[B, C, H, W]`; bytes stay in channels-last order, as images are decoded, and are only copied."""
    if not images:
        return torch.empty(0, 3, 0, 0)
    if images[0].is_floating_point():
        return torch.stack(list(images))
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


@atexit.register
def _end_remaining_workers() -> None:
    """End workers that no loader closed. They ignore Python's signal to end, and Python would wait for them forever."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises their deaths
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    for process in daemons:  # other libraries' too: they get the chance that Python gives them
        process.terminate()
    for process in daemons:
        process.join(timeout=1)
        process.kill()


def _ignore_signals(_worker: int) -> None:
    """Keep signals to stop from the workers: the main process needs them until it has saved, and ends them itself.

    Ctrl-C and torchrun signal the process group; Slurm and systemd each process. Workers end by themselves when the
    main process is gone.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
