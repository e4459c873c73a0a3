"""Maps of labels from image files, whose pixels are numbers of classes and no colours.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os

import numpy as np
from PIL import PngImagePlugin, PpmImagePlugin, TiffImagePlugin
from PIL.Image import Image

from inline_attention.data.images import ImageError, open_image

# Without loss alone: a JPEG would blur labels into each other.
MAP_FORMATS = {"PNG": (".png",), "TIFF": (".tif", ".tiff"), "BMP": (".bmp",), "GIF": (".gif",), "PPM": (".pgm",)}
MAP_SUFFIXES = frozenset(suffix for suffixes in MAP_FORMATS.values() for suffix in suffixes)
# What Pillow multiplies grey values of less than 8 bits with, by how they lie in the file.
GREY_SCALES = {"L;2": 85, "L;2R": 85, "L;4": 17, "L;4R": 17}
NUMBER_MODES = ("1", "L", "P", "I;16", "I;16B", "I;16L", "I")


class ColouredMapError(ImageError):
    """A file that should hold labels holds colours."""


def read_label_map(path: str | os.PathLike[str]) -> np.ndarray:
    """Read a map; of a picture with a palette the numbers, not the colours they stand for.

    Returns:
        `[H, W]` int32.

    Raises:
        ColouredMapError: If its pixels are colours.
        ImageError: If the file cannot be read, or not without changing labels.
    """
    with open_image(path, formats=MAP_FORMATS, what="map of labels") as image:
        if image.mode not in NUMBER_MODES:
            raise ColouredMapError(path, _colours_refused(image.mode))
        if isinstance(image, PpmImagePlugin.PpmImageFile) and (maximum := _maximum(image)) not in (255, 65535):
            raise ImageError(path, _maximum_refused(maximum))
        scale = _grey_scale(image)
        return np.asarray(image).astype(np.int32) // scale


def _grey_scale(image: Image) -> int:
    if not isinstance(image, (PngImagePlugin.PngImageFile, TiffImagePlugin.TiffImageFile)) or not image.tile:
        return 1
    arguments = image.tile[0][3]  # of the decoder, which begin with the mode in the file; gone after decoding
    raw_mode = arguments[0] if isinstance(arguments, tuple) else arguments
    return GREY_SCALES.get(str(raw_mode), 1)


def _maximum(image: PpmImagePlugin.PpmImageFile) -> int:
    """The largest value that a PGM announces, which Pillow scales to 255 or 65535, and all others with it."""
    arguments = image.tile[0][3]  # of the decoder; the largest value is the last of them where it can be any
    return int(arguments[-1]) if isinstance(arguments, tuple) else 255


def _maximum_refused(maximum: int) -> str:
    return (
        f"is a PGM that announces values up to {maximum} (its maxval), from which labels would be scaled; write it "
        "with 255 or 65535 in that place, or as a PNG"
    )


def _colours_refused(mode: str) -> str:
    return (
        f"holds colours ({mode}), and a map of labels needs one number for each pixel; convert it to a grey picture or "
        "one with a palette, in which the number of a class is the pixel's value"
    )
