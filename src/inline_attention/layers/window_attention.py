"""The softmax attentions of the Swin and CSWin families, on grids of any size.

Windows and stripes that reach over the edge of the grid, or of an image inside a padded batch, are masked there: what
is made up takes part in no softmax and in no 3×3 term.

Shapes: `B` batch, `N` = h·w tokens, `C` channels, `H` heads, `D` = C / H, `L` tokens of a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from inline_attention.layers.grids import from_windows, pad_to_multiple, to_windows


class WindowAttention(nn.Module):
    """Softmax attention in square windows with a relative position bias, optionally shifted by half a window."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int,
        shifted: bool,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        """Build the layer.

        Args:
            dim: Channels C.
            num_heads: Heads H.
            window_size: Side of a window in tokens.
            shifted: Shift by half a window, along each axis that is longer than a window.
            qkv_bias: Whether the query, key and value projections have a bias.
            attn_drop: Dropout rate on the weights.
            proj_drop: Dropout rate on the projected output.
        """
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        self.shifted = shifted
        self.attn_drop_rate = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window_size - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(
        self, x: torch.Tensor, grid_size: tuple[int, int], key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mix `[B, N, C]` within windows; `key_padding_mask` `[B, N]` is True inside each image's rectangle."""
        qkv = torch.unflatten(self.qkv(x), 1, grid_size)  # [B, h, w, 3C]
        if key_padding_mask is None:
            out = self._attend(qkv, None, self._shift(*grid_size))
        else:
            # An image smaller than a window is not shifted when alone, so it must not be in a batch either.
            inside = torch.unflatten(key_padding_mask, 1, grid_size)
            extents = zip(inside.any(2).sum(1).tolist(), inside.any(1).sum(1).tolist(), strict=True)
            groups: dict[tuple[int, int], list[int]] = {}
            for index, (height, width) in enumerate(extents):
                groups.setdefault(self._shift(height, width), []).append(index)
            out = qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3)
            for shift, members in groups.items():
                out[members] = self._attend(qkv[members], inside[members], shift)
        return self.proj_drop(self.proj(out.flatten(1, 2)))

    def set_window_size(self, window_size: int) -> None:
        """Change the window, resampling the relative position bias."""
        if window_size == self.window_size:
            return
        table = resample_relative_positions(self.relative_position_bias_table.detach(), window_size)
        self.relative_position_bias_table = nn.Parameter(table)
        self.window_size = window_size

    def _shift(self, height: int, width: int) -> tuple[int, int]:
        if not self.shifted:
            return 0, 0
        half = self.window_size // 2
        if torch.compiler.is_exporting():  # one graph for every size: the choice is made when it runs
            return (
                torch.sym_ite(height > self.window_size, half, 0),
                torch.sym_ite(width > self.window_size, half, 0),
            )
        return (half if height > self.window_size else 0), (half if width > self.window_size else 0)

    def _attend(self, qkv: torch.Tensor, inside: torch.Tensor | None, shift: tuple[int, int]) -> torch.Tensor:
        """Attention `[B, h, w, 3C]` → `[B, h, w, C]`; `inside` is `[B, h, w]` bool or None."""
        batch, height, width, channels = qkv.shape
        window = (self.window_size, self.window_size)
        padded = pad_to_multiple(qkv, window, dims=(1, 2))
        size = (padded.shape[1], padded.shape[2])
        complete = inside is None and size == (height, width)
        if inside is None:
            inside = torch.ones(1, height, width, dtype=torch.bool, device=qkv.device)
        inside = pad_to_multiple(inside, window, dims=(1, 2))
        # After the roll, rows and columns that came round the edge share windows with others they are no part of.
        rows = torch.arange(size[0], device=qkv.device) >= size[0] - shift[0]
        columns = torch.arange(size[1], device=qkv.device) >= size[1] - shift[1]
        region = (2 * rows.long()[:, None] + columns.long()[None, :])[None]
        rolled = self.shifted if torch.compiler.is_exporting() else shift != (0, 0)
        if rolled:
            padded = torch.roll(padded, (-shift[0], -shift[1]), dims=(1, 2))
            inside = torch.roll(inside, (-shift[0], -shift[1]), dims=(1, 2))

        tokens = to_windows(padded, window).unflatten(-1, (3, self.num_heads, -1))  # [B, windows, L, 3, H, D]
        if torch.compiler.is_exporting() or rolled or not complete:
            mask = _pair_mask(to_windows(inside, window), to_windows(region, window))
            bias = torch.where(mask[:, :, None], self._bias(qkv.dtype), -torch.inf)  # [1 or B, windows, H, L, L]
            # Windows join the heads, so that one bias serves the whole batch.
            q, k, v = tokens.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
            out = self._softmax(q, k, v, bias.flatten(1, 2))
            out = out.unflatten(1, (-1, self.num_heads))
        else:
            q, k, v = tokens.permute(3, 0, 1, 4, 2, 5).flatten(1, 2)
            out = self._softmax(q, k, v, self._bias(qkv.dtype)[None])
            out = out.unflatten(0, (batch, -1))
        out = out.transpose(2, 3).flatten(3)  # [B, windows, L, C]
        out = from_windows(out, window, size)
        if rolled:
            out = torch.roll(out, shift, dims=(1, 2))
        return out[:, :height, :width]

    def _softmax(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        drop = self.attn_drop_rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)

    def _bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Relative position bias `[H, L, L]`."""
        side = self.window_size
        # Computed, not stored: a buffer would be rubbish after building on the meta device.
        index = relative_position_index(side, self.relative_position_bias_table.device)
        bias = self.relative_position_bias_table[index.flatten()].unflatten(0, (side * side, side * side))
        return bias.permute(2, 0, 1).to(dtype)


class StripeAttention(nn.Module):
    """CSWin's softmax attention: half of the heads in vertical stripes, half in horizontal ones.

    Each branch adds a depthwise 3×3 convolution of its values, zero-padded at the border of the stripe. With
    `stripe_width=None` there is one branch over the whole map.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        stripe_width: int | None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        """Build the layer.

        Args:
            dim: Channels C.
            num_heads: Heads H; even where there are two branches.
            stripe_width: Tokens across a stripe; None for the whole map.
            qkv_bias: Whether the query, key and value projections have a bias.
            attn_drop: Dropout rate on the weights.
            proj_drop: Dropout rate on the projected output.
        """
        super().__init__()
        branches = 1 if stripe_width is None else 2
        if num_heads % branches != 0:
            raise ValueError(f"two branches of stripes need an even number of heads, got {num_heads=}")
        self.num_heads = num_heads
        self.stripe_width = stripe_width
        self.attn_drop_rate = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        width = dim // branches
        self.static_local = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(branches))
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: torch.Tensor, grid_size: tuple[int, int], key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mix `[B, N, C]` within stripes; `key_padding_mask` `[B, N]` is True inside each image's rectangle."""
        height, width = grid_size
        qkv = torch.unflatten(self.qkv(x), 2, (3, len(self.static_local), -1))  # [B, N, 3, branches, C / branches]
        if key_padding_mask is not None:
            qkv = qkv.masked_fill(~key_padding_mask[:, :, None, None, None], 0)
        stripe = self.stripe_width
        windows = [grid_size] if stripe is None else [(height, stripe), (stripe, width)]
        branches = [
            self._attend(branch, convolution, grid_size, window, key_padding_mask)
            for branch, convolution, window in zip(qkv.unbind(3), self.static_local, windows, strict=True)
        ]
        return self.proj_drop(self.proj(torch.cat(branches, dim=-1)))

    def _attend(
        self,
        qkv: torch.Tensor,
        convolution: nn.Module,
        grid_size: tuple[int, int],
        window: tuple[int, int],
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """One branch, `[B, N, 3, c]` → `[B, N, c]`."""
        height, width = grid_size
        batch = qkv.shape[0]
        heads = self.num_heads // len(self.static_local)
        padded = pad_to_multiple(torch.unflatten(qkv, 1, grid_size), window, dims=(1, 2))
        size = (padded.shape[1], padded.shape[2])
        tokens = to_windows(padded, window)  # [B, windows, L, 3, c]
        mask = None
        if key_padding_mask is not None or size != grid_size or torch.compiler.is_exporting():
            if key_padding_mask is None:
                key_padding_mask = torch.ones(1, height * width, dtype=torch.bool, device=qkv.device)
            inside = pad_to_multiple(torch.unflatten(key_padding_mask, 1, grid_size), window, dims=(1, 2))
            inside = to_windows(inside, window)  # [1 or B, windows, L]
            inside = inside | ~inside.any(-1, keepdim=True)  # a stripe of padding only: any weights, but no NaN
            mask = inside.expand(batch, -1, -1).flatten(0, 1)[:, None, None, :]

        q, k, v = tokens.flatten(0, 1).unflatten(-1, (heads, -1)).permute(2, 0, 3, 1, 4)  # [B · windows, H, L, D]
        drop = self.attn_drop_rate if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop).transpose(1, 2).flatten(2)
        values = tokens[:, :, :, 2].flatten(0, 1).unflatten(1, window).permute(0, 3, 1, 2)
        out = out + convolution(values).flatten(2).transpose(1, 2)
        out = from_windows(out.unflatten(0, (batch, -1)), window, size)
        return out[:, :height, :width].flatten(1, 2)


