"""Sizes of pictures from the first bytes of their files: to check a whole dataset, decoding it takes too long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from PIL import Image, PngImagePlugin, TiffImagePlugin
from PIL.ExifTags import Base

from inline_attention.data.images import ImageError, exif_orientation, open_image

TURNED_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations
READERS = 8  # threads; what takes time is the disk
PNG_SIGNATURE = 8  # bytes before the first chunk
# Starts of chunks of a PNG in which Pillow looks for an orientation: their type and, of texts, their keyword.
PNG_ORIENTATIONS = (b"eXIf", b"tEXtRaw profile type exif", b"zTXtRaw profile type exif", b"iTXtXML:com.adobe.xmp")


def image_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(height, width) in pixels of a picture, upright as `load_image` would return it.

    Raises:
        ImageError: If it is missing, no picture, or larger than `load_image` accepts. Damage further on in the file
            goes unnoticed.
    """
    with open_image(path) as image:
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow turns its size, but not yet its orientation
            width, height = image.tag_v2[Base.ImageWidth], image.tag_v2[Base.ImageLength]
        else:
            width, height = image.size
        orientation = _orientation(image)
    return (width, height) if orientation in TURNED_ON_ITS_SIDE else (height, width)


def image_sizes(
    paths: Iterable[Path | ImageError], on_progress: Callable[[], None] | None = None
) -> Iterator[tuple[int, int] | ImageError]:
    """`image_size` of many files at once, in their order, with the errors among them.

    Args:
        paths: The files, or errors in their place, which are passed on.
        on_progress: Called after each.
    """
    with ThreadPoolExecutor(READERS) as executor:
        for found in executor.map(_size_or_error, paths):
            yield found
            if on_progress is not None:
                on_progress()


def _size_or_error(path: Path | ImageError) -> tuple[int, int] | ImageError:
    try:
        return path if isinstance(path, ImageError) else image_size(path)
    except ImageError as error:
        return error


def _orientation(image: Image.Image) -> int:
    if isinstance(image, PngImagePlugin.PngImageFile) and image.fp is not None and _metadata_behind_pixels(image.fp):
        image.load()
    return exif_orientation(image)


def _metadata_behind_pixels(file: IO[bytes]) -> bool:
    """Whether a PNG may have an orientation behind its pixels, from the names of its chunks alone."""
    position, behind = file.tell(), False
    file.seek(PNG_SIGNATURE)
    try:
        while len(start := file.read(8)) == 8:
            following = file.tell() + int.from_bytes(start[:4]) + 4  # 4 bytes of checksum
            if behind and (start[4:] + file.read(max(map(len, PNG_ORIENTATIONS)))).startswith(PNG_ORIENTATIONS):
                return True
            behind |= start[4:] == b"IDAT"
            file.seek(following)
        return False
    finally:
        file.seek(position)
