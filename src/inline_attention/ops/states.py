"""States of keys and values: everything a query needs to know about them (docs/math.md, section 6).

States of disjoint sets merge exactly. So keys may be split over chunks, devices or the tiles of an image that is too
large for memory, and each query still attends to all of them.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.ops import composed, validation
from inline_attention.ops.api import warn_of_order
from inline_attention.ops.backends import triton
from inline_attention.ops.call import AttentionCall, Normalization
from inline_attention.ops.feature_maps import FeatureMap, apply_feature_map
from inline_attention.ops.tracing import as_autocast, autocast_enabled, is_plain_execution

KERNEL_DEVICES = ("cuda",)  # Triton's interpreter on a CPU is for tests


class AttentionState(NamedTuple):
    """The state of a set of keys and values, in float32 (float64 for float64 inputs).

    A state without keys has key_count 0 and zeros elsewhere. It changes nothing where it is merged.
    """

    key_count: Tensor  # [B] int64, the number M of real keys
    key_mean: Tensor  # [B, H, D], the mean of phi(k)
    value_mean: Tensor  # [B, H, Dv]
    covariance: Tensor  # [B, H, D, Dv], of phi(k) and v, without the scale


def attention_state(
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap = "identity",
    key_padding_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> AttentionState:
    """Compute the state of keys and values. Differentiable, in memory linear in `chunk_size`.

    Args:
        k: Keys `[B, M, H, D]`; M = 0 gives a state without keys.
        v: Values `[B, M, H, Dv]`.
        feature_map: phi, as in `inline_attention`; `attend` needs the same one.
        key_padding_mask: `[B, M]` bool, True for a real key. A row without any gives a state without keys.
        chunk_size: Number of keys to convert to float32 at once; all by default.

    Returns:
        The state, for `merge_states` and `attend`.
    """
    validation.check_head_tokens("k", k, least_tokens=0)
    validation.check_keys_and_values(k, v, least_tokens=0)
    validation.check_matches("k", k, "v", v)
    validation.check_feature_map(feature_map)
    if key_padding_mask is None:
        warn_of_order("attention_state reads k", k, k, "transpose(1, 2) queries, keys and values", stacklevel=3)
    else:
        validation.check_mask_form(key_padding_mask, k)
    if chunk_size is not None:
        validation.check_count("chunk_size", chunk_size)
        starts = range(0, max(k.shape[1], 1), chunk_size)
        masks = (None if key_padding_mask is None else key_padding_mask[:, at : at + chunk_size] for at in starts)
        parts = ((k[:, at : at + chunk_size], v[:, at : at + chunk_size]) for at in starts)
        return reduce(
            merge_states,
            (
                attention_state(*part, feature_map=feature_map, key_padding_mask=mask)
                for part, mask in zip(parts, masks, strict=True)
            ),
        )
    k, v = as_autocast(k), as_autocast(v)
    if k.shape[1] == 0:
        key_padding_mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)  # sums, no means
    count = (
        torch.full(k.shape[:1], k.shape[1], dtype=torch.int64, device=k.device)
        if key_padding_mask is None
        else key_padding_mask.sum(1)
    )
    with _without_autocast(k):
        call = AttentionCall(k, k, v, None, 1.0, feature_map, "subtract", key_padding_mask, None, None, 0)
        if _suits_kernels(call, k, v):
            covariance, key_mean, value_mean = triton.state_of_keys(call)
            return AttentionState(count, key_mean, value_mean, covariance)
        dtype = torch.promote_types(k.dtype, torch.float32)
        key, value = apply_feature_map(feature_map, k, dtype), v.to(dtype)
        if key_padding_mask is not None:
            key, value = composed.without_padding(key, value, key_padding_mask)
        key_mean, value_mean, covariance = composed.moments(key, value, key_padding_mask)
        return AttentionState(count, key_mean.squeeze(1), value_mean.squeeze(1), covariance)


def merge_states(*states: AttentionState) -> AttentionState:
    """Return the state of the union of disjoint sets of keys, from the states of each.

    Exact up to rounding, differentiable, and independent of the order.
    """
    if not states:
        raise ValueError("merge_states needs at least one state, got none")
    for state in states:
        if not isinstance(state, AttentionState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"merge_states takes states, each an argument of its own, got {type(state).__name__}")
    kinds = {(tuple(state.covariance.shape), state.covariance.dtype, state.covariance.device) for state in states}
    if len(kinds) > 1:
        raise ValueError(
            "states must agree in B, H, D, Dv, dtype and device, got "
            + " and ".join(sorted(f"{shape} {dtype} on {device}" for shape, dtype, device in kinds))
        )
    counts, key_means, value_means, covariances = (torch.stack(parts) for parts in zip(*states, strict=True))
    total = counts.sum(0)
    dtype = key_means.dtype  # integers would be divided in float32
    share = (counts.to(dtype) / total.clamp(min=1).to(dtype))[..., None, None]  # [states, B, 1, 1]
    key_mean, value_mean = (share * key_means).sum(0), (share * value_means).sum(0)
    between = (key_means - key_mean)[..., :, None] * (value_means - value_mean)[..., None, :]
    return AttentionState(total, key_mean, value_mean, (share[..., None] * (covariances + between)).sum(0))


def attend(
    q: Tensor,
    state: AttentionState,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
    v: Tensor | None = None,
    local_weight: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
) -> Tensor:
    """Compute the attention of queries over the keys and values of a state. Queries may come in any chunks.

    `attend(q, attention_state(k, v))` is `inline_attention(q, k, v)`.

    Args:
        q: Queries `[B, N, H, D]`.
        state: State of the keys; each row of the batch needs a real one.
        scale: Factor on the inner products; `D ** -0.5` by default.
        feature_map: phi, the one of the state.
        normalization: "subtract" (InLine), "divide" or "magnitude".
        v: Values `[B, N, H, Dv]` of the queries' own tokens, a grid without prefix tokens; given with `local_weight`.
        local_weight: `[B, H, Dv, 3, 3]` of the local term, see `inline_attention`. The term takes rows and columns
            beyond the edge of `grid_size` for zeros.
        grid_size: `(h, w)` of the queries, N = h·w; given with `local_weight`.

    Returns:
        `[B, N, H, Dv]`, in the dtype of q.
    """
    validation.check_head_tokens("q", q)
    validation.check_feature_map(feature_map)
    validation.check_normalization(normalization)
    scale = validation.resolve_scale(scale, q.shape[3])
    _check_state(state, q, feature_map)
    q, v, local_weight = as_autocast(q), as_autocast(v), as_autocast(local_weight)
    own = q
    if local_weight is not None:
        if v is None:
            raise ValueError("local_weight needs v, the values of the queries' own tokens")
        validation.check_head_tokens("v", v)
        expected = *q.shape[:3], state.value_mean.shape[2]
        if any(got != wanted for got, wanted in zip(v.shape, expected, strict=True)) or v.device != q.device:
            raise ValueError(
                f"v must be the values [B, N, H, Dv] = {expected} of the queries' own tokens on {q.device}, got "
                f"{tuple(v.shape)} on {v.device}"
            )
        own, grid_size = v, validation.check_local(local_weight, grid_size, 0, v)
    with _without_autocast(q):
        call = AttentionCall(q, q, own, None, scale, feature_map, normalization, None, local_weight, grid_size, 0)
        others = () if local_weight is None else (own, local_weight)
        fits = state.covariance.dtype == torch.float32 and state.covariance.shape[3] <= triton.LARGEST_HEAD_DIM
        if fits and own.dtype == q.dtype and _suits_kernels(call, q, *state[1:], *others):
            return triton.attend_to_state(call, (scale * state.covariance, state.key_mean, state.value_mean))
        query = apply_feature_map(feature_map, q, state.covariance.dtype)
        if query.shape[3] != state.covariance.shape[2]:
            raise _disagrees(state, query)
        means = state.key_mean[:, None], state.value_mean[:, None]
        out = composed.apply_moments(query, *means, state.covariance, scale, normalization)
        if local_weight is not None and grid_size is not None:  # added before the sum is rounded to the dtype of q
            out = out + composed.local_term(own.to(out.dtype), local_weight.to(out.dtype), grid_size)
        return out.to(q.dtype)


def state_weights(
    q: Tensor,
    k: Tensor,
    state: AttentionState,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
) -> Tensor:
    """Return the weights `[B, H, N, n]` of queries `[B, N, H, D]` for some keys `[B, n, H, D]` of a state's set.

    Keys may come in any chunks: all weights of a query are known in memory linear in the number of keys.
    """
    validation.check_queries_and_keys(q, k)
    validation.check_feature_map(feature_map)
    scale = validation.resolve_scale(scale, q.shape[3])
    dtype = state.covariance.dtype
    query, key = (apply_feature_map(feature_map, tokens, dtype).transpose(1, 2) for tokens in (q, k))
    deviation = scale * query @ (key - state.key_mean[:, :, None]).transpose(2, 3)
    if normalization != "subtract":
        mean_score = scale * (query * state.key_mean[:, :, None]).sum(-1, keepdim=True)
        deviation = deviation * composed.amplification(mean_score, normalization)
    return (1 + deviation) / state.key_count.to(dtype)[:, None, None, None]


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context for float32 sums; meta tensors have no autocast to disable."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast_enabled(tensor) else nullcontext()


def _suits_kernels(call: AttentionCall, *tensors: Tensor) -> bool:
    """True if the Triton kernels can run the part of a call that needs these tensors."""
    return (
        call.q.device.type in KERNEL_DEVICES
        and isinstance(call.feature_map, str)
        and call.q.numel() > 0
        and is_plain_execution(*tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and triton.unsupported_reason(call) is None
    )


def _check_state(state: Any, q: Tensor, feature_map: str | FeatureMap) -> None:
    """Check that an argument is a state for queries `[B, N, H, ·]`."""
    if not isinstance(state, AttentionState):
        raise ValueError(f"state must be an AttentionState, got {type(state).__name__}; use attention_state(k, v)")
    B, H, D, _ = state.covariance.shape
    widens = not isinstance(feature_map, str)  # only a callable may change D
    if q.shape[0] != B or q.shape[2] != H or (q.shape[3] != D and not widens):
        raise _disagrees(state, q)
    if state.covariance.device != q.device:
        raise ValueError(f"q and the state must be on one device, got {q.device} and {state.covariance.device}")


def _disagrees(state: AttentionState, query: Tensor) -> ValueError:
    B, _, H, D = query.shape
    return ValueError(
        f"q must agree with the state in B, H and D = {tuple(state.covariance.shape[:3])}, got {(B, H, D)} after the "
        "feature map; use the feature map and the layout [B, N, H, D] of the keys"
    )


class SoftmaxState(NamedTuple):
    """Softmax attention of a few queries over a set of keys, which merges with that over other keys. Cost: N·M·D."""

    highest: Tensor  # [B, H, N, 1], the largest score; -inf without keys
    total: Tensor  # [B, H, N, 1], the sum of exp(score - highest)
    values: Tensor  # [B, H, N, Dv], the sum of exp(score - highest) times the value

    @property
    def out(self) -> Tensor:
        """The output `[B, N, H, Dv]`, in float32 at least."""
        return (self.values / self.total).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the weights `[B, H, N, M]` that the queries give to some of the keys."""
        return (_scores(q, k, scale) - self.highest).exp() / self.total