def relative_position_index(side: int, device: torch.device) -> torch.Tensor:
    """Row of the bias table for every pair of tokens of a window, `[L, L]`."""
    steps = torch.arange(side, device=device)
    rows, columns = (axis.flatten() for axis in torch.meshgrid(steps, steps, indexing="ij"))
    row_offset = rows[:, None] - rows[None, :] + side - 1
    column_offset = columns[:, None] - columns[None, :] + side - 1
    return row_offset * (2 * side - 1) + column_offset


def resample_relative_positions(table: torch.Tensor, window_size: int) -> torch.Tensor:
    """A bias table `[(2s - 1)², H]` for another window, bicubically over relative offsets."""
    old = round(table.shape[0] ** 0.5)
    new = 2 * window_size - 1
    if old == new:
        return table
    image = torch.unflatten(table.T, 1, (old, old))[None].float()
    # Offset zero stays in the middle: both grids are odd, and their corners are made to coincide.
    resampled = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=True)
    return resampled[0].flatten(1).T.contiguous().to(table.dtype)


def _pair_mask(inside: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
    """Which token of a window may look at which, `[1 or B, windows, L, L]`: real ones of its own region, and itself."""
    allowed = inside[:, :, None, :] & (region[:, :, :, None] == region[:, :, None, :])
    itself = torch.eye(inside.shape[-1], dtype=torch.bool, device=inside.device)  # padding too: a softmax needs one
    return allowed | itself
