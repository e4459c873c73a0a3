"""Figures that the paper (arXiv 2412.06590) reports for its authors' weights. We have not measured them."""

from __future__ import annotations

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
