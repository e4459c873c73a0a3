"""Fit converted attention to the softmax it replaces: one factor per head, in closed form, without labels.

InLine is the first two terms of softmax's series in the scores. Where scores are large, the second term is too large:
softmax saturates. The factor makes it explain most of softmax's output, and goes into the weights of the queries.

Shapes: `B` batch, `N` tokens, `P` prefix tokens, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.adapted_attention import call_arguments
from inline_attention.layers.attention import KernelAttention
from inline_attention.layers.conversion import RECORD
from inline_attention.ops.api import inline_attention

LEAST_GAIN = 0.05  # of heads whose second term explains nothing: they must be able to learn


@torch.no_grad()
def calibrate_attention(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Fit the attention of a model that `convert_attention` has just converted, on some images, in place.

    The model runs once. Each InLine attention compares its output with that of softmax on the same queries, keys and
    values, and scales the weights of its queries, so that later layers see what calibrated ones give. About 16 typical
    images are enough. Layers that normalize their queries have one factor for all heads. Queries that keep softmax
    (`softmax_prefix`) are not changed: they get the inverse factor, a new parameter.

    Args:
        model: The model, with the weights of softmax attention. Call this once, before training.
        *args: What the model takes: usually images `[B, 3, H, W]`, normalized, all of one size.
        **kwargs: The same, by name.

    Returns:
        The factors `[H]` by the names of the attentions.

    Raises:
        ValueError: If there is no InLine attention that a conversion has made, it is calibrated already, or its outputs
            are not finite. The model is unchanged, as after any other error.
    """
    record: dict[str, Any] | None = getattr(model, RECORD, None)
    layers = calibratable_layers(model)
    if record is None or not layers:
        raise ValueError(
            f"{type(model).__name__} has no InLine attention with the identity as its feature map that "
            "convert_attention has put in; call convert_attention(model) first"
        )
    if any(layer.is_calibrated for layer in layers.values()):
        raise ValueError(f"{type(model).__name__} is calibrated already; that is possible only once")
    gains: dict[str, Tensor] = {}
    before = {name: [part.clone() for part in _parts(layer)] for name, layer in layers.items()}
    was_training = model.training
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def calibrate(
                layer: KernelAttention, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
            ) -> None:
                if name not in gains:  # a layer in several places is called several times
                    gains[name] = _calibrate(layer, call_arguments(layer, args, kwargs))

            hooks.enter_context(layer.register_forward_pre_hook(calibrate, with_kwargs=True))
        try:
            model.eval()(*args, **kwargs)
        except BaseException:
            for name in gains:
                _undo(layers[name], before[name], has_prefix_gain=record["options"].get("prefix_gain", False))
            raise
        finally:
            model.train(was_training)
    if any(layer.prefix_gain is not None for layer in layers.values()):
        record["options"] = {**record["options"], "prefix_gain": True}
    return gains


def calibratable_layers(model: nn.Module) -> dict[str, KernelAttention]:
    """Return the attentions whose second term is proportional to their queries, by name."""
    return {
        name: module
        for name, module in cast(Iterable[tuple[str, nn.Module]], model.named_modules())
        if isinstance(module, KernelAttention)
        and (module.normalization, module.feature_map) == ("subtract", "identity")
    }


def _calibrate(layer: KernelAttention, arguments: dict[str, Any]) -> Tensor:
    """Scale the query weights of a layer that is about to be called; return the factors `[H]`."""
    if arguments.get("key_padding_mask") is not None or arguments.get("attn_mask") is not None:
        raise ValueError("images of unequal size cannot calibrate a model in one batch; give images of one size")
    q, k, v = (part.float() for part in layer.project(arguments["x"], rope=arguments.get("rope"))[:3])
    softmax, second = beyond_mean(q, k, v, layer.scale)
    first = layer.num_prefix_tokens if layer.has_softmax_prefix else 0
    gains = fitted_gains(softmax[:, first:], second[:, first:], by_head=layer.q_norm is None)
    if not gains.isfinite().all():
        raise ValueError("the model's attention is not finite on these images; check its weights and the images")
    parts = _parts(layer)
    if not parts:  # a norm without weights
        return torch.ones_like(gains)
    for part in parts:
        if layer.q_norm is None:
            part.view(layer.num_heads, layer.head_dim, -1).mul_(gains[:, None, None])
        else:
            part.mul_(gains[0])
    if layer.has_softmax_prefix:
        inverse = layer.add_prefix_gain() if layer.prefix_gain is None else layer.prefix_gain
        inverse.div_(gains)
    layer.is_calibrated = True
    return gains


def _parts(layer: KernelAttention) -> list[Tensor]:
    """Return the weights to scale: those of the queries, or of their norm, which all heads share."""
    if layer.q_norm is not None:
        return list(layer.q_norm.parameters())
    if not (parts := layer.query_weights()):
        raise ValueError("the queries' projection is no plain linear layer; calibrate before adding LoRA or quantizing")
    return parts


def _undo(layer: KernelAttention, before: Sequence[Tensor], *, has_prefix_gain: bool) -> None:
    for part, old in zip(_parts(layer), before, strict=True):
        part.copy_(old)
    if layer.prefix_gain is not None:
        layer.prefix_gain.fill_(1.0)
        layer.prefix_gain = layer.prefix_gain if has_prefix_gain else None
    layer.is_calibrated = False


def beyond_mean(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, N, H, D]` of softmax and InLine, minus the mean value."""
    mean = v.mean(1, keepdim=True)
    q_, k_, v_ = (part.transpose(1, 2) for part in (q, k, v))
    softmax = F.scaled_dot_product_attention(q_, k_, v_, scale=scale).transpose(1, 2)
    return softmax - mean, inline_attention(q, k, v, scale=scale) - mean


def fitted_gains(softmax: Tensor, second: Tensor, *, by_head: bool = True) -> Tensor:
    """Return the factors `[H]` on InLine's second term `[B, N, H, D]` that bring it closest to softmax's output."""
    axes = (0, 1, 3) if by_head else (0, 1, 2, 3)
    explained, energy = ((part * second).double().sum(axes) for part in (softmax, second))
    gains = torch.where(energy == 0, 1.0, explained / energy).clamp(min=LEAST_GAIN).float()
    return gains.expand(second.shape[2])
