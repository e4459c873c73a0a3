"""Ranks of a run, one on a laptop and many under torchrun, their devices and mixed precision.

Before each batch, ranks agree on signals and broken images.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from inline_attention.data.broken import BrokenImage, BrokenImages, BrokenImagesError, write_report
from inline_attention.engine.interruption import InterruptedBySignalError, Interruption
from inline_attention.support.text import counted, printable
from inline_attention.tasks.task import DataSection, Reading, find_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processes:
    """This rank, its device, and collectives over all ranks, which all of them must call.

    `group` is the process group, if the ranks are some of those of the run.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes and prints."""
        return self.rank == 0

    def reading(self, data: DataSection, batch_size: int, seed: int = 0) -> Reading:
        """Return how this rank reads batches of the data."""
        return Reading(batch_size, self.device, seed, data.workers, self.rank, self.world_size, data.timeout)

    def divided(self, context: int, timeout_minutes: float) -> tuple[Processes, DeviceMesh | None]:
        """Form groups of `context` consecutive ranks that share the rows of their images. All ranks must call it.

        Returns the ranks that have the same rows as this one, of other images, and the mesh of this rank's group.
        """
        if context == 1:
            return self, None
        timeout = datetime.timedelta(minutes=timeout_minutes)
        sharing = [list(range(first, first + context)) for first in range(0, self.world_size, context)]
        with_same_rows = [list(ranks) for ranks in zip(*sharing, strict=True)]
        rows, _ = dist.new_subgroups_by_enumeration(sharing, timeout=timeout)
        images, _ = dist.new_subgroups_by_enumeration(with_same_rows, timeout=timeout)
        assert isinstance(rows, dist.ProcessGroup)
        assert isinstance(images, dist.ProcessGroup)
        others = Processes(self.rank // context, len(sharing), self.device, images)
        return others, DeviceMesh.from_group(rows, self.device.type)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, in each."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def any(self, *conditions: bool) -> tuple[bool, ...]:
        """Return for each condition if it holds on any rank."""
        if self.world_size == 1:
            return conditions
        flags = torch.tensor(conditions, dtype=torch.float32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(flag > 0 for flag in flags.tolist())

    def adopt_main(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors from rank 0 to all ranks."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def joined_processes(device: str = "auto", timeout_minutes: float = 10.0) -> Iterator[Processes]:
    """Join the ranks that torchrun started, if any, and leave them at the end.

    The device is "auto" (one GPU per rank, if there are any), "cpu", "cuda" or "cuda:N".
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    chosen = find_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1:
        yield Processes(0, 1, chosen)
        return
    if dist.is_initialized():  # the caller has joined them, and leaves them itself
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun restarts all ranks when one dies, but keeps the store: entries of the old ranks must not be read.
    attempt = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


class LostRankError(RuntimeError):
    """Another rank has ended or hangs."""


def lost_rank_error(error: BaseException, folder: Path) -> LostRankError | None:
    """Return a clear error if PyTorch's is about a connection to another rank, None otherwise."""
    if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
        return None
    reason = str(error).splitlines()[0].rpartition("] ")[2][:200].rstrip(".")
    return LostRankError(
        f"another rank of the run has ended or hangs, so this one stops ({reason}); see what that rank printed, then "
        f"resume with --resume {folder}"
    )


class Precision:
    """Autocast to bfloat16 or float16, or none (`dtype` is None); `scaler` scales losses for float16 on GPUs."""

    def __init__(self, amp: str, device: torch.device):
        """Choose by "bf16", "fp16", "auto" (bf16 if the device has it, else fp16) or "off"."""
        if amp == "auto":
            amp = "bf16" if _has_bfloat16(device) else "fp16"
        if amp not in DTYPES:
            raise ValueError(f"amp must be bf16, fp16, auto or off, got {amp!r}")
        self.dtype, self._device = DTYPES[amp], device
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16" and device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes."""
        return nullcontext() if self.dtype is None else torch.autocast(self._device.type, self.dtype)


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


class BrokenReport:
    """Shares the lists of broken images, one per dataset, between ranks, and writes them to the run's folder."""

    def __init__(self, lists: Sequence[BrokenImages], processes: Processes, folder: Path | None = None):
        self._lists, self._processes, self._folder = lists, processes, folder
        self._known = 0

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    @property
    def has_news(self) -> bool:
        """True if this rank has found images that the others do not know."""
        return len(self) > self._known

    def share(self) -> None:
        """Share the lists. All ranks must call it.

        Raises:
            BrokenImagesError: On all ranks, if a dataset has more than allowed.
        """
        gathered = self._processes.gather([list(images) for images in self._lists])
        try:
            for number, images in enumerate(self._lists):
                images.add(image for lists in gathered for image in lists[number])
        finally:
            if self._processes.is_main:
                found = [image for images in self._lists for image in images]
                where = "" if self._folder is None else f", all in {write_report(self._folder, found)}"
                message = f"left out {counted(len(found) - self._known, 'broken images')}{where}; the last: {found[-1]}"
                logger.warning("%s", printable(message))
            self._known = len(self)

    def state(self) -> list[list[tuple[str, str]]]:
        """Return name and reason of each image, by dataset, for a checkpoint."""
        return [[(image.name, image.reason) for image in images] for images in self._lists]

    def restore(self, state: list[list[tuple[str, str]]]) -> None:
        """Restore the lists from a checkpoint."""
        for images, entries in zip(self._lists, state, strict=True):
            images.add(BrokenImage(name, reason) for name, reason in entries)


class RankSync:
    """Fetches batches. Signals and broken images of one rank stop all of them."""

    def __init__(self, processes: Processes, interruption: Interruption, broken: BrokenReport):
        self.processes, self._interruption, self._broken = processes, interruption, broken

    def read(self, batches: Iterator[T], count: int = 1) -> list[T]:
        """Return the next batches of this rank, fewer at the end. Call `agree` before using them."""
        with suppress(BrokenImagesError):  # raised on all ranks by `agree`
            return list(islice(batches, count))
        return []

    def agree(self) -> None:
        """Synchronize ranks. All must call it.

        Raises:
            InterruptedBySignalError: On all ranks, if one got a signal.
            BrokenImagesError: On all ranks, if there are more broken images than allowed.
        """
        is_stopped, has_news = self.processes.any(self._interruption.number is not None, self._broken.has_news)
        if has_news:
            self._broken.share()
        if is_stopped:
            raise InterruptedBySignalError(self._interruption.number or signal.SIGTERM)
