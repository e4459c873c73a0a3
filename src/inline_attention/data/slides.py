"""Read images too large to decode whole: tiled and pyramidal TIFF and BigTIFF, GeoTIFF, and whole-slide formats.

TIFF is read with tifffile, vendors' formats with OpenSlide (extra `slides`). Files may come from strangers: only
regular files are opened, sizes and tables are checked before pixels are decoded, and no file that a header names is
read.
"""

from __future__ import annotations

import io
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from inline_attention.data.images import DEFAULT_MAX_PIXELS, READERS, SUFFIXES, ImageError, image_errors, open_image
from inline_attention.support.files import AnyPath, open_regular
from inline_attention.support.text import first_line

TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8", ".svs", ".qptiff")
VENDOR_SUFFIXES = (".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".czi")
SLIDE_SUFFIXES = frozenset(TIFF_SUFFIXES + VENDOR_SUFFIXES)
MAX_SLIDE_PIXELS = 2**36  # of a level; 262,144²
MAX_LEVELS = 64  # images of a TIFF that are looked at
MAX_TILES = 2**24
LARGEST_TILE_ROW = 2**30  # bytes of one row of tiles, decoded
SAME_SHAPE = 0.02  # relative difference in aspect ratio between levels
ROWS_AT_ONCE = 256  # of a vendor's format
SMALL_TILE = 2**16  # bytes that any compressed tile may have
UPRIGHT = 1
DAMAGED = "is damaged or cut off ({}); copy or export it again"
PREMULTIPLIED, ALPHA = 1, 2  # extra samples that are an alpha channel
JP2K_OF_YCBCR = 33003
# TIFF's numbers of compressions. The second group has a size of its own in each tile.
PLAIN = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "Zstandard"}
WITH_SIZE = {7: "JPEG", 33003: "JPEG 2000", 33004: "JPEG 2000", 33005: "JPEG 2000", 34712: "JPEG 2000", 50001: "WebP"}


