"""From images to tokens, and from a finer grid of tokens to a coarser one.

Modules take a map `[B, C, H, W]` and its grid and return tokens `[B, N, C']` and theirs, ceil(H / stride) ×
ceil(W / stride): an incomplete last row or column is completed with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.grids import Grid, ceil_divide, pad_to_multiple, resample_positions
from inline_attention.layers.row_shards import RowShards
from inline_attention.ops.tracing import is_exporting

torch.fx.wrap("pad_to_multiple")  # one call in a graph of torch.fx, for images of any size


class PatchConvolution(nn.Conv2d):
    """A convolution whose kernels do not overlap, computed on GPUs as one matrix product.

    Convolution libraries are slow at it there (cuDNN took 0.84 ms for 256 images of 224² in bfloat16, a fifth of the
    time of a whole InLine-DeiT-T) and their result would have to be transposed. On a CPU they are as fast.
    """

    # The constructor is that of `nn.Conv2d`: adapters such as LoRA build more layers of the same class.

    def forward(self, input: Tensor) -> Tensor:
        """`[B, C, H, W]` → `[B, dim, h, w]`; H and W are multiples of the patch size."""
        return _convolve_patches(self, input)

    def as_product(self, input: Tensor) -> Tensor:
        """`forward` as a matrix product."""
        side, weight = self.kernel_size[0], self.weight
        patches = torch.unflatten(torch.unflatten(input, 3, (-1, side)), 2, (-1, side))  # [B, C, h, side, w, side]
        if self.in_channels < side * side:  # images, whose rows lie together in memory
            patches = patches.permute(0, 2, 4, 1, 3, 5)
        else:  # tokens, whose channels do
            patches, weight = patches.permute(0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)
        return F.linear(patches.flatten(3), weight.flatten(1), self.bias).permute(0, 3, 1, 2)


@torch.fx.wrap
def _convolve_patches(layer: PatchConvolution, input: Tensor) -> Tensor:
    return layer.as_product(input) if input.device.type == "cuda" else nn.Conv2d.forward(layer, input)


class ConvEmbedding(nn.Module):
    """A strided convolution, optionally followed by a norm and a learned position embedding."""

    def __init__(
        self,
        in_channels: int,
        dim: int,
        *,
        kernel_size: int,
        stride: int,
        padding: int = 0,
        norm_eps: float | None = None,
        position_grid: tuple[int, int] | None = None,
    ) -> None:
        """Build the embedding; without `norm_eps` it has no norm, without `position_grid` no position embedding."""
        super().__init__()
        self.stride = stride
        # Rows of the result above and below a row that read some of the same pixels, or less.
        self.halo = ceil_divide(max(padding, kernel_size - padding - stride), stride)
        self.proj = (
            PatchConvolution(in_channels, dim, stride, stride=stride)
            if kernel_size == stride and padding == 0
            else nn.Conv2d(in_channels, dim, kernel_size, stride=stride, padding=padding)
        )
        self.norm = nn.Identity() if norm_eps is None else nn.LayerNorm(dim, eps=norm_eps)
        self.position_grid = position_grid
        self.positions = None
        if position_grid is not None:
            self.positions = nn.Parameter(torch.empty(1, position_grid[0] * position_grid[1], dim))
            nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """`[B, C, H, W]` → tokens `[B, N, dim]`."""
        coarser = grid.coarser(self.stride)
        if isinstance(grid, RowShards):
            rows, columns = self.proj.kernel_size[0], self.proj.padding[1]
            x = pad_to_multiple(grid.take_for(x, coarser, rows, self.stride, int(self.proj.padding[0])), self.stride)
            if self.proj.padding == (0, 0):
                x = self.proj(x)
            else:  # its rows of padding are there already
                x = F.conv2d(x, self.proj.weight, self.proj.bias, self.stride, (0, int(columns)))
        else:
            x = self.proj(pad_to_multiple(x, self.stride))
        tokens, grid = self.norm(x.flatten(2).transpose(1, 2)), coarser
        if self.positions is not None and self.position_grid is not None:
            tokens = tokens + grid.positions(self.positions, self.position_grid).to(tokens.dtype)
        return tokens, grid

    def set_position_grid(self, grid_size: tuple[int, int]) -> None:
        """Make another grid the native one, resampling the position embedding."""
        if self.positions is not None and self.position_grid is not None:
            resampled = resample_positions(self.positions.detach(), self.position_grid, grid_size)
            self.positions = nn.Parameter(resampled.contiguous())
            self.position_grid = grid_size


class ConvStem(nn.Module):
    """A chain of 3×3 convolutions with norms, and GELU between them.

    "Early convolutions help transformers see better", NeurIPS 2021, arXiv 2106.14881. Small images with few labels gain
    most: on them a single large patch sees too little.
    """

    def __init__(self, in_channels: int, layers: Sequence[tuple[int, int]], *, norm_eps: float) -> None:
        """Build the chain of `layers`, channels and stride of each."""
        super().__init__()
        self.stride = math.prod(stride for _, stride in layers)
        inputs = [in_channels, *(channels for channels, _ in layers)]
        self.layers = nn.ModuleList(
            ConvEmbedding(before, channels, kernel_size=3, stride=stride, padding=1, norm_eps=norm_eps)
            for before, (channels, stride) in zip(inputs, layers, strict=False)
        )
        # The first and last row of pixels that row 0 of the result depends on, from the last layer to the first.
        first = last = 0
        for _, stride in reversed(layers):
            first, last = first * stride - 1, last * stride + 1
        self.halo = ceil_divide(max(-first, last + 1 - self.stride), self.stride)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """`[B, C, H, W]` → tokens `[B, N, dim]`."""
        *inner, last = self.layers
        for layer in inner:
            tokens, grid = layer(x, grid)
            x = F.gelu(grid.to_map(tokens))
            if is_exporting():  # with the strides of tokens the next convolution excludes some of the open sizes
                x = x.contiguous()
        return last(x, grid)


class PatchMerging(nn.Module):
    """Swin's merging: 2×2 neighbors side by side, a norm, and a linear map from 4C to 2C."""

    stride, halo = 2, 0

    def __init__(self, dim: int, *, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=norm_eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """`[B, C, H, W]` → tokens `[B, N, 2C]`."""
        coarser = grid.coarser(2)
        if isinstance(grid, RowShards):
            x = grid.take_for(x, coarser, kernel=2, stride=2)
        x = pad_to_multiple(x, 2).permute(0, 2, 3, 1)
        # Down the first column, then down the second: the order of the published weights.
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        return self.reduction(self.norm(x)).flatten(1, 2), coarser
