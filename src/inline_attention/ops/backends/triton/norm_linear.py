# Triton's language is Python in name only: a type checker sees constants where the compiler sees tensors.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
"""A LayerNorm and the linear map after it, in one kernel, with the sums of what lies between them.

The normalised tokens are needed for their projections to queries, keys and values, and for their mean, from which the
3×3 weights are predicted. They never reach memory.

Shapes: `B` batch, `N` tokens, `C` channels, `F` outputs of the map, `S` pieces that a sample is cut into.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inline_attention.ops.backends.triton.feed_forward import normalize, split_channels


class Plan(NamedTuple):
    """Cut of the problem, and the resources of a program."""

    first: int  # channels as a sum of two powers of two, the second possibly zero: what tensor cores take
    second: int
    block_tokens: int
    block_out: int
    num_warps: int
    num_stages: int


@functools.cache
def plan(channels: int, outputs: int) -> Plan:
    """For so many channels and outputs: small programs, several to a processor, so that one loads as another stores."""
    block_out = 64 if outputs % 64 == 0 else 32
    return Plan(*split_channels(channels), block_tokens=64, block_out=block_out, num_warps=4, num_stages=2)


def launch(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    launched: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, N, F]`, the map of the norm of x, and float32 `[B, S, C]`, the norm's sums over each piece's tokens.

    Args:
        x: Tokens `[B, N, C]`, contiguous.
        norm_weight: `[C]`.
        norm_bias: `[C]`.
        weight: `[F, C]` of the linear map.
        bias: `[F]` of the linear map, or None.
        eps: Of the norm.
        launched: What to launch in place of the kernel: its wrapper for compilers.
    """
    B, N, C = x.shape
    outputs = weight.shape[0]
    cut = plan(C, outputs)
    pieces = triton.cdiv(N, cut.block_tokens)
    out = torch.empty((B, N, outputs), dtype=x.dtype, device=x.device)
    sums = torch.empty((B, pieces, C), dtype=torch.float32, device=x.device)
    (launched or inline_norm_linear)[(B * pieces,)](
        x, norm_weight, norm_bias, weight, weight if bias is None else bias, out, sums, N, pieces, eps,
        FIRST=cut.first, SECOND=cut.second, OUTPUTS=outputs, HAS_BIAS=bias is not None,
        BLOCK_TOKENS=cut.block_tokens, BLOCK_OUT=cut.block_out,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out, sums


@triton.jit
def inline_norm_linear(
    x, norm_weight, norm_bias, weight, bias, out, sums, tokens, pieces, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Axis 0: sample × piece. Outputs are walked through in blocks."""
    CHANNELS: tl.constexpr = FIRST + SECOND
    dtype = out.dtype.element_ty
    sample, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    token = piece * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = sample.to(tl.int64) * tokens + token
    inside = (token < tokens)[:, None]
    at_sums = sums + tl.program_id(0).to(tl.int64) * CHANNELS
    a = tl.arange(0, FIRST)
    x_a = tl.load(x + row[:, None] * CHANNELS + a[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(x_a, 1)
    if SECOND > 0:
        b = FIRST + tl.arange(0, SECOND)
        x_b = tl.load(x + row[:, None] * CHANNELS + b[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(x_b, 1)
    mean = total / CHANNELS
    centred_a = x_a - mean[:, None]
    squares = tl.sum(centred_a * centred_a, 1)
    if SECOND > 0:
        centred_b = x_b - mean[:, None]
        squares += tl.sum(centred_b * centred_b, 1)
    deviation = tl.rsqrt(squares / CHANNELS + eps)
    norm_a = normalize(x_a, norm_weight, norm_bias, a, mean, deviation).to(dtype)
    tl.store(at_sums + a, tl.sum(tl.where(inside, norm_a.to(tl.float32), 0.0), 0))
    if SECOND > 0:
        norm_b = normalize(x_b, norm_weight, norm_bias, b, mean, deviation).to(dtype)
        tl.store(at_sums + b, tl.sum(tl.where(inside, norm_b.to(tl.float32), 0.0), 0))
    for start in range(0, OUTPUTS, BLOCK_OUT):
        column = start + tl.arange(0, BLOCK_OUT)
        result = tl.dot(norm_a, tl.load(weight + column[None, :] * CHANNELS + a[:, None]))
        if SECOND > 0:
            result = tl.dot(norm_b, tl.load(weight + column[None, :] * CHANNELS + b[:, None]), result)
        if HAS_BIAS:
            result += tl.load(bias + column).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * OUTPUTS + column[None, :], result.to(dtype), mask=inside)
