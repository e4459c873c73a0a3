"""What one attention layer did with a batch, and the weights that follow from it.

Shapes: `B` batch, `b` some of its images, `N` tokens (prefix first, then an h×w grid row by row), `M` keys, `H` heads,
`D` head dim, `Q` chosen queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inline_attention.ops.call import Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_feature_map
from inline_attention.ops.reference import KIND_OF_NORMALIZATION, AttentionKind, weights_from_scores

TAPS = 9  # of a 3×3 kernel, row by row; the fifth is the token itself
ROUNDING = 1e-13  # relative, of float64 rows
LARGEST_MATRIX = 1 << 29  # bytes of one matrix of weights; half a dozen of that size may be alive at once


class MatrixTooLargeError(ValueError):
    """Explicit weights would take too much memory."""


@dataclass(frozen=True)
class MixingRule:
    """How queries and keys become weights."""

    normalization: Normalization | None  # None for softmax
    feature_map: str | FeatureMap  # phi; the identity for softmax
    scale: float

    @property
    def kind(self) -> AttentionKind:
        """Name of the attention."""
        return "softmax" if self.normalization is None else KIND_OF_NORMALIZATION[self.normalization]

    @property
    def feature_map_name(self) -> str:
        """phi, for tables."""
        if self.normalization is None:
            return "none"
        return self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "phi")

    def features(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return phi of queries or keys `[..., D]`, in `dtype`."""
        if self.normalization is None:
            return x.to(dtype)
        if not isinstance(self.feature_map, str):
            x = x.float()  # a callable may have float32 parameters
        return apply_feature_map(self.feature_map, x, dtype)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        bias: Tensor | None = None,
        visible: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return weights `[..., N, M]` of queries `[..., N, D]` for keys `[..., M, D]`, computed in `dtype`.

        Softmax adds the bias to its scores. Keys that are not `visible` get no weight, see `weights_from_scores`.
        """
        assert bias is None or self.normalization is None, "only softmax has a bias"
        scores = self.scale * self.features(q, dtype) @ self.features(k, dtype).mT
        return weights_from_scores(scores if bias is None else scores + bias.to(dtype), self.normalization, visible)


@dataclass(frozen=True)
class LayerAttention:
    """Queries, keys, values and local kernels of one layer of any kind."""

    name: str  # path in its model, such as "blocks.3.attn"
    index: int  # among the model's attention layers
    rule: MixingRule
    q: Tensor  # [B, N, H, D]
    k: Tensor  # [B, N, H, D]
    v: Tensor  # [B, N, H, D]
    local_weight: Tensor | None  # 3×3 kernels [B, H, D, 3, 3] of the local term
    local_bias: Tensor | None  # [H, D], added to every grid token
    grid_size: tuple[int, int]
    num_prefix_tokens: int  # before the grid
    groups: Tensor | None = None  # [H, N]: tokens with equal numbers see each other; None when all see all
    position_bias: Callable[[int, Tensor], Tensor] | None = None  # of a head and queries [Q]: [Q, N], for softmax

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.q.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[3]

    def token(self, row: int, column: int) -> int:
        """Return the number of the token at a place of the grid; raise `ValueError` if the place is outside."""
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(
                f"layer {self.index} ({self.name}) has {height}×{width} tokens, got row {row}, column {column}; "
                f"rows go from 0 to {height - 1}, columns from 0 to {width - 1}"
            )
        return self.num_prefix_tokens + row * width + column

    def reach(self, head: int, queries: Tensor | None = None) -> Tensor:
        """Return `[Q, N]` bool, True where a query, by default of all tokens, can see a key."""
        group = self.q.new_zeros(self.num_tokens) if self.groups is None else self.groups[head]
        return (group if queries is None else group[queries])[:, None] == group[None, :]

    def rows(
        self,
        images: int | slice,
        head: int,
        queries: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the weights `[Q, N]` of one head of one image, or `[b, Q, N]` of a slice, without the local term.

        Args:
            images: Number in the batch, or a slice.
            head: Number of the head.
            queries: `[Q]` tokens; all by default.
            hidden: `[Q, N]` bool, True where a key is hidden from a query.
            dtype: Dtype of the computation.
        """
        queries = torch.arange(self.num_tokens, device=self.q.device) if queries is None else queries
        check_matrix_size(len(queries), self.num_tokens, dtype)
        visible = None if self.groups is None and hidden is None else self.reach(head, queries)
        if visible is not None and hidden is not None:
            visible &= ~hidden
        bias = None if self.position_bias is None else self.position_bias(head, queries)
        q, k = self.q[images, :, head], self.k[images, :, head]
        return self.rule.weights(q[..., queries, :], k, bias=bias, visible=visible, dtype=dtype)

    def neighbors(self, head: int) -> tuple[Tensor, Tensor]:
        """Return the 3×3 neighbors that the local term reads, see `neighbor_table`."""
        numbers, exists = neighbor_table(self.grid_size, self.num_prefix_tokens, self.q.device)
        if self.groups is not None:
            group = self.groups[head]
            exists = exists & (group[numbers] == group[:, None])
        return numbers, exists

    def local_term(self, images: slice, head: int, hidden: Tensor | None = None) -> Tensor | None:
        """Return the output `[b, N, D]` of the local term in v's dtype; `hidden` `[N, N]` hides tokens from kernels."""
        if self.local_weight is None:
            return None
        numbers, exists = self.neighbors(head)
        if hidden is not None:
            exists = exists & ~hidden.gather(1, numbers)
        kernel = self.local_weight[images, head].flatten(-2).to(self.v.dtype)  # [b, D, 9]
        values = self.v[images, :, head]
        out = torch.zeros_like(values)
        for tap in range(TAPS):  # one at a time: nine gathered copies of the values might not fit
            out += values[:, numbers[:, tap]] * exists[:, tap, None] * kernel[:, None, :, tap]
        if self.local_bias is not None:
            out[:, self.num_prefix_tokens :] += self.local_bias[head]
        return out


