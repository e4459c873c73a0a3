"""Attention written out: the weights of every query for every key, with keys hidden from single queries if asked.

The fast paths never form these matrices, and `ops.reference` hides keys from whole samples only. Here each query may
have keys of its own that it cannot see, which is what masking experiments and windows need.

Shapes: `...` any leading dimensions, `N` queries, `M` keys, `D` head dim.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from inline_attention.ops.call import SMALLEST_MEAN_SCORE, Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_feature_map

AttentionKind: TypeAlias = Literal["softmax", "linear", "inline", "magnitude"]
KIND_OF_NORMALIZATION: dict[Normalization, AttentionKind] = {
    "divide": "linear",
    "subtract": "inline",
    "magnitude": "magnitude",
}
ROUNDING = 1e-13  # of float64 rows, relative
LARGEST_MATRIX = 1 << 29  # bytes of one matrix of weights; half a dozen of that size may be alive at once


class MatrixTooLargeError(ValueError):
    """Explicit weights would take more memory than is reasonable."""


@dataclass(frozen=True)
class MixingRule:
    """How queries and keys become weights.

    Attributes:
        normalization: Of linear-time attention; None for softmax.
        feature_map: phi; softmax has none, that is, the identity.
        scale: Factor on the inner products.
    """

    normalization: Normalization | None
    feature_map: str | FeatureMap
    scale: float

    @property
    def kind(self) -> AttentionKind:
        """The attention's name."""
        return "softmax" if self.normalization is None else KIND_OF_NORMALIZATION[self.normalization]

    @property
    def feature_map_name(self) -> str:
        """phi, for tables."""
        if self.normalization is None:
            return "none"
        return self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "phi")

    def features(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """phi of queries or keys `[..., D]`, in `dtype`."""
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
        """Weights `[..., N, M]`. Rows sum to one over the keys that are visible; the others get zero.

        Hidden keys count nowhere: not in a softmax, not in a mean score, not in the number M of keys. A query that
        sees no key at all has a row of zeros.

        Args:
            q: Queries `[..., N, D]`.
            k: Keys `[..., M, D]`.
            bias: Added to the scores of softmax, broadcast to `[..., N, M]`.
            visible: True where a query sees a key, broadcast to `[..., N, M]`; None when all see all.
            dtype: To compute in.
        """
        scores = self.scale * self.features(q, dtype) @ self.features(k, dtype).mT
        if self.normalization is None:
            scores = scores if bias is None else scores + bias.to(dtype)
            if visible is None:
                return scores.softmax(-1)
            # Where nothing is visible a softmax is NaN; there is nothing to look at, so there is nothing.
            return scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0)
        assert bias is None, "only softmax has a bias"
        if visible is None:
            mean, count = scores.mean(-1, keepdim=True), scores.shape[-1]
        else:
            count = visible.sum(-1, keepdim=True).clamp(min=1)
            mean = scores.masked_fill(~visible, 0).sum(-1, keepdim=True) / count
        weights = (1 + _slope(self.normalization, mean) * (scores - mean)) / count
        return weights if visible is None else weights.masked_fill(~visible, 0)

    def weight_gradients(self, q: Tensor, k: Tensor) -> Tensor:
        """Derivatives `[Q, M, D]` of the weights of queries `[Q, D]` for keys `[M, D]` by those queries, in float64.

        By hand where phi is built in: forward-mode differentiation of so little takes a few times as long.
        """
        if self.normalization is not None and not isinstance(self.feature_map, str):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch about itself, at the first use of this
                return torch.func.vmap(torch.func.jacfwd(lambda x: self.weights(x[None], k)[0]))(q)
        with torch.enable_grad():
            point = q.detach().double().requires_grad_()
            features = self.features(point)
            (slopes,) = torch.autograd.grad(features.sum(), point)  # phi works on each coordinate by itself
        keys = self.features(k)
        scores = self.scale * features.detach() @ keys.mT
        by_query = self.scale * slopes[:, None] * keys  # of the scores
        if self.normalization is None:
            weights = scores.softmax(-1)[..., None]
            return weights * (by_query - (weights * by_query).sum(1, keepdim=True))
        mean, mean_by_query = scores.mean(-1, keepdim=True), by_query.mean(1, keepdim=True)
        slope = _slope(self.normalization, mean)
        centred = (scores - mean)[..., None]
        result = slope[..., None] * (by_query - mean_by_query)
        if self.normalization != "subtract":  # there the slope is one whatever the mean; else it goes with 1 / mean
            divisible = mean.abs() > SMALLEST_MEAN_SCORE
            bend = torch.where(divisible, -1 / torch.where(divisible, mean, 1).square(), 0)
            result = result + bend[..., None] * mean_by_query * centred
        return result / len(k)


def beyond_uniform(rows: Tensor, uniform: Tensor | float) -> Tensor:
    """What float64 rows of weights `[..., M]` say about the keys: themselves less uniform attention.

    Rows are compared by this. All rows share their uniform part, so beside it nearly uniform rows look equal whatever
    they say. What rounding leaves of a uniform row is zero: it says nothing.

    Args:
        rows: Weights.
        uniform: What uniform attention gives, broadcast to the rows.
    """
    beyond = rows - uniform
    is_uniform = beyond.norm(dim=-1, keepdim=True) <= ROUNDING * rows.norm(dim=-1, keepdim=True)
    return beyond.masked_fill_(is_uniform, 0)


def check_matrix_size(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> None:
    """Refuse a matrix of weights that would fill the memory.

    Raises:
        MatrixTooLargeError: With the sizes, and what to do.
    """
    needed = rows * columns * dtype.itemsize
    if needed > LARGEST_MATRIX:
        raise MatrixTooLargeError(
            f"the weights of {rows:,} queries for {columns:,} keys take {needed / 2**30:.1f} GiB for one head of one "
            f"image, the limit is {LARGEST_MATRIX / 2**30:.1f} GiB; take smaller images (--size), or a layer with a "
            "coarser grid (--layer)"
        )


def _slope(normalization: Normalization, mean: Tensor) -> Tensor:
    """a(z) of docs/math.md, section 2: all three attentions are `(1 + a(z) (s - z)) / M`."""
    if normalization == "subtract":
        return torch.ones_like(mean)
    divisible = mean.abs() > SMALLEST_MEAN_SCORE
    inverse = torch.where(divisible, 1 / torch.where(divisible, mean, 1), 0)
    return inverse if normalization == "divide" else 1 + inverse
