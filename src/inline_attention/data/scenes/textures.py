"""Procedural materials: patterns of light and dark that fill backgrounds and objects alike.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

Pattern = np.ndarray  # [H, W] float32 from 0 (the material's dark colour) to 1 (its light one)


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


def painted(pattern: Pattern, dark: np.ndarray, light: np.ndarray) -> np.ndarray:
    """`[H, W, 3]` colours between two: `dark` `[3]` where the pattern is 0, `light` `[3]` where it is 1."""
    return dark + pattern[..., None] * (light - dark)
