"""Which attentions give different queries different weights, measured on queries built to collide in linear attention.

Linear attention divides the scores of a query by their sum, so its weights depend on the direction of phi(q) alone.
For phi(x) = relu(x), all queries on a ray from the origin share one direction. A bias looks like a way out and is
not: for phi(x) = relu(Ax + b) the colliding queries lie on a ray from -A⁻¹b instead.

Shapes: `N` queries, `M` keys, all in the plane (head dim 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from inline_attention.ops import attention_weights

AttentionKind: TypeAlias = Literal["softmax", "linear", "inline"]
Verdict: TypeAlias = Literal["collide", "distinct"]

KINDS: tuple[AttentionKind, ...] = ("softmax", "linear", "inline")
# Weights are float64 and of order one: rounding stays below 1e-14, and what these cases tell apart differs by 1e-2.
COLLISION_TOLERANCE = 1e-9

KEYS = ((2.6, 0.4), (2.3, 1.7), (1.4, 2.0), (0.8, 2.5), (0.1, 2.2), (0.4, 0.9))


@dataclass(frozen=True)
class CollisionCase:
    """Queries with parallel features, and the keys they look at.

    Attributes:
        name: Short name for tables.
        feature_map_name: phi as one writes it.
        matrix: A of phi(x) = relu(Ax + b), `[2, 2]`, invertible.
        bias: b, `[2]`.
        keys: `[M, 2]`, float64.
        queries: `[N, 2]`, float64, pairwise different, with phi(q) > 0 and parallel.
    """

    name: str
    feature_map_name: str
    matrix: torch.Tensor
    bias: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor

    @property
    def apex(self) -> torch.Tensor:
        """Where Ax + b = 0, `[2]`: the point from which the rays of colliding queries start."""
        return -torch.linalg.solve(self.matrix, self.bias)

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        """phi(x) = relu(Ax + b) of `[..., 2]`."""
        return torch.relu(x @ self.matrix.T + self.bias)


class InjectivityResult(NamedTuple):
    """The weights that one attention gives to the queries of one case.

    Attributes:
        case: The queries and keys.
        kind: The attention. "linear" and "inline" share the phi of the case; softmax has none.
        weights: `[N, M]`, float64; rows sum to one.
        largest_difference: max |Δw| of the pair of queries that differs most.
        smallest_difference: max |Δw| of the pair of queries that differs least.
    """

    case: CollisionCase
    kind: AttentionKind
    weights: torch.Tensor
    largest_difference: float
    smallest_difference: float

    @property
    def feature_map_name(self) -> str:
        """The phi that made these weights, as one writes it."""
        return "none" if self.kind == "softmax" else self.case.feature_map_name

    @property
    def verdict(self) -> Verdict:
        """ "distinct" when every two queries differ by more than `COLLISION_TOLERANCE`, "collide" otherwise."""
        return "distinct" if self.smallest_difference > COLLISION_TOLERANCE else "collide"


def measure_injectivity() -> list[InjectivityResult]:
    """Weights of softmax, linear and InLine attention in both cases; deterministic.

    Returns:
        One result per case and attention, cases in the outer loop.
    """
    return [_measure(case, kind) for case in collision_cases() for kind in KINDS]


def collision_cases() -> list[CollisionCase]:
    """Queries on a ray from the origin under relu(x), and queries on no such ray under relu(Ax + b)."""
    keys = torch.tensor(KEYS, dtype=torch.float64)
    identity, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    matrix = torch.tensor([[1.0, 0.2], [0.6, 1.0]], dtype=torch.float64)
    bias = torch.tensor([0.84, -1.08], dtype=torch.float64)
    ray = _parallel_queries(identity, zero, first_query=(0.5, 0.25), factors=(1.0, 2.4, 4.0, 6.0))
    shifted = _parallel_queries(matrix, bias, first_query=(-0.4, 1.6), factors=(1.0, 1.8, 2.8, 4.0))
    return [
        CollisionCase("one ray", "relu(x)", identity, zero, keys, ray),
        CollisionCase("different rays", "relu(Ax + b)", matrix, bias, keys, shifted),
    ]


def _parallel_queries(
    matrix: torch.Tensor, bias: torch.Tensor, first_query: tuple[float, float], factors: tuple[float, ...]
) -> torch.Tensor:
    """Queries `[len(factors), 2]` that solve `A q + b = factor · (A first_query + b)`: parallel features by design."""
    first_feature = matrix @ torch.tensor(first_query, dtype=torch.float64) + bias
    assert (first_feature > 0).all()  # where relu clips, it would bend the line of solutions
    features = torch.tensor(factors, dtype=torch.float64)[:, None] * first_feature
    return torch.linalg.solve(matrix, (features - bias).T).T


def _measure(case: CollisionCase, kind: AttentionKind) -> InjectivityResult:
    feature_map = "identity" if kind == "softmax" else case.feature_map
    q, k = case.queries[None, :, None], case.keys[None, :, None]  # [1, N, 1, 2], [1, M, 1, 2]
    weights = attention_weights(q, k, kind=kind, feature_map=feature_map)[0, 0]
    differences = torch.pdist(weights, p=torch.inf)  # one per pair of queries
    return InjectivityResult(case, kind, weights, differences.max().item(), differences.min().item())
