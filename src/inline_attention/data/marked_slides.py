"""Generate large tiled TIFFs whose class depends on two small marks far apart, so that no tile alone can tell it.

Each slide has two marks, each a ring or a cross with equal probability. The class is "same" or "different". Marks are
at least half a side apart. A slide is drawn tile by tile and written as it is drawn.

    DIR/{train,validation}/{same,different}/000000.tif    pyramids: the image, and copies reduced by 8 and 64
    DIR/slides.csv                                        class, marks and their places (x, y in pixels)
    DIR/slides.json                                       the settings that produce the dataset again
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inline_attention.data.randomness import derived_seed
from inline_attention.data.sources import DataError
from inline_attention.support.files import AnyPath, read_bounded, replace_atomically, write_atomically
from inline_attention.support.untrusted import parse_json

TILE = 256
REDUCTION = 8  # from one level to the next
LEVELS = 3
CLASSES = ("same", "different")
KINDS = ("ring", "cross")
LATTICE = 64  # pixels between the values of the smooth background
BIGTIFF_FROM = 2**31  # bytes of pixels; a TIFF has 32-bit offsets
JPEG_QUALITY = 90
TISSUE = np.array([222.0, 170.0, 196.0])  # the background's mean color
INK = np.array([58.0, 36.0, 110.0])


class Mark(NamedTuple):
    """A mark: its kind, and its center in pixels."""

    kind: str
    x: int
    y: int


@dataclass(frozen=True)
class SlidesPlan:
    """Settings that determine a dataset of slides."""

    images: int = 32  # slides to train on
    validation_images: int = 8
    size: int = 4096  # pixels of a side
    mark_size: int = 96  # pixels of a mark's side
    seed: int = 0

    def __post_init__(self):
        if min(self.images, self.validation_images) < 2:
            raise ValueError("both classes need a slide: at least 2 to train on and 2 to validate on")
        if not 8 <= self.mark_size <= (most := self.size // 8):
            raise ValueError(f"mark_size must be 8 to {most} pixels, an eighth of the size, got {self.mark_size}")


def write_slides(folder: AnyPath, plan: SlidesPlan, *, on_progress: Callable[[], None] | None = None) -> Path:
    """Write a dataset; returns its folder. Slides that are there already are kept, so that a killed generation resumes.

    Raises `DataError` if something else is in the folder, and OSError if nothing can be written there.
    """
    folder = Path(folder)
    manifest = {"kind": "inline slides", **asdict(plan)}
    known = folder / "slides.json"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = None
        with suppress(OSError, ValueError):
            found = parse_json(read_bounded(known, 2**16))
        if found != manifest:
            raise DataError(f"{folder} holds something else, or slides of other settings; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(known, json.dumps(manifest, indent=2) + "\n")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", "split", "class", "first", "first_x", "first_y", "second", "second_x", "second_y"])
    for split, count in (("train", plan.images), ("validation", plan.validation_images)):
        for index in range(count):
            # Classes alternate, so that both are equally frequent.
            label = CLASSES[index % 2]
            marks = place_marks(plan, split, index, label)
            path = folder / split / label / f"{index:06d}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_slide(path, plan.size, marks, plan.mark_size, _seed(plan, split, index))
            writer.writerow([path.relative_to(folder).as_posix(), split, label, *marks[0], *marks[1]])
            if on_progress is not None:
                on_progress()
    write_atomically(folder / "slides.csv", table.getvalue())
    return folder


def place_marks(plan: SlidesPlan, split: str, index: int, label: str) -> tuple[Mark, Mark]:
    """Draw the kinds and places of the marks of a slide. One kind alone says nothing about the class."""
    rng = np.random.default_rng(derived_seed("marks", plan.seed, split, index))
    first = int(rng.integers(2))
    second = first if label == "same" else 1 - first
    low, high = plan.mark_size, plan.size - plan.mark_size
    while True:
        places = rng.integers(low, high, (2, 2))
        if math.dist(*places) >= plan.size / 2:
            (x, y), (other_x, other_y) = places.tolist()
            return Mark(KINDS[first], x, y), Mark(KINDS[second], other_x, other_y)


def write_slide(path: AnyPath, size: int, marks: tuple[Mark, ...], mark_size: int, seed: int) -> None:
    """Draw a slide of size×size pixels and write it as a pyramid of JPEG tiles, BigTIFF if it needs to be.

    Memory holds a row of tiles and the reduced copies, a 64th of the pixels.
    """
    import tifffile

    sizes = [size]
    while len(sizes) < LEVELS and sizes[-1] // REDUCTION >= 16:
        sizes.append(-(-sizes[-1] // REDUCTION))
    draw = _Drawing(size, marks, mark_size, seed)
    reduced = [np.zeros((side, side, 3), dtype=np.uint8) for side in sizes[1:]]

    def tiles(level: int) -> Iterator[np.ndarray]:
        for top, left, height, width in _tiles(sizes[level]):
            tile = draw(top, left, height, width) if level == 0 else reduced[level - 1][top:, left:][:TILE, :TILE]
            if level < len(reduced):
                small = _averaged(tile)
                row, column = top // REDUCTION, left // REDUCTION
                reduced[level][row : row + len(small), column : column + small.shape[1]] = small
            # Tiles at the border are filled up, as the format wants.
            yield np.pad(tile, ((0, TILE - height), (0, TILE - width), (0, 0)), mode="edge")

    with replace_atomically(path) as temporary, tifffile.TiffWriter(
        temporary, bigtiff=3 * size * size >= BIGTIFF_FROM
    ) as file:  # fmt: skip
        for level, side in enumerate(sizes):
            file.write(
                tiles(level), shape=(side, side, 3), dtype=np.uint8, tile=(TILE, TILE), photometric="rgb",
                compression="jpeg", compressionargs={"level": JPEG_QUALITY}, subfiletype=int(level > 0),
                metadata=None, maxworkers=1,
            )  # fmt: skip


def draw_slide(plan: SlidesPlan, split: str, index: int) -> tuple[np.ndarray, str]:
    """Draw a slide in memory; return its pixels `[size, size, 3]`, which no JPEG has changed, and its class."""
    label, size = CLASSES[index % 2], plan.size
    draw = _Drawing(size, place_marks(plan, split, index, label), plan.mark_size, _seed(plan, split, index))
    pixels = np.empty((size, size, 3), dtype=np.uint8)
    for top, left, height, width in _tiles(size):
        pixels[top : top + height, left : left + width] = draw(top, left, height, width)
    return pixels, label


def _tiles(side: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield top, left, height and width of the tiles of a square, row by row."""
    starts = range(0, side, TILE)
    return ((top, left, min(TILE, side - top), min(TILE, side - left)) for top in starts for left in starts)


