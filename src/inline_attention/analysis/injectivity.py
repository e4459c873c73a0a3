"""Do different queries always get different weights? Collisions and the rank of the keys, on a layer's real keys.

A *collision* is a pair of distinct queries with equal weights. The rank of the keys decides whether there are any; see
docs/math.md, section 4.

Shapes: `Q` queries, `M` keys, `D` head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Unpack

import torch
from torch import Tensor

from inline_attention.analysis.probes import LayerAttention, MixingRule, beyond_uniform, choose_layers
from inline_attention.analysis.subjects import Chosen, PictureSample, Subject, captured_images
from inline_attention.data.randomness import derived_seed
from inline_attention.ops.feature_maps import EXP_RATE, FEATURE_MAPS, LEAKY_RELU_SLOPE
from inline_attention.ops.reference import KIND_OF_NORMALIZATION, AttentionKind
from inline_attention.support.figures import KIND_LABELS, LIGHT, MUTED, Axes, light_grid, new_figure, save

ONE_TO_ONE_MAPS = ("identity", "leaky_relu", "exp", "elu_plus_one")
POSITIVE_MAPS = ("exp", "elu_plus_one")  # feature maps that the magnitude rule (MALA) is meant for
RAY_FACTOR = 2.0
SEARCH_DISTANCE = 0.5  # of q' from q, in lengths of q
SEARCH_STEPS = 8
# Relative differences, see `relative_difference`. Constructed collisions agree to 1e-13. The queries of a pair differ
# by half their length, which one-to-one attention shows: on untrained models rows are at least 1e-6 apart, or 1e-8 with
# leaky ReLU, which makes half of a query a hundred times smaller.
EQUAL_ROWS = 1e-10
EQUAL_ROWS_OF_CALLABLES = 1e-5  # a callable phi computes in float32
DISTINCT_QUERIES = 0.1
FOUND = 1e-2  # share of the tolerance at which a search stops
KIND_ORDER = ("softmax", "inline", "magnitude", "linear")
BAR = 0.38


@dataclass(frozen=True)
class CollisionRate:
    """How many queries of one head have a partner with equal weights, under one rule."""

    layer: int
    head: int
    attention: AttentionKind
    feature_map: str
    is_own: bool  # the layer's own rule
    queries: int
    constructed: int  # queries with a constructed partner
    found: int  # queries with a partner found by search
    colliding: int  # queries with a partner either way
    smallest_difference: float  # relative, of rows, over all partners that differ enough from their query
    tolerance: float  # relative difference up to which rows count as equal


@dataclass(frozen=True)
class KeyCondition:
    """The keys of one head of one image, and what follows from them."""

    layer: int
    head: int
    attention: AttentionKind
    feature_map: str
    keys: int  # M; in windows, of the window with the worst keys
    rank: int  # of [K, 1] for mapped keys K: one more than the number of singular values above rounding
    needed: int  # d + 1
    largest: float  # singular value of the centered mapped keys
    smallest: float  # of all d; zero where there are too few keys
    injective: bool | None  # True if different queries always get different weights; None if unknown
    reason: str
    singular_values: tuple[float, ...]  # all d, descending

    @property
    def condition(self) -> float:
        """Largest over smallest singular value: how much less the weights change along the worst direction."""
        return self.largest / self.smallest if self.smallest > 0 else torch.inf


def survey_injectivity(
    subject: Subject, sample: PictureSample, *, queries: int = 8, seed: int = 0, **chosen: Unpack[Chosen]
) -> tuple[list[CollisionRate], list[KeyCondition]]:
    """Return collisions on the queries and keys of some layers, and the condition of the keys of all layers.

    Looking for collisions takes time: the first, the middle and the last layer are searched by default.
    """
    count = len(choose_layers(subject.model, None))
    searched = choose_layers(subject.model, chosen.pop("layers", None) or [0, count // 2, count - 1])
    rates: list[CollisionRate] = []
    conditions: list[KeyCondition] = []
    for _, _, places in captured_images(subject, sample, **chosen):
        for layer, image, head in places:
            conditions.append(measure_key_condition(layer, image, head))
            if layer.index in searched:
                rates += measure_collisions(layer, image, head, queries=queries, seed=seed)
    return rates, conditions


def measure_key_condition(layer: LayerAttention, image: int, head: int) -> KeyCondition:
    """Return the condition of one head of one image; in windows, of the window with the worst keys."""
    group, keys = layer.group(head), layer.k[image, :, head]
    conditions = [key_condition(layer.rule, keys[group == number], layer.index, head) for number in group.unique()]
    return min(conditions, key=lambda found: (found.rank - found.needed, found.smallest / max(found.largest, 1e-300)))


def key_condition(rule: MixingRule, keys: Tensor, layer: int = 0, head: int = 0) -> KeyCondition:
    """Return the condition of keys `[M, D]` under a rule."""
    features = rule.features(keys)
    count, width = features.shape
    values = torch.linalg.svdvals(features - features.mean(0))
    values = torch.cat([values, values.new_zeros(max(0, width - len(values)))])  # fewer keys than channels
    # Keys are only known to their own precision.
    rounding = max(count, width) * torch.finfo(keys.dtype).eps * values[0]
    rank = int((values > rounding).sum()) + 1
    injective, reason = _verdict(rule, rank, width, count, keeps_width=width == keys.shape[1])
    return KeyCondition(
        layer=layer,
        head=head,
        attention=rule.kind,
        feature_map=rule.feature_map_name,
        keys=count,
        rank=rank,
        needed=width + 1,
        largest=values[0].item(),
        smallest=values[-1].item(),
        injective=injective,
        reason=reason,
        singular_values=tuple(values.tolist()),
    )


def _verdict(rule: MixingRule, rank: int, width: int, count: int, *, keeps_width: bool) -> tuple[bool | None, str]:
    is_built_in = isinstance(rule.feature_map, str)
    if rule.normalization == "divide" and keeps_width:
        return False, "division cancels the length of φ(q)"
    if is_built_in and rule.feature_map not in ONE_TO_ONE_MAPS:
        return False, f"φ = {rule.feature_map_name} is not one-to-one"
    if is_built_in and rule.normalization == "magnitude" and rule.feature_map not in POSITIVE_MAPS:
        return False, f"φ = {rule.feature_map_name} is not positive: all queries of mean score -1 get uniform weights"
    missing = width + 1 - rank
    if missing > 0 and keeps_width and count <= width:
        return False, f"{count} keys cannot span {width} channels: {missing} directions of φ(q) are lost"
    if missing > 0 and keeps_width:
        return False, f"the centered keys lose {missing} of {width} directions of φ(q)"
    if not is_built_in:
        return None, f"φ = {rule.feature_map_name} is not built in: it may be one-to-one or not"
    return True, "the centered keys have full rank"


def rules_to_try(own: MixingRule) -> list[MixingRule]:
    """Return softmax, every built-in feature map with each normalization it is meant for, and the layer's own rule."""
    rules = [MixingRule(None, "identity", own.scale)]
    for normalization in KIND_OF_NORMALIZATION:
        maps = POSITIVE_MAPS if normalization == "magnitude" else tuple(FEATURE_MAPS)
        rules += [MixingRule(normalization, name, own.scale) for name in maps]
    return rules if own in rules else [*rules, own]


