"""What a classifier minimises."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from timm.data.mixup import Mixup
from torch import Tensor, nn

from inline_attention.data.augmentation import SeededMixup
from inline_attention.data.batch import Batch


class Objective:
    """The loss of a batch: cross entropy, on mixed images where mixing is on."""

    def __init__(self, *, smoothing: float = 0.0, mixup: SeededMixup | None = None, off_epoch: int = 0):
        """Choose.

        Args:
            smoothing: Of labels; mixing has its own.
            mixup: How images are mixed; not at all, if None.
            off_epoch: Epoch from which nothing is mixed; 0 for never.
        """
        self._smoothing, self._mixup, self._off_epoch = smoothing, mixup, off_epoch

    def __call__(self, runnable: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""
        images, targets = self.inputs(batch)
        return self.loss(runnable(images), targets)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images, and class numbers `[B]` or shares of classes `[B, K]`."""
        if self._mixup is None or (self._off_epoch and batch.epoch >= self._off_epoch):
            return batch.images, batch.targets
        return self._mixup(batch)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy; shares of classes are smoothed already."""
        smoothing = self._smoothing if targets.dim() == 1 else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def mixing(*, num_classes: int, smoothing: float, seed: int, rank: int, **options: Any) -> SeededMixup | None:
    """How images are mixed; None if they are not.

    Args:
        num_classes: K.
        smoothing: Of labels.
        seed: Of the random numbers.
        rank: This process.
        options: As for timm's `Mixup`.
    """
    if not (options["mixup_alpha"] or options["cutmix_alpha"]):
        return None
    mixup = Mixup(label_smoothing=smoothing, num_classes=num_classes, **options)
    return SeededMixup(mixup, seed=seed, rank=rank)