def _seed(plan: SlidesPlan, split: str, index: int) -> int:
    return derived_seed("slide", plan.seed, split, index)


class _Drawing:
    """A slide as a function: any rectangle of it, the same whatever rectangles are asked for."""

    def __init__(self, size: int, marks: tuple[Mark, ...], mark_size: int, seed: int) -> None:
        self.marks, self.mark_size, self.seed = marks, mark_size, seed
        cells = size // LATTICE + 2
        self.lattice = np.random.default_rng(seed).normal(0, 16, (cells, cells)).astype(np.float32)

    def __call__(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """Return the pixels `[height, width, 3]`; the rectangle is a tile or the rest of one."""
        y, x = np.arange(top, top + height), np.arange(left, left + width)
        shade = self._smooth(y, x)
        noise = np.random.default_rng((self.seed, top // TILE, left // TILE)).normal(0, 9, (TILE, TILE))
        shade = shade + noise[:height, :width]
        pixels = TISSUE + shade[..., None]
        for mark in self.marks:
            covered = self._mark(mark, y, x)
            if covered is not None:
                pixels = np.where(covered[..., None], INK + 0.3 * shade[..., None], pixels)
        return pixels.clip(0, 255).astype(np.uint8)

    def _smooth(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the bilinear background at the pixels."""
        (row, down), (column, across) = (np.divmod(place / LATTICE, 1) for place in (y, x))
        row, column = row.astype(int)[:, None], column.astype(int)
        down, across = down[:, None], across[None]
        corners = [self.lattice[row + i, column + j] for i in (0, 1) for j in (0, 1)]
        upper = corners[0] * (1 - across) + corners[1] * across
        lower = corners[2] * (1 - across) + corners[3] * across
        return upper * (1 - down) + lower * down

    def _mark(self, mark: Mark, y: np.ndarray, x: np.ndarray) -> np.ndarray | None:
        """Return where a mark covers the pixels; None if nowhere."""
        radius = self.mark_size / 2
        down, across = (y - mark.y)[:, None] / radius, (x - mark.x)[None] / radius
        if np.abs(down).min() > 1 or np.abs(across).min() > 1:
            return None
        if mark.kind == "ring":
            distance = np.hypot(down, across)
            return (distance <= 1) & (distance >= 0.6)
        inside = (np.abs(down) <= 1) & (np.abs(across) <= 1)
        return inside & ((np.abs(down) <= 0.25) | (np.abs(across) <= 0.25))


def _averaged(tile: np.ndarray) -> np.ndarray:
    """Return the means of squares of a tile; incomplete squares at its border count what they have."""
    starts = [np.arange(0, side, REDUCTION) for side in tile.shape[:2]]
    sums = np.add.reduceat(np.add.reduceat(tile.astype(np.float32), starts[0], 0), starts[1], 1)
    counts = [np.diff([*start, side]) for start, side in zip(starts, tile.shape[:2], strict=True)]
    return (sums / (counts[0][:, None] * counts[1])[..., None]).round().astype(np.uint8)
