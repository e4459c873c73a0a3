"""The softmax attentions of the Swin and CSWin families, on grids of any size.

Places beyond the edge of the grid, or of an image in a padded batch, take part in no softmax and in no 3×3 term.

Shapes: `B` batch, `N` = h·w tokens, `C` channels, `H` heads, `D` = C / H, `L` tokens of a window.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.attention import ProjectedAttention, heads_last
from inline_attention.layers.cache import cache_by_shape
from inline_attention.layers.grids import Windows, extents_of
from inline_attention.layers.row_shards import RowShards, whole_rows
from inline_attention.ops import validation
from inline_attention.ops.tracing import are_open, plain_sizes, unrecorded


class _GridAttention(ProjectedAttention):
    dim: int
    qkv: nn.Linear

    def forward(
        self, x: Tensor, grid_size: tuple[int, int], key_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Mix tokens `[B, N, C]` and project them. The mask `[B, N]` is True inside each image's rectangle.

        Options: see `mix`.
        """
        return self.proj_drop(self.proj(self.attend(x, grid_size, key_padding_mask, **options)))

    def attend(
        self, x: Tensor, grid_size: tuple[int, int], key_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """`forward` without the output projection."""
        _check_inputs(x, self.dim, grid_size, key_padding_mask)
        return mix(self, self.qkv(x), grid_size, key_padding_mask, **options)

    @abstractmethod
    def mix(
        self, qkv: Tensor, grid_size: tuple[int, int], key_padding_mask: Tensor | None, *, shards: RowShards | None
    ) -> Tensor:
        """Mix projected tokens, `[B, N, 3C]` → `[B, N, C]`.

        `shards` are the rows that this rank has, if ranks share them.
        """


@torch.fx.wrap
def mix(layer: _GridAttention, *arguments: Any, **options: Any) -> Tensor:
    """Call `layer.mix`. torch.fx records one call, for grids of any size."""
    return layer.mix(*arguments, **options)


class WindowAttention(_GridAttention):
    """Softmax attention in square windows with a relative position bias, optionally shifted by half a window."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int,
        shifted: bool,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        """Build the layer; `shifted` shifts by half a window, along each axis that is longer than a window."""
        super().__init__()
        validation.check_heads(dim, num_heads)
        validation.check_rate("attn_drop", attn_drop)
        validation.check_rate("proj_drop", proj_drop)
        validation.check_count("window_size", window_size)
        self.dim = dim
        self.num_heads = num_heads
        self.window_size = window_size
        self.shifted = shifted
        self.attn_drop_rate = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window_size - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def mix(
        self,
        qkv: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None,
        *,
        extents: Sequence[tuple[int, int]] | None = None,
        shards: RowShards | None = None,
        shift: tuple[int, int] | None = None,
    ) -> Tensor:
        """Mix tokens within windows.

        `extents` are the rectangles of the mask, where known. `shift` is another one than the grid's own, for some rows
        of a taller grid; without a mask.
        """
        if shards is not None:
            grid_size, extents = shards.whole.size, shards.whole.extents
        if key_padding_mask is None:
            return self._mix(qkv, grid_size, None, self.shift_of(*grid_size) if shift is None else shift, shards)
        # An image smaller than a window is not shifted when alone, so it must not be in a batch either.
        groups: dict[tuple[int, int], list[int]] = {}
        pairs = extents_of(torch.unflatten(key_padding_mask, 1, grid_size)) if extents is None else extents
        for index, (height, width) in enumerate(pairs):
            groups.setdefault(self.shift_of(height, width), []).append(index)
        if len(groups) == 1:
            (shift,) = groups
            return self._mix(qkv, grid_size, key_padding_mask, shift, shards)
        out = qkv.new_empty(*qkv.shape[:2], self.dim)
        for shift, members in groups.items():
            mixed = self._mix(qkv[members], grid_size, key_padding_mask[members], shift, shards, members)
            out[members] = mixed.to(out.dtype)
        return out

    def set_window_size(self, window_size: int) -> None:
        """Change the window, resampling the relative position bias."""
        validation.check_count("window_size", window_size)
        if window_size == self.window_size:
            return
        table = resample_relative_positions(self.relative_position_bias_table.detach(), window_size)
        self.relative_position_bias_table = nn.Parameter(table)
        self.window_size = window_size

    def shift_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns by which the windows of a grid are shifted."""
        if not self.shifted:
            return 0, 0
        half = self.window_size // 2
        if are_open(height, width):  # one graph for every size: the choice is made when it runs
            return (
                torch.sym_ite(height > self.window_size, half, 0),
                torch.sym_ite(width > self.window_size, half, 0),
            )
        return (half if height > self.window_size else 0), (half if width > self.window_size else 0)

    def _mix(
        self,
        qkv: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None,
        shift: tuple[int, int],
        shards: RowShards | None = None,
        members: Sequence[int] | None = None,
    ) -> Tensor:
        """Attention within windows, `[B, N, 3C]` → `[B, N, C]`; `members` are the images of `shards` in the batch."""
        if shards is not None:
            # Rows of padding above the grid shift the windows as the roll does, whose first rows see no others.
            above = (self.window_size - shift[0]) % self.window_size
            wanted = shards.windows(self.window_size, above)
            rows = wanted[shards.group.rank]
            mask = shards.mask_of(rows)
            mask = mask if mask is None or members is None else mask[members]
            size = rows[1] - rows[0], grid_size[1]
            out = self._mix(shards.take_tokens(qkv, wanted), size, mask, (0, shift[1]))
            return shards.own_tokens(out, rows)
        batch = qkv.shape[0]
        windows = Windows.cover(grid_size, (self.window_size, self.window_size))
        tokens = torch.unflatten(windows.flatten(windows.split(qkv, shift)), -1, (3, self.num_heads, -1))
        q, k, v = tokens.permute(2, 0, 3, 1, 4).unbind(0)  # [B · W, H, L, D]
        bias = self._bias(qkv.dtype)
        drop = self.attn_drop_rate if self.training else 0.0
        if key_padding_mask is None and windows.is_exact() and shift == (0, 0):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], dropout_p=drop)
        else:
            visible = windows.visible(key_padding_mask, shift, qkv.device)
            bias = torch.where(visible[:, :, None], bias, -torch.inf)  # [1 or B, W, H, L, L]
            if windows.is_open:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=windows.repeat(bias, batch), dropout_p=drop)
            else:  # windows join the heads, so that one bias serves the whole batch
                q, k, v = (torch.unflatten(tensor, 0, (batch, bias.shape[1])).flatten(1, 2) for tensor in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.flatten(1, 2), dropout_p=drop)
                out = torch.unflatten(out, 1, tuple(bias.shape[1:3])).flatten(0, 1)
        return windows.join(windows.unflatten(heads_last(out).flatten(2)), batch, shift)

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """Relative position bias `[H, L, L]`."""
        side = self.window_size
        # Computed, not stored: a buffer would be rubbish after building on the meta device.
        index = relative_position_index(self.relative_position_bias_table.device, side)
        rows = self.relative_position_bias_table[index.flatten()]
        bias = torch.unflatten(rows, 0, (side * side, side * side))
        return bias.permute(2, 0, 1).to(dtype)


