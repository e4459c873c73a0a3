"""Look into the attention layers of a running model with hooks, and replace what they compute.

All attention of this library is supported: over the whole map (softmax, linear, InLine), in shifted windows (Swin) and
in stripes (CSWin), also in models whose attention `convert_attention` has replaced. A hook before the layer computes
queries, keys and values from the layer's input once more; a hook before its output projection replaces the values.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` head dim, `L` tokens of a window, `Q` queries, `W` windows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from inline_attention.analysis.layer_attention import LayerAttention, MixingRule
from inline_attention.layers.attention import SoftmaxAttention, TokenAttention
from inline_attention.layers.grids import Windows
from inline_attention.layers.window_attention import StripeAttention, WindowAttention, relative_position_index

AnyAttention: TypeAlias = TokenAttention | WindowAttention | StripeAttention


def attention_layers(model: nn.Module) -> dict[str, AnyAttention]:
    """Return the attention layers of a model by their path in it, in order; raise `ValueError` if there are none."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AnyAttention)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of this library; convert a timm model with "
            "inline_attention.layers.conversion.convert_attention first"
        )
    return layers


def choose_layers(model: nn.Module, wanted: Sequence[int] | None) -> list[int]:
    """Return valid layer numbers in order: negative ones count from the end, all if none are given."""
    count = len(attention_layers(model))
    for number in wanted or ():
        if not -count <= number < count:
            raise ValueError(f"the model has {count} attention layers, got layer {number}; give 0 to {count - 1}")
    return sorted({number % count for number in wanted or range(count)})


def choose_heads(layer: LayerAttention, wanted: Sequence[int] | None) -> list[int]:
    """Return valid head numbers in order; all if none are given."""
    for number in wanted or ():
        if not 0 <= number < layer.num_heads:
            raise ValueError(
                f"layer {layer.index} ({layer.name}) has {layer.num_heads} heads, got head {number}; "
                f"give 0 to {layer.num_heads - 1}"
            )
    return sorted(set(wanted or range(layer.num_heads)))


@torch.no_grad()
def capture_attention(model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None) -> list[LayerAttention]:
    """Run a model and return what its attention layers did.

    Args:
        model: Model in evaluation mode.
        images: `[B, 3, H, W]`, normalized, all of one size.
        layers: Numbers of the layers to return; all by default.
    """
    captured: list[LayerAttention] = []
    with observed(model, captured.append, layers=layers):
        model(images)
    return captured


@contextmanager
def observed(
    model: nn.Module, on_layer: Callable[[LayerAttention], Tensor | None], *, layers: Sequence[int] | None = None
) -> Iterator[None]:
    """Call `on_layer` with every attention layer that runs inside the `with` block.

    Args:
        model: The model.
        on_layer: Function that may return mixed values `[B, N, C]`, as `masking.mixed_values` does, to replace the
            layer's own.
        layers: Numbers of the layers to observe; all by default.
    """
    chosen = choose_layers(model, layers)
    with ExitStack() as hooks:
        for index, (name, attention) in enumerate(attention_layers(model).items()):
            if index in chosen:
                hooks.enter_context(_hooks(attention, name, index, on_layer))
        yield


