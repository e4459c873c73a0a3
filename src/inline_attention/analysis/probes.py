"""Looking into the attention layers of a running model, and putting something else in their place.

Every attention of this library is understood: over the whole map (softmax, linear, InLine), in shifted windows (Swin)
and in stripes (CSWin); so are models of others whose attention `convert_attention` has replaced.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from inline_attention.analysis.explicit import MixingRule
from inline_attention.analysis.layer_attention import LayerAttention, PositionBias
from inline_attention.layers.attention import SoftmaxAttention, TokenAttention
from inline_attention.layers.grids import Windows
from inline_attention.layers.window_attention import StripeAttention, WindowAttention, relative_position_index
from inline_attention.ops.call import AttentionCall

AnyAttention: TypeAlias = TokenAttention | WindowAttention | StripeAttention
OnLayer: TypeAlias = Callable[[LayerAttention], Tensor | None]


def attention_layers(model: nn.Module) -> dict[str, AnyAttention]:
    """The attention layers of a model by their path in it, in order.

    Raises:
        ValueError: If there are none.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TokenAttention | WindowAttention | StripeAttention)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of this library; "
            "inline_attention.layers.conversion.convert_attention puts some into a model of timm's"
        )
    return layers


def choose_layers(model: nn.Module, wanted: Sequence[int] | None) -> list[int]:
    """Layer numbers as given, negative ones counted from the end; all where none are given.

    Raises:
        ValueError: If the model has fewer.
    """
    count = len(attention_layers(model))
    if not wanted:
        return list(range(count))
    for number in wanted:
        if not -count <= number < count:
            raise ValueError(f"the model has {count} attention layers, got layer {number}; give 0 to {count - 1}")
    return sorted({number % count for number in wanted})


def choose_heads(layer: LayerAttention, wanted: Sequence[int] | None) -> list[int]:
    """Head numbers as given; all where none are given.

    Raises:
        ValueError: If the layer has fewer.
    """
    for number in wanted or ():
        if not 0 <= number < layer.num_heads:
            raise ValueError(
                f"layer {layer.index} ({layer.name}) has {layer.num_heads} heads, got head {number}; "
                f"give 0 to {layer.num_heads - 1}"
            )
    return sorted(set(wanted)) if wanted else list(range(layer.num_heads))


@torch.no_grad()
def capture_attention(model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None) -> list[LayerAttention]:
    """Run a model and return what its attention layers did.

    Args:
        model: In evaluation mode.
        images: `[B, 3, H, W]`, normalised, all of one size.
        layers: Numbers of the layers to look at; all by default.
    """
    captured: list[LayerAttention] = []
    with observed(model, captured.append, layers=layers):
        model(images)
    return captured


@contextmanager
def observed(model: nn.Module, on_layer: OnLayer, *, layers: Sequence[int] | None = None) -> Iterator[None]:
    """While inside, call `on_layer` with every attention layer that runs.

    Args:
        model: The model.
        on_layer: May return mixed values `[B, N, C]`, as `masking.mixed_values` does, to replace the layer's own.
        layers: Numbers of the layers to observe; all by default.
    """
    chosen = choose_layers(model, layers)
    with ExitStack() as undoing:
        for index, (name, attention) in enumerate(attention_layers(model).items()):
            if index in chosen:
                for undo in _observe(attention, name, index, on_layer):
                    undoing.callback(undo)
        yield


def _observe(attention: AnyAttention, name: str, index: int, on_layer: OnLayer) -> list[Callable[[], None]]:
    """Watch one layer; returns what undoes it."""
    if isinstance(attention, TokenAttention):
        return _observe_token_attention(attention, name, index, on_layer)
    return _observe_windows(attention, name, index, on_layer)


def _observe_token_attention(
    attention: TokenAttention, name: str, index: int, on_layer: OnLayer
) -> list[Callable[[], None]]:
    """Through `mix`, which gets all there is to know but the grid of layers without a local term."""
    signature = inspect.signature(attention.forward)
    original = attention.mix
    grid_size: tuple[int, int] | None = None

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal grid_size
        arguments = signature.bind(*args, **kwargs).arguments
        grid_size = attention._resolve_grid(arguments["x"].shape[1], arguments.get("grid_size"))

    def mix(call: AttentionCall) -> Tensor:
        _refuse_padding(call.key_padding_mask)
        assert grid_size is not None
        normalization = None if isinstance(attention, SoftmaxAttention) else attention.normalization
        rule = MixingRule(normalization, attention.feature_map, attention.scale)
        layer = LayerAttention(
            name, index, rule, call.q, call.k, call.v,
            # Learned kernels are views of parameters; nobody wants gradients of an analysis.
            local_weight=None if call.local_weight is None else call.local_weight.detach(),
            local_bias=None, grid_size=grid_size, num_prefix_tokens=attention.num_prefix_tokens,
        )  # fmt: skip
        mixed = on_layer(layer)
        if mixed is None:
            return original(call._replace(overwrite_q=False))  # the observer may keep the queries
        return mixed.unflatten(2, call.v.shape[2:]).to(call.v.dtype)

    handle = attention.register_forward_pre_hook(before, with_kwargs=True)
    vars(attention)["mix"] = mix  # on this one layer, in place of its class's

    def restore() -> None:
        del vars(attention)["mix"]

    return [handle.remove, restore]


