"""Pictures so long and thin that resizing them by their shorter side would fill the memory."""

from __future__ import annotations

from PIL import Image

LARGEST_ASPECT = 8


def without_far_ends(image: Image.Image) -> Image.Image:
    """Cut the ends off a very long picture: a centre crop drops them anyway, but only after enlarging them."""
    longest = LARGEST_ASPECT * min(image.size)
    width, height = min(image.width, longest), min(image.height, longest)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image if (width, height) == image.size else image.crop((left, top, left + width, top + height))
