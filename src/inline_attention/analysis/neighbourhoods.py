"""Who is whose neighbour on a token grid.

Shapes: `N` tokens: `num_prefix_tokens` class or register tokens, then an h×w grid row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = 9  # of a 3×3 kernel, row by row; the fifth is the token itself


def neighbour_table(
    grid_size: tuple[int, int], num_prefix_tokens: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """The 3×3 neighbours of every token, the token itself in the middle.

    Returns:
        Numbers `[N, 9]`, and `[N, 9]` bool whether there is such a neighbour: not beyond the border, and not for
        prefix tokens. Where there is none, the number is some token's.
    """
    height, width = grid_size
    place = torch.arange(height * width, device=device)
    tap = torch.arange(TAPS, device=device)
    row = place[:, None] // width + tap // 3 - 1
    column = place[:, None] % width + tap % 3 - 1
    exists = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    numbers = num_prefix_tokens + row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    above = (0, 0, num_prefix_tokens, 0)
    return F.pad(numbers, above), F.pad(exists, above)


def neighbourhood_mask(
    grid_size: tuple[int, int], num_prefix_tokens: int, side: int, device: torch.device | None = None
) -> Tensor:
    """`[N, N]` bool: whether a key lies in the side×side square around a query, itself included; no prefix token does.

    Args:
        grid_size: (h, w).
        num_prefix_tokens: Tokens before the grid.
        side: Tokens along the square's side, odd.
        device: Where to put the mask.
    """
    if side < 1 or side % 2 == 0:
        raise ValueError(f"a neighbourhood has its query in the middle, so its side must be odd, got {side}; try 3")
    height, width = grid_size
    place = torch.arange(height * width, device=device)
    row, column = place // width, place % width
    radius = side // 2
    near = ((row[:, None] - row).abs() <= radius) & ((column[:, None] - column).abs() <= radius)
    return F.pad(near, (num_prefix_tokens, 0, num_prefix_tokens, 0))
