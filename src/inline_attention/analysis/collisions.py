"""Distinct queries with equal attention weights, looked for on the real keys of a layer: by construction and by search.

By construction (docs/math.md, section 4): a partner of query q is a query q' with
- parallel features, phi(q') = 2 phi(q): equal weights under division, whatever the keys;
- equal features, phi(q') = phi(q), q' ≠ q: equal weights under every rule; only ReLU has such queries;
- features that differ by what the centred keys do not see: equal weights under softmax and InLine, where there is such
  a direction.
By search: start from q in the direction in which its weights change least, at a fixed distance, and let Gauss–Newton
steps bring the weights of q' to those of q. This knows nothing of phi, so it finds what the constructions do not.

Rows of weights are compared by what they have beyond uniform attention, as in `confusion`: all rows of an untrained
model are nearly uniform, and not equal for that reason.

Shapes: `Q` queries, `M` keys, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inline_attention.analysis.explicit import KIND_OF_NORMALIZATION, AttentionKind, MixingRule, beyond_uniform
from inline_attention.analysis.key_conditions import POSITIVE_MAPS
from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.data.randomness import derived_seed
from inline_attention.ops.feature_maps import EXP_RATE, FEATURE_MAPS, LEAKY_RELU_SLOPE

RAY_FACTOR = 2.0
SEARCH_DISTANCE = 0.5  # of q' from q, in lengths of q
SEARCH_STEPS = 8
# Relative differences, see `relative_difference`. Constructed collisions agree to 1e-13. The queries of a pair differ
# by half their length, which one-to-one attention shows: on untrained models rows are at least 1e-6 apart, or 1e-8 with
# leaky ReLU, which makes half of a query a hundred times smaller.
EQUAL_ROWS = 1e-10
EQUAL_ROWS_OF_CALLABLES = 1e-5  # a callable phi computes in float32
DISTINCT_QUERIES = 0.1
FOUND = 1e-2  # of the difference that counts as equal: where a search need not go on


@dataclass(frozen=True)
class CollisionRate:
    """How many queries of one head have a partner with equal weights.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        attention: The rule tried on the layer's queries and keys.
        feature_map: Its phi.
        is_own: Whether it is the layer's own rule.
        queries: How many were tried.
        constructed: Of how many a partner could be constructed.
        found: Of how many the search found one.
        colliding: Of how many either way gave one.
        smallest_difference: Of rows, relative to what they have beyond uniform attention, over all partners that
            differ enough from their query.
        tolerance: Up to which difference rows count as equal.
    """

    layer: int
    head: int
    attention: AttentionKind
    feature_map: str
    is_own: bool
    queries: int
    constructed: int
    found: int
    colliding: int
    smallest_difference: float
    tolerance: float


def rules_to_try(own: MixingRule) -> list[MixingRule]:
    """Softmax, every built-in feature map under every normalisation that it is meant for, and a layer's own rule."""
    rules = [MixingRule(None, "identity", own.scale)]
    for normalization in KIND_OF_NORMALIZATION:
        maps = POSITIVE_MAPS if normalization == "magnitude" else tuple(FEATURE_MAPS)
        rules += [MixingRule(normalization, name, own.scale) for name in maps]
    return rules if own in rules else [*rules, own]


def measure_collisions(
    layer: LayerAttention, image: int, head: int, *, queries: int = 16, seed: int = 0
) -> list[CollisionRate]:
    """Try all rules on the queries and keys of one head of one image.

    In windows, on those of one window; a position bias is left out, since it does not decide which queries collide.

    Args:
        layer: The layer.
        image: Number in the batch.
        head: Number of the head.
        queries: How many of its queries to try, drawn at random.
        seed: Of the draw.
    """
    members = torch.arange(layer.num_tokens, device=layer.q.device)
    if layer.groups is not None:
        members = (layer.groups[head] == layer.groups[head].mode().values).nonzero().flatten()
    generator = torch.Generator().manual_seed(derived_seed("queries", seed, layer.index, head))
    chosen = members[torch.randperm(len(members), generator=generator)[:queries].to(members.device)]
    q, k = layer.q[image, chosen, head].double(), layer.k[image, members, head].double()
    rates: list[CollisionRate] = []
    for rule in rules_to_try(layer.rule):
        # Many small steps, one after the other: a GPU takes longer. A callable's parameters are where the layer is.
        device = "cpu" if isinstance(rule.feature_map, str) else q.device
        rate = collision_rate(rule, q.to(device), k.to(device))
        rates.append(replace(rate, layer=layer.index, head=head, is_own=rule == layer.rule))
    return rates


def collision_rate(rule: MixingRule, q: Tensor, k: Tensor) -> CollisionRate:
    """Collisions of queries `[Q, D]` on keys `[M, D]`, both float64, under one rule."""
    rows = _said_by_rows(rule, q, k)
    constructed = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    smallest = torch.inf
    for partner in constructed_partners(rule, q, k):
        collides, difference = _compare(rule, rows, q, partner, k)
        constructed |= collides
        smallest = min(smallest, difference)
    found, difference = _compare(rule, rows, q, search_partner(rule, q, k), k)
    return CollisionRate(
        layer=0,
        head=0,
        attention=rule.kind,
        feature_map=rule.feature_map_name,
        is_own=False,
        queries=len(q),
        constructed=int(constructed.sum()),
        found=int(found.sum()),
        colliding=int((constructed | found).sum()),
        smallest_difference=min(smallest, difference),
        tolerance=_tolerance(rule),
    )


