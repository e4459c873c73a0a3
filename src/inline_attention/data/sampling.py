"""Which samples make up which batch, on which rank: known in advance for every batch of every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from inline_attention.data.randomness import derived_seed


@dataclass(frozen=True)
class BatchKey:
    """All that determines a batch.

    Attributes:
        epoch: Epoch, from 0.
        number: Batch in the epoch, from 0.
        indices: `[B]` samples of the dataset.
    """

    epoch: int
    number: int
    indices: Tensor


class TooFewSamplesError(ValueError):
    """A dataset that does not fill one step."""


class Batches(Protocol):
    """The batches of one process."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """The batches of an epoch in order, from `start_batch` on."""
        ...


class TrainingBatches:
    """Full batches in an order shuffled anew for every epoch; the samples that are left over sit the epoch out.

    All processes together take consecutive pieces of one order: `world_size` times `batch_size` samples a step.
    """

    def __init__(self, length: int, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1):
        """Plan.

        Args:
            length: Samples in the dataset.
            batch_size: Samples in a batch of one process.
            seed: The order depends on it and the epoch alone.
            rank: This process.
            world_size: Number of processes.

        Raises:
            TooFewSamplesError: If there are not enough samples for one step.
        """
        _check_process(batch_size, rank, world_size)
        if length < batch_size * world_size:
            raise TooFewSamplesError(
                f"one step takes {batch_size * world_size} samples ({batch_size} on each of {world_size} processes), "
                f"the dataset has {length}; reduce the batch size to {max(1, length // world_size)} or less"
            )
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return self._length // (self._batch_size * self._world_size)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """The batches of an epoch in order, from `start_batch` on."""
        generator = torch.Generator().manual_seed(derived_seed("shuffle", self._seed, epoch))
        order = torch.randperm(self._length, generator=generator)
        for number in range(start_batch, len(self)):
            first = (number * self._world_size + self._rank) * self._batch_size
            yield BatchKey(epoch, number, order[first : first + self._batch_size])


class EvaluationBatches:
    """Every sample exactly once over all processes, in order; the last batch may be smaller.

    Nothing is repeated to make processes equal, so one may have a batch more than another: sum up after the epoch, not
    after each batch.
    """

    def __init__(self, length: int, batch_size: int, *, rank: int = 0, world_size: int = 1):
        """Plan. Arguments: see `TrainingBatches`."""
        _check_process(batch_size, rank, world_size)
        self._indices = torch.arange(rank, length, world_size) if rank < length else torch.empty(0, dtype=torch.int64)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """The batches in order, from `start_batch` on; the same in every epoch."""
        for number in range(start_batch, len(self)):
            first = number * self._batch_size
            yield BatchKey(epoch, number, self._indices[first : first + self._batch_size])


def _check_process(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below the world size, got {rank=}, {world_size=}")


BORDERS = (1.0,)


class AspectRatioBatches:
    """Full batches, shuffled anew for every epoch, of wide or of tall images; no more than two of them mix both.

    As with `TrainingBatches` a batch is known in advance from (seed, epoch, number), no sample comes twice in an epoch,
    and what is left over, less than one step's samples, sits it out. Batches of one step may differ in shape.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        borders: Sequence[float] = BORDERS,
    ):
        """Plan.

        Args:
            sizes: `[N, 2]` height and width of each image.
            batch_size: Samples in a batch of one process.
            seed: The order depends on it and the epoch alone.
            rank: This process.
            world_size: Number of processes.
            borders: Ratios of width to height, ascending, that divide shapes; a square is wide.

        Raises:
            ValueError: If there are not enough samples for one step.
        """
        self._plain = TrainingBatches(len(sizes), batch_size, seed=seed, rank=rank, world_size=world_size)
        self._groups = torch.from_numpy(np.searchsorted(borders, sizes[:, 1] / sizes[:, 0], side="right"))
        self._batch_size, self._seed = batch_size, seed
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return len(self._plain)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """The batches of an epoch in order, from `start_batch` on."""
        batches = self._epoch(epoch)
        for number in range(start_batch, len(self)):
            yield BatchKey(epoch, number, batches[number * self._world_size + self._rank])

    def _epoch(self, epoch: int) -> list[Tensor]:
        """All batches of all processes, in an order in which shapes are mixed."""
        generator = torch.Generator().manual_seed(derived_seed("aspect ratios", self._seed, epoch))
        order = torch.randperm(len(self._groups), generator=generator)
        # Stable: within a group the order stays random. Batches across the border of two groups are the mixed ones.
        grouped = order[torch.argsort(self._groups[order], stable=True)]
        count = len(grouped) // self._batch_size
        # What is left over is of the last group alone, unless the whole is turned by a random number of samples.
        start = int(torch.randint(len(grouped), (), generator=generator))
        batches = torch.cat([grouped[start:], grouped[:start]])[: count * self._batch_size].split(self._batch_size)
        return [batches[place] for place in torch.randperm(count, generator=generator).tolist()]