def measure_collisions(
    layer: LayerAttention, image: int, head: int, *, queries: int = 16, seed: int = 0
) -> list[CollisionRate]:
    """Try all rules on random queries and the keys of one head of one image; in windows, of one window.

    A position bias is left out, since it does not decide which queries collide.
    """
    group = layer.group(head)
    members = (group == group.mode().values).nonzero().flatten()
    generator = torch.Generator().manual_seed(derived_seed("queries", seed, layer.index, head))
    chosen = members[torch.randperm(len(members), generator=generator)[:queries].to(members.device)]
    q, k = layer.q[image, chosen, head].double(), layer.k[image, members, head].double()
    rates: list[CollisionRate] = []
    for rule in rules_to_try(layer.rule):
        # Many small steps are faster on the CPU. The parameters of a callable are on the layer's device.
        device = "cpu" if isinstance(rule.feature_map, str) else q.device
        rate = collision_rate(rule, q.to(device), k.to(device))
        rates.append(replace(rate, layer=layer.index, head=head, is_own=rule == layer.rule))
    return rates


def collision_rate(rule: MixingRule, q: Tensor, k: Tensor) -> CollisionRate:
    """Return the collisions of queries `[Q, D]` on keys `[M, D]`, both float64, under one rule."""
    # The query itself comes first, so that its weights are rounded as those of its partners.
    queries = torch.stack([q, *constructed_partners(rule, q, k), search_partner(rule, q, k)])  # [..., Q, D]
    rows = _compared_rows(rule, queries, k)
    difference = relative_difference(rows, rows[0])
    difference[relative_difference(queries, q) < DISTINCT_QUERIES] = torch.inf
    tolerance = _tolerance(rule)
    collides = difference <= tolerance
    return CollisionRate(
        layer=0,
        head=0,
        attention=rule.kind,
        feature_map=rule.feature_map_name,
        is_own=False,
        queries=len(q),
        constructed=int(collides[:-1].any(0).sum()),
        found=int(collides[-1].sum()),
        colliding=int(collides.any(0).sum()),
        smallest_difference=difference.min().item(),
        tolerance=tolerance,
    )