def _observe_windows(
    attention: WindowAttention | StripeAttention, name: str, index: int, on_layer: OnLayer
) -> list[Callable[[], None]]:
    """Before the layer runs; what replaces its values waits for its output projection."""
    signature = inspect.signature(attention.forward)
    replacement: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        replacement.clear()
        arguments = signature.bind(*args, **kwargs).arguments
        _refuse_padding(arguments.get("key_padding_mask"))
        x, grid_size = arguments["x"], arguments["grid_size"]
        if isinstance(attention, WindowAttention):
            layer = _read_window_attention(attention, name, index, x, grid_size)
        else:
            layer = _read_stripe_attention(attention, name, index, x, grid_size)
        mixed = on_layer(layer)
        if mixed is not None:
            replacement.append(mixed)

    def before_projection(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (replacement.pop().to(args[0].dtype),) if replacement else None

    return [
        attention.register_forward_pre_hook(before, with_kwargs=True).remove,
        attention.proj.register_forward_pre_hook(before_projection).remove,
    ]


def _refuse_padding(key_padding_mask: Tensor | None) -> None:
    if key_padding_mask is not None:
        raise ValueError("images of unequal size cannot be analysed in one batch; run them one by one")


def _read_window_attention(
    attention: WindowAttention, name: str, index: int, x: Tensor, grid_size: tuple[int, int]
) -> LayerAttention:
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    side = attention.window_size
    windows = Windows.cover(grid_size, (side, side))
    shift = attention._shift(*grid_size)
    regions = windows.regions(shift, x.device)  # [W, side, side]
    window = torch.arange(len(regions), device=x.device)[:, None, None]
    place = torch.arange(side * side, device=x.device).view(1, side, side).expand_as(regions)
    groups = _per_token(windows, window * (1 + regions.max()) + regions, shift)
    table = attention.relative_position_bias_table.detach()
    bias = table[relative_position_index(x.device, side)]  # [L, L, H]
    return LayerAttention(
        name,
        index,
        MixingRule(None, "identity", q.shape[-1] ** -0.5),
        q,
        k,
        v,
        local_weight=None,
        local_bias=None,
        grid_size=grid_size,
        num_prefix_tokens=0,
        groups=groups.expand(attention.num_heads, -1),
        position_bias=PositionBias(bias.permute(2, 0, 1), _per_token(windows, place, shift)),
    )


def _read_stripe_attention(
    attention: StripeAttention, name: str, index: int, x: Tensor, grid_size: tuple[int, int]
) -> LayerAttention:
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    convolutions = [cast(nn.Conv2d, convolution) for convolution in attention.static_local]
    heads_and_channels = q.shape[2:]
    kernels = torch.cat([convolution.weight.detach() for convolution in convolutions]).view(
        1, *heads_and_channels, 3, 3
    )
    biases = [convolution.bias.detach() for convolution in convolutions if convolution.bias is not None]
    stripe = attention.stripe_width
    groups = None
    if stripe is not None:
        per_branch: list[Tensor] = []
        for shape in ((None, stripe), (stripe, None)):
            windows = Windows.cover(grid_size, shape)
            window = torch.arange(windows.counts[0] * windows.counts[1], device=x.device)[:, None, None]
            per_branch.append(_per_token(windows, window.expand(-1, *windows.window), (0, 0)))
        groups = torch.stack(per_branch).repeat_interleave(attention.num_heads // 2, dim=0)
    return LayerAttention(
        name,
        index,
        MixingRule(None, "identity", q.shape[-1] ** -0.5),
        q,
        k,
        v,
        local_weight=kernels.expand(x.shape[0], -1, -1, -1, -1),
        local_bias=torch.cat(biases).view(heads_and_channels) if biases else None,
        grid_size=grid_size,
        num_prefix_tokens=0,
        groups=groups,
    )


def _per_token(windows: Windows, numbers: Tensor, shift: tuple[int, int]) -> Tensor:
    """Numbers at the places of windows, `[W, height, width]`, by token: `[N]`."""
    return windows.join(numbers[..., None], 1, shift).flatten()
