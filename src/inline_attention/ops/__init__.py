"""The attention op: tensors in, tensors out, no modules."""

from inline_attention.ops.api import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual

__all__ = ["attention_weights", "inline_attention", "inline_attention_qkvpacked", "local_residual"]
