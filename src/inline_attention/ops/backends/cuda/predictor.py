"""The 3×3 weights of the local residual from a block's tokens, in one launch or two: what inference asks for.

Mean over the tokens, linear, GELU, linear, the linear maps block-diagonal over heads. Composed, that is half a dozen
launches of next to no work each.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` = C / H.
"""

from __future__ import annotations

from typing import Any

import torch

from inline_attention.ops import fused_op
from inline_attention.ops.backends import cuda
from inline_attention.ops.backends.cuda import launch
from inline_attention.ops.tracing import are_plain_eager_tensors

# Beyond so many tokens, and with fewer blocks than processors, several blocks sum the tokens of a sample.
MOST_TOKENS_PER_BLOCK = 1024
BLOCKS_PER_PROCESSOR = 4
FEWEST_TOKENS_PER_SPLIT = 128


def unsupported_reason(source: torch.Tensor, parameters: tuple[torch.Tensor, ...], num_heads: int) -> str | None:
    """Why the weights cannot be predicted by these kernels, or None. The source is tokens, or float32 sums of them."""
    first = parameters[0]
    reason = cuda.device_reason(first)
    if reason is not None:
        return reason
    if source.dtype not in (first.dtype, torch.float32):
        return f"takes tokens of the parameters' dtype, got {source.dtype} and {first.dtype}"
    if any(tensor.device != first.device for tensor in (source, *parameters)) or any(
        parameter.dtype != first.dtype for parameter in parameters
    ):
        return "takes parameters of one dtype, on the tokens' device"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (source, *parameters)):
        return "has no derivative"
    if torch.is_autocast_enabled(source.device.type):
        return "leaves the choice of a dtype to autocast"
    head_dim = cuda.known_head_dim(source.shape[2] // num_heads)
    if head_dim is None:
        return f"takes head dims of 32 and 64, got {source.shape[2]} channels in {num_heads} heads"
    return fused_op.transform_reason() or cuda.build_reason(source.device.index, first.dtype, head_dim)


def predict(
    source: torch.Tensor,
    count: int,
    hidden_weight: torch.Tensor,
    hidden_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """The weights `[B, H, D, 3, 3]`.

    Args:
        source: Tokens `[B, N, C]`, of which the mean is taken; or float32 `[B, S, C]`, their sums in pieces.
        count: N.
        hidden_weight: `[C, D, 1]` of the first map, as a grouped 1×1 convolution stores it.
        hidden_bias: `[C]`.
        weight: `[9 C, D, 1]` of the second map; channel c owns rows 9c … 9c + 8.
        bias: `[9 C]`.
        num_heads: H.
    """
    arguments = (source, count, hidden_weight, hidden_bias, weight, bias, num_heads)
    if are_plain_eager_tensors(source) and torch._C._len_torch_dispatch_stack() == 0:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return _launch(*arguments)
    return _op(*arguments)


def _launch(
    source: torch.Tensor,
    count: int,
    hidden_weight: torch.Tensor,
    hidden_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    B, _, C = source.shape
    D = C // num_heads
    device, dtype = source.device.index, weight.dtype
    out = torch.empty((B, num_heads, D, 3, 3), dtype=dtype, device=source.device)
    if B == 0:
        return out
    units = -(-C // launch.UNIT)
    parameters = [parameter.contiguous() for parameter in (hidden_weight, hidden_bias, weight, bias)]
    with cuda.on_device(source.device):
        stream, kernels = launch.current_stream(device), launch.load_kernels(device, dtype, D)
        if source.dtype == torch.float32:
            tokens, sums = None, source.contiguous()
        else:
            tokens, sums = _readable(source), None
            splits = choose_splits(B * units, count, launch.processors(device))
            if splits.number > 1:
                sums = torch.empty((B, splits.number, C), dtype=torch.float32, device=source.device)
                kernels["inline_sum_tokens"].launch(
                    (B * units * splits.number, 1), 0, stream,
                    launch.TOKEN_SUM.pack(
                        *_address(tokens), sums.data_ptr(), count, splits.tokens_each, splits.number, C, units, 0
                    ),
                )  # fmt: skip
        kernels["inline_predict"].launch(
            (B * units, 1), 0, stream,
            launch.PREDICT.pack(
                *_address(tokens), 0 if sums is None else sums.data_ptr(),
                *(parameter.data_ptr() for parameter in parameters), out.data_ptr(),
                count, 1 if sums is None else sums.shape[1], C, units,
            ),
        )  # fmt: skip
    return out


def _readable(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, copied if they cannot be read sixteen bytes at a time."""
    if tokens.stride(2) != 1 or (tokens.stride(0) | tokens.stride(1)) % launch.CHUNK or tokens.data_ptr() % 16:
        return tokens.clone(memory_format=torch.contiguous_format)
    return tokens


def _address(tokens: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tokens is None else (tokens.data_ptr(), tokens.stride(0), tokens.stride(1))


def choose_splits(blocks: int, tokens: int, processors: int) -> launch.Splits:
    """How many blocks share the tokens of a sample's unit of channels, and how many tokens each sums."""
    if tokens <= MOST_TOKENS_PER_BLOCK or blocks >= processors:
        return launch.Splits(1, tokens)
    wanted = -(-BLOCKS_PER_PROCESSOR * processors // blocks)
    each = max(FEWEST_TOKENS_PER_SPLIT, -(-tokens // wanted))
    return launch.Splits(-(-tokens // each), each)


def _fake(source: torch.Tensor, count: int, hidden_weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    del count
    (B, _, C), num_heads = source.shape, rest[-1]
    return hidden_weight.new_empty(B, num_heads, C // num_heads, 3, 3)


_LIBRARY = torch.library.Library("inline_attention", "FRAGMENT")
_LIBRARY.define(  # pyright: ignore[reportUnknownMemberType]
    "cuda_predict_local_weight(Tensor source, SymInt count, Tensor hidden_weight, Tensor hidden_bias, Tensor weight, "
    "Tensor bias, int num_heads) -> Tensor"
)
_LIBRARY.impl("cuda_predict_local_weight", _launch, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
torch.library.register_fake("inline_attention::cuda_predict_local_weight", _fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
_op = torch.ops.inline_attention.cuda_predict_local_weight.default
