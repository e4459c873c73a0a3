"""Write a folder with a page that shows a slide, to zoom into, with maps over it. It loads nothing else.

DIR/index.html
DIR/tiles/LEVEL/ROW_COLUMN.jpg    level 0 is the finest; each further one is half as large
DIR/overlays/NUMBER.png
"""

from __future__ import annotations

import errno
import html
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from inline_attention.analysis.attention_map import AttentionMaps, EvidenceMap
from inline_attention.data.slides import Slide
from inline_attention.support.files import replace_folder
from inline_attention.support.text import printable

TILE = 512
LARGEST_SIDE = 16384  # pixels; larger slides are shown reduced
JPEG_QUALITY = 85


def write_slide_page(
    folder: str | os.PathLike[str],
    slide: Slide,
    maps: Sequence[AttentionMaps],
    note: str,
    evidence: Sequence[EvidenceMap] = (),
) -> Path:
    """Write the page of a slide; returns `index.html`. Maps are of `measure_slide_maps` and `measure_slide_evidence`.

    An earlier page in the folder is replaced when the new one is complete. Slides above `LARGEST_SIDE` are reduced.
    """
    folder = Path(folder)
    if folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "a link, whose target is not replaced", str(folder))
    with replace_folder(folder) as new:
        (new / "overlays").mkdir()
        step = -(-max(slide.size) // LARGEST_SIDE)
        height, width = (-(-side // step) for side in slide.size)
        pyramid = _Pyramid(new / "tiles", height, width)
        band = TILE * step
        for top in range(0, slide.size[0], band):
            pyramid.add(_reduced(slide.read_rows(top, min(top + band, slide.size[0])), step))
        pyramid.finish()
        overlays = _write_overlays(new / "overlays", evidence, maps, 1 / step)
        content = {"width": width, "height": height, "tile": TILE, "levels": pyramid.sizes, "overlays": overlays}
        values = {
            "TITLE": html.escape(printable(slide.path.name)),
            "NOTE": html.escape(note),
            "SLIDE": json.dumps(content).replace("<", "\\u003c"),
        }
        page = (files("inline_attention.analysis") / "slide_page.html").read_text(encoding="utf-8")
        # In one pass: a value may contain what looks like a place.
        page = re.sub("@([A-Z]+)@", lambda place: values[place[1]], page)
        (new / "index.html").write_text(page, encoding="utf-8")
    return folder / "index.html"


class _Pyramid:
    """Tiles of an image that comes in bands, and those of its halves, in memory of a band each."""

    def __init__(self, folder: Path, height: int, width: int, level: int = 0) -> None:
        self.folder, self.width, self.level = folder, width, level
        self.rows = torch.empty(3, 0, width, dtype=torch.uint8)  # [3, rows, width], not written yet
        self.written = 0  # rows of tiles
        (folder / str(level)).mkdir(parents=True)
        is_small = max(height, width) <= TILE
        self.coarser = None if is_small else _Pyramid(folder, -(-height // 2), -(-width // 2), level + 1)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and columns of tiles of this level and all coarser ones."""
        return [(self.written, -(-self.width // TILE)), *([] if self.coarser is None else self.coarser.sizes)]

    def add(self, rows: Tensor) -> None:
        """Take uint8 rows `[3, rows, width]`."""
        self.rows = torch.cat([self.rows, rows], dim=1)
        while self.rows.shape[1] >= TILE:
            self._write(self.rows[:, :TILE])
            self.rows = self.rows[:, TILE:]

    def finish(self) -> None:
        """Write what is left."""
        if self.rows.shape[1]:
            self._write(self.rows)
        if self.coarser is not None:
            self.coarser.finish()

    def _write(self, band: Tensor) -> None:
        for column, left in enumerate(range(0, self.width, TILE)):
            pixels = band[:, :, left : left + TILE].permute(1, 2, 0).contiguous().numpy()
            path = self.folder / str(self.level) / f"{self.written}_{column}.jpg"
            Image.fromarray(pixels).save(path, quality=JPEG_QUALITY)
        self.written += 1
        if self.coarser is not None:
            self.coarser.add(_reduced(band, 2))


def _reduced(rows: Tensor, step: int) -> Tensor:
    """Return the means of squares of uint8 pixels `[3, rows, width]`."""
    if step == 1:
        return rows
    return F.avg_pool2d(rows[None].float(), step, ceil_mode=True)[0].round().byte()


def _write_overlays(
    folder: Path, evidence: Sequence[EvidenceMap], maps: Sequence[AttentionMaps], scale: float
) -> list[dict[str, object]]:
    """Write a picture per map: red above the mean evidence or uniform weight, blue below, opaque far from it."""
    overlays: list[dict[str, object]] = []

    def add(name: str, beyond: Tensor, side: float, **further: object) -> None:
        values = beyond.numpy()
        share = np.clip(np.abs(values) / max(float(np.quantile(np.abs(values), 0.995)), 1e-9), 0, 1)
        color = np.where(values[..., None] > 0, (214, 39, 40), (31, 90, 200))
        pixels = np.concatenate([color, 255 * share[..., None]], axis=-1).astype(np.uint8)
        file, (rows, columns) = f"{len(overlays)}.png", values.shape
        Image.fromarray(pixels).save(folder / file)
        size = {"width": side * columns, "height": side * rows}
        overlays.append({"name": name, "file": f"overlays/{file}", **size, **further})

    for item in evidence:
        name = f"{item.label}: evidence for {printable(item.class_name)}, logit {item.logit:.2f}"
        add(name, item.values - item.values.mean(), item.cell_pixels * scale)
    for item in maps:
        for token_map in item.maps:
            side, (row, column) = item.cell_pixels * scale, token_map.token
            name = f"{item.label}, layer {item.layer}: cell {row},{column}"
            add(name, token_map.times_uniform - 1, side, query=[column * side, row * side, side])
    return overlays