@contextmanager
def _hooks(
    attention: AnyAttention, name: str, index: int, on_layer: Callable[[LayerAttention], Tensor | None]
) -> Iterator[None]:
    signature = inspect.signature(attention.forward)
    replacement: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("key_padding_mask") is not None or arguments.get("attn_mask") is not None:
            raise ValueError("images of unequal size cannot be analyzed in one batch; run them one by one")
        mixed = on_layer(_read_layer(attention, name, index, arguments))
        replacement[:] = [] if mixed is None else [mixed]

    def before_projection(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (replacement.pop().to(args[0].dtype),) if replacement else None

    with (
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.proj.register_forward_pre_hook(before_projection),
    ):
        yield


def _read_layer(attention: AnyAttention, name: str, index: int, arguments: dict[str, Any]) -> LayerAttention:
    x: Tensor = arguments["x"]
    if isinstance(attention, TokenAttention):
        return _read_token_attention(attention, name, index, x, arguments)
    grid_size: tuple[int, int] = arguments["grid_size"]
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    rule = MixingRule(None, "identity", q.shape[-1] ** -0.5)
    if isinstance(attention, WindowAttention):
        groups, bias = _windows(attention, grid_size, x.device)
        return LayerAttention(name, index, rule, q, k, v, None, None, grid_size, 0, groups, bias)
    heads_and_channels = q.shape[2:]
    convolutions = [cast(nn.Conv2d, convolution) for convolution in attention.static_local]
    kernels = torch.cat([convolution.weight.detach() for convolution in convolutions])
    kernels = kernels.view(1, *heads_and_channels, 3, 3).expand(x.shape[0], -1, -1, -1, -1)
    biases = [convolution.bias.detach() for convolution in convolutions if convolution.bias is not None]
    bias = torch.cat(biases).view(heads_and_channels) if biases else None
    groups = _stripes(attention, grid_size, x.device)
    return LayerAttention(name, index, rule, q, k, v, kernels, bias, grid_size, 0, groups)


def _read_token_attention(
    attention: TokenAttention, name: str, index: int, x: Tensor, arguments: dict[str, Any]
) -> LayerAttention:
    normalization = None if isinstance(attention, SoftmaxAttention) else attention.normalization
    local_input = arguments.get("local_input")
    local_weight = attention._local_weight(x if local_input is None else local_input, None)
    grid = attention._resolve_grid(x.shape[1], arguments.get("grid_size"), x)
    q, k, v = attention._project(x, None, local_weight, grid)[:3]
    static = attention.static_local
    return LayerAttention(
        name, index, MixingRule(normalization, attention.feature_map, attention.scale), q, k, v,
        # Kernels may be views of parameters; an analysis needs no gradients.
        local_weight=None if local_weight is None else local_weight.detach(),
        local_bias=None if static is None or static.bias is None else static.bias.detach().view(q.shape[2:]),
        grid_size=grid,
        num_prefix_tokens=attention.num_prefix_tokens,
    )  # fmt: skip


def _windows(
    attention: WindowAttention, grid_size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """Return the groups `[H, N]` of tokens in one window, and the position bias."""
    side = attention.window_size
    windows = Windows.cover(grid_size, (side, side))
    shift = attention._shift(*grid_size)
    regions = windows.regions(shift, device)  # [W, side, side]
    window = torch.arange(len(regions), device=device)[:, None, None]
    groups = _per_token(windows, window * (1 + regions.max()) + regions, shift)
    places = torch.arange(side * side, device=device).view(1, side, side).expand_as(regions)
    places = _per_token(windows, places, shift)  # [N], in the token's window
    table = attention.relative_position_bias_table.detach()
    table = table[relative_position_index(device, side)].permute(2, 0, 1)  # [H, L, L]

    def position_bias(head: int, queries: Tensor) -> Tensor:
        return table[head][places[queries][:, None], places]  # without meaning for tokens of different windows

    return groups.expand(attention.num_heads, -1), position_bias


def _stripes(attention: StripeAttention, grid_size: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return the groups `[H, N]` of tokens in one stripe; None where the stripe covers the map."""
    stripe = attention.stripe_width
    if stripe is None:
        return None
    branches: list[Tensor] = []
    for shape in ((None, stripe), (stripe, None)):
        windows = Windows.cover(grid_size, shape)
        window = torch.arange(windows.counts[0] * windows.counts[1], device=device)[:, None, None]
        branches.append(_per_token(windows, window.expand(-1, *windows.window), (0, 0)))
    return torch.stack(branches).repeat_interleave(attention.num_heads // 2, dim=0)


def _per_token(windows: Windows, numbers: Tensor, shift: tuple[int, int]) -> Tensor:
    """Return numbers at the places of windows, `[W, height, width]`, by token: `[N]`."""
    return windows.join(numbers[..., None], 1, shift).flatten()
