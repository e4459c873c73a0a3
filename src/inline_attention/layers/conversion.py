"""Replacing the softmax attention of an existing model, in place."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from inline_attention.layers.attention import InLineAttention, SoftmaxAttention, TokenAttention
from inline_attention.layers.patch_grids import PatchGrid
from inline_attention.ops.validation import check_count

Attention = TypeVar("Attention", bound=TokenAttention)

# Parts of parameter names that give away tokens beside the grid.
_PREFIX_TOKEN_NAMES = ("cls_token", "class_token", "dist_token", "reg_token", "register_token")
_PROBED_TOKENS = 9
# Attribute of a converted model: what `convert_attention` did, as plain data. Files of weights note it.
RECORD = "attention_conversion"


def convert_attention(
    model: nn.Module,
    *,
    attention: type[TokenAttention] = InLineAttention,
    keep_softmax: Collection[int] = (),
    num_prefix_tokens: int | None = None,
    **options: Any,
) -> list[str]:
    """Replace the softmax attention of `model` (timm's `Attention`, as in its ViTs) in place.

    Projections are kept, so the model's weights stay where they are and new ones (the local residual) start at zero.
    A module counts as softmax attention if a copy of it gives the outputs of softmax attention with its projections.
    Modules that take maps instead of tokens `[B, N, C]`, or attend to channels, are left alone, with a warning.

    A local residual needs the same prefix tokens in all layers, and the grid of the other tokens. Models with timm's
    `patch_embed` tell the grid of every call, also with `dynamic_img_size` and after `set_input_size`. Other models
    (CAFormer, NaFlexViT) are assumed to have square grids, so images must be square. For other images, or if a model
    adds its class token half-way (ConViT), convert with `local_residual=False`.

    Args:
        model: Any model; its `num_prefix_tokens` and `patch_embed.grid_size` are used where it has them.
        attention: The layer class to put in.
        keep_softmax: Numbers of the attentions that stay as they are: 0 for the first that could be replaced, in the
            model's order, -1 for the last. A module that stands in several places counts once.
        num_prefix_tokens: Class or register tokens, if the model does not say.
        **options: Arguments of the layer, such as `local_residual` or `feature_map`.

    Returns:
        The names of the replaced modules; a module that stands in several places has several.

    Raises:
        ValueError: No attention could be replaced (the message says why for each candidate), or `keep_softmax` has a
            number that no attention has, or keeps all; or a local residual would have to guess the number of prefix
            tokens, or look for neighbors of patches that a model drops in training. The model is unchanged.
    """
    if hasattr(model, "qkv") and hasattr(model, "proj"):
        raise ValueError(
            f"{type(model).__name__} is an attention itself, which cannot be replaced in place; "
            f"use new = {attention.__name__}.from_softmax(attention), or pass the model around it"
        )
    if num_prefix_tokens is not None:
        check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    is_prefix_known = True
    modules = dict(cast(Iterable[tuple[str, nn.Module]], model.named_modules(remove_duplicate=False)))
    places = {
        name: module
        for name, module in modules.items()
        if hasattr(module, "qkv") and hasattr(module, "proj") and not isinstance(module, TokenAttention)
    }
    new_modules: dict[nn.Module, TokenAttention] = {}
    tried: dict[tuple[Any, ...], ValueError | None] = {}  # what the trial of equal modules gave
    refused: dict[nn.Module, str] = {}
    for name, module in places.items():
        if module in new_modules or module in refused:
            continue
        prefix: Any = num_prefix_tokens
        if prefix is None:
            prefix = getattr(_nearest_owner(model, name, "num_prefix_tokens"), "num_prefix_tokens", None)
        try:
            new = attention.from_softmax(module, num_prefix_tokens=0 if prefix is None else prefix, **options)
            _check_is_softmax_attention(module, tried)
            new_modules[module] = new
            is_prefix_known &= prefix is not None or not new.has_local_term
        except ValueError as error:
            refused[module] = f"{name}: {error}"
    reasons = "; ".join(list(refused.values())[:3])
    if not new_modules:
        has_own = any(isinstance(module, TokenAttention) for module in modules.values())
        own = "its attention is one of this library's already" if has_own else "no module has both `qkv` and `proj`"
        raise ValueError(f"found no attention to convert in {type(model).__name__}: {reasons or own}")
    kept = _resolve_numbers(keep_softmax, len(new_modules))
    new_modules = {module: new for number, (module, new) in enumerate(new_modules.items()) if number not in kept}
    if not is_prefix_known:
        _check_has_no_prefix_tokens(model)
    if any(new.has_local_term for new in new_modules.values()):
        _check_keeps_all_patches(model)
    if refused:
        warnings.warn(
            f"{len(refused)} attentions of {type(model).__name__} are left as they were: {reasons}", stacklevel=2
        )
    converted = [name for name, module in places.items() if module in new_modules]
    for name in converted:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new_modules[places[name]])
    _connect_grids(model, converted)
    given = options if num_prefix_tokens is None else {**options, "num_prefix_tokens": num_prefix_tokens}
    _record(model, attention, kept, given)
    return converted


def _resolve_numbers(numbers: Collection[int], count: int) -> list[int]:
    """Return numbers of attentions without repetition, sorted and counted from the start."""
    if unknown := [number for number in numbers if type(number) is not int or not -count <= number < count]:
        raise ValueError(
            f"keep_softmax must have whole numbers from {-count} to {count - 1}, since {count} attentions can be "
            f"replaced, got {unknown[0]!r}"
        )
    kept = sorted({number % count for number in numbers})
    if len(kept) == count:
        raise ValueError(f"keep_softmax names all {count} attentions, so none would be replaced; leave some out")
    return kept


def _record(model: nn.Module, attention: type[TokenAttention], kept: list[int], options: Mapping[str, Any]) -> None:
    """Note on the model what was done, so that files of its weights can say it."""
    name = attention.__name__.removesuffix("Attention").lower()
    record = {"attention": name, "keep_softmax": kept, "options": dict(options)}
    if (before := getattr(model, RECORD, None)) is not None:  # of the attentions that were kept, some are kept again
        record["keep_softmax"] = [before["keep_softmax"][number] for number in kept]
        if (before["attention"], before["options"]) != (name, record["options"]):
            record["attention"] = f"{before['attention']} and {name}"  # not one conversion: no file can describe it
    setattr(model, RECORD, record)


def _connect_grids(model: nn.Module, names: Sequence[str]) -> None:
    """Connect attentions that need a grid to the nearest `patch_embed` with a `grid_size`."""
    grids: dict[nn.Module, PatchGrid] = {}
    between: dict[nn.Module, dict[nn.Module, None]] = {}  # by owner: the modules that lead to its attentions
    for name in names:
        attention = cast(TokenAttention, model.get_submodule(name))
        owner = _nearest_owner(model, name, "patch_embed")
        patch_embed = getattr(owner, "patch_embed", None)
        if owner is None or not isinstance(patch_embed, nn.Module) or not hasattr(patch_embed, "grid_size"):
            continue
        if not attention.has_local_term:
            continue
        attention.patch_grid = grids.setdefault(owner, PatchGrid(patch_embed))
        path = [model, *(model.get_submodule(outer) for outer in _outer_names(name)), attention]
        between.setdefault(owner, {}).update(dict.fromkeys(path[path.index(owner) + 1 :]))
    for owner, grid in grids.items():
        grid.install(owner, between[owner])


def _nearest_owner(model: nn.Module, name: str, attribute: str) -> nn.Module | None:
    """The innermost module around `name` that has an attribute, `model` included."""
    for outer in reversed(["", *_outer_names(name)]):
        module = model.get_submodule(outer)
        if getattr(module, attribute, None) is not None:
            return module
    return None


def _outer_names(name: str) -> list[str]:
    """Names of the modules around a module, outermost first, without the model itself."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def from_softmax(
    kind: type[Attention],
    attention: nn.Module,
    num_prefix_tokens: int,
    grid_size: tuple[int, int] | None,
    options: dict[str, Any],
) -> Attention:
    """See `TokenAttention.from_softmax`."""
    qkv, proj = getattr(attention, "qkv", None), getattr(attention, "proj", None)
    num_heads = getattr(attention, "num_heads", None)
    name = type(attention).__name__
    if not isinstance(qkv, nn.Linear) or not isinstance(proj, nn.Linear) or not isinstance(num_heads, int):
        raise ValueError(
            f"cannot convert {name}: expected a module with `qkv` and `proj` linear layers and `num_heads`, "
            "as timm's Attention; build InLineAttention(dim, num_heads) and copy the weights yourself"
        )
    dim = qkv.in_features
    if qkv.out_features != 3 * dim or proj.in_features != dim or proj.out_features != dim:
        raise ValueError(
            f"cannot convert {name}: expected qkv {dim}→{3 * dim} and proj {dim}→{dim}, got qkv {dim}→"
            f"{qkv.out_features} and proj {proj.in_features}→{proj.out_features}; heads of another width than "
            "dim / num_heads are not supported"
        )
    known = ("qkv.", "proj.", "q_norm.", "k_norm.")
    learned = [key for key in attention.state_dict() if not key.startswith(known)]
    asked = set(inspect.signature(attention.forward).parameters) - {"x", "attn_mask", "is_causal"}
    for what, foreign in (("it also learns", learned), ("its forward also takes", sorted(asked))):
        if foreign:
            raise ValueError(
                f"cannot convert {name}: {what} {', '.join(foreign)}, which InLine attention has no place for"
            )
    drops = {drop: getattr(attention, drop, None) for drop in ("attn_drop", "proj_drop")}
    inherited: dict[str, Any] = {
        **{name: drop.p if isinstance(drop, nn.Dropout) else 0.0 for name, drop in drops.items()},
        "scale": getattr(attention, "scale", None),
        "device": qkv.weight.device,
        "dtype": qkv.weight.dtype,
    }
    new = kind(dim, num_heads, num_prefix_tokens=num_prefix_tokens, **(inherited | options))
    new.qkv, new.proj = qkv, proj
    norms = [getattr(attention, norm, None) for norm in ("q_norm", "k_norm")]
    new.q_norm, new.k_norm = (None if isinstance(norm, nn.Identity) else norm for norm in norms)
    new.default_grid_size = grid_size
    if new.residual is not None:
        new.residual.zero_last_layer()
    return new.train(attention.training)


