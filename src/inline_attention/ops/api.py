"""The public op: validate → select a backend → call it.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
Heads come last but one, as the qkv projection leaves them: no transposes around the op. `layout="bhnd"` takes tensors
in the order of PyTorch's `scaled_dot_product_attention`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast, get_args

import torch
from torch import Tensor

from inline_attention.ops import dispatch, reference, validation
from inline_attention.ops.backends import eager
from inline_attention.ops.call import AttentionCall, Layout, Normalization
from inline_attention.ops.feature_maps import FeatureMap
from inline_attention.ops.tracing import (
    are_plain_eager_tensors,
    as_autocast,
    autocast_enabled,
    is_transformed,
    plain_sizes,
    unrecorded,
)

_NORMALIZATION_OF_KIND: dict[str, Normalization] = {
    kind: normalization for normalization, kind in reference.KIND_OF_NORMALIZATION.items()
}


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
    key_padding_mask: Tensor | None = None,
    local_weight: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    num_prefix_tokens: int = 0,
    layout: Layout = "bnhd",
    backend: str = "auto",
) -> Tensor:
    """Compute injective linear attention, in time and memory linear in the number of tokens.

    The weight of key j for query i is `(s_ij - mean_j s_ij + 1) / M` with `s_ij = scale · phi(q_i)·phi(k_j)`: it sums
    to one by subtraction, where linear attention divides. With `local_weight`, a dynamic 3×3 correlation of the value
    grid is added. Under autocast the inputs are cast to the autocast dtype, as in PyTorch's own attention.

    Args:
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, M, H, D]`.
        v: Values `[B, M, H, Dv]`.
        scale: Factor on the inner products; `D ** -0.5` by default.
        feature_map: phi: "identity", "relu", "leaky_relu", "exp", "elu_plus_one", or a callable on `[B, N, H, D]`
            that keeps all but the last dimension. Callables see float32 (float64) whatever the input's dtype.
        normalization: "subtract" (InLine), "divide" (vanilla linear attention) or "magnitude" (MALA).
        key_padding_mask: `[B, M]` bool, True for a real key. Padded keys and values are left out of the sums, of M and
            of the local term. Every row needs a real key.
        local_weight: `[B, H, Dv, 3, 3]`, a 3×3 kernel per sample and channel (cross-correlation, zero padding).
        grid_size: `(h, w)` of the token grid; given with `local_weight` only, where N = M = num_prefix_tokens + h·w.
        num_prefix_tokens: Class or register tokens before the grid, which the local term neither reads nor changes;
            given with `local_weight` only.
        layout: Order of the dimensions of q, k, v and the result: "bnhd" as above, or "bhnd" for heads before tokens,
            as in `scaled_dot_product_attention`. It is an option, not a second function, so that all other arguments
            work in both orders. Neither is copied, but the `cuda` backend needs a token's heads side by side in memory.
        backend: "auto", or by name "cuda", "triton", "eager", or "reference" (explicit weights, quadratic memory).

    Returns:
        `[B, N, H, Dv]`, or `[B, H, N, Dv]` for "bhnd", in the dtype of the inputs.

    Raises:
        ValueError: If arguments do not fit together. The message says what to do.
    """
    if layout != "bnhd":
        q, k, v = _tokens_first(layout, q, k, v)
    call = AttentionCall(
        q, k, v, None, cast(float, scale), feature_map, normalization,
        key_padding_mask, local_weight, grid_size, num_prefix_tokens,
    )  # fmt: skip
    out = attend(call, backend, may_be_heads_first=layout == "bnhd")
    return out if layout == "bnhd" else out.transpose(1, 2)


def inline_attention_qkvpacked(
    qkv: Tensor,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
    key_padding_mask: Tensor | None = None,
    local_weight: Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    num_prefix_tokens: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Compute `inline_attention` on the output of a fused projection, read in place; its gradient is packed, too.

    It has no `layout`: packed tensors come from a projection, which leaves them in this order.

    Args:
        qkv: `[B, N, 3, H, D]`: queries, keys and values, as the projection leaves them.
        scale, feature_map, normalization, key_padding_mask, local_weight, grid_size, num_prefix_tokens, backend:
            The arguments of `inline_attention`, where M = N and Dv = D.

    Returns:
        `[B, N, H, D]`.
    """
    validation.check_packed(qkv)
    q, k, v = qkv.unbind(2)
    call = AttentionCall(
        q, k, v, qkv, cast(float, scale), feature_map, normalization,
        key_padding_mask, local_weight, grid_size, num_prefix_tokens,
    )  # fmt: skip
    return attend(call, backend, may_be_heads_first=True)


def local_residual(
    v: Tensor,
    local_weight: Tensor,
    *,
    grid_size: tuple[int, int],
    num_prefix_tokens: int = 0,
    key_padding_mask: Tensor | None = None,
    layout: Layout = "bnhd",
) -> Tensor:
    """Compute the local term alone: a dynamic 3×3 cross-correlation of the value grid, to add to another attention.

    `inline_attention(..., local_weight=...)` computes it together with the rest, which is faster.

    Args:
        v: Values `[B, N, H, Dv]`.
        local_weight: `[B, H, Dv, 3, 3]`.
        grid_size: `(h, w)`, N = num_prefix_tokens + h·w.
        num_prefix_tokens: Tokens before the grid; their result is zero.
        key_padding_mask: `[B, N]` bool, True for a real token; padded values count as zero.
        layout: "bnhd", or "bhnd" for v and the result as `[B, H, N, Dv]`.

    Returns:
        `[B, N, H, Dv]`.
    """
    if layout != "bnhd":
        (v,) = _tokens_first(layout, v)
    if autocast_enabled(v):
        v, local_weight = as_autocast(v), as_autocast(local_weight)
    grid_size = plain_sizes(grid_size)
    with unrecorded():
        validation.check_head_tokens("v", v)
        grid_size = validation.check_local(local_weight, grid_size, num_prefix_tokens, v)
        if key_padding_mask is not None:
            validation.check_mask(key_padding_mask, v)
    if key_padding_mask is not None:
        v = v.masked_fill(~key_padding_mask[:, :, None, None], 0)
    out = eager.run_local_term(v, local_weight, grid_size, num_prefix_tokens)
    return out if layout == "bnhd" else out.transpose(1, 2)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    kind: reference.AttentionKind = "inline",
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    key_padding_mask: Tensor | None = None,
    layout: Layout = "bnhd",
) -> Tensor:
    """Compute the weights of every query for every key, for analysis and teaching; memory is quadratic.

    Args:
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, M, H, D]`.
        kind: "inline", "linear", "magnitude" (MALA) or "softmax".
        scale: Factor on the inner products; `D ** -0.5` by default.
        feature_map: phi, a name or a callable; softmax takes only "identity".
        key_padding_mask: `[B, M]` bool, True for a real key; padded keys get weight zero.
        layout: "bnhd", or "bhnd" for q and k as `[B, H, N, D]`.

    Returns:
        `[B, H, N, M]`, computed in float64 and returned in the dtype of q. Rows sum to one.
    """
    may_be_heads_first = layout == "bnhd" and key_padding_mask is None
    if layout != "bnhd":
        q, k = _tokens_first(layout, q, k)
    validation.check_queries_and_keys(q, k)
    if may_be_heads_first:
        warn_of_order("attention_weights reads q", q, k, "pass layout='bhnd'", stacklevel=3)
    validation.check_feature_map(feature_map)
    scale = validation.resolve_scale(scale, q.shape[3])
    if key_padding_mask is not None:
        validation.check_mask(key_padding_mask, k)
    if kind == "softmax":
        if feature_map != "identity":
            raise ValueError(f"softmax has no feature map, got {feature_map!r}; apply it to q and k yourself")
        weights = reference.softmax_weights(q, k, scale, key_padding_mask)
    elif isinstance(kind, str) and kind in _NORMALIZATION_OF_KIND:  # pyright: ignore[reportUnnecessaryIsInstance]
        normalization = _NORMALIZATION_OF_KIND[kind]
        weights = reference.kernel_weights(q, k, scale, feature_map, normalization, key_padding_mask)
    else:
        raise validation.unknown_name("kind", kind, [*_NORMALIZATION_OF_KIND, "softmax"])
    return weights.to(q.dtype)


# Vision models have up to 32 heads, and 49 tokens (7×7, the coarsest map of a 224² image) or more. What looks like at
# most 32 tokens with at least 49 heads is rather the other order.
_MOST_HEADS, _LEAST_TOKENS = 32, 49
_has_warned = False


def _warn_if_heads_first(call: AttentionCall) -> None:
    """Warn once per process if the tensors of a call look like `[B, H, N, D]`; the result would be wrong.

    Other calls cannot be mistaken: a mask or a grid states the number of tokens, and in cross-attention q and k would
    differ in the number of heads, which is an error.
    """
    if call.local_weight is None and call.key_padding_mask is None:
        fix = "pass layout='bhnd'" if call.qkv is None else "permute qkv to [B, N, 3, H, D]"
        warn_of_order("inline_attention reads q", call.q, call.k, fix, stacklevel=5)


def warn_of_order(what: str, q: Tensor, k: Tensor, fix: str, *, stacklevel: int) -> None:
    """Warn once per process if both tensors look like `[B, H, N, D]` instead of `[B, N, H, D]`."""
    global _has_warned
    if _has_warned or not are_plain_eager_tensors(q):
        return
    tokens, heads = q.shape[1:3]
    if tokens <= _MOST_HEADS and heads >= _LEAST_TOKENS and k.shape[1] == tokens:
        _has_warned = True
        warnings.warn(
            f"{what} {tuple(q.shape)} as [B, N, H, D], {tokens} tokens with {heads} heads; "
            f"{fix} if your heads come before your tokens, as in scaled_dot_product_attention",
            stacklevel=stacklevel,
        )


def _tokens_first(layout: str, *tensors: Any) -> tuple[Any, ...]:
    """Return tensors `[B, H, N, D]` as views `[B, N, H, D]`; validation refuses tensors of other dimensions."""
    if layout != "bhnd":
        raise validation.unknown_name("layout", layout, get_args(Layout))
    return tuple(x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in tensors)


# The backend and the scale of calls seen before, by everything that checks and selection depend on. The layers of a
# model make the same calls every step, and selecting again takes the host longer than a small kernel takes on a GPU.
_SELECTED: dict[tuple[Any, ...], tuple[Callable[[AttentionCall], Tensor], float]] = {}
_MAX_SELECTED = 4096


def attend(call: AttentionCall, backend: str, *, may_be_heads_first: bool = False) -> Tensor:
    """Validate a call, select a backend and run it. Layers call it directly where q is theirs, with `overwrite_q`."""
    if autocast_enabled(call.q):
        call = _as_autocast_call(call)
        # Left on, autocast would also round the float32 sums inside.
        with torch.autocast(call.q.device.type, enabled=False):
            return attend(call, backend, may_be_heads_first=may_be_heads_first)
    signature = _signature(call, backend)
    found = None if signature is None else _SELECTED.get(signature)
    if found is not None:
        run, scale = found
        return run(call if call.scale is not None else call._replace(scale=scale))  # pyright: ignore[reportUnnecessaryComparison]
    call = call._replace(grid_size=plain_sizes(call.grid_size))
    with unrecorded():
        call = validation.validated(call)
    if may_be_heads_first:
        _warn_if_heads_first(call)
    run = dispatch.select(backend, call).run
    if signature is not None:
        if len(_SELECTED) >= _MAX_SELECTED:
            _SELECTED.clear()
        _SELECTED[signature] = run, call.scale
    return run(call)


def _as_autocast_call(call: AttentionCall) -> AttentionCall:
    """Cast the tensors of a call to the autocast dtype, as PyTorch does for its own attention."""
    local_weight = as_autocast(call.local_weight)
    if call.qkv is not None:
        qkv = as_autocast(call.qkv)
        q, k, v = qkv.unbind(2)
        return call._replace(q=q, k=k, v=v, qkv=qkv, local_weight=local_weight)
    return call._replace(q=as_autocast(call.q), k=as_autocast(call.k), v=as_autocast(call.v), local_weight=local_weight)


def _signature(call: AttentionCall, backend: str) -> tuple[Any, ...] | None:
    """Return a key of everything that checks and selection depend on; None for calls that are checked each time."""
    if call.key_padding_mask is not None or not isinstance(call.feature_map, str) or is_transformed():
        return None
    tensors = (call.q, call.k, call.v, call.local_weight) if call.qkv is None else (call.qkv, call.local_weight)
    grid_size, prefix = call.grid_size, call.num_prefix_tokens
    try:
        layouts = [
            None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.storage_offset() % 8, type(x))
            for x in tensors
        ]
        if grid_size is not None and any(type(extent) is not int for extent in grid_size):
            return None  # 3.0 and True equal integers, but are refused; NumPy's integers are converted
        numbers = (call.scale, type(call.scale), prefix, type(prefix), grid_size)  # types for the same reason
        signature = (*layouts, *numbers, call.feature_map, call.normalization, call.overwrite_q, backend)
        hash(signature)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return signature
