"""What a step of an augmentation is.

Shapes: `N` samples of a dataset, `B` batch, `P` columns of a plan, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn


class Step(nn.Module, ABC):
    """One thing that is done to images at random.

    Attributes:
        purpose: Tells its random numbers from those of other steps: adding a step changes nothing about the others.
    """

    purpose: ClassVar[str]

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """What is to be done to each of `count` samples.

        Args:
            count: Samples of the dataset.
            generator: Of random numbers on the CPU, which are the same whatever the device.
            device: Where to work out what follows from them.

        Returns:
            `[N, P]` float32 on the device, a row for each sample.
        """

    @abstractmethod
    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Do it.

        Args:
            images: `[B, C, H, W]`.
            plan: `[B, P]` their rows.

        Returns:
            `[B, C, H, W]` of the same dtype.
        """
