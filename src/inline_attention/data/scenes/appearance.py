"""Shapes, materials and colors of objects and backgrounds.

A kind of object has a usual color and material, never a certain one: kinds share hues in pairs and materials in others,
some objects and backgrounds have unusual colors, and light tints them all. Color narrows down what an object may be;
its outline tells which one it is.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

Distance = np.ndarray  # [H, W] in the shape's own unit, negative inside
Pattern = np.ndarray  # [H, W] float32 from 0 (the material's dark color) to 1 (its light one)
Paint = tuple[np.ndarray, np.ndarray]  # [3] each, float32 from 0 to 1: dark and light color of a material
REACH = 1.2  # no shape goes further from its center
SHARE_OF_ODD_COLORS = 0.12
SHARE_OF_ODD_MATERIALS = 0.3


def _disc(x: np.ndarray, y: np.ndarray, center: tuple[float, float] = (0, 0), radius: float = 1) -> Distance:
    return np.hypot(x - center[0], y - center[1]) - radius


def _box(x: np.ndarray, y: np.ndarray, half_width: float, half_height: float) -> Distance:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _triangle(x: np.ndarray, y: np.ndarray) -> Distance:
    root = np.float32(np.sqrt(0.75))
    return np.maximum(np.maximum(root * x, -root * x) - 0.5 * y, y) - 0.5


def _heart(x: np.ndarray, y: np.ndarray) -> Distance:
    """A square on its tip, with a half disc on each of the two upper sides."""
    y = y - 0.1
    half = 0.55
    shift = half / np.sqrt(2)
    tip = _box((x + y) / np.float32(np.sqrt(2)), (x - y) / np.float32(np.sqrt(2)), half, half)
    return np.minimum(tip, np.minimum(_disc(x, y, (shift, -shift), half), _disc(x, y, (-shift, -shift), half)))


# How far points (x, y) lie outside of a shape that about fills the unit disc. The y axis points down.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], Distance]] = {
    "disc": _disc,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.78) - 0.22,
    "square": lambda x, y: _box(x, y, 0.8, 0.8),
    "triangle": _triangle,
    "star": lambda x, y: np.minimum(_triangle(x, y), _triangle(x, -y)),
    "cross": lambda x, y: np.minimum(_box(x, y, 0.95, 0.32), _box(x, y, 0.32, 0.95)),
    "crescent": lambda x, y: np.maximum(_disc(x, y), -_disc(x, y, (0.5, 0), 0.75)),
    "heart": _heart,
}


@cache
def unit_area(kind: str) -> float:
    """Return the area of a shape."""
    steps = np.linspace(-REACH, REACH, 241, dtype=np.float32)
    return float((SHAPES[kind](steps, steps[:, None]) < 0).mean()) * (2 * REACH) ** 2


def smooth_noise(random: np.random.Generator, height: int, width: int, grain: float) -> Pattern:
    """Random hills and valleys, about `grain` pixels from one to the next."""
    rows, columns = (max(2, round(side / grain) + 2) for side in (height, width))
    coarse = Image.fromarray(random.random((rows, columns), dtype=np.float32))
    return np.clip(np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)), 0, 1)


def _clouds(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Slow changes, with finer ones on top."""
    grain = random.uniform(40, 90)
    coarse, middle, fine = (smooth_noise(random, height, width, grain / divisor) for divisor in (1, 3, 9))
    return 0.6 * coarse + 0.27 * middle + 0.13 * fine


