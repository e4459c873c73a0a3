"""Calls of the op that users cannot make, and another dispatch table for one test."""

import torch

from inline_attention.ops import api, dispatch
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.dispatch import Backend


def use_backends(monkeypatch, *backends: Backend) -> None:
    """Let "auto" choose among these, and forget which backends earlier calls were given."""
    monkeypatch.setattr(dispatch, "AUTO_BACKENDS", backends)
    monkeypatch.setattr(api, "_SELECTED", {})


def attend_over_queries(
    q, k, v, *, local_weight=None, grid_size=None, num_prefix_tokens=0, overwrite_q=True, backend="auto"
) -> torch.Tensor:
    """Call the op as a layer does that owns its queries."""
    call = AttentionCall(
        q, k, v, None, q.shape[3] ** -0.5, "identity", "subtract",
        None, local_weight, grid_size, num_prefix_tokens, overwrite_q,
    )  # fmt: skip
    return api.attend(call, backend)
