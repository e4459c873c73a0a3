"""Rotation, shear and translation of a batch, each image by a matrix of its own.

Shapes: `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Resample images, bilinearly.

    Args:
        images: `[B, C, H, W]` floating-point numbers.
        matrices: `[B, 6]` a, b, c, d, e, f as Pillow has them: the point (x, y) of the result is taken from
            (ax + by + c, dx + ey + f), in pixels from the upper left corner.
        fill: `[C]` for points from outside.

    Returns:
        `[B, C, H, W]`.
    """
    height, width = images.shape[-2:]
    # Not by `affine_grid`: TensorFloat32 may do its matrix product, and three digits are no place in an image.
    x = torch.arange(width, device=images.device) + 0.5  # centres of pixels
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    from_x = (a * x + b * y + c) * (2 / width) - 1  # [B, H, W] from -1 at one border to 1 at the other
    from_y = (d * x + e * y + f) * (2 / height) - 1
    taken = F.grid_sample(
        images, torch.stack([from_x, from_y], dim=-1), mode="bilinear", padding_mode="border", align_corners=False
    )
    inside = (from_x.abs() <= 1) & (from_y.abs() <= 1)
    return torch.where(inside[:, None], taken, fill[:, None, None])
