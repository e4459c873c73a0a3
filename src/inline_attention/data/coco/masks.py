"""Masks as COCO writes them: polygons, and run lengths as numbers or packed into text.

Run lengths go down the columns of a mask, first of zeros, then of ones, and so on in turn.
Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from inline_attention.data.sources import DataError


class MaskError(ValueError):
    """A segmentation is not what the format allows; the message says what is wrong with it."""


class MaskSizeError(MaskError):
    """A mask is of another size than its image."""


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """Run lengths of a `[H, W]` mask as numbers: exact, and readable without any library."""
    flat = np.asarray(mask, dtype=bool).ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], changes, [flat.size]])).tolist()
    if flat[0]:
        counts.insert(0, 0)
    return {"size": list(mask.shape), "counts": counts}


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """`[H, W]` uint8 of zeros and ones.

    Args:
        segmentation: As in the file: a list of polygons, or a dictionary of run lengths.
        height: Of the image.
        width: Of the image.

    Raises:
        MaskError: If it is malformed.
        DataError: If it takes a library to decode it that is not installed.
    """
    if isinstance(segmentation, dict):
        return _decode_run_lengths(segmentation, height, width)
    polygons = valid_polygons(segmentation, height, width)
    if not polygons:
        raise MaskError(_polygon_fault(segmentation))
    library = mask_library()
    return library.decode(library.merge(library.frPyObjects(polygons, height, width)))


def mask_extent(segmentation: Any, height: int, width: int) -> tuple[float, float, float, float] | None:
    """Left, top, right and bottom in pixels of what a segmentation covers within the image; None if that is nothing.

    Polygons are not drawn for it, which makes this fit for checking a million of them.

    Raises:
        MaskError: If it is malformed.
        DataError: As for `decode_mask`.
    """
    if isinstance(segmentation, dict):
        return extent_of(_decode_run_lengths(segmentation, height, width))
    polygons = valid_polygons(segmentation, height, width)
    if not polygons:
        raise MaskError(_polygon_fault(segmentation))
    x = np.clip(np.concatenate([polygon[0::2] for polygon in polygons]), 0, width)
    y = np.clip(np.concatenate([polygon[1::2] for polygon in polygons]), 0, height)
    left, top, right, bottom = float(x.min()), float(y.min()), float(x.max()), float(y.max())
    return (left, top, right, bottom) if left < right and top < bottom else None


def extent_of(mask: np.ndarray) -> tuple[float, float, float, float] | None:
    """Left, top, right and bottom in pixels of the ones in a `[H, W]` mask; None if there are none."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def valid_polygons(segmentation: Any, height: int, width: int) -> list[list[float]]:
    """The polygons of a segmentation that can be drawn: three points or more, none of them far outside of the image."""
    if not isinstance(segmentation, Sequence) or isinstance(segmentation, (str, bytes)):
        return []
    return [polygon for polygon in segmentation if _is_polygon(polygon, height, width)]


def with_whole_size(segmentation: Any) -> Any:
    """A segmentation as it is, but for run lengths whose size is written as 480.0: evaluation takes whole numbers only.

    Sizes that are no whole numbers stay; `decode_mask` refuses them.
    """
    size = segmentation.get("size") if isinstance(segmentation, dict) else None
    if not isinstance(size, list) or not any(isinstance(side, float) and side.is_integer() for side in size):
        return segmentation
    whole = [int(side) if isinstance(side, float) and side.is_integer() else side for side in size]
    return {**segmentation, "size": whole}


def mask_library() -> ModuleType:
    """faster-coco-eval's masks.

    Raises:
        DataError: If it is not installed.
    """
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise DataError(
            "polygons and packed run lengths of COCO are decoded by faster-coco-eval, which is not installed: "
            "pip install 'inline-attention[detection]'"
        ) from error
    return mask


def _decode_run_lengths(segmentation: dict[str, Any], height: int, width: int) -> np.ndarray:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(size, (list, tuple)) or not isinstance(counts, (list, str, bytes)):
        raise MaskError("run lengths need a list 'size' and a list or text 'counts'")
    if not all(isinstance(side, int) for side in size):
        raise MaskError(f"the 'size' of run lengths must be whole numbers, got {list(size)}")
    if list(size) != [height, width]:
        raise MaskSizeError(f"the mask's (height, width) is {tuple(size)}, the image's {(height, width)}")
    if isinstance(counts, list):
        return _from_numbers(counts, height, width)
    library = mask_library()
    packed = counts.encode() if isinstance(counts, str) else counts
    try:
        return library.decode({"size": [height, width], "counts": packed})
    except (ValueError, RuntimeError) as error:
        raise MaskError(f"packed run lengths are damaged: {error}") from error


def _from_numbers(counts: list[Any], height: int, width: int) -> np.ndarray:
    if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != height * width:
        raise MaskError(f"run lengths must be whole numbers that add up to the {height * width:,} pixels of the image")
    values = (np.arange(len(counts)) % 2).astype(np.uint8)
    return np.repeat(values, counts).reshape((height, width), order="F")


def _is_polygon(polygon: Any, height: int, width: int) -> bool:
    # Checked for all: the library neither notices a missing coordinate nor comes back from one that is not finite.
    if not isinstance(polygon, Sequence) or isinstance(polygon, (str, bytes)) or len(polygon) < 6 or len(polygon) % 2:
        return False
    # Whole numbers are finite, though perhaps too large for `math.isfinite`.
    if not all(isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) for value in polygon):
        return False
    x, y = polygon[0::2], polygon[1::2]
    return -width <= min(x) and max(x) <= 2 * width and -height <= min(y) and max(y) <= 2 * height


def _polygon_fault(segmentation: Any) -> str:
    if not segmentation:
        return "there is no mask"
    if not isinstance(segmentation, list):
        return f"a segmentation is a list of polygons or a dictionary of run lengths, got {type(segmentation).__name__}"
    return "no polygon has three points or more, all finite and near the image"
