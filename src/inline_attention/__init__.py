"""Injective linear attention (InLine) for vision."""

from inline_attention.ops import attention_weights, inline_attention, inline_attention_qkvpacked

__version__ = "0.1.0"

__all__ = ["__version__", "attention_weights", "inline_attention", "inline_attention_qkvpacked"]