def _check_has_no_prefix_tokens(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters() if any(part in name for part in _PREFIX_TOKEN_NAMES)]
    if names:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(names)} but no num_prefix_tokens, so it is not known where the "
            "grid of the local residual starts; pass num_prefix_tokens=1 (0 if they join later), or "
            "local_residual=False"
        )


def _check_keeps_all_patches(model: nn.Module) -> None:
    rate = max(getattr(getattr(module, "patch_drop", None), "prob", 0.0) for module in model.modules())
    if rate > 0:
        raise ValueError(
            f"{type(model).__name__} drops {rate:.0%} of its patches in training, and those that are left have no grid "
            "for the local residual; create it with patch_drop_rate=0, or pass local_residual=False"
        )


def _check_is_softmax_attention(attention: nn.Module, tried: dict[tuple[Any, ...], ValueError | None]) -> None:
    """Check on random tokens `[B, N, C]` that a module gives the output of softmax attention with its projections.

    Modules of equal structure and settings are tried once: `tried` has the outcomes.
    """
    plain = {name: value for name, value in vars(attention).items() if isinstance(value, (bool, int, float, str))}
    key = (type(attention), repr(attention), tuple(plain.items()))
    if key not in tried:
        tried[key] = _try_as_softmax_attention(attention)
    if (error := tried[key]) is not None:
        raise error


