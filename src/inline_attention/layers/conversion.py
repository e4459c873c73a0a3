"""Replacing the softmax attention of an existing model, in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from inline_attention.layers.adapted_attention import (
    ADAPTED,
    AdaptedAttention,
    Parts,
    looks_like_attention,
    take_apart,
)
from inline_attention.layers.attention import InLineAttention, ProjectedAttention, SoftmaxAttention, TokenAttention
from inline_attention.layers.patch_grids import PatchGrid
from inline_attention.layers.window_attention import WindowAttention
from inline_attention.ops.validation import check_count

Attention = TypeVar("Attention", bound=TokenAttention)

# Parts of parameter names that give away tokens beside the grid.
_PREFIX_TOKEN_NAMES = (
    *("cls_token", "class_token", "dist_token", "reg_token", "register_token"),
    *("class_embedding", "distillation_token"),
)
# Attribute of a converted model: what `convert_attention` did, as plain data. Files of weights note it.
RECORD = "attention_conversion"


def convert_attention(
    model: nn.Module,
    *,
    attention: type[TokenAttention] = InLineAttention,
    keep_softmax: Collection[int] = (),
    num_prefix_tokens: int | None = None,
    drop_position_bias: bool = False,
    **options: Any,
) -> list[str]:
    """Replace the softmax attention of `model`, of this library, timm or transformers, in place.

    Projections are kept, so the model's weights stay where they are and new ones (the local residual) start at zero.
    A module counts as softmax attention if a copy of it gives the outputs of softmax attention with its projections.
    Modules that do something else, such as attend to channels, are left alone, with a warning. Rotary positions, norms
    of queries and keys, and gates are kept. docs/conversion.md has a table of models.

    A local residual needs the same prefix tokens in all layers, and the grid of the other tokens. Models with timm's
    `patch_embed`, or transformers' `embeddings`, tell the grid of every call, also for images of another size. Other
    models (CAFormer, NaFlexViT) are assumed to have square grids, so images must be square. For other images, or if a
    model adds its class token half-way (ConViT), convert with `local_residual=False`.

    Args:
        model: Any model; its `num_prefix_tokens` and `patch_embed.grid_size` are used where it has them.
        attention: The layer class to put in.
        keep_softmax: Numbers of the attentions that stay as they are: 0 for the first that could be replaced, in the
            model's order, -1 for the last. A module that stands in several places counts once.
        num_prefix_tokens: Class or register tokens, if the model does not say.
        drop_position_bias: Also replace attention that adds relative positions to its scores (BEiT, SAM, and windows of
            this library's Swin), without them.
        **options: Arguments of the layer, such as `local_residual` or `feature_map`.

    Returns:
        The names of the replaced modules; a module that stands in several places has several.

    Raises:
        ValueError: No attention could be replaced (the message says why for each candidate), or `keep_softmax` has a
            number that no attention has, or keeps all; or a local residual would have to guess the number of prefix
            tokens, or look for neighbors of patches that a model drops in training. The model is unchanged.
    """
    if looks_like_attention(model):
        raise ValueError(
            f"{type(model).__name__} is an attention itself, which cannot be replaced in place; "
            f"use new = {attention.__name__}.from_softmax(attention), or pass the model around it"
        )
    if num_prefix_tokens is not None:
        check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    is_prefix_known = True
    modules = dict(cast(Iterable[tuple[str, nn.Module]], model.named_modules(remove_duplicate=False)))
    places = {name: module for name, module in modules.items() if _is_candidate(module, attention)}
    new_modules: dict[nn.Module, TokenAttention] = {}
    tried: dict[tuple[Any, ...], bool | ValueError] = {}  # what the trial of equal modules gave
    refused: set[nn.Module] = set()
    reasons: dict[str, str] = {}  # why, and the first module of which it is true
    for name, module in places.items():
        if module in new_modules or module in refused:
            continue
        try:
            is_window = isinstance(module, WindowAttention)
            if isinstance(module, SoftmaxAttention) or (is_window and drop_position_bias):
                new_modules[module] = _like(attention, module, num_prefix_tokens, options)
                continue
            if isinstance(module, ProjectedAttention):
                raise ValueError(
                    f"{type(module).__name__} attends within {'windows' if is_window else 'stripes'}, where softmax is "
                    "cheap" + ("; drop_position_bias=True puts attention over the whole map there" if is_window else "")
                )
            parts = take_apart(module)
            if parts.position_biases and not drop_position_bias:
                _refuse_position_bias(parts)
            takes_maps = _check_is_softmax_attention(module, tried)
            if takes_maps and (window := getattr(model.get_submodule(name.rpartition(".")[0]), "window_size", 0)):
                raise ValueError(
                    f"cannot convert {parts.name}: it attends within windows of {window} tokens a side, where softmax "
                    "is cheap"
                )
            prefix = num_prefix_tokens
            if takes_maps:
                prefix = 0  # maps have no place for such tokens
            elif prefix is None:
                prefix = _find_prefix_tokens(model, name, parts.style)
            new = _build(attention, module, parts, prefix or 0, options, takes_maps)
            if parts.style == "transformers" and new.has_local_term and _find_patch_embed(model, name)[1] is None:
                raise ValueError(
                    f"cannot convert {parts.name}: {type(model).__name__} does not tell the grid of its tokens, which "
                    "the local residual needs; pass local_residual=False"
                )
            new_modules[module] = new
            is_prefix_known &= prefix is not None or not new.has_local_term
        except ValueError as error:
            refused.add(module)
            reasons.setdefault(str(error), name)
    why = "; ".join(f"{name}: {reason}" for reason, name in list(reasons.items())[:3])
    if not new_modules:
        own = "no module has both `qkv` and `proj`, or q_proj, k_proj, v_proj and an output projection"
        if any(isinstance(module, TokenAttention) for module in modules.values()):
            own = "its attention is converted already, or was never softmax"
        raise ValueError(f"found no attention to convert in {type(model).__name__}: {why or own}")
    kept = _resolve_numbers(keep_softmax, len(new_modules))
    new_modules = {module: new for number, (module, new) in enumerate(new_modules.items()) if number not in kept}
    if not is_prefix_known:
        _check_has_no_prefix_tokens(model)
    if any(new.has_local_term for new in new_modules.values()):
        _check_keeps_all_patches(model)
    if refused:
        warnings.warn(f"{len(refused)} attentions of {type(model).__name__} are left as they were: {why}", stacklevel=2)
    converted = [name for name, module in places.items() if module in new_modules]
    for name in converted:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new_modules[places[name]])
    _connect_grids(model, converted)
    given = options if num_prefix_tokens is None else {**options, "num_prefix_tokens": num_prefix_tokens}
    given = {**given, "drop_position_bias": True} if drop_position_bias else given
    _record(model, attention, kept, given)
    return converted


def _is_candidate(module: nn.Module, attention: type[TokenAttention]) -> bool:
    """True if a module looks like an attention that a conversion to `attention` may replace."""
    if isinstance(module, TokenAttention):
        is_softmax = isinstance(module, SoftmaxAttention) and not isinstance(module, AdaptedAttention)
        return is_softmax and not issubclass(attention, SoftmaxAttention)
    return looks_like_attention(module)


def _like(
    kind: type[TokenAttention],
    attention: SoftmaxAttention | WindowAttention,
    num_prefix_tokens: int | None,
    options: Mapping[str, Any],
) -> TokenAttention:
    """Return a layer with the parts of softmax attention of this library. A local residual that it lacks is zero."""
    inherited: dict[str, Any] = {
        "proj_drop": attention.proj_drop.p,
        "device": attention.proj.weight.device,
        "dtype": attention.proj.weight.dtype,
    }
    if isinstance(attention, WindowAttention):
        inherited["attn_drop"] = attention.attn_drop_rate
    else:
        inherited |= {
            "fused_qkv": attention.qkv is not None,
            "scale": attention.scale,
            "num_prefix_tokens": attention.num_prefix_tokens,
            "attn_drop": attention.attn_drop.p,
            "static_local": attention.static_local is not None,
            "softmax_prefix": attention.softmax_prefix,
            "backend": attention.backend,
        }
    if num_prefix_tokens is not None:
        inherited["num_prefix_tokens"] = num_prefix_tokens
    new = kind(attention.dim, attention.num_heads, **(inherited | dict(options)))
    if new.residual is not None:
        new.residual.zero_last_layer()
    for name in ("qkv", "q", "kv", "proj", "residual", "static_local"):
        if getattr(new, name) is not None and (part := getattr(attention, name, None)) is not None:
            setattr(new, name, part)
    for name in ("q_norm", "k_norm", "norm", "gate", "rotate_half", "default_grid_size"):
        setattr(new, name, getattr(attention, name, getattr(new, name)))
    return new.train(attention.training)


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
    if (before := getattr(model, RECORD, None)) is not None:
        if (before["attention"], before["options"]) == (name, record["options"]):
            # Of the attentions that were kept before, some are kept again.
            record["keep_softmax"] = [before["keep_softmax"][number] for number in kept]
        else:
            record["attention"] = f"{before['attention']} and {name}"  # not one conversion: no file can describe it
    setattr(model, RECORD, record)


def _connect_grids(model: nn.Module, names: Sequence[str]) -> None:
    """Connect attentions that need a grid to the module that makes their patches."""
    grids: dict[nn.Module, PatchGrid] = {}
    between: dict[nn.Module, dict[nn.Module, None]] = {}  # by owner: the modules that lead to its attentions
    for name in names:
        if getattr(model.get_submodule(name.rpartition(".")[0]), "tells_grid", False):
            continue  # a block of this library; its class is not imported, since that imports timm
        attention = cast(TokenAttention, model.get_submodule(name))
        owner, patch_embed = _find_patch_embed(model, name)
        if owner is None or patch_embed is None or not attention.has_local_term:
            continue
        attention.patch_grid = grids.setdefault(owner, PatchGrid(patch_embed))
        around = [model.get_submodule(outer) for outer in _outer_names(name)]
        norms: list[nn.Module] = []
        if isinstance(attention, AdaptedAttention) and attention.parts.style == "transformers" and around:
            # Its checkpoints recompute a layer from the layer's norm, without the hooks of the layer itself.
            norms += (module for module in around[-1].children() if isinstance(module, nn.LayerNorm))
        path = [model, *around, *norms, attention]
        between.setdefault(owner, {}).update(dict.fromkeys(path[path.index(owner) + 1 :]))
    for owner, grid in grids.items():
        grid.install(owner, between[owner])


def _find_patch_embed(model: nn.Module, name: str) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the model around an attention, and the module in it that makes patches: timm's, or a convolution."""
    owner = _nearest_owner(model, name, "patch_embed")
    patch_embed = getattr(owner, "patch_embed", None)
    if owner is not None:
        return owner, patch_embed if isinstance(patch_embed, nn.Module) and hasattr(patch_embed, "grid_size") else None
    owner = _nearest_owner(model, name, "embeddings")  # of transformers
    embeddings = getattr(owner, "embeddings", None)
    modules = embeddings.modules() if isinstance(embeddings, nn.Module) else ()
    return owner, next((module for module in modules if isinstance(module, nn.Conv2d)), None)


def _find_prefix_tokens(model: nn.Module, name: str, style: str) -> int | None:
    """Return the number of class and register tokens of the model around an attention, if it says so."""
    owner = _nearest_owner(model, name, "num_prefix_tokens")
    if owner is not None:
        return cast("int | None", getattr(owner, "num_prefix_tokens", None))
    embeddings = getattr(_nearest_owner(model, name, "embeddings"), "embeddings", None)
    if style != "transformers" or not isinstance(embeddings, nn.Module):
        return None
    parameters = embeddings.named_parameters(recurse=False)  # [1, tokens, C] or [C]
    shapes = [value.shape for name, value in parameters if any(part in name for part in _PREFIX_TOKEN_NAMES)]
    return sum(shape[-2] if len(shape) > 1 else 1 for shape in shapes)


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
    parts, options = take_apart(attention), dict(options)
    if not options.pop("drop_position_bias", False) and parts.position_biases:
        _refuse_position_bias(parts)
    new = _build(kind, attention, parts, num_prefix_tokens, options)
    new.default_grid_size = grid_size
    return new


def _build(
    kind: type[Attention],
    attention: nn.Module,
    parts: Parts,
    num_prefix_tokens: int,
    options: Mapping[str, Any],
    takes_maps: bool = False,
) -> Attention:
    """Return a layer with the parts of an attention that can be converted."""
    is_adapted = takes_maps or not parts.is_ours
    if is_adapted and kind not in ADAPTED:
        names = ", ".join(known.__name__ for known in ADAPTED)
        raise ValueError(f"cannot convert {parts.name} to {kind.__name__}: it can become one of {names}")
    weight = getattr(attention, parts.output).weight
    drops = {drop: getattr(attention, drop, None) for drop in ("attn_drop", "proj_drop")}
    inherited: dict[str, Any] = {
        **{name: drop.p if isinstance(drop, nn.Dropout) else 0.0 for name, drop in drops.items()},
        "scale": getattr(attention, "scale", getattr(attention, "scaling", None)),
        "device": weight.device,
        "dtype": weight.dtype,
    }
    if parts.style == "transformers":  # its modules have rates, not dropout layers
        inherited["attn_drop"] = getattr(attention, "attention_dropout", getattr(attention, "dropout", 0.0))
    build: Any = ADAPTED[kind] if is_adapted else kind
    new = build(parts.dim, parts.num_heads, num_prefix_tokens=num_prefix_tokens, **(inherited | dict(options)))
    if isinstance(new, AdaptedAttention):
        new.take_over(attention, parts)
    else:
        new.qkv, new.proj = attention.qkv, attention.proj
    for name in ("q_norm", "k_norm", "norm", "gate"):
        part = getattr(attention, name, None)
        setattr(new, name, None if isinstance(part, nn.Identity) else part)
    new.rotate_half = parts.style == "transformers" or bool(getattr(attention, "rotate_half", False))
    if new.residual is not None:
        new.residual.zero_last_layer()
    return cast(Attention, new.train(attention.training))


def _refuse_position_bias(parts: Parts) -> None:
    raise ValueError(
        f"cannot convert {parts.name}: it adds relative positions ({', '.join(parts.position_biases)}) to the scores "
        "of every pair of tokens, and linear-time attention has no scores per pair; drop_position_bias=True leaves "
        "them out, and training must make up for what the model knew about distances"
    )


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
    rate, remedy = max(
        (rate, "patch_drop_rate=0"), (getattr(getattr(model, "config", None), "mask_ratio", 0.0), "mask_ratio=0")
    )
    if rate > 0:
        raise ValueError(
            f"{type(model).__name__} drops {rate:.0%} of its patches in training, and those that are left have no grid "
            f"for the local residual; create it with {remedy}, or pass local_residual=False"
        )


def _check_is_softmax_attention(attention: nn.Module, tried: dict[tuple[Any, ...], bool | ValueError]) -> bool:
    """Check that a module gives the output of softmax attention with its parts; return True if it takes maps.

    A position bias is left out of the comparison. Modules of equal structure and settings are tried once: `tried` has
    the outcomes.
    """
    plain = {name: value for name, value in vars(attention).items() if isinstance(value, (bool, int, float, str))}
    key = (type(attention), repr(attention), tuple(plain.items()))
    if key not in tried:
        with torch.no_grad(), torch.device("cpu"):  # the caller may have set another default
            tried[key] = _try_as_softmax_attention(attention)
    outcome = tried[key]
    if isinstance(outcome, ValueError):
        raise outcome
    return outcome


def _try_as_softmax_attention(attention: nn.Module) -> bool | ValueError:
    """Compare a module with softmax attention; return whether it takes maps, or an error that says what it does."""
    name = type(attention).__name__
    errors: list[str] = []
    for takes_maps in (False, True):
        try:
            is_the_same = _is_softmax_attention(attention, takes_maps)
        except Exception as error:  # a module made for something else can fail in any way
            errors.append(f"{type(error).__name__}: {error}")
            continue
        if is_the_same:
            return takes_maps
        what = "maps [B, h, w, C]" if takes_maps else "tokens [B, N, C]"
        return ValueError(
            f"cannot convert {name}: on {what} it does something else than softmax attention over the tokens"
        )
    return ValueError(f"cannot convert {name}: it does not take tokens [B, N, C] alone ({errors[0]})")


def _is_softmax_attention(attention: nn.Module, takes_maps: bool) -> bool:
    """True if random tokens, or maps, give the same outputs as softmax attention with the module's parts."""
    # A copy on a CPU, with random weights: the module may be on the meta device, have hooks, or be all zeros.
    trial: Any = copy.deepcopy(attention)
    if any(parameter.is_meta for parameter in trial.parameters()):
        trial = trial.to_empty(device="cpu")
        for module in trial.modules():
            if hasattr(module, "init_non_persistent_buffers"):  # timm's name
                module.init_non_persistent_buffers()
    trial = trial.to("cpu", torch.float64).eval()
    for module in trial.modules():  # hooks must not see the trial; torch has no public name for them
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    for part in {name.partition(".")[0] for name in take_apart(trial).position_biases}:
        if hasattr(trial, part):  # others are arguments
            setattr(trial, part, None)
    if hasattr(trial, "use_rel_pos"):
        trial.use_rel_pos = False
    if hasattr(getattr(trial, "config", None), "_attn_implementation"):  # in full precision
        trial.config._attn_implementation = "sdpa"
    parts = take_apart(trial)
    expected = _build(SoftmaxAttention, trial, parts, 0, {}, takes_maps)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    side, prefix = 3, getattr(trial, "num_prefix_tokens", 0)
    tokens = random(2, side, side, parts.dim) if takes_maps else random(2, prefix + side**2, parts.dim)
    angles = random(side**2, expected.head_dim), random(side**2, expected.head_dim)
    calls: list[dict[str, Any]] = [{}]
    if "rope" in parts.arguments:
        calls.append({"rope": torch.cat(angles, -1)})
    if "position_embeddings" in parts.arguments:
        calls = [{"position_embeddings": angles}]
    for call in calls:
        got, wanted = cast(Any, type(attention)).forward(trial, tokens, **call), expected(tokens, **call)
        if parts.style == "transformers":
            got, wanted = got[0], wanted[0]
        if not torch.allclose(got, wanted, rtol=1e-6, atol=1e-8):
            return False
    return True
