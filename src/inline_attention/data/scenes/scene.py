"""A picture and all that is known about it: every annotation of every format is derived from this.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inline_attention.data.scenes.shapes import SHAPES
from inline_attention.data.scenes.textures import MATERIALS

OBJECT_KINDS = tuple(SHAPES)
# Numbers from 1, as in COCO and ADE20K; 0 is what has no name.
SEMANTIC_CLASSES = (*OBJECT_KINDS, *MATERIALS)
OTHER = 0


def category_number(name: str) -> int:
    """Number of a kind of object or of a material, from 1."""
    return SEMANTIC_CLASSES.index(name) + 1


@dataclass(frozen=True)
class Scene:
    """What was drawn.

    Attributes:
        image: `[H, W, 3]` uint8.
        instances: `[H, W]` uint8, number of the object that is seen at each pixel, from 1; 0 for none.
        kinds: Kind of each object, that of number 1 first.
        background: `[H, W]` uint8, number of the material behind all objects; `OTHER` where a wire runs.
    """

    image: np.ndarray
    instances: np.ndarray
    kinds: tuple[str, ...]
    background: np.ndarray

    def visible_mask(self, number: int) -> np.ndarray:
        """`[H, W]` bool: where the object of this number, from 1, is not hidden by others."""
        return self.instances == number

    def semantic_map(self) -> np.ndarray:
        """`[H, W]` uint8: number of what is seen at each pixel."""
        by_instance = np.array([OTHER, *map(category_number, self.kinds)], dtype=np.uint8)
        return np.where(self.instances > 0, by_instance[self.instances], self.background)
