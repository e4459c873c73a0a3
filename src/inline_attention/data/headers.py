"""Sizes of pictures from the first bytes of their files: to check a whole dataset, decoding it takes too long."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from inline_attention.data.images import DEFAULT_MAX_PIXELS, FORMATS, ImageError

TURNED_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations
READERS = 8  # threads; what takes time is the disk


def image_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(height, width) in pixels of a picture, upright as `load_image` would return it.

    Raises:
        ImageError: If it is missing, no picture, or larger than `load_image` accepts. Damage further on in the file
            goes unnoticed.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.init()
            with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                width, height = image.size
                orientation = _orientation(image)
    except UnidentifiedImageError:
        raise ImageError(path, f"is damaged or no picture; expected {', '.join(FORMATS)}") from None
    except OSError as error:
        raise ImageError(path, f"cannot be opened: {error.strerror or error}") from error
    except Exception as error:  # a damaged file can fail anywhere
        raise ImageError(path, f"is damaged: {str(error) or type(error).__name__}") from error
    if width * height > DEFAULT_MAX_PIXELS:
        raise ImageError(path, f"has {width * height:,} pixels, more than the limit of {DEFAULT_MAX_PIXELS:,}")
    return (width, height) if orientation in TURNED_ON_ITS_SIDE else (height, width)


def image_sizes(
    paths: Iterable[Path], on_progress: Callable[[], None] | None = None
) -> Iterator[tuple[int, int] | ImageError]:
    """`image_size` of many files at once, in their order, with the errors among them.

    Args:
        paths: The files.
        on_progress: Called after each.
    """
    with ThreadPoolExecutor(READERS) as executor:
        for found in executor.map(_size_or_error, paths):
            yield found
            if on_progress is not None:
                on_progress()


def _size_or_error(path: Path) -> tuple[int, int] | ImageError:
    try:
        return image_size(path)
    except ImageError as error:
        return error


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # no reason to refuse the picture
        return 1
