"""Images with label maps, by number.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from inline_attention.data.images import ImageError, load_image
from inline_attention.data.segmentation.files import Pair, read_label_map
from inline_attention.data.sources import DataError

IGNORED = 255  # label of pixels that count neither in losses nor in figures


@dataclass(frozen=True)
class LabelRules:
    """Rules that turn numbers in files into labels of a model.

    Attributes:
        num_classes: Labels are 0 to `num_classes - 1`, and `IGNORED`.
        reduce_zero_label: 0 in files means "other" and is ignored, 1 is the first class, as in ADE20K.
        ignored: Number in files that is ignored.
        outside_ignored: Ignore numbers out of range, which are an error otherwise.
        resize: Resize a map to the size of its image, if they differ, which is an error otherwise.
    """

    num_classes: int
    reduce_zero_label: bool = False
    ignored: int = IGNORED
    outside_ignored: bool = False
    resize: bool = False

    def __post_init__(self):
        if not 1 <= self.num_classes <= IGNORED:
            raise DataError(f"there may be 1 to {IGNORED} classes, got {self.num_classes}")

    def labels(self, values: np.ndarray) -> np.ndarray:
        """Labels as they follow from numbers in files, of the same shape; -1 where they are out of range."""
        labels = values.astype(np.int32) - int(self.reduce_zero_label)
        labels[(labels < 0) | (labels >= self.num_classes)] = -1
        labels[values == self.ignored] = IGNORED
        if self.reduce_zero_label:
            labels[values == 0] = IGNORED
        return labels


class SegmentationSource:
    """Pairs of images and label maps. Cheap to copy into worker processes.

    Attributes:
        location: Their place, for messages.
        class_names: Name of each class; its place is its label.
        rules: Rules that turn numbers in files into labels.
    """

    def __init__(self, location: str, class_names: Sequence[str], pairs: Sequence[Pair], rules: LabelRules):
        if not pairs:
            raise DataError(f"{location} has no pair of an image and a label map to use")
        self.location, self.class_names, self.rules = location, tuple(class_names), rules
        # Arrays instead of many strings: processes that are forked share them, and keep sharing them.
        self._images = np.array([os.fsencode(pair.image) for pair in pairs])
        self._maps = np.array([os.fsencode(pair.label_map) for pair in pairs])

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        """The image's path."""
        return os.fsdecode(self._images[index])

    def load(self, index: int) -> Image.Image:
        """The image, upright and in RGB.

        Raises:
            ImageError: If it cannot be read.
        """
        return load_image(self.name(index))

    def target(self, index: int, size: tuple[int, int]) -> np.ndarray:
        """`[H, W]` uint8: the label of each pixel, `IGNORED` where there is none.

        Args:
            index: Number of the pair.
            size: (height, width) of the image.

        Raises:
            ImageError: If the map cannot be read, or does not follow the rules.
        """
        path = os.fsdecode(self._maps[index])
        values = read_label_map(path)
        if values.shape != size:
            if not self.rules.resize:
                raise ImageError(path, f"is {values.shape[1]}×{values.shape[0]} pixels, its image {size[1]}×{size[0]}")
            values = np.asarray(Image.fromarray(values).resize((size[1], size[0]), Image.Resampling.NEAREST))
        labels = self.rules.labels(values)
        outside = labels < 0
        if outside.any() and not self.rules.outside_ignored:
            raise ImageError(path, f"has the label {values[outside][0]}, which is not in the list of classes")
        labels[outside] = IGNORED
        return labels.astype(np.uint8)
