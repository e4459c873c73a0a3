"""Read image files of any mode as upright RGB, or raise an error that names the file and the fault.

Files may come from strangers. Only regular files are opened, only formats that Pillow decodes itself, and sizes are
checked before pixels are decoded.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal, TypeVar

import numpy as np
from PIL import Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError
from PIL.ExifTags import Base

from inline_attention.support.files import AnyPath, NotARegularFileError, open_regular
from inline_attention.support.text import first_line, install_command, printable

Item = TypeVar("Item")
Result = TypeVar("Result")
DEFAULT_MAX_PIXELS = 200_000_000
SMALL_FILE = 2**26  # bytes that any file may have
BYTES_PER_PIXEL = 8  # 16-bit RGBA, uncompressed: the most that a file needs
MAX_READS = 5_000_000  # Pillow reads some headers byte by byte, however long they are
MAX_TIFF_STRIPS = 1_000_000  # Pillow keeps some 300 bytes for each
# Formats that Pillow decodes itself. Others start programs (EPS) or run drawing commands (WMF).
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
# What turns an image upright, by its EXIF orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
STRIP_TAGS = (Base.StripOffsets, Base.StripByteCounts, Base.TileOffsets)
INTEGERS_OF_16_BITS = ("PNG", "PPM")  # formats in which integers that Pillow widens to 32 bits have 16
TURNED_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations
READERS = 8  # threads; what takes time is the disk
PNG_SIGNATURE = 8  # bytes before the first chunk
# Starts of chunks of a PNG in which Pillow looks for an orientation: their type and, of texts, their keyword.
PNG_ORIENTATIONS = (b"eXIf", b"tEXtRaw profile type exif", b"zTXtRaw profile type exif", b"iTXtXML:com.adobe.xmp")
LARGEST_ASPECT = 8  # of the longer to the shorter side


class ImageError(ValueError):
    """A file at a path cannot be used as an image, for a reason."""

    def __init__(self, path: AnyPath, reason: str):
        super().__init__(path, reason)
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


def load_image(path: AnyPath, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Read an image as RGB, turned upright as its EXIF orientation says.

    Transparency is composited on white. 16-bit gray values are scaled to 8 bits; 32-bit and floating-point ones, whose
    white point is unknown, from their own range. The first frame of an animation is used.

    Raises `ImageError` if it cannot be opened, is damaged or in none of `FORMATS`, or has more than `max_pixels`, which
    is noticed before it is decoded.
    """
    with open_image(path, max_pixels=max_pixels) as image:
        return _upright_rgb(image)


