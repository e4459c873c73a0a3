"""InLine attention in CUDA C++ for vision models: half precision, head dims 32 and 64, on tensor cores.

`kernels.cu` is the device code, `compiler` builds it with NVRTC at first use, `launch` divides the work into blocks.
Calls that this backend cannot run, and all calls without NVRTC, go to the next backend in the table.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from inline_attention.ops import fused_op
from inline_attention.ops.backends.cuda import compiler, launch
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.tracing import constant_when_compiled, transform_reason

HEAD_DIMS = (32, 64)
DTYPES = (torch.bfloat16, torch.float16)
# mma with bfloat16 and asynchronous copies.
SMALLEST_CAPABILITY = (8, 0)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why this backend cannot run the call, or None."""
    q = call.q
    reason = device_reason(q)
    if reason is not None:
        return reason
    head_dim = known_head_dim(q.shape[3])
    if head_dim is None or call.v.shape[3] != head_dim:
        return f"takes head dims D = Dv of 32 and 64, got D = {q.shape[3]}, Dv = {call.v.shape[3]}"
    if call.feature_map != "identity" or call.normalization != "subtract":
        return (
            "takes feature_map='identity' and normalization='subtract', "
            f"got {call.feature_map!r} and {call.normalization!r}"
        )
    if call.key_padding_mask is not None:
        return "takes no key_padding_mask"
    for name, tensor in (("q", q), ("k", call.k), ("v", call.v)):
        if not _is_readable(tensor):
            return f"needs a token's heads side by side in memory, in multiples of 16 bytes; those of {name} are not"
    return transform_reason() or build_reason(q.device.index, q.dtype, head_dim)


def known_head_dim(head_dim: int) -> int | None:
    """Return the head dim as a number if the kernels support it, even if it is symbolic; else None."""
    for known in HEAD_DIMS:
        if head_dim == known:
            return known
    return None


def device_reason(tensor: Tensor) -> str | None:
    """Return why no kernel accepts the tensor, or None. It must be in half precision on an NVIDIA GPU."""
    if tensor.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got {tensor.device.type if torch.version.hip is None else 'ROCm'}"
    if tensor.dtype not in DTYPES:
        return f"takes bfloat16 and float16, got {tensor.dtype}"
    return None


def _is_readable(tensor: Tensor) -> bool:
    """True if kernels can read sixteen bytes at a time; an unaligned start is copied at launch."""
    batch, token, head, channel = tensor.stride()
    chunk = launch.CHUNK
    return bool(channel == 1 and head == tensor.shape[3] and token % chunk == 0 and batch % chunk == 0)


@constant_when_compiled
def build_reason(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    """Build the kernels for a device; return why that failed, or None."""
    return _cached_build_reason(device_index, dtype, head_dim)


@functools.cache
def _cached_build_reason(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    """Build the kernels once per process, device, dtype and head dim."""
    capability = torch.cuda.get_device_capability(device_index)
    if capability < SMALLEST_CAPABILITY:
        return f"needs compute capability {SMALLEST_CAPABILITY} or more, got {capability}"
    try:
        launch.load_kernels(device_index, dtype, head_dim)
    except compiler.CompilerUnavailableError as error:
        return str(error)
    return None


run = fused_op.register(
    "cuda", launch.forward, launch.backward, largest_head_dim=max(HEAD_DIMS), can_make_state_again=True
)
