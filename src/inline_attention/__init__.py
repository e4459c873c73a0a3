"""Injective linear attention (InLine) for vision. Importing it registers the models with timm."""

from inline_attention.layers import InLineAttention, LinearAttention, SoftmaxAttention, convert_attention
from inline_attention.models import create_model, list_models, load_checkpoint
from inline_attention.ops import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual

__version__ = "0.1.0"

__all__ = [
    "InLineAttention",
    "LinearAttention",
    "SoftmaxAttention",
    "__version__",
    "attention_weights",
    "convert_attention",
    "create_model",
    "inline_attention",
    "inline_attention_qkvpacked",
    "list_models",
    "load_checkpoint",
    "local_residual",
]
