"""Stored facts of the models, to list them without PyTorch: parameters, multiply-adds, and the paper's accuracy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
