"""Maps of labels from image files, whose pixels are numbers of classes and no colours.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from inline_attention.data.images import DEFAULT_MAX_PIXELS, ImageError

# Without loss alone: a JPEG would blur labels into each other.
MAP_FORMATS = {"PNG": (".png",), "TIFF": (".tif", ".tiff"), "BMP": (".bmp",), "GIF": (".gif",), "PPM": (".pgm",)}
MAP_SUFFIXES = frozenset(suffix for suffixes in MAP_FORMATS.values() for suffix in suffixes)
NUMBER_MODES = ("1", "L", "P", "I;16", "I;16B", "I;16L", "I")


class ColouredMapError(ImageError):
    """A file that should hold labels holds colours."""


def read_label_map(path: str | os.PathLike[str]) -> np.ndarray:
    """Read a map; of a picture with a palette the numbers, not the colours they stand for.

    Returns:
        `[H, W]` int32.

    Raises:
        ColouredMapError: If its pixels are colours.
        ImageError: If the file cannot be read.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=list(MAP_FORMATS)) as image:
                if image.width * image.height > DEFAULT_MAX_PIXELS:
                    raise ImageError(path, f"is larger than the limit of {DEFAULT_MAX_PIXELS:,} pixels")
                if image.mode not in NUMBER_MODES:
                    raise ColouredMapError(path, _colours_refused(image.mode))
                return np.asarray(image).astype(np.int32)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(path, f"is damaged, or no map of labels; expected {', '.join(MAP_FORMATS)}") from None
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}" if error.strerror else f"is damaged: {error}"
        raise ImageError(path, reason) from error
    except Exception as error:  # a damaged file can fail anywhere
        raise ImageError(path, f"is damaged: {str(error) or type(error).__name__}") from error


def _colours_refused(mode: str) -> str:
    return (
        f"holds colours ({mode}), and a map of labels needs one number for each pixel; convert it to a grey picture or "
        "one with a palette, in which the number of a class is the pixel's value"
    )
