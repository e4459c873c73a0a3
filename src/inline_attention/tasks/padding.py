"""Images of unequal size as one batch, with a note of what is image and what is padding.

Shapes: `B` batch, `C` channels, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from inline_attention.layers.grids import Grid

# The coarsest stride of the backbones, which take no image that is thinner.
SHORTEST_SIDE = 32


@dataclass(frozen=True)
class PaddedImages:
    """A batch in which each image occupies the top left corner of its canvas, and the rest is zero.

    The canvas is no larger than it must be: images of one size, or one alone, fill it as far as a backbone can tell,
    and then nothing has to be masked. A stage of a pyramid has half of the finer one's tokens along each axis, rounded
    up.

    Attributes:
        canvas: `[B, C, H, W]`, both sides at least `SHORTEST_SIDE`.
        sizes: (height, width) of each image in pixels.
    """

    canvas: Tensor
    sizes: list[tuple[int, int]]

    @cached_property
    def backbone_sizes(self) -> list[tuple[int, int]]:
        """What a backbone takes for the image: thinner ones than its coarsest token count as filled up to one."""
        return [(max(height, SHORTEST_SIDE), max(width, SHORTEST_SIDE)) for height, width in self.sizes]

    def extents(self, stride: int) -> list[tuple[int, int]]:
        """Rows and columns of tokens of a stride that belong to each image, incomplete ones included."""
        return [(-(-height // stride), -(-width // stride)) for height, width in self.backbone_sizes]

    def outside(self, stride: int) -> Tensor | None:
        """`[B, 1, h, w]` bool, true where a token of a stride belongs to no image; None if all do."""
        if stride not in self._outside:
            self._outside[stride] = self._compute_outside(stride)
        return self._outside[stride]

    @cached_property
    def _outside(self) -> dict[int, Tensor | None]:
        return {}

    @cached_property
    def _pixels(self) -> Grid:
        height, width = self.canvas.shape[-2:]
        return Grid.of_images(height, width, self.backbone_sizes, self.canvas.device)

    def _compute_outside(self, stride: int) -> Tensor | None:
        grid = self._pixels.coarser(stride)
        mask = grid.mask()
        return None if mask is None else ~mask.unflatten(1, grid.size)[:, None]


def pad_images(images: Sequence[Tensor]) -> PaddedImages:
    """Put normalised images `[C, H, W]` of one device and dtype on a common canvas.

    Raises:
        ValueError: If there are none.
    """
    if not images:
        raise ValueError("there are no images; pass a list of at least one [C, H, W]")
    sizes = [(image.shape[-2], image.shape[-1]) for image in images]
    height, width = (max(SHORTEST_SIDE, *sides) for sides in zip(*sizes, strict=True))
    canvas = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    for place, image in enumerate(images):
        canvas[place, :, : image.shape[1], : image.shape[2]] = image
    return PaddedImages(canvas, sizes)