class Slide(AbstractContextManager["Slide"]):
    """An image that is read in rows, at one of its levels. Close it, or use it in a `with` statement.

    `level` is the number of the level that is read; 0 is the finest. `level_sizes` are (height, width) in pixels.
    """

    def __init__(self, path: Path, level_sizes: list[tuple[int, int]], level: int) -> None:
        self.path, self.level_sizes = path, level_sizes
        if not 0 <= level < (count := len(level_sizes)):
            shown = ", ".join(f"{width}×{height}" for height, width in level_sizes)
            raise ImageError(path, f"has {count} levels ({shown}), expected 0 to {count - 1}, got level {level}")
        self.level = level
        height, width = self.size
        if height * width > MAX_SLIDE_PIXELS:
            reason = f"has {width}×{height} pixels at level {level}, more than {MAX_SLIDE_PIXELS:,}"
            raise ImageError(path, f"{reason}; choose a coarser level")
        if min(height, width) < 1:
            raise ImageError(path, f"is empty at level {level}: {width}×{height} pixels")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the level."""
        return self.level_sizes[self.level]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `[3, stop - start, width]` of the level as uint8 RGB.

        Threads and forked processes may share a slide.

        Raises:
            ImageError: If tiles are missing or damaged.
            ValueError: If there are no such rows.
        """
        if not 0 <= start <= stop <= self.size[0]:
            raise ValueError(f"expected rows between 0 and {self.size[0]}, got {start} to {stop}")
        with image_errors(self.path, DAMAGED):
            empty = np.empty((0, self.size[1], 3), dtype=np.uint8)
            return torch.from_numpy(np.concatenate([empty, *self._parts(start, stop)])).permute(2, 0, 1)

    def thumbnail(self, most: int = 512) -> Image.Image:
        """Return the level reduced to at most `most` pixels along a side, by averaging."""
        height, width = self.size
        step = -(-max(height, width) // most)
        rows = (self.read_rows(start, min(start + step, height))[None].float() for start in range(0, height, step))
        pixels = torch.cat([avg_pool2d(part, step, ceil_mode=True) for part in rows], dim=2)[0].round().byte()
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield `[rows, width, 3]` uint8, from the top to the bottom."""

    def __exit__(self, *_: object) -> None:
        self.close()


def open_slide(path: AnyPath, level: int = 0) -> Slide:
    """Open a large image at a level, 0 being the finest.

    Raises:
        ImageError: If the file cannot be opened or used, or has no such level.
        ModuleNotFoundError: If the reader of its format is not installed.
    """
    path = Path(path)
    with image_errors(path, DAMAGED):
        return (_VendorSlide if path.suffix.lower() in VENDOR_SUFFIXES else _TiffSlide)(path, level)


def needs_streaming(path: AnyPath, max_pixels: int = DEFAULT_MAX_PIXELS) -> bool:
    """True if a file cannot be decoded whole, so that `open_slide` has to read it in rows, or to say what is wrong."""
    suffix = Path(path).suffix.lower()
    if suffix not in TIFF_SUFFIXES or find_spec("tifffile") is None:
        return suffix in SLIDE_SUFFIXES and suffix not in SUFFIXES
    try:
        with open_image(path, max_pixels=max_pixels):
            return False
    except ImageError:
        return True


class _TiffSlide(Slide):
    def __init__(self, path: Path, level: int) -> None:
        import tifffile

        logging.getLogger("tifffile").addHandler(logging.NullHandler())  # errors are raised, not printed
        Image.init()  # in this thread: others would race for it
        self._file = open_regular(path)
        try:
            self._bytes = os.fstat(self._file.fileno()).st_size
            if self._bytes == 0:
                raise ImageError(path, "is empty; expected a TIFF")
            # Not its `series`: those of some formats name other files.
            pages = _level_pages(tifffile.TiffFile(self._file, name=path.name))
            super().__init__(path, [(int(page.imagelength), int(page.imagewidth)) for page in pages], level)
            self._page = page = pages[level]
            strip = min(page.rowsperstrip, page.imagelength), page.imagewidth
            self._tile_size = (page.tilelength, page.tilewidth) if page.is_tiled else strip
            if problem := self._problem():
                raise ImageError(path, problem)
            # What tifffile reads lazily is read now: threads that decode must not move in the file.
            tables: Any = {"jpegtables": self._page.jpegtables, "jpegheader": self._page.jpegheader}
            self._decode = partial(self._page.decode, **tables)
            self._cached: tuple[int, np.ndarray] | None = None
            self._lock = Lock()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _problem(self) -> str | None:
        """Return why the level cannot be decoded, None if it can."""
        page, known = self._page, PLAIN | WITH_SIZE
        (height, width), (tile_height, tile_width) = self.size, self._tile_size
        self._down, self._across = -(-height // tile_height), -(-width // tile_width)
        self._planes = page.samplesperpixel if int(page.planarconfig) == 2 else 1
        is_known = page.photometric.name in ("RGB", "YCBCR", "MINISBLACK", "MINISWHITE")
        if page.dtype not in (np.uint8, np.uint16) or page.bitspersample not in (8, 16) or not is_known:
            kind = f"{page.bitspersample} bits ({page.dtype}) as {page.photometric.name}"
            return f"has pixels of {kind}; expected RGB or gray of 8 or 16 bits; convert it first"
        if int(page.compression) not in known:
            expected = ", ".join(dict.fromkeys(known.values()))
            return f"has the compression {int(page.compression)}; expected {expected}; convert it first"
        if page.tags.valueof("Orientation", UPRIGHT) != UPRIGHT:
            return "is not stored upright; turn it first"
        tile_bytes = tile_height * tile_width * page.samplesperpixel * page.dtype.itemsize
        if (row_bytes := self._across * tile_bytes) > LARGEST_TILE_ROW:
            excess = f"{row_bytes / 2**30:.1f} GiB, more than {LARGEST_TILE_ROW / 2**30:.0f}"
            return f"has rows of tiles or strips of {excess}; save it as a tiled TIFF"
        count = self._down * self._across * self._planes
        if count > MAX_TILES:
            return f"has {count:,} tiles, more than {MAX_TILES:,}"
        of_count = f"of {count:,} tiles at level {self.level}"
        offsets, sizes = (np.asarray(table, dtype=np.uint64) for table in (page.dataoffsets, page.databytecounts))
        if (listed := min(len(offsets), len(sizes))) < count:
            return f"lists {listed:,} {of_count}"
        offsets, sizes = offsets[:count], sizes[:count]
        if sizes.max(initial=0) > 2 * tile_bytes + SMALL_TILE:
            return f"is damaged: a tile of {tile_bytes:,} bytes is said to take {sizes.max():,}"
        if (missing := (offsets == 0) | (sizes == 0)).any():
            return f"has no data for {missing.sum():,} {of_count}; write it again with all tiles"
        if (beyond := offsets + sizes > self._bytes).any():
            return f"is truncated: {beyond.sum():,} {of_count} lie behind its end; copy it again"
        return None

    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        tile_height, _ = self._tile_size
        with self._lock:
            for row in range(start // tile_height, -(-stop // tile_height)):
                top = row * tile_height
                if self._cached is None or self._cached[0] != row:
                    self._cached = None  # freed before the next one is made
                    self._cached = row, self._tile_row(row)
                yield self._cached[1][max(start - top, 0) : stop - top]

    def _bytes_at(self, offset: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # no position, which forked processes share
            return os.pread(self._file.fileno(), size, offset)
        self._file.seek(offset)
        return self._file.read(size)

    def _tile_row(self, row: int) -> np.ndarray:
        """Return the decoded pixels of one row of tiles, `[rows, width, 3]` uint8."""
        page, (height, width) = self._page, self.size
        tile_height, tile_width = self._tile_size
        rows = min(tile_height, height - row * tile_height)
        colors = 3 if page.samplesperpixel >= 3 else 1
        alpha = page.extrasamples[0] if page.samplesperpixel > colors and page.extrasamples else None
        samples = colors + (alpha in (PREMULTIPLIED, ALPHA))
        planes = samples if self._planes > 1 else 1
        pixels: np.ndarray = np.empty((rows, width, samples), dtype=page.dtype)

        def decode(number: int, content: bytes) -> None:
            plane, column = number // (self._down * self._across), number % self._across
            try:
                if int(page.compression) in WITH_SIZE:
                    with Image.open(io.BytesIO(content), formats=["JPEG", "JPEG2000", "WEBP"]) as image:
                        if image.width > tile_width or image.height > tile_height:
                            raise ValueError(f"it has {image.width}×{image.height} pixels of its own")
                decoded = self._decode(content, number)[0]
            except Exception as error:
                raise ImageError(
                    self.path, f"is damaged: tile {column} of row {row} cannot be decoded ({first_line(error)})"
                ) from error
            left = column * tile_width
            wanted = rows, min(tile_width, width - left)
            if decoded is None or decoded.shape[1] < wanted[0] or decoded.shape[2] < wanted[1]:
                raise ImageError(self.path, f"is damaged: tile {column} of row {row} is too small")
            inner = decoded[0, : wanted[0], : wanted[1]]
            target = pixels[:, left : left + wanted[1]]
            if self._planes > 1:
                target[..., plane] = inner[..., 0]
            else:
                target[...] = inner[..., :samples]

        firsts = [(plane * self._down + row) * self._across for plane in range(planes)]
        numbers = [first + column for first in firsts for column in range(self._across)]
        contents = (self._bytes_at(page.dataoffsets[number], page.databytecounts[number]) for number in numbers)
        with ThreadPoolExecutor(READERS) as threads:  # for this row: those of a process do not survive its fork
            list(threads.map(decode, numbers, contents))
        if pixels.dtype == np.uint16:
            pixels = np.right_shift(pixels, 8).astype(np.uint8)
        pixels, opaque = pixels[..., :colors], pixels[..., colors:]
        if page.photometric.name == "MINISWHITE":
            pixels = 255 - pixels
        is_ycbcr = page.photometric.name == "YCBCR" and int(page.compression) in PLAIN
        if is_ycbcr or int(page.compression) == JP2K_OF_YCBCR:  # tifffile converts JPEG only
            pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels), "YCbCr").convert("RGB"))
        if samples > colors:  # on white, as `load_image` does
            colored = pixels if alpha == PREMULTIPLIED else (pixels * opaque.astype(np.uint16) + 127) // 255
            pixels = np.minimum(colored + (255 - opaque.astype(np.uint16)), 255).astype(np.uint8)
        return pixels if colors == 3 else np.repeat(pixels, 3, axis=2)


class _VendorSlide(Slide):
    def __init__(self, path: Path, level: int) -> None:
        import openslide

        open_regular(path).close()
        self._slide = openslide.OpenSlide(os.fspath(path))
        sizes = [(height, width) for width, height in self._slide.level_dimensions]
        super().__init__(path, sizes, level)

    def close(self) -> None:
        """Close the file."""
        self._slide.close()

    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        scale = self._slide.level_downsamples[self.level]
        for top in range(start, stop, ROWS_AT_ONCE):
            size = self.size[1], min(ROWS_AT_ONCE, stop - top)
            region = self._slide.read_region((0, round(top * scale)), self.level, size)
            # Places that were not scanned are transparent.
            yield np.asarray(Image.alpha_composite(Image.new("RGBA", size, "white"), region))[..., :3]


def _level_pages(tiff: Any) -> list[Any]:
    """Return the first image of a TIFF and its reduced copies, the finest first."""
    first = tiff.pages[0]
    others = [*(first.pages or ())][:MAX_LEVELS]
    with suppress(IndexError):
        for number in range(1, MAX_LEVELS):
            others.append(tiff.pages[number])

    def is_copy(page: Any) -> bool:
        if page.imagelength < 1 or page.imagewidth < 1:
            return True  # named in an error if it is chosen
        aspect = page.imagelength * first.imagewidth / (page.imagewidth * first.imagelength)
        is_smaller = page.imagelength < first.imagelength  # else another plane of a stack
        is_alike = all(getattr(page, name) == getattr(first, name) for name in ("samplesperpixel", "dtype", "is_tiled"))
        return is_smaller and is_alike and abs(aspect - 1) < SAME_SHAPE

    return sorted([first, *filter(is_copy, others)], key=lambda page: page.imagelength, reverse=True)
