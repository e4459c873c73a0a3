"""Which samples make up which batch, on which rank: known in advance for every batch of every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inline_attention.data.randomness import derived_seed


@dataclass(frozen=True)
class BatchKey:
    """All that determines a batch: its epoch and its number in it, from 0, and its samples `[B]`."""

    epoch: int
    number: int
    indices: Tensor


class TooFewSamplesError(ValueError):
    """A dataset that does not fill one step."""


class TrainingBatches:
    """Full batches in an order shuffled anew for every epoch; leftover samples are skipped in that epoch.

    All processes together take consecutive pieces of one order: `world_size` times `batch_size` samples a step.
    """

    def __init__(self, length: int, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1):
        """Plan batches of `batch_size` out of `length` samples for process `rank` of `world_size`.

        The order depends on the seed and the epoch alone. Raises `TooFewSamplesError` if samples do not fill one step.
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
        """Yield the batches of an epoch in order, from `start_batch` on."""
        order = self._order(epoch)
        for number in range(start_batch, len(self)):
            first = (number * self._world_size + self._rank) * self._batch_size
            yield BatchKey(epoch, number, order[first : first + self._batch_size])

    def _order(self, epoch: int) -> Tensor:
        """Samples of the epoch's batches of all processes."""
        generator = torch.Generator().manual_seed(derived_seed("shuffle", self._seed, epoch))
        return torch.randperm(self._length, generator=generator)


class AspectRatioBatches(TrainingBatches):
    """Full batches, shuffled anew for every epoch, of wide or of tall images; no more than two of them mix both.

    Squares are wide. Batches of one step may differ in shape.
    """

    def __init__(self, sizes: np.ndarray, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1):
        """Plan for images of the given height and width, `[N, 2]`. Other arguments: see `TrainingBatches`."""
        super().__init__(len(sizes), batch_size, seed=seed, rank=rank, world_size=world_size)
        self._is_wide = torch.from_numpy(sizes[:, 1] >= sizes[:, 0])

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed("aspect ratios", self._seed, epoch))
        order = torch.randperm(self._length, generator=generator)
        # Stable: within a group the order stays random. Batches across the border of the groups are the mixed ones.
        grouped = order[torch.argsort(self._is_wide[order], stable=True)]
        count = self._length // self._batch_size
        # What is left over is of the last group alone, unless the whole is turned by a random number of samples.
        start = int(torch.randint(self._length, (), generator=generator))
        batches = grouped.roll(-start)[: count * self._batch_size].view(count, self._batch_size)
        return batches[torch.randperm(count, generator=generator)].flatten()


class EvaluationBatches:
    """Every sample exactly once over all processes, in order; the last batch may be smaller.

    Nothing is repeated to make processes equal, so one may have a batch more than another: sum up after the epoch, not
    after each batch.
    """

    def __init__(self, length: int, batch_size: int, *, rank: int = 0, world_size: int = 1):
        """Plan. Arguments: see `TrainingBatches`."""
        _check_process(batch_size, rank, world_size)
        self._indices = torch.arange(length)[rank::world_size]
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def keys(self, epoch: int, start_batch: int = 0) -> Iterator[BatchKey]:
        """Yield the batches in order, from `start_batch` on; the same in every epoch."""
        for number in range(start_batch, len(self)):
            first = number * self._batch_size
            yield BatchKey(epoch, number, self._indices[first : first + self._batch_size])


Batches = TrainingBatches | EvaluationBatches


class SampledBatches(EvaluationBatches):
    """Batches of `count` samples drawn at random without repetition, in the order of the dataset; None draws all."""

    def __init__(self, length: int, count: int | None, batch_size: int, seed: int):
        super().__init__(length, batch_size)
        if count is not None and count < length:
            generator = torch.Generator().manual_seed(derived_seed("sampled pictures", seed))
            self._indices = torch.randperm(length, generator=generator)[:count].sort().values


def _check_process(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below the world size, got {rank=}, {world_size=}")
