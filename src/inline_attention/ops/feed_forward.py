"""The rest of a transformer block after attention, fused where that is faster: half-precision inference on Hopper.

Shapes: `B` batch, `N` tokens, `C` channels, `F` hidden channels.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.ops import fused_op
from inline_attention.ops.tracing import constant_when_compiled, is_plain_execution, transform_reason

# Where it was measured to be faster than the composition.
CAPABILITIES = ((9, 0),)
MOST_CHANNELS = 256
HIDDEN_MULTIPLE = 64


class FeedForwardParameters(NamedTuple):
    """The parameters of a block after its attention."""

    projection_weight: Tensor  # [C, C]
    projection_bias: Tensor  # [C]
    norm_weight: Tensor  # [C]
    norm_bias: Tensor  # [C]
    hidden_weight: Tensor  # [F, C]
    hidden_bias: Tensor  # [F]
    weight: Tensor  # [C, F]
    bias: Tensor  # [C]


def fused_feed_forward(x: Tensor, attended: Tensor, parameters: FeedForwardParameters, eps: float) -> Tensor:
    """`y + linear(GELU(linear(norm(y))))` for `y = x + projection(attended)`; `unsupported_reason` must be None.

    `x` `[B, N, C]` is the residual stream, `attended` `[B, N, C]` the attention's output before its projection.
    """
    arguments: list[Any] = [*(tensor.contiguous() for tensor in (x, attended, *parameters)), eps]
    return (_feed_forward_op if torch.compiler.is_compiling() else _feed_forward)(*arguments)


def unsupported_reason(x: Tensor, parameters: FeedForwardParameters) -> str | None:
    """Return why the fused kernel cannot run or would not be faster; None if it should run."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "recorded graphs consist of PyTorch's own operations"
    hidden, channels = parameters.hidden_weight.shape
    # A power of two or a sum of two, 16 at least: tensor cores then need no padding.
    suits_tensor_cores = channels % 16 == 0 and channels.bit_count() <= 2
    if channels > MOST_CHANNELS or hidden % HIDDEN_MULTIPLE != 0 or not suits_tensor_cores:
        return f"is faster only up to {MOST_CHANNELS} channels that fit tensor cores, got {channels} and {hidden}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {x.dtype}"
    if x.device.type != "cuda":
        return f"needs a CUDA device, got {x.device.type}"
    if not (
        x.shape[-1] == channels
        and parameters.projection_weight.shape == (channels, channels)
        and parameters.norm_weight.shape == (channels,)
        and parameters.weight.shape == (channels, hidden)
    ):
        return "takes maps that fit together, since the kernel reads as far as one of them says"
    if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in parameters):
        return "takes tensors of one dtype and device"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters)):
        return "has no derivative"
    if torch.is_autocast_enabled(x.device.type):
        return "leaves the choice of a dtype to autocast"
    if x.numel() == 0:
        return "takes at least one token"
    if not torch.compiler.is_compiling() and not is_plain_execution(x, *parameters):
        return "does not run under dispatch modes, such as a FLOP counter"
    return transform_reason() or _device_reason(x.device.index)


@constant_when_compiled
def _device_reason(index: int | None) -> str | None:
    return _cached_device_reason(index)


@functools.cache
def _cached_device_reason(index: int | None) -> str | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) not in CAPABILITIES:
        return "is faster on Hopper only"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


# A plain call launches, a compiler gets an op that it can look into. Triton is imported by the first of either.


def _feed_forward(x: Tensor, attended: Tensor, *parameters_and_eps: Tensor | float) -> Tensor:
    from inline_attention.ops.backends.triton import feed_forward

    with fused_op.on_device(x.device):
        return feed_forward.launch(x, attended, *parameters_and_eps)


@torch.library.triton_op("inline_attention::feed_forward", mutates_args=())  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _feed_forward_op(
    x: torch.Tensor,
    attended: torch.Tensor,
    projection_weight: torch.Tensor,
    projection_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    hidden_weight: torch.Tensor,
    hidden_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    from inline_attention.ops.backends.triton import feed_forward

    launched = torch.library.wrap_triton(feed_forward.inline_feed_forward)  # pyright: ignore[reportUnknownMemberType]
    parameters = (
        projection_weight, projection_bias, norm_weight, norm_bias, hidden_weight, hidden_bias, weight, bias,
    )  # fmt: skip
    return feed_forward.launch(x, attended, *parameters, eps, launched=launched)
