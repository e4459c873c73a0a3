"""Where pictures and their classes come from: the one interface of folders, archives and arrays."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from PIL import Image

from inline_attention.support.text import printable


class DataError(ValueError):
    """A dataset cannot be opened or used as asked. Names from files in the message are shown as text."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class ImageSource(ABC):
    """Labelled pictures by number. Cheap to copy into worker processes.

    Attributes:
        location: Where they are, for messages.
        class_names: Name of each class; its place is the class's number.
        targets: `[N]` class number of each picture, int64.
        empty_classes: Names of classes that were announced, and have no picture.
    """

    def __init__(
        self, location: str, class_names: Sequence[str], targets: np.ndarray, empty_classes: Sequence[str] = ()
    ):
        self.location = location
        self.class_names = tuple(class_names)
        self.targets = np.asarray(targets, dtype=np.int64)
        self.empty_classes = tuple(empty_classes)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def load(self, index: int) -> Image.Image:
        """The picture, upright and in RGB.

        Raises:
            ImageError: If it cannot be read.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """The picture's path, or what else it can be found by."""

    def with_classes(self, class_names: Sequence[str]) -> Self:
        """The same pictures with classes numbered as in `class_names`, as those of the model or of the training data.

        Raises:
            DataError: If a class is not among them.
        """
        numbers = {name: number for number, name in enumerate(class_names)}
        unknown = [name for name in self.class_names if name not in numbers]
        if unknown:
            raise DataError(
                f"{self.location} has {len(unknown)} classes that are not among the {len(numbers)} known ones, "
                f"such as {unknown[0]!r}; rename or remove them"
            )
        renumbered = copy.copy(self)
        renumbered.class_names = tuple(class_names)
        renumbered.targets = np.array([numbers[name] for name in self.class_names], dtype=np.int64)[self.targets]
        return renumbered


class ArraySource(ImageSource):
    """Pictures in memory."""

    def __init__(self, location: str, class_names: Sequence[str], images: np.ndarray, targets: np.ndarray):
        """Take them as they are.

        Args:
            location: Where they are from.
            class_names: As for `ImageSource`.
            images: `[N, H, W, 3]` uint8.
            targets: `[N]` class numbers.
        """
        super().__init__(location, class_names, targets)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """The picture."""
        return Image.fromarray(self.images[index])

    def name(self, index: int) -> str:
        """Its number."""
        return f"{self.location}[{index}]"
