"""Attention layers: InLine, its baselines on the same skeleton, and conversion of existing models."""

from inline_attention.layers.attention import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.layers.calibration import calibrate_attention
from inline_attention.layers.conversion import convert_attention

__all__ = ["InLineAttention", "LinearAttention", "SoftmaxAttention", "calibrate_attention", "convert_attention"]