def load_image_bytes(content: bytes, name: str, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Read the content of an image file as `load_image` does; errors bear the given name."""
    with open_image(name, content, max_pixels=max_pixels) as image:
        return _upright_rgb(image)


@contextmanager
def open_image(
    path: AnyPath,
    content: bytes | None = None,
    *,
    formats: Collection[str] = FORMATS,
    what: str = "image",
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Iterator[Image.Image]:
    """Open a file, or its content, with Pillow, which reads its header, and close it in the end.

    `ImageError` if the file cannot be opened, is damaged or not of the formats, or is too large; also in place of any
    other error in the body of the `with` statement.
    """
    path = Path(path)
    with image_errors(path), _LimitedReads(open_regular(path) if content is None else io.BytesIO(content)) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        limit = f"limit of {max_pixels:,} pixels{_slide_hint(path)}"
        if size > most_bytes(max_pixels):
            raise ImageError(path, f"has {size:,} bytes, too many for the {limit}")
        if (strips := _tiff_strips(file)) > MAX_TIFF_STRIPS:
            raise ImageError(path, f"is a TIFF of {strips:,} strips, more than {MAX_TIFF_STRIPS:,}")
        Image.init()
        known = [name for name in formats if name in Image.OPEN]
        try:
            with _no_pillow_limit, Image.open(file, formats=known) as image:
                if (pixels := image.width * image.height) > max_pixels:
                    reason = f"it is a decompression bomb, or merely larger than the {limit}"
                    raise ImageError(path, f"has {pixels:,} pixels: {reason}")
                yield image
        except UnidentifiedImageError:
            reason = f"is damaged or no {what}" if size else "is empty"
            raise ImageError(path, f"{reason}; expected {', '.join(formats)}") from None


@contextmanager
def image_errors(path: Path, damage: str = "is damaged: {}") -> Iterator[None]:
    """Turn every error about a file into an `ImageError`: a damaged file can fail anywhere."""
    try:
        yield
    except (ImageError, ModuleNotFoundError):
        raise
    except NotARegularFileError:
        raise ImageError(path, "cannot be opened: it is a folder, FIFO, socket or device, not a file") from None
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}" if error.strerror else f"is damaged: {error}"
        raise ImageError(path, reason) from error
    except MemoryError as error:
        raise ImageError(path, "does not fit into memory") from error
    except Exception as error:
        raise ImageError(path, damage.format(first_line(error))) from error


def _slide_hint(path: Path) -> str:
    if path.suffix.lower() not in (".tif", ".tiff"):
        return ""
    return (
        "; only `inline predict` with a classifier and `inline analyze attention-map` read large tiled TIFFs in parts "
        f"({install_command('slides')}), and training decodes images whole: save a coarser level of it"
    )


def most_bytes(max_pixels: int) -> int:
    """Return how many bytes a file with so many pixels may have."""
    return BYTES_PER_PIXEL * max_pixels + SMALL_FILE


def exif_orientation(image: Image.Image) -> int:
    """Return the orientation in the metadata of an opened image that were read so far; 1 if there is none."""
    try:
        # Not `image.getexif`, which for a PNG decodes all pixels to see what is behind them.
        return Image.Image.getexif(image).get(Base.Orientation, 1)
    except Exception:  # no reason to refuse the image
        return 1


def find_images(paths: Iterable[AnyPath], suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Return files as they are given, and for each folder the images below it, sorted.

    A file is an image by its suffix; hidden files and folders are left out. Missing paths are kept, to be reported
    when they are read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not os.path.isdir(path):  # unlike `Path.is_dir`, whatever the name or the permissions
            found.append(path)
            continue
        below = (file for file in path.rglob("*") if file.suffix.lower() in suffixes and not os.path.isdir(file))
        found += (file for file in sorted(below) if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return found


class _LimitedReads(io.BufferedReader):
    """A file that can be read in at most `MAX_READS` calls."""

    def __init__(self, file: BinaryIO):
        super().__init__(file)  # pyright: ignore[reportArgumentType] (a buffered file will do as well)
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError("its header has no end")
        return super().read(size)


def _tiff_strips(file: BinaryIO) -> int:
    """Return how many strips or tiles the first image of a TIFF announces, 0 for other formats."""
    header = file.read(16)
    order: Literal["little", "big"] = "little" if header[:2] == b"II" else "big"
    version = int.from_bytes(header[2:4], order) if header[:2] in (b"II", b"MM") else 0
    # Bytes of an offset, of the number of entries, and of an entry, as in a TIFF and in a BigTIFF.
    word, number, entry = {42: (4, 2, 12), 43: (8, 8, 20)}.get(version, (0, 0, 1))
    file.seek(int.from_bytes(header[word : 2 * word], order))
    entries = min(int.from_bytes(file.read(number), order), 2**16)
    table = file.read(entries * entry) if word else b""
    file.seek(0)
    fields = [table[start : start + 4 + word] for start in range(0, len(table), entry)]
    strips = (int.from_bytes(field[4:], order) for field in fields if int.from_bytes(field[:2], order) in STRIP_TAGS)
    return max(strips, default=0)


class _PillowLimit:
    """Lifts Pillow's own limit of pixels, one for the process, while any thread opens a file. No thread waits."""

    def __init__(self) -> None:
        self._lock, self._opening = threading.Lock(), 0
        self._others: int | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._opening == 0:
                self._others, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            self._opening += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._opening -= 1
            if self._opening == 0:
                Image.MAX_IMAGE_PIXELS = self._others


_no_pillow_limit = _PillowLimit()


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    # Not by `ImageOps.exif_transpose`, which writes the metadata anew and fails where only that cannot be done.
    turn = TURNS.get(exif_orientation(image))
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    rgb = image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _to_8_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in INTEGERS_OF_16_BITS):
        values, low, high = np.array(image, dtype=np.float32), 0.0, 65535.0
    else:
        values = np.array(image, dtype=np.float64)  # 32-bit integers are exact in it
        finite = np.isfinite(values)
        low, high = float(values.min(where=finite, initial=np.inf)), float(values.max(where=finite, initial=-np.inf))
        if low > high:  # not one is finite
            low = high = 0.0
        np.nan_to_num(values, copy=False, nan=low, posinf=high, neginf=low)
    values -= low
    values *= 255 / max(high - low, 1e-12)
    return Image.fromarray(values.round(out=values).astype(np.uint8))


def image_size(path: AnyPath, *, decode: bool = False) -> tuple[int, int]:
    """Return (height, width) of an image as `load_image` turns it.

    `decode` reads the whole file, which finds truncated ones, not only its start.
    """
    with open_image(path) as image:
        width, height = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow turns its size, but not yet its orientation
            width, height = image.tag_v2[Base.ImageWidth], image.tag_v2[Base.ImageLength]
        if isinstance(image, PngImagePlugin.PngImageFile) and image.fp and _metadata_behind_pixels(image.fp):
            image.load()
        orientation = exif_orientation(image)
        if decode:
            image.load()
    return (width, height) if orientation in TURNED_ON_ITS_SIDE else (height, width)


def read_in_threads(
    read: Callable[[Item], Result], items: Iterable[Item], on_progress: Callable[[], None] | None = None
) -> Iterator[Result | ImageError]:
    """Call a function for many items at once; yield its results in order, or the `ImageError`s that it raised."""

    def result_or_error(item: Item) -> Result | ImageError:
        try:
            return read(item)
        except ImageError as error:
            return error

    with ThreadPoolExecutor(READERS) as executor:
        for result in executor.map(result_or_error, items):
            yield result
            if on_progress is not None:
                on_progress()


def _metadata_behind_pixels(file: IO[bytes]) -> bool:
    """True if a PNG may have an orientation behind its pixels, from the names of its chunks alone."""
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


def limit_aspect_ratio(image: Image.Image) -> Image.Image:
    """Cut the ends off a very long image: a center crop drops them anyway, but only after enlarging them."""
    longest = LARGEST_ASPECT * min(image.size)
    width, height = min(image.width, longest), min(image.height, longest)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image if (width, height) == image.size else image.crop((left, top, left + width, top + height))
