"""The kinds of objects: outlines as distances, from which edges of any softness follow.

Each kind is built of half-planes and discs: the smaller of two distances is the union, the larger the intersection.
Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

Distance = np.ndarray  # [H, W] in the shape's own unit, negative inside
REACH = 1.2  # no shape goes further from its centre


def _disc(x: np.ndarray, y: np.ndarray, centre: tuple[float, float] = (0, 0), radius: float = 1) -> Distance:
    return np.hypot(x - centre[0], y - centre[1]) - radius


def _ring(x: np.ndarray, y: np.ndarray) -> Distance:
    return np.abs(np.hypot(x, y) - 0.78) - 0.22


def _box(x: np.ndarray, y: np.ndarray, half_width: float, half_height: float) -> Distance:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _square(x: np.ndarray, y: np.ndarray) -> Distance:
    return _box(x, y, 0.8, 0.8)


def _triangle(x: np.ndarray, y: np.ndarray) -> Distance:
    root = np.float32(np.sqrt(0.75))
    return np.maximum(np.maximum(root * x, -root * x) - 0.5 * y, y) - 0.5


def _star(x: np.ndarray, y: np.ndarray) -> Distance:
    return np.minimum(_triangle(x, y), _triangle(x, -y))


def _cross(x: np.ndarray, y: np.ndarray) -> Distance:
    return np.minimum(_box(x, y, 0.95, 0.32), _box(x, y, 0.32, 0.95))


def _crescent(x: np.ndarray, y: np.ndarray) -> Distance:
    return np.maximum(_disc(x, y), -_disc(x, y, (0.5, 0), 0.75))


def _heart(x: np.ndarray, y: np.ndarray) -> Distance:
    """A square on its tip, with a half disc on each of the two upper sides."""
    y = y - 0.1
    half = 0.55
    shift = half / np.sqrt(2)
    tip = _box((x + y) / np.float32(np.sqrt(2)), (x - y) / np.float32(np.sqrt(2)), half, half)
    return np.minimum(tip, np.minimum(_disc(x, y, (shift, -shift), half), _disc(x, y, (-shift, -shift), half)))


SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], Distance]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "crescent": _crescent,
    "heart": _heart,
}


def outline_distance(kind: str, x: np.ndarray, y: np.ndarray) -> Distance:
    """How far points lie outside of a shape that about fills the unit disc, whose y axis points down.

    Args:
        kind: One of `SHAPES`.
        x: `[H, W]`, or anything that broadcasts with `y`.
        y: As `x`.
    """
    return SHAPES[kind](x, y)


@cache
def unit_area(kind: str) -> float:
    """Area of the shape that `outline_distance` describes."""
    steps = np.linspace(-REACH, REACH, 241, dtype=np.float32)
    return float((outline_distance(kind, steps, steps[:, None]) < 0).mean()) * (2 * REACH) ** 2
