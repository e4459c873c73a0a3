"""Ranks of a run: one on a laptop, many under torchrun."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")


class DeviceError(ValueError):
    """There is no such device."""


@dataclass(frozen=True)
class Processes:
    """This rank, its device, and collectives over all ranks, which all of them must call."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, in each."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, *conditions: bool) -> tuple[bool, ...]:
        """Return for each condition if it holds on any rank."""
        if self.world_size == 1:
            return conditions
        flags = torch.tensor(conditions, dtype=torch.float32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
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
        dist.all_gather_object(values, value)
        return values


@contextmanager
def joined_processes(device: str = "auto", timeout_minutes: float = 10.0) -> Iterator[Processes]:
    """Join the ranks that torchrun started, if any, and leave them at the end.

    The device is "auto" (one GPU per rank, if there are any), "cpu", "cuda" or "cuda:N".

    Raises:
        DeviceError: If there is no such device.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = _choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1:
        yield Processes(0, 1, chosen)
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


def _choose_device(name: str, local_rank: int) -> torch.device:
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name if name != "auto" else "cuda" if has_gpu else "cpu")
    except RuntimeError as error:
        raise DeviceError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and not has_gpu:
        raise DeviceError(f"PyTorch finds no GPU here, got device {name!r}; use auto or cpu")
    return torch.device("cuda", local_rank) if device == torch.device("cuda") else device
