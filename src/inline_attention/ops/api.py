"""The public op: validate → select a backend → call it.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
Heads come last but one, as the qkv projection leaves them: no transposes around the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inline_attention.ops import dispatch, reference, validation
from inline_attention.ops.autocast import as_autocast, autocast_enabled
from inline_attention.ops.backends import eager
from inline_attention.ops.call import AttentionCall, Normalization, PreparedCall
from inline_attention.ops.feature_maps import FeatureMap
from inline_attention.ops.tracing import is_transformed, plain_sizes, unrecorded

_NORMALIZATION_OF_KIND: dict[str, Normalization] = {
    kind: normalization for normalization, kind in reference.KIND_OF_NORMALIZATION.items()
}


def inline_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
    key_padding_mask: torch.Tensor | None = None,
    local_weight: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    num_prefix_tokens: int = 0,
    overwrite_q: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Injective linear attention, in time and memory linear in the number of tokens.

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
        key_padding_mask: `[B, M]` bool, True for a real key. Padded keys and values count nowhere: not in the sums,
            not in M, not in the local term. Every row needs a real key.
        local_weight: `[B, H, Dv, 3, 3]`, a 3×3 kernel per sample and channel (cross-correlation, zero padding).
        grid_size: `(h, w)` of the token grid; given with `local_weight` only, where N = M = num_prefix_tokens + h·w.
        num_prefix_tokens: Class or register tokens before the grid, which the local term neither reads nor changes;
            given with `local_weight` only.
        overwrite_q: Allow the result to take the memory of q where no gradients are asked for, which saves a tensor of
            that size. Some kernels do, compiled graphs never; do not read q, or what shares its memory, afterwards.
        backend: "auto", or by name "cuda", "triton", "eager", or "reference" (explicit weights, quadratic memory).

    Returns:
        `[B, N, H, Dv]`, in the dtype of the inputs.

    Raises:
        ValueError: Arguments that do not fit together; the message says what to do.
    """
    validation.check_flag("overwrite_q", overwrite_q)
    if autocast_enabled(q):
        q, k, v, local_weight = map(as_autocast, (q, k, v, local_weight))
    return _attend(
        q, k, v, None, scale, feature_map, normalization,
        key_padding_mask, local_weight, grid_size, num_prefix_tokens, overwrite_q, backend,
    )  # fmt: skip


