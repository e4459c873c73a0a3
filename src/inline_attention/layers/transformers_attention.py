"""`attn_implementation="inline"` in transformers. Importing this module registers it; `registration` imports it.

Only the attention itself is replaced: transformers tells its attention functions nothing about the grid of tokens, so
there is no 3×3 term. `convert_attention` adds that term.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.adapted_attention import as_key_mask
from inline_attention.ops import validation
from inline_attention.ops.api import inline_attention
from inline_attention.ops.tracing import unrecorded

NAME = "inline"


def inline_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute InLine attention as transformers calls its attention functions.

    Args:
        module: The attention module of transformers that calls.
        query: `[B, H, N, D]`.
        key: `[B, H or fewer, M, D]`.
        value: `[B, H or fewer, M, D]`.
        attention_mask: None, or a mask of padding `[B, 1, N or 1, M]`, bool or added to scores.
        scaling: Factor on the inner products; `D ** -0.5` by default.
        dropout: Dropout rate of the output in training, since linear-time attention never forms its weights.
        is_causal: Must be False; by default what the module says.
        **kwargs: Other arguments of attention functions, which have no effect on vision models.

    Returns:
        `[B, N, H, D]`, and None instead of weights.

    Raises:
        ValueError: For causal attention, position biases, and masks of other things than padding.
    """
    name = type(module).__name__
    if getattr(module, "is_causal", False) if is_causal is None else is_causal:
        raise ValueError(f"{name} is causal, and InLine attention is for images; use attn_implementation='sdpa' for it")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{name} adds position biases to its scores, which InLine attention has no place for")
    mask = None
    if attention_mask is not None:
        mask = as_key_mask(attention_mask)[:, 0, 0]
        if mask.is_floating_point():
            with unrecorded():
                validation.check_added_mask(mask)
            mask = mask == 0
        mask = mask.expand(query.shape[0], -1)
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    q, k, v = (heads.transpose(1, 2) for heads in (query, key, value))
    out = inline_attention(q, k, v, scale=scaling, key_padding_mask=mask)
    return F.dropout(out, dropout, module.training), None


def register() -> None:
    """Make "inline" an attention implementation of transformers; `import inline_attention` does it."""
    import_module("transformers.modeling_utils").AttentionInterface.register(NAME, inline_attention_forward)
    masking = import_module("transformers.masking_utils")  # without a mask function, transformers drops masks silently
    masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)


register()
