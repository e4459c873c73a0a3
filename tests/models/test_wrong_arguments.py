"""Arguments of a wrong type or size are refused at construction, with a sentence, by every family and layer."""

import math

import pytest
import torch

from inline_attention.layers.attention import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.layers.window_attention import StripeAttention, WindowAttention
from inline_attention.models.cswin import InLineCSWin
from inline_attention.models.deit import InLineDeiT
from inline_attention.models.pvt import InLinePVT
from inline_attention.models.swin import InLineSwin

FOUR = {"depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "embed_dim": 8}
FAMILIES = {
    InLineDeiT: {"embed_dim": 8, "num_heads": 2, "depth": 1, "img_size": 16, "patch_size": 8},
    InLinePVT: {"depths": (1, 1, 1, 1), "img_size": 32},
    InLineSwin: {**FOUR, "global_blocks": (1, 1, 0, 0), "window_size": 2},
    InLineCSWin: {**FOUR, "global_stages": 1, "stripe_widths": (1, 1, 1)},
}
LAYERS = {
    InLineAttention: {},
    LinearAttention: {},
    SoftmaxAttention: {},
    WindowAttention: {"window_size": 2, "shifted": False},
    StripeAttention: {"stripe_width": 2},
}
NO_COUNTS = ((), [], "64", -1, 1.5, math.nan, (1,), ("a",) * 4, (1, 1, 1, ()), {}, object())
NO_RATES = ("0.5", -0.1, 1.1, math.nan, math.inf, (), None, 1j)
RATES = ("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")


def is_refused(kind, arguments):
    with torch.device("meta"), pytest.raises(ValueError, match="must"):
        kind(**arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_refuse_wrong_counts(family):
    for name in (*FAMILIES[family], "in_chans", "num_classes"):
        for value in NO_COUNTS:
            is_refused(family, FAMILIES[family] | {name: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_families_refuse_wrong_rates(family):
    for name in RATES:
        for value in NO_RATES:
            is_refused(family, FAMILIES[family] | {name: value})


@pytest.mark.parametrize("family", [InLineDeiT, InLineSwin, InLineCSWin])
@pytest.mark.parametrize("ratio", [-1, 0, math.nan, math.inf, 1e-9, "4", None, {}, (), (4, 4), True, 10**30, 1j])
def test_families_refuse_wrong_ratios(family, ratio):
    is_refused(family, FAMILIES[family] | {"mlp_ratio": ratio})


@pytest.mark.parametrize("family", FAMILIES)
def test_families_refuse_unknown_attention_and_wrong_options(family):
    for value in (3, "inlin", None, ()):
        is_refused(family, FAMILIES[family] | {"attention": value})
    for value in (3, "relu", [1]):
        is_refused(family, FAMILIES[family] | {"attention_options": value})


def test_stripes_are_checked_when_they_change():
    model = InLineCSWin(**FAMILIES[InLineCSWin])
    for value in ("abc", (1, 2), (1, 2, 0), 3):
        with pytest.raises(ValueError, match="stripe_widths must"):
            model.set_input_size(stripe_widths=value)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_refuse_wrong_types(layer):
    sizes = {"dim": 8, "num_heads": 2} | LAYERS[layer]
    for name in ("dim", "num_heads", "window_size", "stripe_width"):
        for value in NO_COUNTS if name in sizes else ():
            is_refused(layer, sizes | {name: value})
    for name in ("attn_drop", "proj_drop"):
        for value in NO_RATES:
            is_refused(layer, sizes | {name: value})
