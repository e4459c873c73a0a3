"""Linear-time InLine attention in plain PyTorch: any device, any floating dtype, every transform.

`blocked` runs plain eager calls on a CPU, `composed` all others. Sums are in float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from inline_attention.ops import composed, fused_op
from inline_attention.ops.backends.eager import blocked
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.tracing import are_plain_eager_tensors

# Activations stay below this sum (ten million of a thousand each); float32 gradients overflow far above it.
LARGEST_ORDINARY_SUM = 1e10
_KERNELS = fused_op.Kernels(blocked.forward, blocked.backward, can_make_state_again=False)


def run(call: AttentionCall) -> Tensor:
    """The call's output `[B, N, H, Dv]` in the dtype of v."""
    compute_dtype = torch.promote_types(call.q.dtype, torch.float32)
    if not _can_block(call):
        return _run_composed(call, compute_dtype).to(call.v.dtype)
    out = _run_blocked(call, compute_dtype)
    if compute_dtype != torch.float64 and not abs(out.detach().sum().item()) < LARGEST_ORDINARY_SUM:
        # Products of three huge float32 numbers overflow, here or in the backward pass, and inf - inf is NaN. Finite
        # inputs must not give NaN, so float64 takes over.
        out = _run_composed(call, torch.float64)
    return out.to(call.v.dtype)


def run_local_term(v: Tensor, local_weight: Tensor, grid_size: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """The local term alone, `[B, N, H, Dv]`; zero on prefix tokens."""
    compute_dtype = torch.promote_types(v.dtype, torch.float32)
    grid = v[:, num_prefix_tokens:].to(compute_dtype)
    local = composed.local_term(grid, local_weight.to(compute_dtype), grid_size).to(v.dtype)
    return torch.cat([torch.zeros_like(v[:, :num_prefix_tokens]), local], dim=1)


def _can_block(call: AttentionCall) -> bool:
    """True for a plain call on CPU tensors: nothing traces, transforms or batches it."""
    tensors = [tensor for tensor in (call.q, call.k, call.v, call.local_weight) if tensor is not None]
    return are_plain_eager_tensors(*tensors) and all(
        tensor.device.type == "cpu" and tensor.numel() > 0 and forward_ad.unpack_dual(tensor).tangent is None  # pyright: ignore[reportUnknownMemberType]
        for tensor in tensors
    )


def _run_composed(call: AttentionCall, compute_dtype: torch.dtype) -> Tensor:
    return composed.attend(composed.mapped(call, compute_dtype))


def _run_blocked(call: AttentionCall, compute_dtype: torch.dtype) -> Tensor:
    if call.qkv is None or call.feature_map != "identity" or call.key_padding_mask is not None:
        return fused_op.run_plain(_KERNELS, composed.mapped(call, compute_dtype))
    qkv = call.qkv.to(compute_dtype)
    q, k, v = qkv.unbind(2)
    local_weight = None if call.local_weight is None else call.local_weight.to(compute_dtype)
    return fused_op.run_plain(_KERNELS, call._replace(q=q, k=k, v=v, qkv=qkv, local_weight=local_weight))
