"""The cells of the everyday benchmark and their bounds, most important first."""

from __future__ import annotations

from collections.abc import Mapping
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


def _attention(
    head_dim: int,
    tokens: int,
    bounds: Mapping[str, tuple[Bound, ...]],
    about: str = "",
    *,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    **options: Any,
) -> Cell:
    """Return a cell of about `ELEMENTS` elements. If its bounds need a base, that is the cell without options."""
    channels = 192 if head_dim == 32 else round(CHANNELS / head_dim) * head_dim
    case = AttentionCase(tokens, channels, head_dim, batch or round(ELEMENTS / (tokens * channels)), **options)
    name = f"D={head_dim} N={tokens if case.grid is None else '×'.join(map(str, case.grid))}"
    needs_base = any(bound.figure == "over_base" for bound in bounds[FORWARD])
    return attention_cell(name + about, bounds, case, base=name if needs_base else None, dtype=dtype, tf32=tf32)


def _main_attention() -> list[Cell]:
    return [
        _attention(32, 196, {FORWARD: (floor(1.65, 1.4),), BOTH: ()}),
        *(_attention(32, tokens, {FORWARD: (floor(1.75, 1.4),), BOTH: ()}) for tokens in (784, 3136)),
        _attention(64, 196, {FORWARD: (floor(1.75, 1.5), softmax(1.3)), BOTH: (softmax(2.2),)}),
        *(_attention(64, tokens, {FORWARD: (floor(1.75, 1.5),), BOTH: ()}) for tokens in (576, 784, 5000, 16384)),
    ]


def _other_attention() -> list[Cell]:
    cells: list[Cell] = []
    for head_dim in OTHER_HEAD_DIMS:
        for tokens, least, least_if_wide in ((196, 1.0, 0.85), (784, 3.0, 2.5)):
            wide = (softmax(least_if_wide),) if head_dim in (96, 128) else ()
            cells.append(_attention(head_dim, tokens, {FORWARD: (floor(2.4, 1.8), *wide), BOTH: (softmax(least),)}))
    with_mask = {FORWARD: (base(1.3, 1.1),), BOTH: (base(1.3, 1.1),)}
    cells += [_attention(head_dim, 784, with_mask, ", mask", padded=True) for head_dim in (32, 64)]
    for normalization, feature_map in NORMALIZATIONS:
        bounds = {FORWARD: (base(1.4, 1.1),), BOTH: (base(1.4, 1.1),)}
        about = f", {normalization}, {feature_map}"
        cells.append(_attention(32, 784, bounds, about, normalization=normalization, feature_map=feature_map))
    one_row = {FORWARD: (floor(2.2, 1.8),), BOTH: ()}
    cells += [_attention(head_dim, 3136, one_row, grid=(1, 3136)) for head_dim in (32, 64)]
    for head_dim, tokens in ((32, 784), (64, 196)):
        for tf32, most, about in ((False, 5.0, ", float32"), (True, 3.5, ", float32, TF32 allowed")):
            bounds = {FORWARD: (floor(most),), BOTH: ()}
            cells.append(_attention(head_dim, tokens, bounds, about, dtype=torch.float32, tf32=tf32))
    one_sample = {FORWARD: (softmax(1.0),)}
    cells += [_attention(head_dim, 196, one_sample, ", one sample", batch=1) for head_dim in (32, 64)]
    unbounded = {FORWARD: (), BOTH: ()}
    cells += [_attention(head_dim, 196, unbounded, ", no 3×3 term", local=False) for head_dim in (32, 64)]
    reason = "inline_attention takes no cu_seqlens; unequal lengths go through a mask"
    return [*cells, attention_cell("D=32, packed sequences (cu_seqlens)", with_mask, missing=reason)]


def _models() -> list[Cell]:
    deit = ModelCase("inline_deit_tiny", 224, 256, "training", ("timm",), autocast=True)
    swin = ModelCase("inline_swin_tiny", 224, 128, "training", ("softmax",), autocast=True)
    vit = ModelCase("vit_small_patch16_224", 224, 128, "training", ("timm",), converted=True)
    vit_base = replace(vit, model="vit_base_patch16_224", mode="inference")
    one = ModelCase("inline_deit_tiny", 224, 1, "inference", ("timm", "softmax"), "eager")
    return [
        _model("DeiT-T, autocast, eager", replace(deit, execution="eager"), 1.0, 1.15),
        _model("DeiT-T, autocast, compiled", deit, 1.1, 1.25),
        _model("DeiT-T, bf16 weights, compiled", replace(deit, autocast=False), 1.1, 1.25),
        _model("Swin-T, autocast, compiled", swin, 1.0, 1.2),
        _model("ViT-S converted, autocast, compiled", vit, 1.0, 1.15),
        _model("DeiT-T, one image, eager", one, 1.0, 1.25),
        _model("Swin-T, one image, eager", replace(one, model="inline_swin_tiny"), 1.0, 1.25),
        _model("PVT-T, one image, eager", replace(one, model="inline_pvt_tiny", rivals=("softmax",)), 1.0, 1.25),
        _model("ViT-S converted 224², compiled", replace(vit, mode="inference"), 1.1, 1.3),
        _model("ViT-B converted 224², compiled", vit_base, 1.1, 1.3),
        _model("ViT-B converted 384², compiled", replace(vit_base, size=384), 1.25, 1.6),
        _model("PVT-T, autocast, compiled", replace(swin, model="inline_pvt_tiny"), 1.0, 1.2),
    ]


def _large_models() -> list[Cell]:
    cswin = ModelCase("inline_cswin_tiny", 224, 128, "training", ("softmax",), autocast=True)
    vit = ModelCase("vit_base_patch16_224", 224, 128, "training", ("timm",), converted=True, autocast=True)
    return [
        _model("CSWin-T, autocast, compiled", cswin, 1.0, 1.2),
        _model("ViT-B converted, autocast, compiled", vit, 1.0, 1.15),
    ]


def _model(name: str, case: ModelCase, accepted: float, goal: float) -> Cell:
    return model_cell(name, {case.mode: (softmax(accepted, goal),)}, case)


def _blocks() -> list[Cell]:
    deit = ModelCase("inline_deit_tiny", 224, 1, "training", ("timm",), "eager")
    vit = replace(deit, model="vit_small_patch16_224", converted=True)
    return [
        block_cell(f"{name}, {execution}", {FORWARD: (), "backward": ()}, replace(case, execution=execution))
        for name, case in (("DeiT-T", deit), ("ViT-S converted", vit))
        for execution in ("eager", "compiled")
    ]
