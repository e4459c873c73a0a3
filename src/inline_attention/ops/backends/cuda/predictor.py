"""The 3×3 weights of the local residual from a block's tokens, in one launch or two, for inference.

Mean over the tokens, linear, GELU, linear; composed, that is half a dozen launches of next to no work each.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` = C / H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inline_attention.ops import fused_op
from inline_attention.ops.backends import cuda
from inline_attention.ops.backends.cuda import launch
from inline_attention.ops.tracing import is_plain_execution, transform_reason

# Beyond so many tokens, and with fewer blocks than processors, several blocks sum the tokens of a sample.
MOST_TOKENS_PER_BLOCK = 1024
BLOCKS_PER_PROCESSOR = 4
FEWEST_TOKENS_PER_SPLIT = 128


def predict_local_weight(
    tokens: Tensor, parameters: tuple[Tensor, Tensor, Tensor, Tensor], num_heads: int
) -> Tensor | None:
    """Predict weights `[B, H, D, 3, 3]` by a fused kernel; return None if there is none for this call.

    Args:
        tokens: `[B, N, C]`; the weights depend on their mean.
        parameters: Weight `[C, D, 1]` and bias `[C]` of the first map, as a grouped 1×1 convolution stores them; weight
            `[9 C, D, 1]` and bias `[9 C]` of the second map. Channel c owns rows 9c … 9c + 8.
        num_heads: H.
    """
    if unsupported_reason(tokens, parameters, num_heads) is not None:
        return None
    run = _launch if is_plain_execution(tokens) else _op
    return run(tokens, *parameters, num_heads)


def unsupported_reason(tokens: Tensor, parameters: tuple[Tensor, ...], num_heads: int) -> str | None:
    """Return why these kernels cannot predict the weights, or None."""
    reason = cuda.device_reason(tokens)
    if reason is not None:
        return reason
    if any(parameter.dtype != tokens.dtype or parameter.device != tokens.device for parameter in parameters):
        return "takes parameters of the tokens' dtype and device"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (tokens, *parameters)):
        return "has no derivative"
    if torch.is_autocast_enabled(tokens.device.type):
        return "leaves the choice of a dtype to autocast"
    head_dim = cuda.known_head_dim(tokens.shape[2] // num_heads)
    if head_dim is None:
        return f"takes head dims of 32 and 64, got {tokens.shape[2]} channels in {num_heads} heads"
    return transform_reason() or cuda.build_reason(tokens.device.index, tokens.dtype, head_dim)


def _launch(
    tokens: Tensor, hidden_weight: Tensor, hidden_bias: Tensor, weight: Tensor, bias: Tensor, num_heads: int
) -> Tensor:
    B, N, C = tokens.shape
    D = C // num_heads
    device = tokens.device.index
    out = torch.empty((B, num_heads, D, 3, 3), dtype=tokens.dtype, device=tokens.device)
    if B == 0:
        return out
    if tokens.stride(2) != 1 or (tokens.stride(0) | tokens.stride(1)) % launch.CHUNK or tokens.data_ptr() % 16:
        tokens = tokens.clone(memory_format=torch.contiguous_format)
    address = tokens.data_ptr(), tokens.stride(0), tokens.stride(1)
    units = -(-C // launch.UNIT)
    splits = choose_splits(B * units, N, launch.processors(device))
    parameters = [launch.aligned(parameter) for parameter in (hidden_weight, hidden_bias, weight, bias)]
    sums = None
    with fused_op.on_device(tokens.device):
        stream, kernels = launch.current_stream(device), launch.load_kernels(device, tokens.dtype, D)
        if splits.number > 1:
            sums = torch.empty((B, splits.number, C), dtype=torch.float32, device=tokens.device)
            kernels["inline_sum_tokens"].launch(
                (B * units * splits.number, 1), 0, stream,
                *address, sums.data_ptr(), N, splits.tokens_each, splits.number, C, units, 0,
            )  # fmt: skip
        kernels["inline_predict"].launch(
            (B * units, 1), 0, stream,
            *address, 0 if sums is None else sums.data_ptr(), *(parameter.data_ptr() for parameter in parameters),
            out.data_ptr(), N, splits.number, C, units,
        )  # fmt: skip
    return out


def choose_splits(blocks: int, tokens: int, processors: int) -> launch.Splits:
    """Choose how many blocks share the tokens of a sample's unit of channels, and how many tokens each sums."""
    if tokens <= MOST_TOKENS_PER_BLOCK or blocks >= processors:
        return launch.Splits(1, tokens)
    wanted = -(-BLOCKS_PER_PROCESSOR * processors // blocks)
    each = max(FEWEST_TOKENS_PER_SPLIT, -(-tokens // wanted))
    return launch.Splits(-(-tokens // each), each)


def _fake(tokens: Tensor, *arguments: Any) -> Tensor:
    (B, _, C), num_heads = tokens.shape, arguments[-1]
    return tokens.new_empty(B, num_heads, C // num_heads, 3, 3)


_LIBRARY = torch.library.Library("inline_attention", "FRAGMENT")
_LIBRARY.define(  # pyright: ignore[reportUnknownMemberType]
    "cuda_predict_local_weight(Tensor tokens, Tensor hidden_weight, Tensor hidden_bias, Tensor weight, Tensor bias, "
    "int num_heads) -> Tensor"
)
_LIBRARY.impl("cuda_predict_local_weight", _launch, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
torch.library.register_fake("inline_attention::cuda_predict_local_weight", _fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
_op = torch.ops.inline_attention.cuda_predict_local_weight.default
