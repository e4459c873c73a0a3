"""From colours to a photograph of them: uneven light, its tint, a little blur, noise."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter


def photograph(random: np.random.Generator, colours: np.ndarray) -> np.ndarray:
    """Photograph a scene.

    Args:
        random: Decides on light, lens and noise.
        colours: `[H, W, 3]` float32 from 0 to 1, in even light.

    Returns:
        `[H, W, 3]` uint8.
    """
    height, width = colours.shape[:2]
    direction, strength = random.uniform(0, 2 * np.pi), random.uniform(0, 0.35)
    x = np.linspace(-1, 1, width, dtype=np.float32)
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    slope = strength * (x * np.float32(np.cos(direction)) + y * np.float32(np.sin(direction)))
    corners = random.uniform(0, 0.15) * (x * x + y * y)
    tint = random.normal(1, 0.06, 3).astype(np.float32) * np.float32(random.uniform(0.85, 1.3))
    lit = colours * (1 + slope - corners)[..., None] * tint
    blurred = Image.fromarray(_to_bytes(lit)).filter(ImageFilter.GaussianBlur(random.uniform(0, 0.8)))
    noise = np.float32(random.uniform(0.5, 7)) * random.standard_normal((height, width, 3), dtype=np.float32)
    return np.clip(np.asarray(blurred) + noise + 0.5, 0, 255).astype(np.uint8)


def _to_bytes(colours: np.ndarray) -> np.ndarray:
    return (np.clip(colours, 0, 1) * 255 + 0.5).astype(np.uint8)
