"""Token grids of any size: padding, masks of images padded inside a batch, windows, resampled position embeddings.

Shapes: `B` batch, `h`×`w` grid, `C` channels, `L` tokens of a window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Grid(NamedTuple):
    """The token grid of a batch.

    Attributes:
        height: Rows.
        width: Columns.
        extents: `[B, 2]` rows and columns that belong to each image, from the top left; None when all do.
    """

    height: int
    width: int
    extents: torch.Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    def mask(self) -> torch.Tensor | None:
        """`[B, h·w]` bool, True for a token of the image; None when all are."""
        if self.extents is None:
            return None
        rows = torch.arange(self.height, device=self.extents.device)
        columns = torch.arange(self.width, device=self.extents.device)
        inside = (rows < self.extents[:, :1])[:, :, None] & (columns < self.extents[:, 1:])[:, None, :]
        return inside.flatten(1)

    def coarser(self, stride: int) -> Grid:
        """The grid after a merging of stride×stride tokens, incomplete ones included."""
        extents = None if self.extents is None else -(-self.extents // stride)
        return Grid(-(-self.height // stride), -(-self.width // stride), extents)


def tokens_to_map(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`[B, h·w, C]` → `[B, C, h, w]` (a view), zero where a token belongs to no image."""
    mask = grid.mask()
    if mask is not None:
        tokens = tokens.masked_fill(~mask[:, :, None], 0)
    return torch.unflatten(tokens, 1, grid.size).permute(0, 3, 1, 2)


def pad_to_multiple(x: torch.Tensor, multiple: tuple[int, int], dims: tuple[int, int]) -> torch.Tensor:
    """Append zeros along two adjacent dimensions until each is a multiple."""
    missing = tuple(-x.shape[dim] % size for dim, size in zip(dims, multiple, strict=True))
    if not torch.compiler.is_exporting() and missing == (0, 0):  # a graph for every size must not ask
        return x
    trailing = [0, 0] * (x.dim() - 1 - max(dims))
    return F.pad(x, [*trailing, 0, missing[1], 0, missing[0]])


def to_windows(x: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
    """`[B, h, w, ...]` → `[B, windows, L, ...]`; h and w are multiples of the window."""
    batch, height, width, *rest = x.shape
    rows, columns = height // window[0], width // window[1]
    x = x.reshape(batch, rows, window[0], columns, window[1], *rest).transpose(2, 3)
    return x.reshape(batch, rows * columns, window[0] * window[1], *rest)


def from_windows(x: torch.Tensor, window: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """`[B, windows, L, ...]` → `[B, h, w, ...]`; the inverse of `to_windows`."""
    batch, _, _, *rest = x.shape
    rows, columns = size[0] // window[0], size[1] // window[1]
    x = x.reshape(batch, rows, columns, window[0], window[1], *rest).transpose(2, 3)
    return x.reshape(batch, size[0], size[1], *rest)


def resample_positions(positions: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Position embeddings `[1, h·w, C]` of an old grid, bilinearly for a new one; exact where both are equal."""
    if not torch.compiler.is_exporting() and old == new:
        return positions
    image = torch.unflatten(positions, 1, old).permute(0, 3, 1, 2)
    # In float32 at least: half-precision interpolation is missing or coarse on some devices.
    resampled = F.interpolate(
        image.to(torch.promote_types(image.dtype, torch.float32)), size=new, mode="bilinear", align_corners=False
    )
    return resampled.to(positions.dtype).flatten(2).transpose(1, 2)


def positions_for(positions: torch.Tensor, native: tuple[int, int], grid: Grid) -> torch.Tensor:
    """Position embeddings of a batch, `[1 or B, h·w, C]`: each image gets those of its own extent, as if alone."""
    if grid.extents is None:
        return resample_positions(positions, native, grid.size)
    canvas = positions.new_zeros(grid.extents.shape[0], grid.height, grid.width, positions.shape[2])
    for index, (height, width) in enumerate(grid.extents.tolist()):
        resampled = resample_positions(positions, native, (height, width))
        canvas[index, :height, :width] = torch.unflatten(resampled[0], 0, (height, width))
    return canvas.flatten(1, 2)
