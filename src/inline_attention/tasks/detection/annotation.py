"""Objects drawn on the picture they were found in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

from inline_attention.tasks.colours import class_colour
from inline_attention.tasks.detection.postprocessing import whole_mask
from inline_attention.tasks.detection.prediction import FoundObject

OPACITY = 110  # of masks, of 255
SMALLEST_FONT = 11


def annotate_objects(image: Image.Image, objects: Sequence[FoundObject]) -> Image.Image:
    """A copy with boxes, masks and names, the best object on top; sizes of lines and letters go with the picture's."""
    canvas = image.copy()
    unit = math.sqrt(image.width * image.height)
    font = ImageFont.load_default(max(SMALLEST_FONT, round(unit / 45)))
    for item in reversed(objects):
        _draw_mask(canvas, item, class_colour(item.label))
    draw = ImageDraw.Draw(canvas)
    for item in reversed(objects):
        colour = class_colour(item.label)
        left, top, right, bottom = _inside(item, image)
        draw.rectangle((left, top, right, bottom), outline=colour, width=max(1, round(unit / 300)))
        label = f" {item.name} {item.score:.0%} "
        _, _, width, height = draw.textbbox((0, 0), label, font=font)
        x, y = min(left, max(0, image.width - width)), top - height if top >= height else top
        draw.rectangle((x, y, x + width, y + height), fill=colour)
        draw.text((x, y), label, fill="white", font=font, stroke_width=1, stroke_fill="black")
    return canvas


def _inside(item: FoundObject, image: Image.Image) -> tuple[int, int, int, int]:
    """Corners in whole pixels of the picture."""
    left, top, right, bottom = item.box
    left, top = min(max(0, math.floor(left)), image.width - 1), min(max(0, math.floor(top)), image.height - 1)
    return (
        left,
        top,
        max(left, min(image.width - 1, math.ceil(right))),
        max(top, min(image.height - 1, math.ceil(bottom))),
    )


def _draw_mask(canvas: Image.Image, item: FoundObject, colour: tuple[int, int, int]) -> None:
    if item.mask is None:
        return
    # In the part of the picture that the box covers, as a photograph may be a thousand times as large.
    left, top, right, bottom = _inside(item, canvas)
    box = torch.tensor(item.box) - torch.tensor([left, top, left, top])
    mask = whole_mask(item.mask, box, (bottom - top + 1, right - left + 1))
    opacity = Image.fromarray((mask.numpy() * OPACITY).astype("uint8"))
    canvas.paste(Image.new("RGB", opacity.size, colour), (left, top), opacity)
