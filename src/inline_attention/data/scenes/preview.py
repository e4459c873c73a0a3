"""Scenes with their annotations drawn on them, side by side: to see at a glance what a dataset is."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from inline_attention.data.coco.masks import extent_of
from inline_attention.data.scenes.scene import SEMANTIC_CLASSES, Scene

COLUMNS = 4
GAP = 8


def draw_preview(scenes: Sequence[Scene]) -> Image.Image:
    """Pictures with boxes and names, each above its map of classes."""
    cell = max(max(scene.image.shape[:2]) for scene in scenes) + GAP
    columns = min(COLUMNS, len(scenes))
    rows = -(-len(scenes) // columns)
    sheet = Image.new("RGB", (columns * cell - GAP, 2 * rows * cell - GAP), "white")
    for number, scene in enumerate(scenes):
        left, top = number % columns * cell, number // columns * 2 * cell
        sheet.paste(_with_boxes(scene), (left, top))
        sheet.paste(Image.fromarray(class_colours()[scene.semantic_map()]), (left, top + cell))
    return sheet


def class_colours() -> np.ndarray:
    """`[K + 1, 3]` uint8: black for what has no name, and a colour for each class."""
    count = len(SEMANTIC_CLASSES)
    # Neighbours in number are far apart in hue, neighbours in hue apart in brightness.
    colours = [colorsys.hsv_to_rgb(5 * number % count / count, 0.75, 1 - number % 3 / 4) for number in range(count)]
    return (np.array([(0, 0, 0), *colours]) * 255).astype(np.uint8)


def _with_boxes(scene: Scene) -> Image.Image:
    image = Image.fromarray(scene.image)
    draw = ImageDraw.Draw(image)
    for number, kind in enumerate(scene.kinds, start=1):
        extent = extent_of(scene.visible_mask(number))
        assert extent is not None, "objects of which nothing is seen are not drawn"
        left, top, right, bottom = extent
        draw.rectangle((left, top, right - 1, bottom - 1), outline="yellow")
        draw.text((left + 2, max(0, top - 11)), kind, fill="yellow", stroke_width=1, stroke_fill="black")
    return image
