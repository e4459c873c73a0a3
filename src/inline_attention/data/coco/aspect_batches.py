"""Batches of pictures that are alike in shape, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import BatchKey, TrainingBatches

BORDERS = (1.0,)


class AspectRatioBatches:
    """Full batches, shuffled anew for every epoch, of wide or of tall pictures; no more than two of them mix both.

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
            sizes: `[N, 2]` height and width of each picture.
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
