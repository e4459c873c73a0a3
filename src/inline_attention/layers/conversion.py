"""Replacing the softmax attention of an existing model, in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from inline_attention.layers.attention import InLineAttention, TokenAttention


def convert_attention(
    model: nn.Module,
    *,
    attention: type[TokenAttention] = InLineAttention,
    num_prefix_tokens: int | None = None,
    **options: Any,
) -> list[str]:
    """Replace every softmax attention of `model` (timm's `Attention`, as in its ViTs) in place.

    Projections are kept, so the model's weights stay where they are and new ones (the local residual) start at zero.

    Args:
        model: Any model; its `num_prefix_tokens` and `patch_embed.grid_size` are used where it has them.
        attention: The layer class to put in.
        num_prefix_tokens: Class or register tokens, if the model does not say.
        **options: Arguments of the layer, such as `local_residual` or `feature_map`.

    Returns:
        The names of the replaced modules.

    Raises:
        ValueError: No attention could be replaced; the message says why for each candidate.
    """
    if num_prefix_tokens is None:
        num_prefix_tokens = int(getattr(model, "num_prefix_tokens", 0))
    grid_size = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    converted: list[str] = []
    refused: list[str] = []
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    for name, module in modules.items():
        if isinstance(module, TokenAttention) or not hasattr(module, "qkv") or not hasattr(module, "proj"):
            continue
        try:
            new = attention.from_softmax(module, num_prefix_tokens=num_prefix_tokens, grid_size=grid_size, **options)
        except ValueError as error:
            refused.append(f"{name}: {error}")
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
        converted.append(name)
    if not converted:
        reasons = "; ".join(refused[:3]) or "no module has both `qkv` and `proj`"
        raise ValueError(f"found no attention to convert in {type(model).__name__}: {reasons}")
    return converted
