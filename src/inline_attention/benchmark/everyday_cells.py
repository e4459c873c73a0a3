"""The cells of the everyday benchmark and their bounds, most important first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from inline_attention.benchmark.attention import AttentionCase
from inline_attention.benchmark.everyday import Bound, Cell
from inline_attention.benchmark.models import ModelCase

ELEMENTS = 25_000_000  # B·N·C
CHANNELS = 384  # about, for head dims other than 32
FORWARD, BOTH = "forward", "forward+backward"
softmax, floor, base = (partial(Bound, figure) for figure in ("times_softmax", "over_floor", "over_base"))
attention_cell, model_cell, block_cell = (partial(Cell, section) for section in ("attention", "models", "blocks"))
# Head dim, tokens, bounds of the forward pass, bounds of forward and backward.
MAIN_ATTENTION = (
    (32, 196, (floor(1.65, 1.4),), ()),
    (32, 784, (floor(1.75, 1.4),), ()),
    (32, 3136, (floor(1.75, 1.4),), ()),
    (64, 196, (floor(1.75, 1.5), softmax(1.3)), (softmax(2.2),)),
    (64, 576, (floor(1.75, 1.5),), ()),
    (64, 784, (floor(1.75, 1.5),), ()),
    (64, 5000, (floor(1.75, 1.5),), ()),
    (64, 16384, (floor(1.75, 1.5),), ()),
)
OTHER_HEAD_DIMS = (96, 128, 48, 80, 16, 24, 40, 72, 112)
NORMALIZATIONS = (
    ("divide", "relu"),
    ("divide", "elu_plus_one"),
    ("magnitude", "elu_plus_one"),
    ("subtract", "relu"),
    ("subtract", "leaky_relu"),
    ("subtract", "exp"),
)


def everyday_cells() -> tuple[Cell, ...]:
    """Return the cells for a GPU."""
    return (*_main_attention(), *_models(), *_blocks(), *_other_attention(), *_large_models())


def smoke_cells() -> tuple[Cell, ...]:
    """Return tiny cells of every kind, for a CPU."""
    tiny = AttentionCase(tokens=12, channels=8, head_dim=4, batch=3)
    padded = replace(tiny, padded=True, normalization="divide", feature_map="relu")
    model = ModelCase("inline_deit_tiny", 32, 2, "training", ("softmax",), "eager")
    return (
        attention_cell("tiny", {FORWARD: (floor(1.65, 1.4),), BOTH: ()}, tiny),
        attention_cell("tiny, mask", {FORWARD: (base(1.3, 1.1),)}, padded, base="tiny"),
        attention_cell("cu_seqlens", {FORWARD: (base(1.3, 1.1),)}, missing="packed sequences"),
        model_cell("DeiT-T", {"training": (softmax(1.0, 1.15),)}, model),
        block_cell("DeiT-T, eager", {FORWARD: (), "backward": ()}, model),
    )


def _attention(tokens: int, head_dim: int, *, batch: int | None = None, **options: Any) -> AttentionCase:
    channels = 192 if head_dim == 32 else round(CHANNELS / head_dim) * head_dim
    return AttentionCase(tokens, channels, head_dim, batch or round(ELEMENTS / (tokens * channels)), **options)


def _main_attention() -> list[Cell]:
    return [
        attention_cell(f"D={head_dim} N={tokens}", {FORWARD: forward, BOTH: both}, _attention(tokens, head_dim))
        for head_dim, tokens, forward, both in MAIN_ATTENTION
    ]


def _other_attention() -> list[Cell]:
    cells: list[Cell] = []
    for head_dim in OTHER_HEAD_DIMS:
        for tokens in (196, 784):
            short, wide = tokens == 196, head_dim in (96, 128)
            forward = (floor(2.4, 1.8), *((softmax(0.85 if short else 2.5),) if wide else ()))
            bounds = {FORWARD: forward, BOTH: (softmax(1.0 if short else 3.0),)}
            cells.append(attention_cell(f"D={head_dim} N={tokens}", bounds, _attention(tokens, head_dim)))
    with_mask = {FORWARD: (base(1.3, 1.1),), BOTH: (base(1.3, 1.1),)}
    for head_dim in (32, 64):
        name, case = f"D={head_dim} N=784", _attention(784, head_dim, padded=True)
        cells.append(attention_cell(f"{name}, mask", with_mask, case, base=name))
    for normalization, feature_map in NORMALIZATIONS:
        name, bounds = "D=32 N=784", {FORWARD: (base(1.4, 1.1),), BOTH: (base(1.4, 1.1),)}
        case = _attention(784, 32, normalization=normalization, feature_map=feature_map)
        cells.append(attention_cell(f"{name}, {normalization}, {feature_map}", bounds, case, base=name))
    for head_dim in (32, 64):
        case = _attention(3136, head_dim, grid=(1, 3136))
        cells.append(attention_cell(f"D={head_dim} N=1×3136", {FORWARD: (floor(2.2, 1.8),), BOTH: ()}, case))
    for head_dim, tokens in ((32, 784), (64, 196)):
        for tf32 in (False, True):
            name = f"D={head_dim} N={tokens}, float32{', TF32 allowed' if tf32 else ''}"
            bounds = {FORWARD: (floor(3.5 if tf32 else 5.0),), BOTH: ()}
            case = _attention(tokens, head_dim)
            cells.append(attention_cell(name, bounds, case, dtype=torch.float32, tf32=tf32))
    for head_dim in (32, 64):
        case = _attention(196, head_dim, batch=1)
        cells.append(attention_cell(f"D={head_dim} N=196, one sample", {FORWARD: (softmax(1.0),)}, case))
    for head_dim in (32, 64):
        case = _attention(196, head_dim, local=False)
        cells.append(attention_cell(f"D={head_dim} N=196, no 3×3 term", {FORWARD: (), BOTH: ()}, case))
    reason = "inline_attention takes no cu_seqlens; unequal lengths go through a mask"
    cells.append(attention_cell("D=32, packed sequences (cu_seqlens)", with_mask, missing=reason))
    return cells


def _models() -> list[Cell]:
    def cell(name: str, case: ModelCase, accepted: float, goal: float) -> Cell:
        return model_cell(name, {case.mode: (softmax(accepted, goal),)}, case)

    deit = ModelCase("inline_deit_tiny", 224, 256, "training", ("timm",), autocast=True)
    swin = ModelCase("inline_swin_tiny", 224, 128, "training", ("softmax",), autocast=True)
    vit = ModelCase("vit_small_patch16_224", 224, 128, "training", ("timm",), converted=True)
    vit_base = replace(vit, model="vit_base_patch16_224", mode="inference")
    one = ModelCase("inline_deit_tiny", 224, 1, "inference", ("timm", "softmax"), "eager")
    return [
        cell("DeiT-T, autocast, eager", replace(deit, execution="eager"), 1.0, 1.15),
        cell("DeiT-T, autocast, compiled", deit, 1.1, 1.25),
        cell("DeiT-T, bf16 weights, compiled", replace(deit, autocast=False), 1.1, 1.25),
        cell("Swin-T, autocast, compiled", swin, 1.0, 1.2),
        cell("ViT-S converted, autocast, compiled", vit, 1.0, 1.15),
        cell("DeiT-T, one image, eager", one, 1.0, 1.25),
        cell("Swin-T, one image, eager", replace(one, model="inline_swin_tiny"), 1.0, 1.25),
        cell("PVT-T, one image, eager", replace(one, model="inline_pvt_tiny", rivals=("softmax",)), 1.0, 1.25),
        cell("ViT-S converted 224², compiled", replace(vit, mode="inference"), 1.1, 1.3),
        cell("ViT-B converted 224², compiled", vit_base, 1.1, 1.3),
        cell("ViT-B converted 384², compiled", replace(vit_base, size=384), 1.25, 1.6),
        cell("PVT-T, autocast, compiled", replace(swin, model="inline_pvt_tiny"), 1.0, 1.2),
    ]


def _large_models() -> list[Cell]:
    cswin = ModelCase("inline_cswin_tiny", 224, 128, "training", ("softmax",), autocast=True)
    vit = ModelCase("vit_base_patch16_224", 224, 128, "training", ("timm",), converted=True, autocast=True)
    return [
        model_cell("CSWin-T, autocast, compiled", {"training": (softmax(1.0, 1.2),)}, cswin),
        model_cell("ViT-B converted, autocast, compiled", {"training": (softmax(1.0, 1.15),)}, vit),
    ]


def _blocks() -> list[Cell]:
    deit = ModelCase("inline_deit_tiny", 224, 1, "training", ("timm",), "eager")
    vit = replace(deit, model="vit_small_patch16_224", converted=True)
    return [
        block_cell(f"{name}, {execution}", {FORWARD: (), "backward": ()}, replace(case, execution=execution))
        for name, case in (("DeiT-T", deit), ("ViT-S converted", vit))
        for execution in ("eager", "compiled")
    ]