def beyond_uniform(rows: Tensor, uniform: Tensor | float) -> Tensor:
    """Return float64 rows of weights `[..., M]` minus uniform attention; a row that is uniform up to rounding is zero.

    Rows are compared by this difference: with the uniform part, which all share, nearly uniform rows would look equal.
    """
    beyond = rows - uniform
    is_uniform = beyond.norm(dim=-1, keepdim=True) <= ROUNDING * rows.norm(dim=-1, keepdim=True)
    return beyond.masked_fill_(is_uniform, 0)


def check_matrix_size(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> None:
    """Raise `MatrixTooLargeError` for a matrix of weights that would fill the memory."""
    needed = rows * columns * dtype.itemsize
    if needed > LARGEST_MATRIX:
        raise MatrixTooLargeError(
            f"the weights of {rows:,} queries for {columns:,} keys take {needed / 2**30:.1f} GiB for one head of one "
            f"image, the limit is {LARGEST_MATRIX / 2**30:.1f} GiB; use smaller images (--size), or a layer with a "
            "coarser grid (--layer)"
        )


def neighbor_table(
    grid_size: tuple[int, int], num_prefix_tokens: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the 3×3 neighbors of every token, itself in the middle: their numbers, and which exist, `[N, 9]` each.

    Beyond the border, and for prefix tokens, there are none, and the number has no meaning.
    """
    height, width = grid_size
    place = torch.arange(1.0, height * width + 1, dtype=torch.float64, device=device)
    around = F.unfold(place.view(1, 1, height, width), 3, padding=1)[0].T.long()  # 0 beyond the border
    around = F.pad(around, (0, 0, num_prefix_tokens, 0))
    return (around + num_prefix_tokens - 1).clamp(min=0), around > 0


def neighborhood_mask(
    grid_size: tuple[int, int], num_prefix_tokens: int, side: int, device: torch.device | None = None
) -> Tensor:
    """Return `[N, N]` bool, True where a key is in the side×side square around a query; prefix tokens never are."""
    if side < 1 or side % 2 == 0:
        raise ValueError(f"a neighborhood has its query in the middle, so its side must be odd, got {side}; try 3")
    height, width = grid_size
    place = torch.arange(height * width, device=device)
    row, column = place // width, place % width
    radius = side // 2
    near = ((row[:, None] - row).abs() <= radius) & ((column[:, None] - column).abs() <= radius)
    return F.pad(near, (num_prefix_tokens, 0, num_prefix_tokens, 0))
