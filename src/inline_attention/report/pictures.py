"""Pictures inside the page, as PNG in the address itself.

Shapes: `H`, `W` height and width in pixels, `h`×`w` token grid.
"""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image
from torch import Tensor

LARGEST_SIDE = 256  # pixels; larger pictures are reduced, so that a page stays small
# Okabe and Ito's, as in the pictures of `inline analyze`: told apart with every common form of colour blindness.
POSITIVE, NEGATIVE = (213, 94, 0), (0, 114, 178)


def picture_address(pixels: Tensor) -> str:
    """A picture uint8 `[3, H, W]` as an address."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return _address(picture)


def map_address(weights: Tensor, largest: float) -> str:
    """Weights `[h, w]` as an address: orange above zero, blue below, the more opaque the larger.

    Transparent where they are zero, so that what lies below, light or dark, shows.

    Args:
        weights: In any unit.
        largest: The absolute weight that is fully opaque.
    """
    values = weights.double().cpu().numpy()
    pixels = np.empty((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(values[..., None] >= 0, POSITIVE, NEGATIVE)
    pixels[..., 3] = np.clip(np.abs(values) / max(largest, 1e-12) * 255, 0, 255).round()
    return _address(Image.fromarray(pixels))


def _address(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