def inline_attention_qkvpacked(
    qkv: torch.Tensor,
    *,
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    normalization: Normalization = "subtract",
    key_padding_mask: torch.Tensor | None = None,
    local_weight: torch.Tensor | None = None,
    grid_size: tuple[int, int] | None = None,
    num_prefix_tokens: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """`inline_attention` on the output of a fused projection, read in place; its gradient comes back packed.

    Args:
        qkv: `[B, N, 3, H, D]`.
        scale: As in `inline_attention`, like all that follow.
        feature_map: See there.
        normalization: See there.
        key_padding_mask: See there.
        local_weight: See there.
        grid_size: See there.
        num_prefix_tokens: See there.
        backend: See there.

    Returns:
        `[B, N, H, D]`.
    """
    if autocast_enabled(qkv):
        qkv, local_weight = as_autocast(qkv), as_autocast(local_weight)
    validation.check_packed(qkv)
    q, k, v = qkv.unbind(2)
    return _attend(
        q, k, v, qkv, scale, feature_map, normalization,
        key_padding_mask, local_weight, grid_size, num_prefix_tokens, False, backend,
    )  # fmt: skip


def local_residual(
    v: torch.Tensor,
    local_weight: torch.Tensor,
    *,
    grid_size: tuple[int, int],
    num_prefix_tokens: int = 0,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The local term on its own: a dynamic 3×3 cross-correlation of the value grid, to add to another attention.

    `inline_attention(..., local_weight=...)` computes it together with the rest, which is faster.

    Args:
        v: Values `[B, N, H, Dv]`.
        local_weight: `[B, H, Dv, 3, 3]`.
        grid_size: `(h, w)`, N = num_prefix_tokens + h·w.
        num_prefix_tokens: Tokens before the grid; their result is zero.
        key_padding_mask: `[B, N]` bool, True for a real token; padded values count as zero.

    Returns:
        `[B, N, H, Dv]`.
    """
    if autocast_enabled(v):
        v, local_weight = as_autocast(v), as_autocast(local_weight)
    grid_size = plain_sizes(grid_size)
    with unrecorded():
        validation.check_value_tensor(v)
        grid_size = validation.check_local(local_weight, grid_size, num_prefix_tokens, v)
        if key_padding_mask is not None:
            validation.check_mask(key_padding_mask, v)
    if key_padding_mask is not None:
        v = v.masked_fill(~key_padding_mask[:, :, None, None], 0)
    return eager.run_local_term(v, local_weight, grid_size, num_prefix_tokens)


def attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    kind: reference.AttentionKind = "inline",
    scale: float | None = None,
    feature_map: str | FeatureMap = "identity",
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights of every query for every key, written out: for analysis and teaching, quadratic memory.

    Args:
        q: Queries `[B, N, H, D]`.
        k: Keys `[B, M, H, D]`.
        kind: "inline", "linear", "magnitude" (MALA) or "softmax".
        scale: Factor on the inner products; `D ** -0.5` by default.
        feature_map: As in `inline_attention`; softmax takes only "identity".
        key_padding_mask: `[B, M]` bool, True for a real key; padded keys get weight zero.

    Returns:
        `[B, H, N, M]`, computed in float64 and returned in the dtype of q. Rows sum to one.
    """
    validation.check_queries_and_keys(q, k)
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


# What runs calls seen before, by everything the checks and the choice of a backend depend on: a model's layers ask the
# same question every step, and answering it costs more host time than a small kernel takes on a GPU.
_PREPARED: dict[tuple[Any, ...], PreparedCall] = {}
_MOST_PREPARED = 4096


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qkv: torch.Tensor | None,
    scale: float | None,
    feature_map: str | FeatureMap,
    normalization: Normalization,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    num_prefix_tokens: int,
    overwrite_q: bool,
    backend: str,
) -> torch.Tensor:
    if autocast_enabled(q):
        # Inputs are cast already; left on, autocast would also round the float32 sums inside.
        with torch.autocast(q.device.type, enabled=False):
            return _attend(
                q, k, v, qkv, scale, feature_map, normalization,
                key_padding_mask, local_weight, grid_size, num_prefix_tokens, overwrite_q, backend,
            )  # fmt: skip
    signature = None
    if key_padding_mask is None and isinstance(feature_map, str) and not is_transformed():
        tensors = (q, k, v, local_weight) if qkv is None else (qkv, local_weight)
        options = (feature_map, normalization, overwrite_q, backend, dispatch.AUTO_BACKENDS)
        signature = _signature(tensors, scale, grid_size, num_prefix_tokens, options)
        prepared = None if signature is None else _PREPARED.get(signature)
        if prepared is not None:
            return prepared(q, k, v, qkv, local_weight)
    grid_size = plain_sizes(grid_size)
    with unrecorded():
        call = _validated_call(
            q, k, v, qkv, scale, feature_map, normalization,
            key_padding_mask, local_weight, grid_size, num_prefix_tokens, overwrite_q,
        )  # fmt: skip
    selected = dispatch.select(backend, call)
    if signature is not None:
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[signature] = selected.prepared(call)
    return selected.run(call)


def _validated_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qkv: torch.Tensor | None,
    scale: float | None,
    feature_map: str | FeatureMap,
    normalization: Normalization,
    key_padding_mask: torch.Tensor | None,
    local_weight: torch.Tensor | None,
    grid_size: tuple[int, int] | None,
    num_prefix_tokens: int,
    overwrite_q: bool,
) -> AttentionCall:
    validation.check_queries_and_keys(q, k)
    validation.check_values(q, k, v)
    validation.check_feature_map(feature_map)
    validation.check_normalization(normalization)
    scale = validation.resolve_scale(scale, q.shape[3])
    if key_padding_mask is not None:
        validation.check_mask(key_padding_mask, k)
    if local_weight is not None:
        validation.check_self_attention(q, k)
        grid_size = validation.check_local(local_weight, grid_size, num_prefix_tokens, v)
    else:
        validation.check_no_local(grid_size, num_prefix_tokens)
    return AttentionCall(
        q, k, v, qkv, scale, feature_map, normalization,
        key_padding_mask, local_weight, grid_size, num_prefix_tokens, overwrite_q,
    )  # fmt: skip


def _signature(
    tensors: Sequence[torch.Tensor | None],
    scale: float | None,
    grid_size: tuple[int, int] | None,
    num_prefix_tokens: int,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """What the checks and the choice of a backend depend on; None for arguments that the checks must see."""
    try:
        layouts = [
            None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.storage_offset() % 8, type(x))
            for x in tensors
        ]
        # Types too: 3.0 and True equal numbers that the checks let pass.
        extents = () if grid_size is None else map(type, grid_size)
        numbers = (scale, type(scale), num_prefix_tokens, type(num_prefix_tokens), grid_size, *extents)
        signature: tuple[Any, ...] = (*layouts, *numbers, *options)
        hash(signature)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return signature