def relative_difference(first: Tensor, second: Tensor) -> Tensor:
    """Return ‖a - b‖ over the longer of a and b, along the last dimension; 0 where both are zero."""
    longest = torch.maximum(first.norm(dim=-1), second.norm(dim=-1))
    return (first - second).norm(dim=-1) / longest.clamp(min=torch.finfo(first.dtype).tiny)


def constructed_partners(rule: MixingRule, q: Tensor, k: Tensor) -> list[Tensor]:
    """Return one candidate partner `[Q, D]` per construction that applies to the rule's feature map."""
    name = rule.feature_map if isinstance(rule.feature_map, str) else ""
    if name not in _PREIMAGES:
        return []
    features = rule.features(q)
    preimage = _PREIMAGES[name]
    partners = [preimage(RAY_FACTOR * features, q)]  # parallel features: equal weights under division
    if name == "relu":
        partners.append(torch.where(q < 0, RAY_FACTOR * q, q))  # equal features: equal weights under every rule
    # Features that differ in the direction in which keys vary least: if they do not vary at all in it, softmax and
    # InLine give equal weights.
    keys = rule.features(k)
    keys = keys - keys.mean(0)
    unseen = torch.linalg.eigh(keys.mT @ keys).eigenvectors[:, 0]
    for direction in (unseen, -unseen):
        length = SEARCH_DISTANCE * features.norm(dim=-1, keepdim=True)
        if name not in ("identity", "leaky_relu"):  # features must stay positive, as this phi makes them
            room = torch.where(direction < 0, features / direction.abs().clamp(min=1e-300), torch.inf)
            length = torch.minimum(length, 0.9 * room.amin(dim=-1, keepdim=True))
        partners.append(preimage(features + length * direction, q))
    return partners


def search_partner(rule: MixingRule, q: Tensor, k: Tensor) -> Tensor:
    """Return for each query `[Q, D]` the best partner found at `SEARCH_DISTANCE` of its length, `[Q, D]`.

    The search starts in the direction in which the weights change least. Gauss–Newton steps, which know nothing about
    phi, bring the weights to those of the query.
    """
    at_query = weight_gradients(rule, q, k)
    _, directions = torch.linalg.eigh(at_query.mT @ at_query)
    # In both directions: a level set may be open to one side only, as with ReLU.
    start = torch.cat([directions[..., 0], -directions[..., 0]])
    center = torch.cat([q, q])
    rows = _compared_rows(rule, center, k)
    radius = SEARCH_DISTANCE * center.norm(dim=-1, keepdim=True)
    candidate = best = center + radius * start
    smallest = relative_difference(_compared_rows(rule, best, k), rows)
    for _ in range(SEARCH_STEPS):
        if (torch.minimum(*smallest.chunk(2)) <= FOUND * _tolerance(rule)).all():
            break
        residual = _compared_rows(rule, candidate, k) - rows
        jacobian = weight_gradients(rule, candidate, k)
        inverse = torch.linalg.pinv(jacobian.mT @ jacobian, rtol=1e-10, hermitian=True)
        offset = candidate - (inverse @ jacobian.mT @ residual[..., None])[..., 0] - center
        candidate = center + radius * offset / offset.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        difference = relative_difference(_compared_rows(rule, candidate, k), rows)
        better = difference < smallest
        best = torch.where(better[:, None], candidate, best)
        smallest = torch.where(better, difference, smallest)
    one_way, other_way = smallest.chunk(2)
    return torch.where((one_way <= other_way)[:, None], *best.chunk(2))


def weight_gradients(rule: MixingRule, q: Tensor, k: Tensor) -> Tensor:
    """Return the derivatives `[Q, M, D]` of the weights of queries `[Q, D]` for keys `[M, D]` by the queries."""

    def along(direction: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: rule.weights(x, k), (q,), (direction.expand_as(q),))[1]

    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's own, at the first use of jvp
        return torch.func.vmap(along, out_dims=-1)(torch.eye(q.shape[-1], dtype=q.dtype, device=q.device))


def _compared_rows(rule: MixingRule, q: Tensor, k: Tensor) -> Tensor:
    return beyond_uniform(rule.weights(q, k), 1 / len(k))


def _tolerance(rule: MixingRule) -> float:
    return EQUAL_ROWS if isinstance(rule.feature_map, str) else EQUAL_ROWS_OF_CALLABLES


