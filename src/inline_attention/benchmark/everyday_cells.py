"""The cells of the everyday benchmark with the bounds they have to keep, most important first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inline_attention.benchmark.attention import AttentionCase
from inline_attention.benchmark.everyday import AttentionCell, BlockCell, Bound, Cell, MissingCell, ModelCell
from inline_attention.benchmark.models import ModelCase

ELEMENTS = 25_000_000  # B·N·C
CHANNELS = 384  # about, for head dims other than 32
OTHER_HEAD_DIMS = (96, 128, 48, 80, 16, 24, 40, 72, 112)
FORWARD, BOTH = "forward", "forward+backward"
OPTIONS_OF = "D=32 N=784"  # the cell that masks, maps and normalizations are compared with
NORMALIZATIONS = (
    ("divide", "relu"),
    ("divide", "elu_plus_one"),
    ("magnitude", "elu_plus_one"),
    ("subtract", "relu"),
    ("subtract", "leaky_relu"),
    ("subtract", "exp"),
)


def everyday_cells() -> tuple[Cell, ...]:
    """Cells for a GPU."""
    return (*_main_attention(), *_models(), *_blocks(), *_other_attention(), *_large_models())


def smoke_cells() -> tuple[Cell, ...]:
    """Tiny cells of every kind, for a CPU."""
    tiny = AttentionCase(tokens=12, channels=8, head_dim=4, batch=3)
    padded = replace(tiny, padded=True, normalization="divide", feature_map="relu")
    model = ModelCase("inline_deit_tiny", 32, 2, "training", ("softmax",), "eager")
    return (
        AttentionCell("tiny", {FORWARD: (_floor(1.65, 1.4),), BOTH: ()}, tiny),
        AttentionCell("tiny, mask", {FORWARD: (_base(1.3, 1.1),)}, padded, base="tiny"),
        MissingCell("cu_seqlens", {FORWARD: (_base(1.3, 1.1),)}, "packed sequences"),
        ModelCell("DeiT-T", {"training": (_softmax(1.0, 1.15),)}, model),
        BlockCell("DeiT-T, eager", {FORWARD: (), "backward": ()}, model),
    )


def _softmax(accepted: float, goal: float | None = None) -> Bound:
    return Bound("times_softmax", accepted, goal)


def _floor(accepted: float, goal: float | None = None) -> Bound:
    return Bound("over_floor", accepted, goal)


def _base(accepted: float, goal: float | None = None) -> Bound:
    return Bound("over_base", accepted, goal)


def _attention(tokens: int, head_dim: int, *, batch: int | None = None, **options: Any) -> AttentionCase:
    channels = 192 if head_dim == 32 else round(CHANNELS / head_dim) * head_dim
    return AttentionCase(tokens, channels, head_dim, batch or round(ELEMENTS / (tokens * channels)), **options)


def _main_attention() -> list[Cell]:
    def cell(head_dim: int, tokens: int, forward: tuple[Bound, ...], both: tuple[Bound, ...] = ()) -> Cell:
        name = f"D={head_dim} N={tokens}"
        return AttentionCell(name, {FORWARD: forward, BOTH: both}, _attention(tokens, head_dim))

    return [
        cell(32, 196, (_floor(1.65, 1.4),)),
        cell(32, 784, (_floor(1.75, 1.4),)),
        cell(32, 3136, (_floor(1.75, 1.4),)),
        cell(64, 196, (_floor(1.75, 1.5), _softmax(1.3)), (_softmax(2.2),)),
        cell(64, 576, (_floor(1.75, 1.5),)),
        cell(64, 784, (_floor(1.75, 1.5),)),
        cell(64, 5000, (_floor(1.75, 1.5),)),
        cell(64, 16384, (_floor(1.75, 1.5),)),
    ]


def _other_attention() -> list[Cell]:
    cells: list[Cell] = []
    for head_dim in OTHER_HEAD_DIMS:
        for tokens in (196, 784):
            short = tokens == 196
            wide = head_dim in (96, 128)
            softmax = (_softmax(0.85 if short else 2.5),) if wide else ()
            bounds = {FORWARD: (_floor(2.4, 1.8), *softmax), BOTH: (_softmax(1.0 if short else 3.0),)}
            cells.append(AttentionCell(f"D={head_dim} N={tokens}", bounds, _attention(tokens, head_dim)))
    for head_dim in (32, 64):
        bounds = {FORWARD: (_base(1.3, 1.1),), BOTH: (_base(1.3, 1.1),)}
        case = _attention(784, head_dim, padded=True)
        cells.append(AttentionCell(f"D={head_dim} N=784, mask", bounds, case, base=f"D={head_dim} N=784"))
    for normalization, feature_map in NORMALIZATIONS:
        bounds = {FORWARD: (_base(1.4, 1.1),), BOTH: (_base(1.4, 1.1),)}
        case = _attention(784, 32, normalization=normalization, feature_map=feature_map)
        cells.append(AttentionCell(f"{OPTIONS_OF}, {normalization}, {feature_map}", bounds, case, base=OPTIONS_OF))
    for head_dim in (32, 64):
        bounds = {FORWARD: (_floor(2.2, 1.8),), BOTH: ()}
        case = _attention(3136, head_dim, grid=(1, 3136))
        cells.append(AttentionCell(f"D={head_dim} N=1×3136", bounds, case))
    for head_dim, tokens in ((32, 784), (64, 196)):
        for tf32 in (False, True):
            name = f"D={head_dim} N={tokens}, float32{', TF32 allowed' if tf32 else ''}"
            bounds = {FORWARD: (_floor(3.5 if tf32 else 5.0),), BOTH: ()}
            cells.append(AttentionCell(name, bounds, _attention(tokens, head_dim), torch.float32, tf32))
    for head_dim in (32, 64):
        case = _attention(196, head_dim, batch=1)
        cells.append(AttentionCell(f"D={head_dim} N=196, one sample", {FORWARD: (_softmax(1.0),)}, case))
    for head_dim in (32, 64):
        case = _attention(196, head_dim, local=False)
        cells.append(AttentionCell(f"D={head_dim} N=196, no 3×3 term", {FORWARD: (), BOTH: ()}, case))
    reason = "inline_attention takes no cu_seqlens; unequal lengths go through a mask"
    bounds = {FORWARD: (_base(1.3, 1.1),), BOTH: (_base(1.3, 1.1),)}
    cells.append(MissingCell("D=32, packed sequences (cu_seqlens)", bounds, reason))
    return cells


def _models() -> list[Cell]:
    def training(name: str, case: ModelCase, accepted: float, goal: float) -> Cell:
        return ModelCell(name, {"training": (_softmax(accepted, goal),)}, case)

    def inference(name: str, case: ModelCase, accepted: float, goal: float) -> Cell:
        return ModelCell(name, {"inference": (_softmax(accepted, goal),)}, case)

    def deit(**options: Any) -> ModelCase:
        return ModelCase("inline_deit_tiny", 224, 256, "training", ("timm",), **options)

    def twin(model: str) -> ModelCase:
        return ModelCase(model, 224, 128, "training", ("softmax",), autocast=True)

    def vit(model: str, size: int, mode: Any) -> ModelCase:
        return ModelCase(model, size, 128, mode, ("timm",), converted=True)

    def one_image(model: str, *rivals: Any) -> ModelCase:
        return ModelCase(model, 224, 1, "inference", rivals, "eager")

    return [
        training("DeiT-T, autocast, eager", deit(autocast=True, execution="eager"), 1.0, 1.15),
        training("DeiT-T, autocast, compiled", deit(autocast=True), 1.1, 1.25),
        training("DeiT-T, bf16 weights, compiled", deit(autocast=False), 1.1, 1.25),
        training("Swin-T, autocast, compiled", twin("inline_swin_tiny"), 1.0, 1.2),
        training("ViT-S converted, autocast, compiled", vit("vit_small_patch16_224", 224, "training"), 1.0, 1.15),
        inference("DeiT-T, one image, eager", one_image("inline_deit_tiny", "timm", "softmax"), 1.0, 1.25),
        inference("Swin-T, one image, eager", one_image("inline_swin_tiny", "timm", "softmax"), 1.0, 1.25),
        inference("PVT-T, one image, eager", one_image("inline_pvt_tiny", "softmax"), 1.0, 1.25),
        inference("ViT-S converted 224², compiled", vit("vit_small_patch16_224", 224, "inference"), 1.1, 1.3),
        inference("ViT-B converted 224², compiled", vit("vit_base_patch16_224", 224, "inference"), 1.1, 1.3),
        inference("ViT-B converted 384², compiled", vit("vit_base_patch16_224", 384, "inference"), 1.25, 1.6),
        training("PVT-T, autocast, compiled", twin("inline_pvt_tiny"), 1.0, 1.2),
    ]


def _large_models() -> list[Cell]:
    bounds = {"training": (_softmax(1.0, 1.2),)}
    cswin = ModelCase("inline_cswin_tiny", 224, 128, "training", ("softmax",), autocast=True)
    vit = ModelCase("vit_base_patch16_224", 224, 128, "training", ("timm",), converted=True, autocast=True)
    return [
        ModelCell("CSWin-T, autocast, compiled", bounds, cswin),
        ModelCell("ViT-B converted, autocast, compiled", {"training": (_softmax(1.0, 1.15),)}, vit),
    ]


def _blocks() -> list[Cell]:
    def cell(name: str, model: str, execution: Any, converted: bool) -> Cell:
        case = ModelCase(model, 224, 1, "training", ("timm",), execution, converted)
        return BlockCell(f"{name}, {execution}", {FORWARD: (), "backward": ()}, case)

    return [
        cell(name, model, execution, converted)
        for name, model, converted in (
            ("DeiT-T", "inline_deit_tiny", False),
            ("ViT-S converted", "vit_small_patch16_224", True),
        )
        for execution in ("eager", "compiled")
    ]
