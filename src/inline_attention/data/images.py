"""Pictures from files: whatever their mode, upright and in RGB, or an error that names the file and what is wrong."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

DEFAULT_MAX_PIXELS = 200_000_000
# What Pillow decodes itself: some others start programs (EPS) or draw what they please (WMF).
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k"),
}
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
_pillow_limit_lock = threading.Lock()


class ImageError(ValueError):
    """A file cannot be used as a picture.

    Attributes:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str):
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def load_image(path: str | os.PathLike[str], *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Read a picture as RGB, turned upright as its EXIF orientation says.

    Transparency is composited on white. 16-bit grey values are scaled to 8 bits; 32-bit and floating-point ones, whose
    white point nobody knows, from their own range. Of an animation the first frame is taken.

    Args:
        path: A file in one of `FORMATS`.
        max_pixels: Larger pictures are refused before they are decoded.

    Raises:
        ImageError: If the file cannot be opened, is damaged or no picture, or is too large.
    """
    path = Path(path)
    try:
        with _open(path, max_pixels) as image:
            image.load()
            return _to_rgb(_upright(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        reason = f"is a decompression bomb, or merely larger than the limit of {max_pixels:,} pixels"
        raise ImageError(path, reason) from None
    except UnidentifiedImageError:
        reason = "is empty" if path.stat().st_size == 0 else "is damaged or no picture"
        raise ImageError(path, f"{reason}; expected {', '.join(FORMATS)}") from None
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}" if error.strerror else f"is damaged: {error}"
        raise ImageError(path, reason) from error
    except Exception as error:  # a damaged file can fail anywhere
        raise ImageError(path, f"is damaged: {str(error) or type(error).__name__}") from error


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Files as they are given, and for each folder the pictures below it, sorted.

    A file is a picture by its suffix; hidden files and folders are left out. Missing paths are kept, to be reported
    when they are read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        below = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and not file.is_dir())
        found += (file for file in sorted(below) if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return found


@contextmanager
def _open(path: Path, max_pixels: int) -> Iterator[Image.Image]:
    # Pillow has its own limit, one for the process: ours takes its place while the header is read.
    with _pillow_limit_lock, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        others, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
        try:
            Image.init()
            image = Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN])
        finally:
            Image.MAX_IMAGE_PIXELS = others
    with image:
        yield image


def _upright(image: Image.Image) -> Image.Image:
    try:
        image.getexif()
    except Exception:  # no reason to refuse the picture
        return image
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    values = np.nan_to_num(np.asarray(image, dtype=np.float32), posinf=0, neginf=0)
    low, high = float(values.min()), float(values.max())
    if image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0, 65535
    scaled = (values - low) * (255 / max(high - low, 1e-12))
    return Image.fromarray(scaled.round().astype(np.uint8))
