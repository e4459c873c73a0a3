"""Replacing the softmax attention of an existing model, in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from inline_attention.layers.attention import InLineAttention, SoftmaxAttention, TokenAttention

# Parts of parameter names that give away tokens beside the grid.
_PREFIX_TOKEN_NAMES = ("cls_token", "class_token", "dist_token", "reg_token", "register_token")
_PROBED_TOKENS = 9


def convert_attention(
    model: nn.Module,
    *,
    attention: type[TokenAttention] = InLineAttention,
    num_prefix_tokens: int | None = None,
    **options: Any,
) -> list[str]:
    """Replace every softmax attention of `model` (timm's `Attention`, as in its ViTs) in place.

    Projections are kept, so the model's weights stay where they are and new ones (the local residual) start at zero.
    A module counts as softmax attention if it does what one with its projections does, which is tried on a copy: what
    takes maps instead of tokens `[B, N, C]`, or attends to channels, is left alone, with a warning.

    A local residual needs the same prefix tokens in all layers, and the grid that the other tokens lie on. Of models
    with timm's `patch_embed` it is known for every image, `dynamic_img_size` and `set_input_size` included; of others
    (CAFormer, NaFlexViT) it is taken to be square, so that images must be. Where a model adds its class token half-way
    (ConViT), or for images that are not square, convert with `local_residual=False`.

    Args:
        model: Any model; its `num_prefix_tokens` and `patch_embed.grid_size` are used where it has them.
        attention: The layer class to put in.
        num_prefix_tokens: Class or register tokens, if the model does not say.
        **options: Arguments of the layer, such as `local_residual` or `feature_map`.

    Returns:
        The names of the replaced modules; a module that stands in several places has several.

    Raises:
        ValueError: No attention could be replaced (the message says why for each candidate), or a local residual would
            have to guess the number of prefix tokens, or look for neighbours of patches that a model drops in training.
            The model is unchanged.
    """
    if hasattr(model, "qkv") and hasattr(model, "proj"):
        raise ValueError(
            f"{type(model).__name__} is an attention itself, which cannot be replaced in place; "
            f"use new = {attention.__name__}.from_softmax(attention), or pass the model around it"
        )
    known_prefix = num_prefix_tokens if num_prefix_tokens is not None else getattr(model, "num_prefix_tokens", None)
    patch_embed = getattr(model, "patch_embed", None)
    grid_size = getattr(patch_embed, "grid_size", None)
    has_own_attention = False
    places: dict[str, nn.Module] = {}
    new_modules: dict[nn.Module, TokenAttention] = {}
    refused: dict[nn.Module, str] = {}
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules(remove_duplicate=False))
    for name, module in modules:
        if isinstance(module, TokenAttention):
            has_own_attention = True
            continue
        if not hasattr(module, "qkv") or not hasattr(module, "proj"):
            continue
        places[name] = module
        if module in new_modules or module in refused:
            continue
        try:
            new_modules[module] = attention.from_softmax(
                module, num_prefix_tokens=int(known_prefix or 0), grid_size=grid_size, **options
            )
            _check_is_softmax_attention(module)
        except ValueError as error:
            new_modules.pop(module, None)
            refused[module] = f"{name}: {error}"
    reasons = "; ".join(list(refused.values())[:3])
    if not new_modules:
        own = "its attention is one of this library's already" if has_own_attention else ""
        raise ValueError(
            f"found no attention to convert in {type(model).__name__}: "
            f"{reasons or own or 'no module has both `qkv` and `proj`'}"
        )
    local = [new for new in new_modules.values() if new.has_local_term]
    if local:
        if known_prefix is None:
            _check_has_no_prefix_tokens(model)
        _check_keeps_all_patches(model)
    if refused:
        warnings.warn(
            f"{len(refused)} attentions of {type(model).__name__} are left as they were: {reasons}", stacklevel=2
        )
    converted = [name for name, module in places.items() if module in new_modules]
    for name in converted:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new_modules[places[name]])
    if local and grid_size is not None:
        assert isinstance(patch_embed, nn.Module)
        patch_embed.register_forward_hook(_TellGrid(local))
    return converted


class _TellGrid:
    """Forward hook of a `patch_embed`: tells attentions on what grid its patches lie. Can be copied and pickled."""

    def __init__(self, attentions: list[TokenAttention]) -> None:
        self.attentions = attentions

    def __call__(self, patch_embed: nn.Module, images: tuple[torch.Tensor, ...], patches: torch.Tensor) -> None:
        del images
        # [B, h, w, C] of images of any size, [B, N, C] of images of the size that is set.
        grid_size = (patches.shape[1], patches.shape[2]) if patches.dim() == 4 else patch_embed.grid_size
        for attention in self.attentions:
            attention.default_grid_size = cast("tuple[int, int]", grid_size)


def _check_has_no_prefix_tokens(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters() if any(part in name for part in _PREFIX_TOKEN_NAMES)]
    if names:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(names)} but no num_prefix_tokens, so it is not known where the "
            "grid of the local residual starts; pass num_prefix_tokens=1 (0 if they join later), or "
            "local_residual=False"
        )


def _check_keeps_all_patches(model: nn.Module) -> None:
    rate = getattr(getattr(model, "patch_drop", None), "prob", 0.0)
    if rate > 0:
        raise ValueError(
            f"{type(model).__name__} drops {rate:.0%} of its patches in training, and those that are left have no grid "
            "for the local residual; create it with patch_drop_rate=0, or pass local_residual=False"
        )


@torch.no_grad()
def _check_is_softmax_attention(attention: nn.Module) -> None:
    """Try whether a module does to random tokens `[B, N, C]` what softmax attention with its projections does."""
    name = type(attention).__name__
    generator = torch.Generator().manual_seed(0)
    try:
        # A copy on a CPU, with weights of its own: the module may be on the meta device, watched, or still all zeros.
        trial = copy.deepcopy(attention)
        if any(parameter.is_meta for parameter in trial.parameters()):
            trial = trial.to_empty(device="cpu")
        trial = trial.to("cpu", torch.float64).eval()
        for module in trial.modules():  # whoever watches has no business here; torch has no public name for it
            module._forward_hooks.clear()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            module._forward_pre_hooks.clear()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        for parameter in trial.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        expected = SoftmaxAttention.from_softmax(trial)
        tokens = torch.randn(2, _PROBED_TOKENS, expected.dim, generator=generator, dtype=torch.float64)
        got = type(trial).forward(trial, tokens)
        is_the_same = torch.allclose(got, expected(tokens), rtol=1e-6, atol=1e-8)
    except Exception as error:  # a module made for something else can fail in any way
        raise ValueError(
            f"cannot convert {name}: it does not take tokens [B, N, C] alone ({type(error).__name__}: {error})"
        ) from error
    if not is_the_same:
        raise ValueError(
            f"cannot convert {name}: on tokens [B, N, C] it does something else than softmax attention over the tokens"
        )