@torch.no_grad()
def _try_as_softmax_attention(attention: nn.Module) -> ValueError | None:
    """Return why a module is not softmax attention, as an error; None if it is."""
    name = type(attention).__name__
    try:
        with torch.device("cpu"):  # the caller may have set another default
            is_the_same = _is_softmax_attention(attention)
    except Exception as error:  # a module made for something else can fail in any way
        return ValueError(
            f"cannot convert {name}: it does not take tokens [B, N, C] alone ({type(error).__name__}: {error})"
        )
    if not is_the_same:
        return ValueError(
            f"cannot convert {name}: on tokens [B, N, C] it does something else than softmax attention over the tokens"
        )
    return None


def _is_softmax_attention(attention: nn.Module) -> bool:
    # A copy on a CPU, with random weights: the module may be on the meta device, have hooks, or be all zeros.
    trial = copy.deepcopy(attention)
    if any(parameter.is_meta for parameter in trial.parameters()):
        trial = trial.to_empty(device="cpu")
    trial = trial.to("cpu", torch.float64).eval()
    for module in trial.modules():  # hooks must not see the trial; torch has no public name for them
        module._forward_hooks.clear()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        module._forward_pre_hooks.clear()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    expected = SoftmaxAttention.from_softmax(trial)
    tokens = torch.randn(2, _PROBED_TOKENS, expected.dim, generator=generator, dtype=torch.float64)
    got = type(trial).forward(trial, tokens)
    return torch.allclose(got, expected(tokens), rtol=1e-6, atol=1e-8)