class StripeAttention(_GridAttention):
    """CSWin's softmax attention: half of the heads in vertical stripes, half in horizontal ones.

    Each branch adds a depthwise 3×3 convolution of its values, zero-padded at the border of the stripe. With
    `stripe_width=None` there is one branch over the whole map.
    """

    def __init__(
        self, dim: int, num_heads: int, *, stripe_width: int | None, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        """Build the layer. Two branches need an even number of heads."""
        super().__init__()
        validation.check_heads(dim, num_heads)
        validation.check_rate("attn_drop", attn_drop)
        validation.check_rate("proj_drop", proj_drop)
        if stripe_width is not None:
            validation.check_count("stripe_width", stripe_width)
        branches = 1 if stripe_width is None else 2
        if num_heads % branches != 0:
            raise ValueError(f"two branches of stripes need an even number of heads, got {num_heads=}")
        self.dim = dim
        self.num_heads = num_heads
        self.stripe_width = stripe_width
        self.attn_drop_rate = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim)
        width = dim // branches
        self.static_local = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(branches))
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def mix(
        self,
        qkv: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None,
        *,
        shards: RowShards | None = None,
    ) -> Tensor:
        """Mix tokens within stripes."""
        batch = qkv.shape[0]
        qkv = torch.unflatten(qkv, 2, (3, len(self.static_local), -1))  # [B, N, 3, branches, C / branches]
        stripe = self.stripe_width
        if shards is not None:
            shapes = [(None, None)] if stripe is None else [(None, stripe), (stripe, None)]
            branches = [
                self._mix_shards(branch, cast(nn.Conv2d, convolution), shape, shards)
                for branch, convolution, shape in zip(qkv.unbind(3), self.static_local, shapes, strict=True)
            ]
            return torch.cat(branches, dim=-1)
        if stripe is None:
            convolution = cast(nn.Conv2d, self.static_local[0])
            real = None if key_padding_mask is None else torch.unflatten(key_padding_mask, 1, grid_size)
            out = self._mix(torch.unflatten(qkv[:, :, :, 0], 1, grid_size), convolution, None, real)
            return out.flatten(1, 2)
        branches: list[Tensor] = []
        for branch, convolution, shape in zip(
            qkv.unbind(3), self.static_local, ((None, stripe), (stripe, None)), strict=True
        ):
            windows = Windows.cover(grid_size, shape)
            real = None
            if key_padding_mask is not None or not windows.is_exact():
                real = windows.repeat(windows.inside(key_padding_mask, (0, 0), qkv.device), batch)
            out = self._mix(windows.split(branch), cast(nn.Conv2d, convolution), windows, real)
            branches.append(windows.join(out, batch))
        return torch.cat(branches, dim=-1)

    def _mix_shards(
        self, qkv: Tensor, convolution: nn.Conv2d, shape: tuple[int | None, int | None], shards: RowShards
    ) -> Tensor:
        """Attention and 3×3 of this rank's rows within stripes, `[B, N, 3, c]` → `[B, N, c]`.

        Stripes over the whole height need the keys and values of all ranks, others the rows of their neighbors.
        """
        height, (batch, width) = shape[0], (qkv.shape[0], shards.size[1])
        wanted = whole_rows(shards.whole, shards.group) if height is None else shards.windows(height)
        rows = wanted[shards.group.rank]
        windows = Windows.cover((rows[1] - rows[0], width), shape)
        mask = shards.mask_of(rows)
        real = None
        if mask is not None or not windows.is_exact():
            real = windows.repeat(windows.inside(mask, (0, 0), qkv.device), batch)
        if height is not None:
            out = self._mix(windows.split(shards.take_tokens(qkv, wanted)), convolution, windows, real)
            return shards.own_tokens(windows.join(out, batch), rows)
        keys_values = windows.split(shards.take_tokens(qkv[:, :, 1:], wanted))
        own = Windows.cover(shards.size, shape)
        out = self._mix(keys_values, convolution, None, real, own.split(qkv[:, :, 0]), shards.first_row)
        return own.join(out, batch)

    def _mix(
        self,
        tokens: Tensor,
        convolution: nn.Conv2d,
        windows: Windows | None,
        real: Tensor | None,
        queries: Tensor | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """Attention and 3×3 within maps, `[maps, height, width, 3, c]` → `[maps, height, width, c]`.

        Maps are stripes, or whole images where `windows` is None. `real` `[maps, height, width]` marks real tokens.
        With `queries` `[maps, rows, width, c]` from row `first_row` on, `tokens` are keys and values only
        (`[maps, height, width, 2, c]`), and the result has the rows of the queries.
        """

        def flatten(x: Tensor) -> Tensor:
            return x.flatten(1, 2) if windows is None else windows.flatten(x)

        mask = None
        if real is not None:
            tokens = tokens.masked_fill(~real[..., None, None], 0)  # for the convolution
            flat = flatten(real)
            mask = (flat | ~flat.any(-1, keepdim=True))[:, None, None, :]  # padding only: any weights, but no NaN
        heads = self.num_heads // len(self.static_local)
        *q, k, v = torch.unflatten(flatten(tokens), -1, (heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # [maps, H, L, D]
        q = q[0] if queries is None else torch.unflatten(flatten(queries), -1, (heads, -1)).transpose(1, 2)
        drop = self.attn_drop_rate if self.training else 0.0
        out = heads_last(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)).flatten(2)
        if queries is not None:
            out = torch.unflatten(out, 1, queries.shape[1:3])
            local = _depthwise(tokens[:, :, :, 1], convolution)
            return out + local[:, first_row : first_row + queries.shape[1]]
        out = torch.unflatten(out, 1, tokens.shape[1:3]) if windows is None else windows.unflatten(out)
        return out + _depthwise(tokens[:, :, :, 2], convolution)


@torch.fx.wrap
def _check_inputs(x: Tensor, dim: int, grid_size: tuple[int, int], key_padding_mask: Tensor | None) -> None:
    grid_size = plain_sizes(grid_size)
    with unrecorded():
        validation.check_tokens("x", x, dim)
        validation.check_grid(grid_size, 0, x.shape[1])
        if key_padding_mask is not None:
            validation.check_mask_form(key_padding_mask, x)


def _depthwise(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """A depthwise 3×3 convolution of `[maps, height, width, c]`, zero-padded."""
    if not (x.device.type == "cuda" and torch.compiler.is_compiling()):
        return convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    # A compiler fuses nine shifted products with the operations around them. It copies a convolution to and from
    # another layout, at twice the cost of the convolution.
    weight, bias = convolution.weight, convolution.bias
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    height, width = x.shape[1:3]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1)).float()
    total = torch.zeros_like(padded[:, 1:-1, 1:-1])
    for row in range(3):
        for column in range(3):
            total = total + padded[:, row : row + height, column : column + width] * weight[:, 0, row, column].float()
    if bias is not None:
        total = total + bias.float()
    return total.to(dtype)


@cache_by_shape
def relative_position_index(device: torch.device, side: int) -> Tensor:
    """Row of the bias table for every pair of tokens of a window, `[L, L]`."""
    steps = torch.arange(side, device=device)
    rows, columns = (axis.flatten() for axis in torch.meshgrid(steps, steps, indexing="ij"))
    row_offset = rows[:, None] - rows[None, :] + side - 1
    column_offset = columns[:, None] - columns[None, :] + side - 1
    return row_offset * (2 * side - 1) + column_offset


def resample_relative_positions(table: Tensor, window_size: int) -> Tensor:
    """Resample a bias table `[(2s - 1)², H]` for another window, bicubically; return other tensors as they are."""
    if table.dim() != 2 or table.dtype not in validation.FLOATING_DTYPES or table.numel() == 0:
        return table
    old, new = math.isqrt(table.shape[0]), 2 * window_size - 1
    if old == new or old * old != table.shape[0] or old % 2 == 0:
        return table
    image = torch.unflatten(table.T, 1, (old, old))[None].float()
    # Offset zero stays in the middle: both grids are odd, and their corners are made to coincide.
    resampled = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=True)
    return resampled[0].flatten(1).T.contiguous().to(table.dtype)