def softmax_state(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_padding_mask: Tensor | None = None
) -> SoftmaxState:
    """Return softmax attention of queries `[B, N, H, D]` over keys and values `[B, M, H, D]`; M may be 0."""
    scores = _scores(q, k, scale)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None], float("-inf"))
    lowest = scores.new_full((*scores.shape[:3], 1), float("-inf"))
    highest = torch.cat([scores.detach(), lowest], dim=-1).amax(-1, keepdim=True)
    weights = (scores - _finite(highest)).exp()
    with _without_autocast(q):
        values = torch.einsum("bhnm,bmhd->bhnd", weights, v.to(weights.dtype))
    return SoftmaxState(highest, weights.sum(-1, keepdim=True), values)


def merge_softmax_states(*states: SoftmaxState) -> SoftmaxState:
    """Return softmax attention over the union of disjoint sets of keys."""
    highest = torch.stack([state.highest for state in states]).amax(0)
    factors = [(state.highest - _finite(highest)).exp() for state in states]
    total = torch.stack([state.total * factor for state, factor in zip(states, factors, strict=True)]).sum(0)
    values = torch.stack([state.values * factor for state, factor in zip(states, factors, strict=True)]).sum(0)
    return SoftmaxState(highest, total, values)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores `[B, H, N, M]` in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with _without_autocast(q):
        return scale * torch.einsum("bnhd,bmhd->bhnm", q.to(dtype), k.to(dtype))


def _finite(highest: Tensor) -> Tensor:
    """Replace -inf, of no keys, by a number: the difference of two infinities is none."""
    return highest.clamp(min=torch.finfo(highest.dtype).min)
