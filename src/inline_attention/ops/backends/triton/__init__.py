"""Fused Triton kernels, forward and backward: portable over NVIDIA and AMD GPUs.

`forward` and `backward` hold the kernels and their launches, `primitives` their common parts, `tuning` block sizes.
Triton is imported by the first launch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from inline_attention.ops import fused_op
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.tracing import constant_when_compiled, transform_reason

LARGEST_HEAD_DIM = 128
# bfloat16 tensor cores, and shared memory enough for the tiles.
SMALLEST_CAPABILITY = (8, 0)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why this backend cannot run the call, or None."""
    device = call.q.device
    reason = _device_reason(device.type, device.index)
    if reason is not None:
        return reason
    if call.q.dtype == torch.float64:
        return "computes in float32, got float64"
    if call.q.shape[3] > LARGEST_HEAD_DIM or call.v.shape[3] > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, got D = {call.q.shape[3]}, Dv = {call.v.shape[3]}"
    return transform_reason()


def _forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    from inline_attention.ops.backends.triton.forward import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> Tensor | None:
    from inline_attention.ops.backends.triton.backward import backward

    return backward(*arguments)


def state_of_keys(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """scale · Cov(phi(k), v) `[B, H, D, Dv]` of the keys of a call, and the means of phi(k) and of v."""
    from inline_attention.ops.backends.triton.forward import accumulate

    with fused_op.on_device(call.k.device):
        call = fused_op.with_unit_strides(call)
        state = fused_op.split_state(fused_op.empty_state(call.k, call.v), call.k, call.v)
        accumulate(call, state)
    return state


def attend_to_state(call: AttentionCall, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Output `[B, N, H, Dv]` of the queries of a call over such a state, contiguous; the call's keys are not read.

    Its scale is the one of the state, and its values are those of the queries' own tokens, for the local term.
    """
    from inline_attention.ops.backends.triton.forward import apply

    with fused_op.on_device(call.q.device):
        call, weight = fused_op.with_unit_strides(call), call.local_weight
        covariance, key_mean, value_mean = (part.contiguous() for part in state)
        taps = None if weight is None else weight.flatten(-2).permute(0, 3, 1, 2).contiguous()
        return apply(call, (covariance, key_mean, value_mean), taps)


run = fused_op.register("triton", _forward, _backward, largest_head_dim=LARGEST_HEAD_DIM, can_make_state_again=False)


@constant_when_compiled
def _device_reason(device_type: str, index: int | None) -> str | None:
    return _cached_device_reason(device_type, index)


@functools.cache
def _cached_device_reason(device_type: str, index: int | None) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type != "cuda" and not (device_type == "cpu" and interpreted):
        return f"needs a CUDA or ROCm device, got {device_type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < SMALLEST_CAPABILITY:
            return f"needs compute capability {SMALLEST_CAPABILITY} or more, got {capability}"
    return None
