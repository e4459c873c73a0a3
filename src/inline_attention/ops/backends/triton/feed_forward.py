# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""The rest of a transformer block after attention, at inference, in one kernel: y = x + projection, y + MLP(norm(y)).

Composed, that moves the hidden activations, four times as wide as the tokens, through memory three times, and the
tokens seven times. Here a program takes some tokens, walks through the hidden channels, and keeps its outputs in
registers: the tokens are read once and written once.

Shapes: `R` rows (tokens of all samples), `C` channels, `F` hidden channels.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64


@functools.cache
def plan(channels: int) -> dict[str, int]:
    """Return the constants and resources of a program: the fastest of half a dozen measured on an H200.

    Programs of 64 rows go two to a processor, and one computes its GELU while the other multiplies.
    """
    # Tensor cores need powers of two: the channels are a sum of two of them, the second possibly zero.
    first = 1 << (channels.bit_length() - 1)
    second = channels - first
    block_hidden, num_stages = (64, 2) if channels <= 64 else (32, 3 if channels <= 192 else 2)
    return {
        "FIRST": first, "SECOND": second, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_HIDDEN": block_hidden,
        "BLOCK_CHANNELS": min(64, second or first), "num_warps": 4, "num_stages": num_stages,
    }  # fmt: skip


def launch(
    x: torch.Tensor, attended: torch.Tensor, *parameters_and_eps: torch.Tensor | float, launched: Any = None
) -> torch.Tensor:
    """Launch on contiguous `[…, C]` tensors; compilers pass a wrapper of the kernel as `launched`.

    Parameters are weight and bias of the projection, of the norm, of the first and of the second linear map.
    """
    out = torch.empty_like(x)
    channels = x.shape[-1]
    rows = x.numel() // channels
    (launched or inline_feed_forward)[(triton.cdiv(rows, BLOCK_ROWS),)](
        x, attended, out, *parameters_and_eps, rows, HIDDEN=parameters_and_eps[4].shape[0],
        INTERPRETED=os.environ.get("TRITON_INTERPRET") == "1", **plan(channels),
    )  # fmt: skip
    return out


@triton.jit
def _gelu(x, INTERPRETED: tl.constexpr):
    """x · Phi(x), where Phi is (1 + tanh p) / 2 with an odd polynomial p: to 3e-5, and to what the instruction gives.

    That instruction is good to 2⁻¹¹, a rounding of float16 and less than one of bfloat16, and takes a third of the
    instructions of an exponential and what makes it an error function.
    """
    square = tl.minimum(x * x, 40.0)  # beyond, tanh is 1 and the polynomial turns around
    argument = x * ((-0.00035190239 * square + 0.03700802) * square + 0.79750528)
    if INTERPRETED:
        tanh = 2.0 * tl.sigmoid(2.0 * argument) - 1.0
    else:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [argument], dtype=tl.float32, is_pure=True, pack=1
        )
    half = 0.5 * x
    return half * tanh + half


@triton.jit
def _normalize(x, weight, bias, channel, mean, deviation):
    scale = tl.load(weight + channel).to(tl.float32)
    shift = tl.load(bias + channel).to(tl.float32)
    return (x - mean[:, None]) * deviation[:, None] * scale[None, :] + shift[None, :]


@triton.jit
def inline_feed_forward(
    x, attended, out, projection_weight, projection_bias, norm_weight, norm_bias,
    hidden_weight, hidden_bias, weight, bias, eps, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Axis 0: rows. Channels and hidden channels are walked through in blocks."""
    CHANNELS: tl.constexpr = FIRST + SECOND
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (row < rows)[:, None]
    a = tl.arange(0, FIRST)
    at_a = row[:, None] * CHANNELS + a[None, :]
    y_a = tl.zeros((BLOCK_ROWS, FIRST), tl.float32)
    if SECOND > 0:
        b = FIRST + tl.arange(0, SECOND)
        at_b = row[:, None] * CHANNELS + b[None, :]
        y_b = tl.zeros((BLOCK_ROWS, SECOND), tl.float32)
    for start in range(0, CHANNELS, BLOCK_CHANNELS):
        channel = start + tl.arange(0, BLOCK_CHANNELS)
        mixed = tl.load(attended + row[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0)
        y_a = tl.dot(mixed, tl.load(projection_weight + a[None, :] * CHANNELS + channel[:, None]), y_a)
        if SECOND > 0:
            y_b = tl.dot(mixed, tl.load(projection_weight + b[None, :] * CHANNELS + channel[:, None]), y_b)
    y_a += _load_residual(x, projection_bias, at_a, a, inside)
    total = tl.sum(y_a, 1)
    if SECOND > 0:
        y_b += _load_residual(x, projection_bias, at_b, b, inside)
        total += tl.sum(y_b, 1)
    mean = total / CHANNELS
    centered_a = y_a - mean[:, None]
    squares = tl.sum(centered_a * centered_a, 1)
    if SECOND > 0:
        centered_b = y_b - mean[:, None]
        squares += tl.sum(centered_b * centered_b, 1)
    deviation = tl.rsqrt(squares / CHANNELS + eps)
    norm_a = _normalize(y_a, norm_weight, norm_bias, a, mean, deviation).to(dtype)
    # The sums begin with the residual and the last bias, which then need no registers of their own.
    sum_a = y_a + tl.load(bias + a).to(tl.float32)[None, :]
    if SECOND > 0:
        norm_b = _normalize(y_b, norm_weight, norm_bias, b, mean, deviation).to(dtype)
        sum_b = y_b + tl.load(bias + b).to(tl.float32)[None, :]
    for start in range(0, HIDDEN, BLOCK_HIDDEN):
        hidden = start + tl.arange(0, BLOCK_HIDDEN)
        activation = tl.dot(norm_a, tl.load(hidden_weight + hidden[None, :] * CHANNELS + a[:, None]))
        if SECOND > 0:
            activation = tl.dot(norm_b, tl.load(hidden_weight + hidden[None, :] * CHANNELS + b[:, None]), activation)
        activation += tl.load(hidden_bias + hidden).to(tl.float32)[None, :]
        activation = _gelu(activation, INTERPRETED).to(dtype)
        sum_a = tl.dot(activation, tl.load(weight + a[None, :] * HIDDEN + hidden[:, None]), sum_a)
        if SECOND > 0:
            sum_b = tl.dot(activation, tl.load(weight + b[None, :] * HIDDEN + hidden[:, None]), sum_b)
    tl.store(out + at_a, sum_a.to(dtype), mask=inside)
    if SECOND > 0:
        tl.store(out + at_b, sum_b.to(dtype), mask=inside)


@triton.jit
def _load_residual(x, bias, offsets, channel, inside):
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + channel).to(tl.float32)[None, :]
