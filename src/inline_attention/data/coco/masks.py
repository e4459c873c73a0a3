"""Masks as COCO writes them: polygons, and run lengths as numbers or packed into text.

Run lengths go down the columns of a mask. They count zeros and ones in turn, zeros first.
Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul, sub
from types import ModuleType
from typing import Any

import numpy as np

from inline_attention.data.sources import DataError
from inline_attention.support.text import install_command

Extent = tuple[float, float, float, float]  # left, top, right, bottom in pixels
LONGEST_PACKED_NUMBER = 8  # characters, for 40 bits
LONGEST_OUTLINE = 2**28  # pixels that a polygon's outline may pass; drawing it takes memory for each


class MaskError(ValueError):
    """A segmentation is not what the format allows; the message says what is wrong with it."""


class MaskSizeError(MaskError):
    """A mask is of another size than its image."""


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """Return the run lengths of a `[H, W]` mask as numbers: exact, and readable without any library."""
    flat = np.asarray(mask, dtype=bool).ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], changes, [flat.size]])).tolist()
    if flat[0]:
        counts.insert(0, 0)
    return {"size": list(mask.shape), "counts": counts}


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Decode a list of polygons or a dictionary of run lengths to `[H, W]` uint8 of zeros and ones.

    Raises `MaskError` if it is malformed, and `DataError` if it takes a library that is not installed.
    """
    if isinstance(segmentation, dict):
        return _decode_run_lengths(segmentation, height, width)
    return mask_library().decode(_drawn(_polygons(segmentation, height, width), height, width))


def mask_extent(segmentation: Any, height: int, width: int) -> Extent | None:
    """Return the extent of a segmentation within the image; None if it covers no pixel. Raises as `decode_mask` does.

    Only polygons so small or thin that they may fall between pixels are drawn for it, which makes this fit for checking
    a million of them.
    """
    if isinstance(segmentation, dict):
        return extent_of(_decode_run_lengths(segmentation, height, width))
    polygons = _polygons(segmentation, height, width)
    certain = any(_surely_covers_a_pixel(polygon, height, width) for polygon in polygons)
    if not certain and not mask_library().area(_drawn(polygons, height, width)):
        return None
    left, top = (float(max(0, min(min(polygon[axis::2]) for polygon in polygons))) for axis in (0, 1))
    right = float(min(width, max(max(polygon[0::2]) for polygon in polygons)))
    bottom = float(min(height, max(max(polygon[1::2]) for polygon in polygons)))
    return (left, top, right, bottom) if left < right and top < bottom else None


def extent_of(mask: np.ndarray) -> Extent | None:
    """Return the extent of the ones in a `[H, W]` mask; None if there are none."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def valid_polygons(segmentation: Any, height: int, width: int) -> list[list[float]]:
    """Return the polygons that can be drawn: three points or more, none of them far outside of the image."""
    polygons = segmentation if _is_sequence(segmentation) else ()
    return [polygon for polygon in polygons if _is_polygon(polygon, height, width)]


def with_whole_size(segmentation: Any) -> Any:
    """Write a size of run lengths such as 480.0 as a whole number, which evaluation needs; other sizes stay."""
    size = segmentation.get("size") if isinstance(segmentation, dict) else None
    if not isinstance(size, list):
        return segmentation
    whole = [int(side) if isinstance(side, float) and side.is_integer() else side for side in size]
    return {**segmentation, "size": whole}


def mask_library() -> ModuleType:
    """Import faster-coco-eval's masks; raises `DataError` if they are not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        missing = "polygons of COCO are decoded by faster-coco-eval, which is not installed"
        raise DataError(f"{missing}: {install_command('detection')}") from error
    return mask


