"""Token grids of any size: padding, masks of images padded inside a batch, windows, resampled position embeddings.

Shapes: `B` batch, `h`×`w` grid, `C` channels, `L` tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.layers.cache import cache_by_shape
from inline_attention.ops.tracing import are_open, plain_sizes

MOST_INTERPOLATED = 2**31 - 1  # elements of one result; PyTorch's GPU kernels index with 32 bits


class Grid:
    """The token grid of a batch.

    What depends on sizes or masks is a method. torch.fx, which knows neither, records a method as one call.

    `extents` are the rows and columns of each image, from the top left; None if all images fill the grid. They are
    host numbers: reading them from a device would wait for all work that was launched before.

    `whole` is the grid that this one has the rows of, from `first_row` on: itself, unless it has only some.
    """

    whole: Grid
    first_row = 0
    is_split = False

    def __init__(
        self,
        height: int,
        width: int,
        extents: Iterable[tuple[int, int]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.size = height, width
        extents = tuple(extents or ())
        self.extents = None if all(extent == self.size for extent in extents) else extents
        self.device = device
        self.whole = self
        self._mask: Tensor | None = None  # no cached_property: Dynamo cannot follow its lock

    def mask(self) -> Tensor | None:
        """`[B, h·w]` bool, True for a token of the image; None when all are."""
        if self._mask is None and self.extents is not None:
            self._mask = rectangle_mask(self.size, self.extents, self.device)
        return self._mask

    def token_mask(self, num_prefix_tokens: int) -> Tensor | None:
        """`[B, N]` bool, True for prefix tokens and tokens of the image; None when all are."""
        mask = self.mask()
        if mask is None or num_prefix_tokens == 0:
            return mask
        return torch.cat([mask.new_ones(mask.shape[0], num_prefix_tokens), mask], dim=1)

    def clear_padding(self, tokens: Tensor, num_prefix_tokens: int = 0) -> Tensor:
        """Set tokens that belong to no image to zero. `tokens` `[B, N, C]` may be the first ones only."""
        mask = self.token_mask(num_prefix_tokens)
        return tokens if mask is None else tokens.masked_fill(~mask[:, : tokens.shape[1], None], 0)

    def to_map(self, tokens: Tensor) -> Tensor:
        """`[B, h·w, C]` → `[B, C, h, w]` (a view), zero where a token belongs to no image."""
        return torch.unflatten(self.clear_padding(tokens), 1, self.size).permute(0, 3, 1, 2)

    def positions(self, table: Tensor, native: tuple[int, int]) -> Tensor:
        """Position embeddings of a batch, `[1 or B, h·w, C]`: each image gets those of its own extent, as if alone.

        `table` `[1, n, C]` are those of the grid `native`.
        """
        whole, first, end = self.whole, self.first_row, self.first_row + self.size[0]
        if whole.extents is None:
            return resample_positions(table, native, whole.size, rows=(first, end) if self.is_split else None)
        canvases: list[Tensor] = []  # not a dict by extent: torch.compile would compile again for every new key
        distinct = 0
        for index, (height, width) in enumerate(whole.extents):
            if index > 0 and (height, width) == whole.extents[index - 1]:
                canvases.append(canvases[-1])
                continue
            rows = (first, max(min(end, height), first)) if self.is_split else None
            resampled = resample_positions(table, native, (height, width), rows=rows)
            resampled = torch.unflatten(resampled, 1, (-1, width))
            below = self.size[0] - resampled.shape[1]
            canvases.append(F.pad(resampled, (0, 0, 0, self.size[1] - width, 0, below)).flatten(1, 2))
            distinct += 1
        return canvases[0] if distinct == 1 else torch.cat(canvases)

    def token_counts(self) -> Tensor | None:
        """Number of tokens `[B]` of each image in the whole grid; None when all images fill it."""
        mask = self.whole.mask()
        return None if mask is None else mask.sum(1)

    def coarser(self, stride: int) -> Grid:
        """The grid after a merging of stride×stride tokens, incomplete ones included."""
        size, *extents = [
            (ceil_divide(rows, stride), ceil_divide(columns, stride))
            for rows, columns in (self.size, *(self.extents or ()))
        ]
        return Grid(*size, extents, self.device)


class GridRows(Grid):
    """Some rows of a taller grid, whose images all fill it."""

    is_split = True

    def __init__(self, whole: Grid, first_row: int, rows: int) -> None:
        super().__init__(rows, whole.size[1], device=whole.device)
        self.whole, self.first_row = whole, first_row

    def coarser(self, stride: int) -> GridRows:
        """The grid after a merging of stride×stride tokens; the first row is one of theirs."""
        return GridRows(self.whole.coarser(stride), self.first_row // stride, ceil_divide(self.size[0], stride))


def rectangle_mask(size: tuple[int, int], extents: Sequence[tuple[int, int]], device: torch.device | None) -> Tensor:
    """`[B, h·w]` bool, True in the given number of rows and columns at the top left of each image."""
    bounds = torch.tensor(extents, dtype=torch.int64).reshape(-1, 2)
    bounds = bounds.to(device, non_blocking=True)  # a blocking copy would wait for all work that was launched before
    rows, columns = (torch.arange(side, device=device) for side in size)
    return ((rows < bounds[:, :1])[:, :, None] & (columns < bounds[:, 1:])[:, None, :]).flatten(1)


def ceil_divide(size: int, step: int) -> int:
    """Return size / step, rounded up. Not -(-size // step): ONNX rounds quotients toward zero."""
    return (size + step - 1) // step


def as_pairs(extents: Tensor) -> list[tuple[int, int]]:
    """`[B, 2]` as Python pairs; a tensor on a GPU is waited for."""
    pairs = cast(list[list[int]], extents.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [(height, width) for height, width in pairs]


def extents_of(mask: Tensor) -> list[tuple[int, int]]:
    """Rows and columns of each image, whose rectangles at the top left are true in `[B, h, w]`."""
    return as_pairs(torch.stack([mask.any(2).sum(1), mask.any(1).sum(1)], dim=1))


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Append rows and columns of zeros to `[B, C, H, W]` until both are multiples."""
    _, _, height, width = plain_sizes(x.shape)
    below = ceil_divide(height, multiple) * multiple - height
    beside = ceil_divide(width, multiple) * multiple - width
    if not are_open(height, width) and below == 0 and beside == 0:  # a graph for every size must not ask
        return x
    return F.pad(x, (0, beside, 0, below))


class Windows(NamedTuple):
    """A division of an h×w grid into windows that may reach over its lower and right edge.

    With a shift, the grid (padded to whole windows) is rolled up and to the left before it is divided. L is the
    number of tokens of a window, W the number of windows.
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    counts: tuple[int, int]

    @classmethod
    def cover(cls, grid: tuple[int, int], window: tuple[int | None, int | None]) -> Windows:
        """Divide a grid; None in `window` stands for the whole height or width."""
        grid = (grid[0], grid[1])  # a list cannot be a key of a cache
        # In an exported graph that must serve every size, one window or several are different cases: always several.
        extra = 1 if are_open(*grid) else 0
        (height, rows), (width, columns) = (
            (extent, 1) if size is None else (size, ceil_divide(extent, size) + extra)
            for extent, size in zip(grid, window, strict=True)
        )
        return cls(grid, (height, width), (rows, columns))

    @property
    def is_open(self) -> bool:
        """True if the grid may have any size: an exported graph must serve them all."""
        return are_open(*self.grid)

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of all windows together."""
        return self.counts[0] * self.window[0], self.counts[1] * self.window[1]

    def is_exact(self) -> bool:
        """True if the windows cover the grid exactly; always False for a grid of any size."""
        return not self.is_open and self.padded == self.grid

    def split(self, x: Tensor, shift: tuple[int, int] = (0, 0)) -> Tensor:
        """Tokens `[B, h·w, ...]` → windows `[B · W, height, width, ...]`.

        Places beyond the edge hold zeros; of a grid of any size they hold some token.
        """
        if self.is_open:
            # By index: an exporter cannot prove that a dimension of any length divides into windows.
            sample = torch.arange(x.shape[0], device=x.device)[:, None] * (self.grid[0] * self.grid[1])
            sample = (sample + torch.zeros_like(self._window_numbers(x.device))).flatten()
            return x.flatten(0, 1)[
                sample[:, None, None] + self.repeat(_tokens(x.device, self, shift)[None], x.shape[0])
            ]
        (rows, columns), (height, width) = self.counts, self.window
        rest = x.shape[2:]
        x = torch.unflatten(x, 1, self.grid)
        if not self.is_exact():
            trailing = [0, 0] * len(rest)
            x = F.pad(x, [*trailing, 0, self.padded[1] - self.grid[1], 0, self.padded[0] - self.grid[0]])
        if shift != (0, 0):
            x = torch.roll(x, (-shift[0], -shift[1]), dims=(1, 2))
        x = x.reshape(x.shape[0], rows, height, columns, width, *rest).transpose(2, 3)
        return x.reshape(-1, height, width, *rest)

    def join(self, x: Tensor, batch: int, shift: tuple[int, int] = (0, 0)) -> Tensor:
        """Windows `[B · W, height, width, C]` → tokens `[B, h·w, C]`: the inverse of `split`."""
        (rows, columns), (height, width) = self.counts, self.window
        if self.is_open:
            row, column = (
                _unroll(torch.arange(extent, device=x.device), step, total)
                for extent, step, total in zip(self.grid, shift, self.padded, strict=True)
            )
            down, inner_row = _divide(row[:, None], height, rows)
            across, inner_column = _divide(column[None, :], width, columns)
            sample = torch.arange(batch, device=x.device)[:, None, None]
            window = sample * (rows * columns) + down * columns + across
            return x[window, inner_row[None], inner_column[None]].flatten(1, 2)
        x = x.reshape(batch, rows, columns, height, width, x.shape[3]).transpose(2, 3)
        x = x.reshape(batch, *self.padded, x.shape[5])
        if shift != (0, 0):
            x = torch.roll(x, shift, dims=(1, 2))
        return x[:, : self.grid[0], : self.grid[1]].flatten(1, 2)

    def flatten(self, x: Tensor) -> Tensor:
        """`[B · W, height, width, ...]` → `[B · W, L, ...]`, in an order that only `unflatten` needs to know."""
        height, width = self.window
        if not self.is_open:
            return x.flatten(1, 2)
        # Concatenated: an exporter cannot prove that a dimension of any length may be merged.
        if _is_constant(height):
            return torch.cat([x[:, row] for row in range(height)], dim=1)
        return torch.cat([x[:, :, column] for column in range(width)], dim=1)

    def unflatten(self, x: Tensor) -> Tensor:
        """`[B · W, L, ...]` → `[B · W, height, width, ...]`: the inverse of `flatten`."""
        height, width = self.window
        if not self.is_open:
            return torch.unflatten(x, 1, self.window)
        if _is_constant(height):
            return torch.stack([x[:, row * width : (row + 1) * width] for row in range(height)], dim=1)
        return torch.stack([x[:, column * height : (column + 1) * height] for column in range(width)], dim=2)

    def repeat(self, x: Tensor, batch: int) -> Tensor:
        """Repeat data of the windows, `[1 or B, W, ...]`, for every sample: `[B · W, ...]`."""
        if self.is_open:  # one grid serves the batch
            numbers = self._window_numbers(x.device) + torch.zeros(batch, 1, dtype=torch.long, device=x.device)
            return x[0][numbers.flatten()]
        return x.expand(batch, *x.shape[1:]).flatten(0, 1)

    def inside(self, key_padding_mask: Tensor | None, shift: tuple[int, int], device: torch.device) -> Tensor:
        """`[1 or B, W, height, width]` bool: which places of the windows hold a token, and a real one."""
        inside = _inside(device, self, shift)[None]
        if key_padding_mask is None:
            return inside
        return inside & key_padding_mask[:, _tokens(device, self, shift)]

    def visible(self, key_padding_mask: Tensor | None, shift: tuple[int, int], device: torch.device) -> Tensor:
        """`[1 or B, W, L, L]` bool: which token of a window may look at which. Padding looks at itself."""
        visible = _visible(device, self, shift)
        if key_padding_mask is None:
            return visible[None]
        real = key_padding_mask[:, _tokens(device, self, shift)].flatten(2)
        return (real[:, :, None, :] & visible) | _itself(device, visible.shape[-1])

    def regions(self, shift: tuple[int, int], device: torch.device) -> Tensor:
        """Return `[W, height, width]` integers; they differ for tokens that only the roll made neighbors."""
        row, column = self.coordinates(shift, device)
        return 2 * (row < shift[0]).long() + (column < shift[1]).long()

    def coordinates(self, shift: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column in the padded grid of every place of the windows, `[W, height, width]` each."""
        (rows, columns), (height, width) = self.counts, self.window
        row = torch.arange(rows, device=device)[:, None, None, None] * height
        row = row + torch.arange(height, device=device)[None, None, :, None]
        column = torch.arange(columns, device=device)[None, :, None, None] * width
        column = column + torch.arange(width, device=device)[None, None, None, :]
        row = _roll(row, shift[0], self.padded[0]) + torch.zeros_like(column)
        column = _roll(column, shift[1], self.padded[1]) + torch.zeros_like(row)
        if _is_constant(rows) and rows == 1:
            return row[0], column[0]
        if _is_constant(columns) and columns == 1:
            return row[:, 0], column[:, 0]
        return row.flatten(0, 1), column.flatten(0, 1)

    def _window_numbers(self, device: torch.device) -> Tensor:
        return torch.arange(self.counts[0] * self.counts[1], device=device)


@cache_by_shape
def _inside(device: torch.device, windows: Windows, shift: tuple[int, int]) -> Tensor:
    """`[W, height, width]` bool: which places hold a token."""
    row, column = windows.coordinates(shift, device)
    return (row < windows.grid[0]) & (column < windows.grid[1])


@cache_by_shape
def _tokens(device: torch.device, windows: Windows, shift: tuple[int, int]) -> Tensor:
    """Return the token index at every place, `[W, height, width]`; any token at places beyond the edge."""
    row, column = windows.coordinates(shift, device)
    return row.clamp(max=windows.grid[0] - 1) * windows.grid[1] + column.clamp(max=windows.grid[1] - 1)


@cache_by_shape
def _visible(device: torch.device, windows: Windows, shift: tuple[int, int]) -> Tensor:
    """`[W, L, L]` bool: which token of a window may look at which, as far as the grid says."""
    inside, region = _inside(device, windows, shift).flatten(1), windows.regions(shift, device).flatten(1)
    visible = inside[:, None, :] & (region[:, :, None] == region[:, None, :])
    return visible | _itself(device, visible.shape[-1])


@cache_by_shape
def _itself(device: torch.device, length: int) -> Tensor:
    return torch.eye(length, dtype=torch.bool, device=device)


def _is_constant(size: int | torch.SymInt) -> bool:
    """False for a size that an exporter leaves open."""
    return not isinstance(size, torch.SymInt)


def _roll(index: Tensor, step: int, total: int) -> Tensor:
    """(index + step) modulo total; spelled out because ONNX export knows no remainder by a size."""
    index = index + step
    return torch.where(index >= total, index - total, index)


def _unroll(index: Tensor, step: int, total: int) -> Tensor:
    """(index - step) modulo total."""
    index = index - step
    return torch.where(index < 0, index + total, index)


def _divide(index: Tensor, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Which window an index falls into, and where in it."""
    if _is_constant(count) and count == 1:
        return torch.zeros_like(index), index
    return index // size, index % size


def resample_positions(
    positions: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    num_prefix_tokens: int = 0,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Resample position embeddings `[1, prefix + h·w, C]` bilinearly to a new grid; those of the prefix stay.

    `rows` are the first row and the row after the last to return; all by default.
    """
    if not are_open(*new) and old == new and rows is None:
        return positions
    image = torch.unflatten(positions[:, num_prefix_tokens:], 1, old).permute(0, 3, 1, 2)
    if rows is not None:
        image, new = _resized_rows(image, new[0], rows), (max(rows[1] - rows[0], 0), new[1])
    if are_open(*new) or image.shape[1] * new[0] * new[1] <= MOST_INTERPOLATED:
        resampled = _interpolated(image, new)
    else:
        channels = max(1, MOST_INTERPOLATED // (new[0] * new[1]))
        resampled = torch.cat([_interpolated(part, new) for part in torch.split(image, channels, dim=1)], dim=1)
    resampled = resampled.flatten(2).transpose(1, 2).to(positions.dtype)
    if num_prefix_tokens == 0:
        return resampled
    return torch.cat([positions[:, :num_prefix_tokens], resampled], dim=1)


def _resized_rows(image: Tensor, height: int, rows: tuple[int, int]) -> Tensor:
    """Resize `[B, C, h, w]` bilinearly to a height, and return some of its rows, in float32 at least."""
    if image.shape[2] == height:
        return image[:, :, rows[0] : rows[1]]
    wide = image.to(torch.promote_types(image.dtype, torch.float32))
    row = torch.arange(rows[0], max(rows), device=image.device, dtype=wide.dtype)
    place = ((row + 0.5) * (image.shape[2] / height) - 0.5).clamp(min=0)
    above = place.floor().long()
    below = (above + 1).clamp(max=image.shape[2] - 1)
    return torch.lerp(wide[:, :, above], wide[:, :, below], (place - above)[:, None])


def _interpolated(image: Tensor, size: tuple[int, int]) -> Tensor:
    # In float32 at least: half-precision interpolation is missing or coarse on some devices.
    if not are_open(*size) and image.shape[2:] == size:
        return image
    if not are_open(*size) and size[0] == 0:  # rows below the image, in a padded batch whose rows ranks share
        return image[:, :, :, :1].expand(*image.shape[:3], size[1])
    wide = image.to(torch.promote_types(image.dtype, torch.float32))
    return F.interpolate(wide, size=size, mode="bilinear", align_corners=False).to(image.dtype)