# phi⁻¹: queries with the given features. ReLU drops negative coordinates, which are taken from the query itself.
_PREIMAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda features, _: features,
    "relu": lambda features, q: torch.where(features > 0, features, q.clamp(max=0)),
    "leaky_relu": lambda features, _: torch.where(features > 0, features, features / LEAKY_RELU_SLOPE),
    "exp": lambda features, _: features.log() / EXP_RATE,
    "elu_plus_one": lambda features, _: torch.where(features > 1, features - 1, features.clamp(max=1).log()),
}


def draw_injectivity(
    rates: Mapping[str, Sequence[CollisionRate]],
    conditions: Mapping[str, Sequence[KeyCondition]],
    note: str,
    folder: Path,
) -> list[Path]:
    """Write `injectivity.png` and `.svg`: collisions by rule above, singular values of the centered keys below."""
    small_print = (
        f"{note} A query collides if another one, at least 10 % away, has the same weights up to {EQUAL_ROWS:g} of "
        "their difference from uniform attention. All rules are tried on the model's own queries and keys; ◂ marks its "
        "own rule. Dark bars: by construction; light bars: by search. Softmax and InLine tell all queries apart "
        "exactly when no singular value of the centered keys is zero (docs/math.md, section 4). Lines: medians over "
        "heads and images."
    )
    title = "Do different queries get different weights?"
    with new_figure(max(10.0, 4.9 * len(rates)), 9.2, title, small_print) as figure:
        panels = figure.subplots(2, len(rates), squeeze=False, sharey="row", height_ratios=(1.35, 1))
        for column, label in enumerate(rates):
            _draw_rates(panels[0, column], rates[label])
            panels[0, column].set_title(label, fontsize=12, fontweight="bold", pad=10)
            _draw_spectra(panels[1, column], conditions[label])
        panels[1, 0].set_ylabel("singular value ÷ largest")
        return save(figure, folder, "injectivity")


def _draw_rates(axes: Axes, rates: Sequence[CollisionRate]) -> None:
    groups: dict[tuple[str, str], list[CollisionRate]] = {}
    for rate in sorted(rates, key=lambda rate: KIND_ORDER.index(rate.attention)):
        groups.setdefault((rate.attention, rate.feature_map), []).append(rate)
    for position, ((kind, _), items) in enumerate(groups.items()):
        total = sum(item.queries for item in items)
        constructed, found = (sum(getattr(item, way) for item in items) / total for way in ("constructed", "found"))
        axes.barh(position - BAR / 2, constructed, BAR, color=LIGHT[kind])
        axes.barh(position + BAR / 2, found, BAR, color=LIGHT[kind], alpha=0.45)
        if constructed == found == 0:
            axes.text(0.015, position, "none", va="center", fontsize=9, color=MUTED)
        if any(item.is_own for item in items):
            axes.text(1.02, position, "◂", va="center", clip_on=False)
    names = [KIND_LABELS[kind] + ("" if name == "none" else f", φ = {name}") for kind, name in groups]
    axes.set_yticks(range(len(groups)), names)
    axes.set(ylim=(len(groups) - 0.4, -0.6), xlim=(0, 1), xlabel="queries that collide")
    axes.xaxis.set_major_formatter("{x:.0%}")
    light_grid(axes, "x")


def _draw_spectra(axes: Axes, conditions: Sequence[KeyCondition]) -> None:
    from matplotlib import colormaps

    layers = sorted({condition.layer for condition in conditions})
    for place, layer in enumerate(layers):
        spectra = [
            [value / condition.largest if condition.largest > 0 else 0.0 for value in condition.singular_values]
            for condition in conditions
            if condition.layer == layer
        ]
        middle = [max(median(values), 1e-17) for values in zip(*spectra, strict=True)]
        color = colormaps["viridis"](0.92 * place / max(len(layers) - 1, 1))
        axes.plot(range(1, len(middle) + 1), middle, color=color, linewidth=1.6, label=f"layer {layer}")
    injective = sum(condition.injective is True for condition in conditions)
    unknown = sum(condition.injective is None for condition in conditions)
    worst = min(conditions, key=lambda condition: condition.rank - condition.needed)
    axes.set(yscale="log", ylim=(1e-9, 1.8), xlabel="singular value of the centered keys, by rank")
    share = f"one-to-one: {injective} of {len(conditions)} (heads × images)" + f", {unknown} unknown" * bool(unknown)
    axes.set_title(f"{share}; rank [K, 1] ≥ {worst.rank} of {worst.needed}", fontsize=10)
    light_grid(axes)
    ends = range(len(layers)) if len(layers) <= 6 else (0, len(layers) // 2, len(layers) - 1)
    axes.legend(handles=[axes.lines[place] for place in ends], loc="lower left", fontsize=9)
