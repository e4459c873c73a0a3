"""Draw predictions on images: class names, objects with masks, classes of pixels.

Lines and letters grow with the picture, whose mean side is the unit of length.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from inline_attention.support.text import shortened
from inline_attention.tasks.classification.prediction import Prediction
from inline_attention.tasks.dense_prediction import FoundObject, SegmentationResult
from inline_attention.tasks.detection.task import whole_mask

GOLDEN_RATIO = 0.618033988749895  # steps of it around the color circle: any number of hues in a row differ clearly
BRIGHTNESSES = (1.0, 0.8, 0.65)
LONGEST_NAME = 40
LARGEST_SHARE = 0.5  # of the picture's height that the box of classes may cover
MASK_OPACITY = 110  # of 255
PIXEL_OPACITY = 0.5
MOST_NAMES = 12


def class_color(number: int) -> tuple[int, int, int]:
    """Red, green and blue from 0 to 255; the same for a number whatever the others are."""
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN_RATIO % 1, 0.75, BRIGHTNESSES[number % len(BRIGHTNESSES)])
    return round(255 * red), round(255 * green), round(255 * blue)


def _unit(image: Image.Image) -> float:
    return math.sqrt(image.width * image.height)


def _small_font(image: Image.Image) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(max(11, round(_unit(image) / 45)))


def annotate(image: Image.Image, predictions: Sequence[Prediction]) -> Image.Image:
    """Return a copy with the classes in a dark box at the top left, or below a picture too small for it."""
    shares = "\n".join(f"{p.probability:.1%}" for p in predictions)
    names = "\n".join(shortened(" ".join(p.name.split()), LONGEST_NAME) for p in predictions)
    font_size = max(14, round(_unit(image) / 36))
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


def annotate_objects(image: Image.Image, objects: Sequence[FoundObject]) -> Image.Image:
    """Return a copy with boxes, masks and names, the best object on top."""
    canvas = image.copy()
    font, line_width = _small_font(image), max(1, round(_unit(image) / 300))
    for item in reversed(objects):
        if item.mask is not None:
            _draw_mask(canvas, item, item.mask)
    draw = ImageDraw.Draw(canvas)
    for item in reversed(objects):
        color = class_color(item.label)
        left, top, right, bottom = _inside(item, image)
        draw.rectangle((left, top, right, bottom), outline=color, width=line_width)
        label = f" {item.name} {item.score:.0%} "
        _, _, width, height = draw.textbbox((0, 0), label, font=font)
        x, y = min(left, max(0, image.width - width)), top - height if top >= height else top
        draw.rectangle((x, y, x + width, y + height), fill=color)
        draw.text((x, y), label, fill="white", font=font, stroke_width=1, stroke_fill="black")
    return canvas


def _inside(item: FoundObject, image: Image.Image) -> tuple[int, int, int, int]:
    """Corners in whole pixels of the picture."""
    left, top, right, bottom = item.box
    left, top = min(max(0, math.floor(left)), image.width - 1), min(max(0, math.floor(top)), image.height - 1)
    right, bottom = min(image.width - 1, math.ceil(right)), min(image.height - 1, math.ceil(bottom))
    return left, top, max(left, right), max(top, bottom)


def _draw_mask(canvas: Image.Image, item: FoundObject, mask: torch.Tensor) -> None:
    # In the part of the picture that the box covers, as a photograph may be a thousand times as large.
    left, top, right, bottom = _inside(item, canvas)
    box = torch.tensor(item.box) - torch.tensor([left, top, left, top])
    shape = whole_mask(mask, box, (bottom - top + 1, right - left + 1))
    opacity = Image.fromarray((shape.numpy() * MASK_OPACITY).astype("uint8"))
    canvas.paste(Image.new("RGB", opacity.size, class_color(item.label)), (left, top), opacity)


def annotate_pixels(image: Image.Image, result: SegmentationResult, class_names: Sequence[str]) -> Image.Image:
    """Return a copy colored by class, and below it the names of the classes that cover the most."""
    assert result.labels is not None
    colors = np.array([class_color(number) for number in range(len(class_names))], dtype=np.uint8)
    colored = Image.blend(image, Image.fromarray(colors[result.labels]), PIXEL_OPACITY)
    font = _small_font(image)
    height = math.ceil(ImageDraw.Draw(colored).textbbox((0, 0), "Ag", font=font)[3])
    line = round(1.4 * height)
    canvas = Image.new("RGB", (image.width, image.height + MOST_NAMES * line), "white")
    canvas.paste(colored, (0, 0))
    draw = ImageDraw.Draw(canvas)
    x, y = 0, image.height
    for class_name, _ in result.shares[:MOST_NAMES]:
        name = " ".join(class_name.split())  # on one line
        width = math.ceil(draw.textlength(name, font=font)) + 3 * height
        if x and x + width > image.width:
            x, y = 0, y + line
        top, color = y + (line - height) // 2, class_color(class_names.index(class_name))
        draw.rectangle((x + height // 2, top, x + 3 * height // 2, top + height), fill=color)
        draw.text((x + 2 * height, top), name, fill="black", font=font)
        x += width
    return canvas.crop((0, 0, image.width, y + line))
