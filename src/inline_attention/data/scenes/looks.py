"""What kinds of objects and backgrounds usually look like, and how far single ones stray from it.

Usual, never certain: kinds share hues in pairs and materials in others, some objects and backgrounds wear colours of no
kind, and light tints them all. Colour narrows down what an object may be; its outline tells which one it is.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, replace

import numpy as np

from inline_attention.data.scenes.textures import MATERIALS

SHARE_OF_ODD_COLOURS = 0.12
SHARE_OF_ODD_MATERIALS = 0.3


@dataclass(frozen=True)
class Paint:
    """The two colours of a material, each `[3]` float32 from 0 to 1: of its darkest and of its lightest places."""

    dark: np.ndarray
    light: np.ndarray

    @property
    def middle(self) -> np.ndarray:
        """`[3]`."""
        return (self.dark + self.light) / 2


@dataclass(frozen=True)
class Colouring:
    """A range of colours.

    Attributes:
        hue: Its middle, in turns of the colour circle: 0 is red, 1/3 green, 2/3 blue.
        spread: Standard deviation of the hue, in turns.
        saturation: Least and greatest, from 0 (grey) to 1.
    """

    hue: float
    spread: float
    saturation: tuple[float, float]

    def or_odd(self, random: np.random.Generator) -> Colouring:
        """That of one object or background: mostly this one, sometimes one around any other hue."""
        return replace(self, hue=random.random()) if random.random() < SHARE_OF_ODD_COLOURS else self

    def draw(self, random: np.random.Generator) -> Paint:
        """Colours of this range."""
        hue = random.normal(self.hue, self.spread) % 1
        light = np.array(colorsys.hsv_to_rgb(hue, random.uniform(*self.saturation), random.uniform(0.5, 1)))
        return Paint((light * random.uniform(0.35, 0.75)).astype(np.float32), light.astype(np.float32))


@dataclass(frozen=True)
class ObjectLook:
    """What a kind of object is usually made of, and where it is usually found.

    Attributes:
        colouring: Of the object.
        material: Of `MATERIALS`.
        ground: The background, of `MATERIALS`.
    """

    colouring: Colouring
    material: str
    ground: str

    def draw_material(self, random: np.random.Generator) -> str:
        """That of one object."""
        odd = random.random() < SHARE_OF_ODD_MATERIALS
        return str(random.choice(list(MATERIALS))) if odd else self.material


def _vivid(hue: float) -> Colouring:
    return Colouring(hue, spread=0.04, saturation=(0.45, 0.95))


# Pairs of one hue: heart and cross, star and disc, triangle and ring, crescent and square.
OBJECT_LOOKS: dict[str, ObjectLook] = {
    "disc": ObjectLook(_vivid(0.165), material="tiles", ground="clouds"),
    "ring": ObjectLook(_vivid(0.435), material="clouds", ground="planks"),
    "square": ObjectLook(_vivid(0.785), material="tiles", ground="gravel"),
    "triangle": ObjectLook(_vivid(0.365), material="planks", ground="gravel"),
    "star": ObjectLook(_vivid(0.095), material="gravel", ground="tiles"),
    "cross": ObjectLook(_vivid(0.035), material="planks", ground="tiles"),
    "crescent": ObjectLook(_vivid(0.715), material="gravel", ground="clouds"),
    "heart": ObjectLook(_vivid(0.965), material="clouds", ground="planks"),
}
# Backgrounds are paler than objects. From top to bottom of a picture, as they usually lie.
GROUND_COLOURS: dict[str, Colouring] = {
    "clouds": Colouring(0.58, spread=0.05, saturation=(0.1, 0.5)),
    "tiles": Colouring(0.45, spread=0.12, saturation=(0.05, 0.4)),
    "planks": Colouring(0.07, spread=0.04, saturation=(0.25, 0.6)),
    "gravel": Colouring(0.12, spread=0.1, saturation=(0.0, 0.25)),
}
