"""Checks on the arguments of the op. Every error says what was expected, what came, and what to do.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, cast, get_args

import torch
from torch import Tensor

from inline_attention.ops.call import AttentionCall, Normalization
from inline_attention.ops.feature_maps import FEATURE_MAPS
from inline_attention.ops.tracing import are_plain_eager_tensors
from inline_attention.support.text import did_you_mean

NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
_LARGEST_SCALE = sys.float_info.max  # integers know no infinity, and go further
FLOATING_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def unknown_name(argument: str, value: object, known: Iterable[str]) -> ValueError:
    """Return the error for a name that is not among `known`, with the nearest one suggested."""
    known = list(known)
    hint = did_you_mean(value, known)
    return ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")


def validated(call: AttentionCall) -> AttentionCall:
    """Check every argument of a call; return it with the scale and the grid filled in."""
    q, k, v = call.q, call.k, call.v
    check_queries_and_keys(q, k)
    check_keys_and_values(k, v)
    check_matches("q", q, "v", v)
    check_feature_map(call.feature_map)
    check_normalization(call.normalization)
    scale = resolve_scale(call.scale, q.shape[3])
    grid_size, prefix = call.grid_size, call.num_prefix_tokens
    if call.key_padding_mask is not None:
        check_mask(call.key_padding_mask, k)
    if call.local_weight is not None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"local_weight needs self-attention: as many queries as keys, got N = {q.shape[1]} and "
                f"M = {k.shape[1]}; leave local_weight out for cross-attention"
            )
        return call._replace(scale=scale, grid_size=check_local(call.local_weight, grid_size, prefix, v))
    check_count("num_prefix_tokens", prefix, least=0)
    if grid_size is not None or prefix != 0:
        raise ValueError(
            f"grid_size and num_prefix_tokens need local_weight, got {grid_size=}, num_prefix_tokens={prefix} without "
            "it; pass local_weight [B, H, Dv, 3, 3], or leave both out: without the 3×3 term, all tokens are treated "
            "alike"
        )
    return call._replace(scale=scale)


def check_packed(qkv: Any) -> None:
    """Check that `qkv` is `[B, N, 3, H, D]`."""
    _check_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"qkv must be [B, N, 3, H, D], got shape {_shape(qkv)}; "
            "from a Linear's output [B, N, 3·H·D] use .unflatten(-1, (3, H, D))"
        )


def check_queries_and_keys(q: Any, k: Any) -> None:
    """Check `q` `[B, N, H, D]` against `k` `[B, M, H, D]`."""
    check_head_tokens("q", q)
    check_head_tokens("k", k)
    check_matches("q", q, "k", k)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q [B, N, H, D] and k [B, M, H, D] must agree in B, H and D, got {_shape(q)} and {_shape(k)}; "
            "heads come after tokens: pass layout='bhnd', or transpose(1, 2), if yours come before"
        )


def check_keys_and_values(k: Tensor, v: Any, *, least_tokens: int = 1) -> None:
    """Check `v` `[B, M, H, Dv]` against checked keys `k` `[B, M, H, D]`."""
    check_head_tokens("v", v, least_tokens=least_tokens)
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        raise ValueError(
            f"v must be [B, M, H, Dv] with B, M, H of k {_shape(k)}, got {_shape(v)}; every key needs a value"
        )


def check_head_tokens(name: str, x: Any, *, least_tokens: int = 1) -> None:
    """Check that queries, keys or values are `[B, N, H, D]`, and not empty; `least_tokens` may allow no tokens."""
    _check_tensor(name, x)
    if x.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions [batch, tokens, heads, head dim], got shape {_shape(x)}; "
            "from [B, N, H·D] use .unflatten(-1, (H, D)), from [B, H, N, D] use .transpose(1, 2)"
        )
    for extent, what in zip(x.shape[1:], ("tokens", "heads", "head dim"), strict=True):
        if extent == 0 and not (what == "tokens" and least_tokens == 0):
            raise ValueError(
                f"{name} needs at least one of each of tokens, heads and head dim, got {what} = 0 in {_shape(x)}; "
                "the mean over no keys is undefined, so skip the call"
            )


def check_mask(key_padding_mask: Any, k: Tensor) -> None:
    """Check `[B, M]` bool with a real key in every row."""
    check_mask_form(key_padding_mask, k)
    if not are_plain_eager_tensors(key_padding_mask):
        return  # values cannot be read here; backends treat an all-padding row as one zero key, never as a NaN
    has_key = key_padding_mask.any(1)
    if key_padding_mask.device.type != "cpu":
        # A device-side assertion: reading the mask would stall the queue once per layer.
        torch._assert_async(has_key.all(), "key_padding_mask has a row without any real key")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not has_key.all():
        empty_rows = [row for row, found in enumerate(has_key) if not found]
        raise ValueError(
            f"key_padding_mask has no real key (True) in row(s) {empty_rows[:8]}; attention over no keys is undefined: "
            "drop those samples, or invert the mask if it marks padding"
        )


def check_mask_form(key_padding_mask: Any, k: Tensor) -> None:
    """Check `[B, M]` bool, whatever it says."""
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        got = key_padding_mask.dtype if isinstance(key_padding_mask, Tensor) else type(key_padding_mask).__name__
        raise ValueError(
            f"key_padding_mask must be a bool tensor, True for a real key, got {got}; "
            "use mask.bool(), and ~mask if yours marks padding (as nn.MultiheadAttention's does)"
        )
    check_dense("key_padding_mask", key_padding_mask)
    shape = key_padding_mask.shape
    if len(shape) != 2 or shape[0] != k.shape[0] or shape[1] != k.shape[1]:
        raise ValueError(
            f"key_padding_mask must be [B, M] = {(k.shape[0], k.shape[1])}, got {_shape(key_padding_mask)}; "
            "one mark per key, shared by all heads"
        )
    _check_same("device", "k", k, "key_padding_mask", key_padding_mask)


def check_added_mask(mask: Tensor) -> None:
    """Check that an additive mask only hides keys or keeps them: linear-time attention has no scores to bias."""
    if not are_plain_eager_tensors(mask):
        return  # values cannot be read here
    does_either = ((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    message = "attn_mask of floating point may only hide keys (-inf, or the dtype's least number) or leave them (0)"
    if mask.device.type != "cpu":
        torch._assert_async(does_either, message)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not does_either:
        raise ValueError(
            f"{message}: linear-time attention has no scores that a bias could be added to; leave the bias out, or "
            "keep softmax attention"
        )


def check_local(local_weight: Any, grid_size: Any, num_prefix_tokens: Any, v: Tensor) -> tuple[int, int]:
    """Check `local_weight` `[B, H, Dv, 3, 3]` and that prefix + h·w = M; return the grid."""
    _check_tensor("local_weight", local_weight)
    batch, tokens, heads, value_dim = v.shape
    expected = (batch, heads, value_dim, 3, 3)
    if local_weight.dim() != 5 or any(local_weight.shape[i] != expected[i] for i in range(5)):
        raise ValueError(
            f"local_weight must be [B, H, Dv, 3, 3] = {expected}, got {_shape(local_weight)}; "
            "one 3×3 kernel per sample and channel"
        )
    check_matches("v", v, "local_weight", local_weight)
    check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    if grid_size is None:
        raise ValueError(f"local_weight needs grid_size=(h, w); {_grid_hint(tokens - num_prefix_tokens)}")
    return check_grid(grid_size, num_prefix_tokens, tokens)


def check_grid(grid_size: Any, num_prefix_tokens: int, tokens: int) -> tuple[int, int]:
    """Check that `grid_size` is (h, w) with prefix + h·w = tokens; return it."""
    if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"grid_size must be a pair (h, w), got {grid_size!r}")
    # Integers of NumPy become Python's.
    height, width = (
        extent if isinstance(extent, int) or not isinstance(extent, Integral) else int(extent)
        for extent in cast(Sequence[Any], grid_size)
    )
    for extent in (height, width):
        if not isinstance(extent, (int, torch.SymInt)) or isinstance(extent, bool) or extent < 1:
            raise ValueError(f"grid_size must be two integers ≥ 1, got {grid_size!r}")
    if num_prefix_tokens + height * width != tokens:
        raise ValueError(
            f"num_prefix_tokens + h·w must equal the number of tokens, got {num_prefix_tokens} + {height}·{width} "
            f"= {num_prefix_tokens + height * width} ≠ {tokens}; {_grid_hint(tokens - num_prefix_tokens)}"
        )
    return height, width


def check_feature_map(feature_map: Any) -> None:
    """Check that `feature_map` is a known name or a callable."""
    if not callable(feature_map) and not (isinstance(feature_map, str) and feature_map in FEATURE_MAPS):
        raise unknown_name("feature_map", feature_map, FEATURE_MAPS)


def check_tokens(name: str, x: Any, dim: int) -> None:
    """Check the input `[B, N, C]` of a layer."""
    _check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(
            f"{name} must be [B, N, {dim}], got shape {_shape(x)}; "
            "flatten a feature map [B, C, h, w] with .flatten(2).transpose(1, 2) and pass grid_size=(h, w)"
        )


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that an argument is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")


def check_heads(dim: Any, num_heads: Any) -> None:
    """Check that channels divide into heads."""
    check_count("dim", dim)
    check_count("num_heads", num_heads)
    if dim % num_heads != 0:
        raise ValueError(
            f"dim must be divisible by num_heads, got {dim=}, {num_heads=}; try num_heads={math.gcd(dim, num_heads)}"
        )


def check_rate(name: str, rate: Any) -> None:
    """Check that an argument is a probability."""
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {rate!r}")


def check_ratio(name: str, ratio: Any, dim: int) -> None:
    """Check that an argument is a finite number, and that many times `dim` at least one."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 1 <= ratio * dim <= sys.maxsize:
        raise ValueError(f"{name} must be a number that makes {dim} channels at least 1, got {ratio!r}")