def _gravel(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Speckles of a few pixels."""
    grain = random.uniform(2.5, 6)
    return np.clip(1.6 * smooth_noise(random, height, width, grain) - 0.3, 0, 1)


def _planks(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Boards side by side, each of its own tone, with a dark gap between them and a grain along them."""
    along, across = _rotated_grid(random, height, width)
    board = across / random.uniform(12, 30)
    tone = _random_tones(random, np.floor(board).astype(np.int64))
    grain = 0.12 * np.sin(across * 1.7 + 3 * np.sin(along / random.uniform(20, 50)))
    return np.clip(0.25 + 0.6 * tone + grain, 0, 1) * _gap(board, 0.08)


def _tiles(random: np.random.Generator, height: int, width: int) -> Pattern:
    """Tiles of many tones in a grid, with joints between them."""
    along, across = _rotated_grid(random, height, width)
    pitch = random.uniform(12, 32)
    row = across / pitch
    # Bricks where rows are shifted by half a tile, a plain grid where they are not.
    column = along / (pitch * random.uniform(1, 2)) + random.choice([0, 0.5]) * np.floor(row)
    tone = _random_tones(random, np.floor(row).astype(np.int64) * 31 + np.floor(column).astype(np.int64))
    return (0.35 + 0.65 * tone) * _gap(row, 0.09) * _gap(column, 0.06)


def _rotated_grid(random: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates `[H, W]` in pixels along and across a random direction."""
    angle = random.uniform(0, np.pi)
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return x * cosine + y * sine, y * cosine - x * sine


def _random_tones(random: np.random.Generator, cells: np.ndarray) -> Pattern:
    """A tone for each number in `cells` (few enough numbers share one that it does not show)."""
    return random.random(997, dtype=np.float32)[cells % 997]


def _gap(position: np.ndarray, share: float) -> Pattern:
    """0.3 at the border of each cell, 1 inside; `share` of the cell's width is border."""
    inside = np.abs(position - np.floor(position) - 0.5)
    return np.where(inside > 0.5 - share / 2, np.float32(0.3), np.float32(1))


MATERIALS: dict[str, Callable[[np.random.Generator, int, int], Pattern]] = {
    "clouds": _clouds,
    "gravel": _gravel,
    "planks": _planks,
    "tiles": _tiles,
}


class ColorRange(NamedTuple):
    """A range of colors.

    Attributes:
        hue: Its middle, in turns of the color circle: 0 is red, 1/3 green, 2/3 blue.
        spread: Standard deviation of the hue, in turns.
        saturation: Least and greatest, from 0 (gray) to 1.
    """

    hue: float
    spread: float
    saturation: tuple[float, float]

    def or_odd(self, random: np.random.Generator) -> ColorRange:
        """Return the range of one object or background: mostly this one, sometimes one around another hue."""
        return self._replace(hue=random.random()) if random.random() < SHARE_OF_ODD_COLORS else self

    def draw(self, random: np.random.Generator) -> Paint:
        """Draw colors of this range."""
        hue = random.normal(self.hue, self.spread) % 1
        light = np.array(colorsys.hsv_to_rgb(hue, random.uniform(*self.saturation), random.uniform(0.5, 1)))
        return (light * random.uniform(0.35, 0.75)).astype(np.float32), light.astype(np.float32)


class ObjectLook(NamedTuple):
    """Usual colors and material of a kind of object, and the material that it usually lies on."""

    color_range: ColorRange
    material: str
    ground: str

    def draw_material(self, random: np.random.Generator) -> str:
        """Draw the material of one object."""
        odd = random.random() < SHARE_OF_ODD_MATERIALS
        return str(random.choice(list(MATERIALS))) if odd else self.material


def _vivid(hue: float) -> ColorRange:
    return ColorRange(hue, spread=0.04, saturation=(0.45, 0.95))


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
# Backgrounds are paler than objects. From top to bottom of an image, as they usually lie.
GROUND_COLORS: dict[str, ColorRange] = {
    "clouds": ColorRange(0.58, spread=0.05, saturation=(0.1, 0.5)),
    "tiles": ColorRange(0.45, spread=0.12, saturation=(0.05, 0.4)),
    "planks": ColorRange(0.07, spread=0.04, saturation=(0.25, 0.6)),
    "gravel": ColorRange(0.12, spread=0.1, saturation=(0.0, 0.25)),
}
