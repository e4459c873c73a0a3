"""timm's mixing of images, repeatable for any batch."""

from __future__ import annotations

from timm.data.mixup import Mixup
from torch import Tensor

from inline_attention.data.batch import Batch
from inline_attention.data.randomness import kept_global_generators, seed_global_generators


class SeededMixup:
    """Mixup and cutmix whose random numbers depend on (seed, rank, epoch, batch) alone."""

    def __init__(self, mixup: Mixup, *, seed: int, rank: int = 0):
        """Wrap timm's.

        Args:
            mixup: Says how to mix.
            seed: Of the random numbers.
            rank: This process; each mixes in its own way.
        """
        self._mixup, self._seed, self._rank = mixup, seed, rank

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mix normalised images, in place.

        Returns:
            Images `[B, C, H, W]` and the shares of the classes in each, `[B, K]`.

        Raises:
            ValueError: If the number of images is odd: they are mixed in pairs.
        """
        if len(batch) % 2:
            raise ValueError(f"mixup and cutmix need an even batch size, got {len(batch)}; use {len(batch) + 1}")
        with kept_global_generators():
            seed_global_generators("mixup", self._seed, self._rank, batch.epoch, batch.number)
            return self._mixup(batch.images, batch.targets)
