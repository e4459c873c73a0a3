"""Sizes of models, against the paper's figures and against sums done by hand."""

import pytest

from inline_attention import list_models
from inline_attention.benchmark.model_size import measure_model_size, stored_model_sizes

# Parameters (M) and multiply-adds (G) as the paper gives them.
PAPER = {
    "inline_deit_tiny": (6.48, 1.11),
    "inline_deit_small": (16.74, 4.97),
    "inline_deit_base": (23.80, 17.17),
    "inline_pvt_tiny": (12.03, 1.98),
    "inline_pvt_small": (21.56, 3.92),
    "inline_pvt_medium": (37.62, 6.86),
    "inline_pvt_large": (51.15, 10.13),
    "inline_swin_tiny": (29.22, 4.46),
    "inline_swin_small": (49.79, 8.72),
    "inline_swin_base": (88.35, 15.40),
    "inline_swin_base_384": (88.47, 46.20),
    "inline_cswin_tiny": (20.61, 4.31),
    "inline_cswin_small": (33.03, 6.77),
    "inline_cswin_base": (73.41, 14.89),
    "inline_cswin_base_384": (73.41, 46.22),
}


def test_every_model_of_the_paper_is_listed():
    assert set(list_models("inline_*")) == {*PAPER, "inline_deit_micro"}


@pytest.mark.parametrize("name", PAPER)
def test_figures_of_the_paper(name):
    size = measure_model_size(name)
    assert stored_model_sizes()[name] == size, "run benchmarks/model_sizes.py"
    parameters, gmacs = PAPER[name]
    assert size.param_count == pytest.approx(parameters, rel=1e-3)
    assert size.gmacs == pytest.approx(gmacs, rel=1e-2)


def test_all_models_are_stored():
    assert set(stored_model_sizes()) == set(list_models())


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models("softmax_*") + list_models("linear_*"))
def test_stored_sizes_of_twins_are_those_counted(name):
    assert stored_model_sizes()[name] == measure_model_size(name), "run benchmarks/model_sizes.py"


@pytest.mark.parametrize("channels", [3, 1])
def test_other_sizes_and_arguments(channels):
    size = measure_model_size("inline_deit_tiny", input_size=(channels, 32, 48), in_chans=channels, num_classes=0)
    tokens, dim, depth, heads = 6, 192, 12, 6
    block = (
        12 * dim * dim * (tokens + 1)  # qkv, projection, MLP
        + 2 * dim * (dim // heads) * (tokens + 1)  # state and output of the attention
        + 10 * dim * (dim // heads)  # the predictor of the local weights
        + 9 * tokens * dim  # the local term
    )
    assert size.macs == depth * block + tokens * dim * channels * 16 * 16
    assert size.input_size == (channels, 32, 48)


def test_the_local_term_is_counted_once():
    size = {"input_size": (3, 64, 64)}
    without = measure_model_size("inline_deit_tiny", **size, attention_options={"local_residual": False}).macs
    assert measure_model_size("linear_deit_tiny", **size).macs == without
    local = 12 * (9 * 16 * 192 + 10 * 192 * 32)
    assert measure_model_size("inline_deit_tiny", **size).macs == without + local


def test_softmax_is_counted_with_both_of_its_products():
    linear, softmax = (
        measure_model_size(f"{kind}_deit_tiny", input_size=(3, 64, 64)).macs for kind in ("linear", "softmax")
    )
    tokens, dim, head_dim = 17, 192, 32
    assert softmax - linear == 12 * 2 * (tokens - head_dim) * tokens * dim
