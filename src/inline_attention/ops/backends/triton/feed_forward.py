# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""The second half of a transformer block at inference, in one kernel: y = x + branch, y + MLP(norm(y)).

Composed, that half moves the hidden activations, four times as wide as the tokens, through memory three times, and the
tokens five times. Here a program takes some tokens, walks through the hidden channels, and keeps its outputs in
registers: the tokens are read once and written once.

Shapes: `R` rows (tokens of all samples), `C` channels, `F` hidden channels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Plan(NamedTuple):
    """Cut of the problem, and the resources of a program."""

    first: int  # channels as a sum of two powers of two, the second possibly zero: what tensor cores take
    second: int
    block_rows: int
    block_hidden: int
    num_warps: int
    num_stages: int


def split_channels(channels: int) -> tuple[int, int]:
    """Channels, a power of two or a sum of two of them, as the larger and the smaller (or zero)."""
    first = 1 << (channels.bit_length() - 1)
    return first, channels - first


@functools.cache
def plan(channels: int) -> Plan:
    """For tokens of so many channels, the fastest of half a dozen measured on an H200.

    Programs of 64 rows go two to a processor, and one computes its GELU while the other multiplies. At 192 channels two
    would leave no shared memory for loads in advance; one of 128 rows is faster then.
    """
    first, second = split_channels(channels)
    if channels == 192:
        return Plan(first, second, block_rows=128, block_hidden=64, num_warps=8, num_stages=3)
    if channels <= 64:
        return Plan(first, second, block_rows=64, block_hidden=64, num_warps=4, num_stages=2)
    return Plan(first, second, block_rows=64, block_hidden=32, num_warps=4, num_stages=3 if channels < 192 else 2)


def launch(
    x: torch.Tensor, branch: torch.Tensor, *parameters_and_eps: torch.Tensor | float, launched: Any = None
) -> torch.Tensor:
    """Launch on contiguous `[…, C]` tensors.

    Args:
        x: The residual stream.
        branch: What is added to it first.
        *parameters_and_eps: Weight and bias of the norm, of the first and of the second linear map; the norm's epsilon.
        launched: What to launch in place of the kernel: its wrapper for compilers.
    """
    out = torch.empty_like(x)
    channels = x.shape[-1]
    rows = x.numel() // channels
    cut = plan(channels)
    (launched or inline_feed_forward)[(triton.cdiv(rows, cut.block_rows),)](
        x, branch, out, *parameters_and_eps, rows,
        FIRST=cut.first, SECOND=cut.second, HIDDEN=parameters_and_eps[2].shape[0],
        BLOCK_ROWS=cut.block_rows, BLOCK_HIDDEN=cut.block_hidden,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _gelu(x):
    """x · Phi(x), where Phi(-|x|) is 2 to a polynomial fitted to its logarithm over [0, 5.5]: relative error 5e-6.

    A rational function times a Gaussian, the usual way to an error function, took half as many instructions again.
    """
    z = tl.minimum(tl.abs(x), 5.5)
    exponent = -1.921234624786968e-06 * z + 6.328849712405765e-05
    exponent = exponent * z - 0.0009434208502103834
    exponent = exponent * z + 0.008556272268098923
    exponent = exponent * z - 0.05405228293298172
    exponent = exponent * z - 0.4583817849119339
    exponent = exponent * z - 1.1512783310979156
    tail = tl.exp2(exponent * z - 0.9999938561098745)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _load_sum(x, branch, offsets, inside):
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) + tl.load(
        branch + offsets, mask=inside, other=0.0
    ).to(tl.float32)


@triton.jit
def _normalize(x, weight, bias, channel, mean, deviation):
    scale = tl.load(weight + channel).to(tl.float32)
    shift = tl.load(bias + channel).to(tl.float32)
    return (x - mean[:, None]) * deviation[:, None] * scale[None, :] + shift[None, :]


@triton.jit
def inline_feed_forward(
    x, branch, out, norm_weight, norm_bias, hidden_weight, hidden_bias, weight, bias, eps, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows. Channels and hidden channels are walked through in blocks."""
    CHANNELS: tl.constexpr = FIRST + SECOND
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (row < rows)[:, None]
    a = tl.arange(0, FIRST)
    at_a = row[:, None] * CHANNELS + a[None, :]
    y_a = _load_sum(x, branch, at_a, inside)
    total = tl.sum(y_a, 1)
    if SECOND > 0:
        b = FIRST + tl.arange(0, SECOND)
        at_b = row[:, None] * CHANNELS + b[None, :]
        y_b = _load_sum(x, branch, at_b, inside)
        total += tl.sum(y_b, 1)
    mean = total / CHANNELS
    centred_a = y_a - mean[:, None]
    squares = tl.sum(centred_a * centred_a, 1)
    if SECOND > 0:
        centred_b = y_b - mean[:, None]
        squares += tl.sum(centred_b * centred_b, 1)
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
        activation = _gelu(activation + tl.load(hidden_bias + hidden).to(tl.float32)[None, :]).to(dtype)
        sum_a = tl.dot(activation, tl.load(weight + a[None, :] * HIDDEN + hidden[:, None]), sum_a)
        if SECOND > 0:
            sum_b = tl.dot(activation, tl.load(weight + b[None, :] * HIDDEN + hidden[:, None]), sum_b)
    tl.store(out + at_a, sum_a.to(dtype), mask=inside)
    if SECOND > 0:
        tl.store(out + at_b, sum_b.to(dtype), mask=inside)
