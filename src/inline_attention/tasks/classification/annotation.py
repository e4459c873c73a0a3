"""Predictions drawn on the picture they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from inline_attention.tasks.classification.prediction import Prediction

SMALLEST_FONT = 14
LONGEST_NAME = 40
LARGEST_SHARE = 0.5  # of the picture's height that the box may cover


def annotate(image: Image.Image, predictions: Sequence[Prediction]) -> Image.Image:
    """A copy with the classes in a dark box at the top left, or below the picture if that is too small for it.

    The size of the letters goes with that of the picture.
    """
    shares = "\n".join(f"{p.probability:.1%}" for p in predictions)
    names = "\n".join(_short(p.name) for p in predictions)
    font_size = max(SMALLEST_FONT, round(math.sqrt(image.width * image.height) / 36))
    margin = font_size // 2
    style: dict[str, Any] = {"font": ImageFont.load_default(font_size), "spacing": font_size // 3}
    measure = ImageDraw.Draw(image).multiline_textbbox
    _, _, shares_width, shares_height = measure((0, 0), shares, **style)
    _, _, names_width, names_height = measure((0, 0), names, **style)
    width = math.ceil(shares_width + names_width) + 3 * margin
    height = math.ceil(max(shares_height, names_height)) + 2 * margin
    if width + 2 * margin <= image.width and height <= LARGEST_SHARE * image.height:
        canvas, left, top = image.copy(), margin, margin
    else:
        canvas, left, top = Image.new("RGB", (max(image.width, width), image.height + height)), 0, image.height
        canvas.paste(image, ((canvas.width - image.width) // 2, 0))
    draw = ImageDraw.Draw(canvas, "RGBA")
    draw.rounded_rectangle((left, top, left + width, top + height), radius=margin, fill=(0, 0, 0, 176))
    draw.multiline_text((left + margin, top + margin), shares, "white", align="right", **style)
    draw.multiline_text((left + 2 * margin + shares_width, top + margin), names, "white", **style)
    return canvas


def _short(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
