"""Classes of pixels drawn on the picture they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inline_attention.tasks.colours import class_colour
from inline_attention.tasks.segmentation.prediction import SegmentationResult

OPACITY = 0.5
SMALLEST_FONT = 11
MOST_NAMES = 12


def annotate_pixels(image: Image.Image, result: SegmentationResult, class_names: Sequence[str]) -> Image.Image:
    """A copy coloured by class, and below it the names of the classes that take the most of it."""
    assert result.labels is not None
    colours = np.array([class_colour(number) for number in range(len(class_names))], dtype=np.uint8)
    coloured = Image.blend(image, Image.fromarray(colours[result.labels]), OPACITY)
    font = ImageFont.load_default(max(SMALLEST_FONT, round(math.sqrt(image.width * image.height) / 45)))
    names = [  # each on one line
        (" ".join(name.split()), class_colour(class_names.index(name))) for name, _ in result.shares[:MOST_NAMES]
    ]
    return _with_legend(coloured, names, font)


def _with_legend(
    image: Image.Image,
    names: Sequence[tuple[str, tuple[int, int, int]]],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> Image.Image:
    draw = ImageDraw.Draw(image)
    _, _, _, height = draw.textbbox((0, 0), "Ag", font=font)
    height = math.ceil(height)
    places: list[tuple[int, int]] = []
    x = row = 0
    for name, _ in names:
        width = math.ceil(draw.textlength(name, font=font)) + 3 * height
        if x and x + width > image.width:
            x, row = 0, row + 1
        places.append((x, row))
        x += width
    line = round(1.4 * height)
    canvas = Image.new("RGB", (image.width, image.height + (row + 1) * line), "white")
    canvas.paste(image, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for (name, colour), (x, row) in zip(names, places, strict=True):
        top = image.height + row * line + (line - height) // 2
        draw.rectangle((x + height // 2, top, x + 3 * height // 2, top + height), fill=colour)
        draw.text((x + 2 * height, top), name, fill="black", font=font)
    return canvas