def _decode_run_lengths(segmentation: dict[str, Any], height: int, width: int) -> np.ndarray:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(size, (list, tuple)) or not isinstance(counts, (list, str, bytes)):
        raise MaskError("run lengths need a list 'size' and a list or text 'counts'")
    if not all(isinstance(side, int) for side in size):
        raise MaskError(f"the 'size' of run lengths must be whole numbers, got {list(size)}")
    if list(size) != [height, width]:
        raise MaskSizeError(f"the mask's (height, width) is {tuple(size)}, the image's {(height, width)}")
    numbers = counts if isinstance(counts, list) else _unpacked(counts)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or sum(numbers) != height * width:
        raise MaskError(f"run lengths must be whole numbers that add up to the {height * width:,} pixels of the image")
    values = (np.arange(len(numbers)) % 2).astype(np.uint8)
    return np.repeat(values, numbers).reshape((height, width), order="F")


def _unpacked(text: str | bytes) -> list[int]:
    """Return the run lengths that are packed into a text.

    A number takes groups of five bits, the lowest first, in characters from "0" on; a sixth bit says that more follow.
    From the fourth on, numbers are differences to the last but one.
    """
    raw = text.encode("latin1", "replace") if isinstance(text, str) else text
    codes = np.frombuffer(raw, np.uint8).astype(np.int64) - ord("0")
    last = (codes & 0x20) == 0
    if not len(codes) or codes.min() < 0 or codes.max() > 0x3F or not last[-1]:
        raise MaskError("packed run lengths are damaged")
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    lengths = np.diff(np.append(starts, len(codes)))
    if lengths.max() > LONGEST_PACKED_NUMBER:
        raise MaskError("packed run lengths are damaged: a number is too long")
    places = np.arange(len(codes)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((codes & 0x1F) << (5 * places), starts)
    numbers -= np.where(codes[last] & 0x10, 1 << (5 * lengths), 0)  # the highest bit is the sign
    numbers[1::2], numbers[2::2] = np.cumsum(numbers[1::2]), np.cumsum(numbers[2::2])
    return numbers.tolist()


def _polygons(segmentation: Any, height: int, width: int) -> list[list[float]]:
    """Return the polygons that can be drawn, at least one."""
    if polygons := valid_polygons(segmentation, height, width):
        return polygons
    if not segmentation:
        raise MaskError("there is no mask")
    if not isinstance(segmentation, list):
        kind = type(segmentation).__name__
        raise MaskError(f"a segmentation is a list of polygons or a dictionary of run lengths, got {kind}")
    raise MaskError("no polygon has three points or more, all finite and near the image")


def _drawn(polygons: list[list[float]], height: int, width: int) -> Any:
    """Packed run lengths of all that lies in one of the polygons."""
    library = mask_library()
    return library.merge(library.frPyObjects(polygons, height, width))


def _surely_covers_a_pixel(polygon: list[float], height: int, width: int) -> bool:
    """True if a polygon that does not wind around anything twice surely covers a pixel; it is not drawn.

    A region whose area is more than half its perimeter holds a point of the unit grid, such as the center of a pixel
    (Bender 1962). It takes twice that here, as drawing rounds corners, and the perimeter is taken along the axes.
    """
    x, y = polygon[0::2], polygon[1::2]
    if min(x) < 0 or min(y) < 0 or max(x) > width or max(y) > height:
        return False
    # Lists instead of arrays, which take longer to make than to use: most polygons have few corners.
    next_x, next_y = [*x[1:], x[0]], [*y[1:], y[0]]
    area = abs(sum(map(mul, x, next_y)) - sum(map(mul, next_x, y))) / 2
    return area > _perimeter(x, y)


def _perimeter(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the length of a polygon's outline, taken along the axes."""
    return sum(sum(map(abs, map(sub, [*line[1:], line[0]], line))) for line in (x, y))


def _is_polygon(polygon: Any, height: int, width: int) -> bool:
    # Checked for all: the library does not notice a missing coordinate, and hangs on one that is not finite.
    if not _is_sequence(polygon) or len(polygon) < 6 or len(polygon) % 2:
        return False
    # Whole numbers are finite, though perhaps too large for `math.isfinite`.
    if not all(isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) for value in polygon):
        return False
    x, y = polygon[0::2], polygon[1::2]
    if not (-width <= min(x) and max(x) <= 2 * width and -height <= min(y) and max(y) <= 2 * height):
        return False
    return 3 * len(x) * (height + width) <= LONGEST_OUTLINE or _perimeter(x, y) <= LONGEST_OUTLINE


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
