"""Whether the propositions on injectivity (docs/math.md, section 4) hold for the keys a layer really has.

Softmax and InLine attention tell all queries apart exactly when the centred keys have full rank, that is, when
rank [K, 1] = d + 1 (InLine: of mapped keys, and phi must be one-to-one; MALA: phi must be positive, too). Linear
attention never does. Of a callable phi nobody knows whether it is one-to-one; that it is continuous is taken for
granted.

Shapes: `M` keys, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.analysis.explicit import AttentionKind, MixingRule
from inline_attention.analysis.layer_attention import LayerAttention

ONE_TO_ONE_MAPS = ("identity", "leaky_relu", "exp", "elu_plus_one")
POSITIVE_MAPS = ("exp", "elu_plus_one")  # those that the magnitude rule (MALA) is meant for


@dataclass(frozen=True)
class KeyCondition:
    """The keys of one head of one image, and what follows from them.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        attention: The layer's own.
        feature_map: Its phi.
        keys: M; in windows, of the window whose keys are worst.
        rank: Of [K, 1], K being the mapped keys: one more than the number of singular values above the rounding of
            the keys.
        needed: d + 1.
        largest: Singular value of the centred mapped keys.
        smallest: The same; among d, so zero where there are too few keys.
        injective: Whether different queries always get different weights; None where nobody knows.
        reason: Why, or why not.
        singular_values: All d of them, descending.
    """

    layer: int
    head: int
    attention: AttentionKind
    feature_map: str
    keys: int
    rank: int
    needed: int
    largest: float
    smallest: float
    injective: bool | None
    reason: str
    singular_values: tuple[float, ...]

    @property
    def condition(self) -> float:
        """Largest over smallest singular value: how much less the weights change along the worst direction."""
        return self.largest / self.smallest if self.smallest > 0 else torch.inf


def measure_key_condition(layer: LayerAttention, image: int, head: int) -> KeyCondition:
    """The condition of one head of one image; in windows, that of the window with the worst keys."""
    keys = layer.k[image, :, head]
    if layer.groups is None:
        return key_condition(layer.rule, keys, layer.index, head)
    group = layer.groups[head]
    conditions = [key_condition(layer.rule, keys[group == number], layer.index, head) for number in group.unique()]
    return min(conditions, key=lambda found: (found.rank - found.needed, found.smallest / max(found.largest, 1e-300)))


def key_condition(rule: MixingRule, keys: Tensor, layer: int = 0, head: int = 0) -> KeyCondition:
    """The condition of keys `[M, D]` under a rule."""
    features = rule.features(keys)
    count, width = features.shape
    values = torch.linalg.svdvals(features - features.mean(0))
    values = torch.cat([values, values.new_zeros(max(0, width - len(values)))])  # fewer keys than channels
    # Keys are known to their own precision, whatever is computed from them.
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
    """Whether the attention is one-to-one, and why."""
    is_built_in = isinstance(rule.feature_map, str)
    if rule.normalization == "divide" and keeps_width:
        return False, "division cancels the length of φ(q)"
    if is_built_in and rule.feature_map not in ONE_TO_ONE_MAPS:
        return False, f"φ = {rule.feature_map_name} is not one-to-one"
    if is_built_in and rule.normalization == "magnitude" and rule.feature_map not in POSITIVE_MAPS:
        return False, f"φ = {rule.feature_map_name} is not positive: all queries of mean score -1 get uniform weights"
    missing = width + 1 - rank
    if missing > 0 and keeps_width:
        if count <= width:
            return False, f"{count} keys cannot span {width} channels: {missing} directions of φ(q) go unseen"
        return False, f"the centred keys leave {missing} of {width} directions of φ(q) unseen"
    if not is_built_in:
        return None, f"φ = {rule.feature_map_name} is not the library's: it may be one-to-one or not"
    return True, "the centred keys have full rank"
