"""Colours that tell classes apart."""

from __future__ import annotations

import colorsys

STEP = 0.618033988749895  # the golden section: any number of hues in a row are far from each other
BRIGHTNESSES = (1.0, 0.8, 0.65)


def class_colour(number: int) -> tuple[int, int, int]:
    """Red, green and blue from 0 to 255; the same for a number whatever the others are."""
    red, green, blue = colorsys.hsv_to_rgb(number * STEP % 1, 0.75, BRIGHTNESSES[number % len(BRIGHTNESSES)])
    return round(255 * red), round(255 * green), round(255 * blue)
