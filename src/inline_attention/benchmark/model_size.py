"""Count a model's parameters and the multiply-adds of one image, without computing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from inline_attention.benchmark.stored_sizes import ModelSize
from inline_attention.layers.attention import TokenAttention
from inline_attention.models import create_model


def measure_model_size(name: str, *, input_size: tuple[int, int, int] | None = None, **arguments: Any) -> ModelSize:
    """Build a model on the meta device, run it there and count.

    Args:
        name: A registered name, such as "inline_deit_tiny".
        input_size: Channels, height and width of the image; the model's native size by default.
        **arguments: Arguments of `create_model`, such as `num_classes`.
    """
    with torch.device("meta"):
        model: Any = create_model(name, **arguments).eval()
        size: tuple[int, int, int] = input_size or model.pretrained_cfg["input_size"]
        image = torch.empty(1, *size)
    local_macs = 0

    def count_local_term(attention: Any, inputs: tuple[Any, ...]) -> None:
        # The counter sees products and convolutions; the 3×3 term is neither.
        nonlocal local_macs
        local_macs += 9 * (inputs[0].shape[1] - attention.num_prefix_tokens) * attention.dim

    for module in model.modules():
        if isinstance(module, TokenAttention) and module.has_local_term:
            module.register_forward_pre_hook(count_local_term)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        # All tokens, as published: `forward` computes the last MLP of a DeiT for the class token alone.
        model.forward_head(model.forward_features(image))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSize(parameters, counter.get_total_flops() // 2 + local_macs, size)
