"""Parameters and multiply-adds of the models, counted or as stored, and the paper's accuracy.

PyTorch is imported only to count: `inline models` lists the stored numbers at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Counting takes about a second per model. `benchmarks/model_sizes.py` writes this file, and tests count again.
STORED_SIZES = Path(__file__).with_name("model_sizes.json")
# What the paper (arXiv 2412.06590) reports for its authors' weights; not measured here.
# ImageNet-1K top-1 accuracy in percent, at the native size of each model.
PUBLISHED_TOP1: dict[str, float] = {
    "inline_deit_tiny": 74.5,
    "inline_deit_small": 80.2,
    "inline_deit_base": 82.3,
    "inline_pvt_tiny": 78.2,
    "inline_pvt_small": 82.0,
    "inline_pvt_medium": 83.2,
    "inline_pvt_large": 83.6,
    "inline_swin_tiny": 82.4,
    "inline_swin_small": 83.6,
    "inline_swin_base": 84.1,
    "inline_cswin_tiny": 83.2,
    "inline_cswin_small": 83.8,
    "inline_cswin_base": 84.5,
    "inline_cswin_base_384": 85.7,
}


@dataclass(frozen=True)
class ModelSize:
    """The size of one model."""

    parameters: int
    macs: int  # multiply-adds of one image: matrix products, convolutions and the 3×3 local term
    input_size: tuple[int, int, int]  # channels, height and width of that image

    @property
    def param_count(self) -> float:
        """Parameters in millions, under the name that timm's benchmarks give them."""
        return self.parameters / 1e6

    @property
    def gmacs(self) -> float:
        """Multiply-adds in billions."""
        return self.macs / 1e9


def stored_model_sizes() -> dict[str, ModelSize]:
    """Return the sizes of the registered models at their native image size, by name."""
    stored: dict[str, tuple[int, int, int]] = json.loads(STORED_SIZES.read_text(encoding="utf-8"))
    return {name: ModelSize(parameters, macs, (3, side, side)) for name, (parameters, macs, side) in stored.items()}


def measure_model_size(name: str, *, input_size: tuple[int, int, int] | None = None, **arguments: Any) -> ModelSize:
    """Build a registered model on the meta device, run it there and count; `arguments` are those of `create_model`.

    `input_size` has channels, height and width of the image; the model's native size by default.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from inline_attention.layers.attention import TokenAttention
    from inline_attention.models import create_model

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