def relative_difference(first: Tensor, second: Tensor) -> Tensor:
    """‖a - b‖ over the longer of a and b, along the last dimension; 0 where both are zero."""
    longest = torch.maximum(first.norm(dim=-1), second.norm(dim=-1))
    return (first - second).norm(dim=-1) / longest.clamp(min=torch.finfo(first.dtype).tiny)


def constructed_partners(rule: MixingRule, q: Tensor, k: Tensor) -> list[Tensor]:
    """One candidate partner `[Q, D]` per construction that applies to the rule's feature map."""
    name = rule.feature_map if isinstance(rule.feature_map, str) else ""
    if name not in _PREIMAGES:
        return []
    features = rule.features(q)
    preimage = _PREIMAGES[name]
    partners = [preimage(RAY_FACTOR * features, q)]
    if name == "relu":
        partners.append(torch.where(q < 0, RAY_FACTOR * q, q))
    unseen = _least_seen_direction(rule.features(k))
    length = SEARCH_DISTANCE * features.norm(dim=-1, keepdim=True)
    for direction in (unseen, -unseen):
        moved = features + length * direction
        if name not in ("identity", "leaky_relu"):  # features must stay positive, as this phi makes them
            room = torch.where(direction < 0, features / direction.abs().clamp(min=1e-300), torch.inf)
            moved = features + torch.minimum(length, 0.9 * room.min(dim=-1, keepdim=True).values) * direction
        partners.append(preimage(moved, q))
    return partners


def search_partner(rule: MixingRule, q: Tensor, k: Tensor) -> Tensor:
    """For each query `[Q, D]` the best partner found at `SEARCH_DISTANCE` of its length, `[Q, D]`."""
    at_query = rule.weight_gradients(q, k)
    _, directions = torch.linalg.eigh(at_query.mT @ at_query)
    # Both ways at once: a level set may be open to one side only, as that of ReLU is.
    start = torch.cat([directions[..., 0], -directions[..., 0]])
    centre = torch.cat([q, q])
    rows = _said_by_rows(rule, centre, k)
    radius = SEARCH_DISTANCE * centre.norm(dim=-1, keepdim=True)
    candidate = best = centre + radius * start
    smallest = relative_difference(_said_by_rows(rule, best, k), rows)
    for _ in range(SEARCH_STEPS):
        if (torch.minimum(*smallest.chunk(2)) <= FOUND * _tolerance(rule)).all():
            break
        residual = _said_by_rows(rule, candidate, k) - rows
        candidate = _gauss_newton_step(candidate, residual, rule.weight_gradients(candidate, k))
        offset = candidate - centre
        candidate = centre + radius * offset / offset.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        difference = relative_difference(_said_by_rows(rule, candidate, k), rows)
        better = difference < smallest
        best = torch.where(better[:, None], candidate, best)
        smallest = torch.where(better, difference, smallest)
    one_way, other_way = best.chunk(2)
    first_is_better = smallest[: len(q)] <= smallest[len(q) :]
    return torch.where(first_is_better[:, None], one_way, other_way)


def _gauss_newton_step(x: Tensor, residual: Tensor, jacobian: Tensor) -> Tensor:
    """x less the damped least-squares solution of `jacobian · step = residual`."""
    values, vectors = torch.linalg.eigh(jacobian.mT @ jacobian)
    gradient = (residual[:, None] @ jacobian)[:, 0]
    damping = 1e-10 * values[:, -1:].clamp(min=1e-300)
    in_basis = (gradient[:, None] @ vectors)[:, 0] / (values.clamp(min=0) + damping)
    return x - (vectors @ in_basis[..., None])[..., 0]


def _compare(rule: MixingRule, rows: Tensor, q: Tensor, partner: Tensor, k: Tensor) -> tuple[Tensor, float]:
    """Which partners collide with their queries, and the smallest difference of rows of those that are distinct."""
    difference = relative_difference(_said_by_rows(rule, partner, k), rows)
    distinct = relative_difference(partner, q) >= DISTINCT_QUERIES
    smallest = difference[distinct].min().item() if distinct.any() else torch.inf
    return distinct & (difference <= _tolerance(rule)), smallest


def _said_by_rows(rule: MixingRule, q: Tensor, k: Tensor) -> Tensor:
    """Rows of weights less uniform attention, `[Q, M]`."""
    return beyond_uniform(rule.weights(q, k), 1 / len(k))


def _tolerance(rule: MixingRule) -> float:
    return EQUAL_ROWS if isinstance(rule.feature_map, str) else EQUAL_ROWS_OF_CALLABLES


def _least_seen_direction(features: Tensor) -> Tensor:
    """The unit vector along which mapped keys `[M, D]` vary least, `[D]`."""
    centred = features - features.mean(0)
    _, vectors = torch.linalg.eigh(centred.mT @ centred)
    return vectors[:, 0]


# phi⁻¹: queries with the given features; ReLU forgets negative coordinates, which are taken from the query itself.
_PREIMAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda features, _: features,
    "relu": lambda features, q: torch.where(features > 0, features, q.clamp(max=0)),
    "leaky_relu": lambda features, _: torch.where(features > 0, features, features / LEAKY_RELU_SLOPE),
    "exp": lambda features, _: features.log() / EXP_RATE,
    "elu_plus_one": lambda features, _: torch.where(features > 1, features - 1, features.clamp(max=1).log()),
}
