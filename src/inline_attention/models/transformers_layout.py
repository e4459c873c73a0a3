"""Vision models that transformers has saved, read as timm's models: ViT, DeiT, DINOv2, DINOv3, CLIP and SigLIP.

Both libraries have the same networks under other names. The configuration and the names of the weights are translated
here. As in `hub_layout`, the result are the notes of a weights file, which `described` checks. transformers itself is
not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inline_attention.models.hub_layout import CheckpointError
from inline_attention.support.text import printable, some_of

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # numbers of Pillow
# Expressions for names in transformers, and the names in timm. The first that matches counts.
_NAMES = [
    (r"embeddings\.(cls_token|class_embedding)", "cls_token"),
    (r"embeddings\.(register_tokens|distillation_token)", "reg_token"),
    (r"embeddings\.(position_embeddings|position_embedding\.weight)", "pos_embed"),
    (r"embeddings\.(patch_embeddings\.projection|patch_embeddings|patch_embedding)\.(\w+)", r"patch_embed.proj.\2"),
    (r"(?:layernorm|post_layernorm|norm)\.(\w+)", r"norm.\1"),
    (r"pre_layrnorm\.(\w+)", r"norm_pre.\1"),
    (r"(?:classifier|cls_classifier)\.(\w+)", r"head.\1"),
    (r"distillation_classifier\.(\w+)", r"head_dist.\1"),
    (r"visual_projection\.weight", "head.weight"),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.in_proj_(\w+)", r"attn_pool.qkv.\1"),
    (r"head\.attention\.out_proj\.(\w+)", r"attn_pool.proj.\1"),
    (r"head\.layernorm\.(\w+)", r"attn_pool.norm.\1"),
    (r"head\.(mlp\.fc[12]\.\w+)", r"attn_pool.\1"),
]  # fmt: skip
_BLOCK = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)")
_BLOCK_NAMES = [
    (r"(?:attention\.attention|attention|self_attn)\.([qkv])(?:uery|ey|alue|_proj)\.(\w+)", r"attn.\1.\2"),
    (r"(?:attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.(\w+)", r"attn.proj.\1"),
    (r"(?:layernorm_before|layer_norm1|norm1)\.(\w+)", r"norm1.\1"),
    (r"(?:layernorm_after|layer_norm2|norm2)\.(\w+)", r"norm2.\1"),
    (r"(?:intermediate\.dense|mlp\.fc1|mlp\.up_proj|mlp\.weights_in)\.(\w+)", r"mlp.fc1.\1"),
    (r"mlp\.gate_proj\.(\w+)", r"mlp.fc1_g.\1"),
    (r"(?:output\.dense|mlp\.fc2|mlp\.down_proj|mlp\.weights_out)\.(\w+)", r"mlp.fc2.\1"),
]
# Weights that say nothing about the picture's features, and towers of text.
_UNUSED = re.compile(r"pooler\.|embeddings\.(mask_token|position_ids)|text_model\.|text_projection|logit_")
_TOWER = re.compile(r"^(?:(?:vit|deit|dinov2|dinov2_with_registers|dinov3_vit|model|vision_model)\.)+")


@dataclass(frozen=True)
class _Family:
    """The network of timm that has the blocks of a family, by activation, and what its configuration fixes."""

    names: Mapping[str, str]
    global_pool: str = "token"
    layer_scales: tuple[str, str] = ("ls1.gamma", "ls2.gamma")
    positions_of_prefix: bool = True  # False: the class token's position is added to the token


_CLIP = _Family({"quick_gelu": "vit_base_patch16_clip_quickgelu_224", "gelu": "vit_base_patch16_clip_224"})
_SIGLIP = _Family(
    {"gelu_pytorch_tanh": "vit_base_patch32_siglip_256", "gelu": "vit_base_patch16_siglip_224"}, global_pool="map"
)
_FAMILIES = {
    "vit": _Family({"gelu": "vit_base_patch16_224"}),
    "deit": _Family({"gelu": "deit_base_patch16_224"}),
    "dinov2": _Family({"gelu": "vit_base_patch14_dinov2", "swiglu": "vit_giant_patch14_dinov2"}),
    "dinov2_with_registers": _Family(
        {"gelu": "vit_base_patch14_reg4_dinov2", "swiglu": "vit_giant_patch14_reg4_dinov2"}, positions_of_prefix=False
    ),
    "dinov3_vit": _Family(
        {"gelu": "vit_small_patch16_dinov3_qkvb", "gated silu": "vit_small_plus_patch16_dinov3_qkvb"},
        layer_scales=("gamma_1", "gamma_2"),
    ),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
}


def translate(
    path: Path, config: Mapping[str, Any], preparation: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the notes and the weights of timm's model for what transformers has saved in a folder.

    `preparation` is the content of `preprocessor_config.json`, empty if there is none. `CheckpointError` if the model
    is of another kind, or has parts that timm's has not.
    """
    kind = str(config.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise CheckpointError(
            f"{path} is a model of transformers of type {printable(kind)[:60]}, expected one of "
            f"{', '.join(_FAMILIES)}; convert others in Python with convert_attention(model)"
        )
    tower = config.get("vision_config", config)
    if not isinstance(tower, Mapping):
        raise CheckpointError(f"{path} has a damaged config.json: expected a mapping as vision_config; fetch it again")
    _check_numbers(path, tower)
    translated = _translate_weights(path, family, weights)
    is_gated = bool(tower.get("use_gated_mlp"))
    activation = str(tower.get("hidden_act", next(iter(family.names))))
    activation = "swiglu" if tower.get("use_swiglu_ffn") else f"gated {activation}" if is_gated else activation
    name = family.names.get(activation)
    if name is None:
        raise CheckpointError(
            f"{path} has an MLP with {printable(activation)[:60]}, which timm's {next(iter(family.names.values()))} "
            "has not; use convert_attention(model) in Python"
        )
    if "head_dist.weight" in translated:  # DeiT with two classifiers
        name, translated["dist_token"] = name.replace("_base", "_base_distilled"), translated.pop("reg_token")
    if family is _SIGLIP and "head.weight" in translated:  # it classifies the mean of the tokens
        translated = {key: value for key, value in translated.items() if not key.startswith("attn_pool.")}
    classes = translated["head.weight"].shape[0] if "head.weight" in translated else 0
    arguments = {"global_pool": family.global_pool, **_sizes(path, tower, translated), "num_classes": classes}
    fc1 = ".mlp.fc1_x." if is_gated else ".mlp.fc1."
    translated = {  # without registers, theirs is an empty tensor
        key.replace(".mlp.fc1.", fc1): value for key, value in translated.items() if value.numel()
    }
    if family is _SIGLIP and "attn_pool.latent" not in translated:
        name, arguments["global_pool"] = name.replace("siglip", "siglip_gap"), "avg"
    notes: dict[str, Any] = {"model_arguments": arguments, **_preparation(preparation)}
    if kind not in ("clip", "clip_vision_model"):  # whose outputs are features, not classes
        notes["class_names"] = _class_names(config, classes)
    texts = {key: json.dumps(value) for key, value in notes.items() if value is not None}
    return {"model": name, **texts}, translated


def _check_numbers(path: Path, tower: Mapping[str, Any]) -> None:
    """Refuse numbers that timm's models have fixed, where others would change the outputs."""
    largest = 1e-5  # of timm's norms
    for name, fits, expected in (
        ("layer_norm_eps", lambda value: 0 <= value <= 2 * largest, f"at most {largest:g}"),
        ("rope_theta", lambda value: value == 100, "100"),
    ):
        value = tower.get(name)
        if type(value) in (int, float) and not fits(value):
            advice = "use convert_attention(model) in Python"
            raise CheckpointError(f"{path} has {name} {value:g}, timm's model {expected}; {advice}")


def _sizes(path: Path, tower: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of timm's model that the configuration and the shapes of the weights decide."""
    try:
        dim, in_chans, *patch = weights["patch_embed.proj.weight"].shape
        hidden = weights["blocks.0.mlp.fc2.weight"].shape[1]
        width = weights["blocks.0.mlp.fc1.weight"].shape[0]  # twice, with a gate
        depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        heads, size = tower["num_attention_heads"], tower["image_size"]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} lacks {error} in its weights or config.json; fetch it again") from error
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else None
    is_rotary = "pos_embed" not in weights  # DINOv3
    return {
        "img_size": size,
        "patch_size": patch[0] if patch[0] == patch[-1] else patch,
        "in_chans": in_chans,
        "embed_dim": dim,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": (max(hidden, width) + 0.5) / dim,  # timm rounds down
        **({} if registers is None else {"num_reg_tokens" if is_rotary else "reg_tokens": registers}),
        **({} if is_rotary else {"qkv_bias": "blocks.0.attn.qkv.bias" in weights}),
    }


def _translate_weights(path: Path, family: _Family, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    translated = {
        name: _translate_name(short, family)
        for name in weights
        if not _UNUSED.match(short := _TOWER.sub("", name))
        # CLIP's classifier reads tokens before the last norm, which timm's cannot.
        and not (family is _CLIP and short.startswith("classifier."))
    }
    if unknown := [printable(name)[:80] for name, new in translated.items() if new is None]:
        raise CheckpointError(
            f"{path} has weights that this kind of model has not in timm: {some_of(unknown)}; use "
            "convert_attention(model) in Python"
        )
    found = {new: weights[name] for name, new in translated.items() if new is not None}
    for name in [name for name in found if re.search(r"\.q\.(weight|bias)$", name)]:
        _join(found, name.rpartition("q.")[0], name.rpartition(".")[2], family)
    if "attn_pool.qkv.weight" in found:
        for part in ("weight", "bias"):
            queries, keys, values = found.pop(f"attn_pool.qkv.{part}").chunk(3)
            found |= {f"attn_pool.q.{part}": queries, f"attn_pool.kv.{part}": torch.cat([keys, values])}
    if "head.weight" in found:
        if found["head.weight"].shape[1] != found["norm.weight"].shape[0]:  # DINOv2's reads two kinds of features
            found = {name: value for name, value in found.items() if not name.startswith("head.")}
        elif "head.bias" not in found:
            found["head.bias"] = found["head.weight"].new_zeros(found["head.weight"].shape[0])
    if "cls_token" in found:
        found["cls_token"] = found["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in found:
        positions = found["pos_embed"].reshape(1, -1, found["pos_embed"].shape[-1])
        if not family.positions_of_prefix:
            found["cls_token"] = found["cls_token"] + positions[:, :1]
            positions = positions[:, 1:]
        found["pos_embed"] = positions
    return {name: value.contiguous() for name, value in found.items()}


def _translate_name(name: str, family: _Family) -> str | None:
    block = _BLOCK.fullmatch(name)
    rules, prefix, rest = _NAMES, "", name
    if block is not None:
        rules, prefix, rest = _BLOCK_NAMES, f"blocks.{int(block[1])}.", block[2]
        for number, scale in enumerate(family.layer_scales, start=1):
            if rest == f"layer_scale{number}.lambda1":
                return prefix + scale
    for expression, new in rules:
        if (match := re.fullmatch(expression, rest)) is not None:
            return prefix + match.expand(new)
    return None


def _join(found: dict[str, Tensor], prefix: str, part: str, family: _Family) -> None:
    """Join queries, keys and values, which timm has in one; a bias that is not there is zero."""
    parts = [found.pop(f"{prefix}{letter}.{part}", None) for letter in "qkv"]
    known = next(value for value in parts if value is not None)
    if part == "bias" and family.layer_scales[0] == "gamma_1":  # Eva's attention has two of the three
        found |= {
            f"{prefix}{letter}_bias": value for letter, value in zip("qkv", parts, strict=True) if value is not None
        }
        return
    found[f"{prefix}qkv.{part}"] = torch.cat([torch.zeros_like(known) if value is None else value for value in parts])


def _class_names(config: Mapping[str, Any], classes: int) -> list[str] | None:
    """Return the names of `id2label`; None if it has none, or those that transformers makes up."""
    labels = config.get("id2label")
    if not isinstance(labels, Mapping) or not classes:
        return None
    names: list[Any] = [labels.get(str(index)) for index in range(classes)]
    is_made_up = names == [f"LABEL_{index}" for index in range(classes)]
    return None if is_made_up or not all(isinstance(name, str) for name in names) else names


def _preparation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how images are prepared, in timm's terms; what a preprocessor does not say is left out."""
    found: dict[str, Any] = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    if isinstance(number := config.get("resample"), int):
        found["interpolation"] = _RESAMPLING.get(number)
    resized, cropped = _side(config.get("size")), _side(config.get("crop_size"))
    if resized and config.get("do_center_crop", cropped is not None):
        found["crop_pct"] = min(1.0, (cropped or resized) / resized)
    elif resized:
        found["crop_pct"] = 1.0
    return {key: value for key, value in found.items() if value is not None}


def _side(size: Any) -> int | None:
    """Return the side in pixels of a size, which is a number or a mapping."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge", size.get("height"))
    return size if type(size) is int and size > 0 else None
