"""What one attention layer did with a batch, and the weights that follow from it, written out.

Shapes: `B` batch, `b` some images of it, `N` tokens (prefix first, then an h×w grid row by row), `H` heads, `D` head
dim, `L` tokens of a window, `Q` chosen queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.analysis.explicit import MixingRule, check_matrix_size
from inline_attention.analysis.neighbourhoods import TAPS, neighbour_table


@dataclass(frozen=True)
class PositionBias:
    """The relative position bias of windows.

    Attributes:
        table: `[H, L, L]`, by the places of query and key in their window.
        places: `[N]` place of each token in its window.
    """

    table: Tensor
    places: Tensor

    def of(self, head: int, queries: Tensor) -> Tensor:
        """Bias `[Q, N]`; without meaning for tokens of different windows."""
        return self.table[head][self.places[queries][:, None], self.places[None, :]]


@dataclass(frozen=True)
class LayerAttention:
    """Queries, keys, values and local kernels of one layer, whatever its kind.

    Attributes:
        name: Path of the layer in its model, such as "blocks.3.attn".
        index: Its number among the model's attention layers, from 0.
        rule: How weights come about.
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, N, H, D]`.
        v: Values `[B, N, H, D]`.
        local_weight: 3×3 kernels `[B, H, D, 3, 3]` of the local term; None without one.
        local_bias: `[H, D]` that the mixing itself adds to every grid token, as stripes do; None without one.
        grid_size: (h, w).
        num_prefix_tokens: Tokens before the grid.
        groups: `[H, N]`: tokens of equal number see each other, as those of a window do; None when all see all.
        position_bias: Of softmax in windows.
    """

    name: str
    index: int
    rule: MixingRule
    q: Tensor
    k: Tensor
    v: Tensor
    local_weight: Tensor | None
    local_bias: Tensor | None
    grid_size: tuple[int, int]
    num_prefix_tokens: int
    groups: Tensor | None = None
    position_bias: PositionBias | None = None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.q.shape[0]

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
        """Number of the token at a place of the grid.

        Raises:
            ValueError: If it lies outside.
        """
        height, width = self.grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(
                f"layer {self.index} ({self.name}) has {height}×{width} tokens, got row {row}, column {column}; "
                f"rows go from 0 to {height - 1}, columns from 0 to {width - 1}"
            )
        return self.num_prefix_tokens + row * width + column

    def reach(self, head: int, queries: Tensor | None = None) -> Tensor | None:
        """`[Q, N]` bool: which keys each query can see at all; None when all see all."""
        if self.groups is None:
            return None
        group = self.groups[head]
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
        """Weights `[Q, N]` of one head of one image (`[b, Q, N]` of several), without the local term.

        Args:
            images: Number in the batch, or several.
            head: Number of the head.
            queries: `[Q]` tokens; all by default.
            hidden: `[Q, N]` bool, True where a key is hidden from a query.
            dtype: To compute in.

        Raises:
            MatrixTooLargeError: If those of one image would fill the memory.
        """
        queries = torch.arange(self.num_tokens, device=self.q.device) if queries is None else queries
        check_matrix_size(len(queries), self.num_tokens, dtype)
        visible = self.reach(head, queries)
        if hidden is not None:
            visible = ~hidden if visible is None else visible & ~hidden
        bias = None if self.position_bias is None else self.position_bias.of(head, queries)
        q, k = self.q[images, :, head], self.k[images, :, head]
        return self.rule.weights(q[..., queries, :], k, bias=bias, visible=visible, dtype=dtype)

    def neighbours(self, head: int) -> tuple[Tensor, Tensor]:
        """The 3×3 neighbours that the local term reads: numbers `[N, 9]`, and `[N, 9]` whether there is one."""
        numbers, exists = neighbour_table(self.grid_size, self.num_prefix_tokens, self.q.device)
        if self.groups is not None:
            group = self.groups[head]
            exists = exists & (group[numbers] == group[:, None])
        return numbers, exists

    def local_term(self, images: slice, head: int, hidden: Tensor | None = None) -> Tensor | None:
        """The local term's output `[b, N, D]` for some images, in the dtype of v; None without one.

        Args:
            images: Of the batch.
            head: Number of the head.
            hidden: `[N, N]` bool, True where a token is hidden from another one's kernel.
        """
        if self.local_weight is None:
            return None
        numbers, exists = self.neighbours(head)
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