def check_normalization(normalization: Any) -> None:
    """Check that `normalization` is a known name."""
    if normalization not in NORMALIZATIONS:
        raise unknown_name("normalization", normalization, NORMALIZATIONS)


def resolve_scale(scale: Any, head_dim: int) -> float:
    """Return `scale` if it is a finite number, `head_dim ** -0.5` for None."""
    if scale is None:
        return head_dim**-0.5
    if (
        not isinstance(scale, (int, float)) or isinstance(scale, bool) or not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE
    ):  # a NaN is neither
        raise ValueError(f"scale must be a finite number, or None for D ** -0.5, got {scale!r}")
    return float(scale) if isinstance(scale, int) else scale


def _check_tensor(name: str, tensor: Any) -> None:
    check_dense(name, tensor)
    if tensor.dtype not in FLOATING_DTYPES:
        raise ValueError(
            f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}; use {name}.float()"
        )


def check_dense(name: str, tensor: Any) -> None:
    """Check that an argument is a tensor, neither sparse nor nested."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; use torch.as_tensor")
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pad it with {name}.to_padded_tensor(0) and mark the "
            "padding in key_padding_mask"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}; use {name}.to_dense()")


def check_matches(first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Check that two tensors share dtype and device."""
    _check_same("dtype", first, a, second, b)
    _check_same("device", first, a, second, b)


def _check_same(what: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    got = getattr(a, what), getattr(b, what)
    if got[0] != got[1]:
        raise ValueError(
            f"{first} and {second} must share one {what}, got {got[0]} and {got[1]}; "
            f"{'cast' if what == 'dtype' else 'move'} them to one {what}, for example {second}.to({first}.{what})"
        )


def _grid_hint(tokens: int) -> str:
    side = math.isqrt(max(tokens, 0))
    if side > 0 and side**2 == tokens:
        return f"{tokens} tokens after the prefix make grid_size=({side}, {side}) if they are a square"
    return "pass the (height, width) in tokens of the feature map, and num_prefix_tokens for class tokens"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
