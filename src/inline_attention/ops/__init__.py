"""The attention op: tensors in, tensors out, no modules."""

from inline_attention.ops.api import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual
from inline_attention.ops.states import AttentionState, attend, attention_state, merge_states, state_weights

__all__ = [
    "AttentionState",
    "attend",
    "attention_state",
    "attention_weights",
    "inline_attention",
    "inline_attention_qkvpacked",
    "local_residual",
    "merge_states",
    "state_weights",
]
