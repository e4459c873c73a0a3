"""Captured attention: explicit weights reproduce what every kind of layer computes."""

import pytest
import timm
import torch
from torch import nn

from analysis.small_models import small_model
from inline_attention.analysis import probes as explicit_module
from inline_attention.analysis.masking import mixed_values
from inline_attention.analysis.probes import (
    MatrixTooLargeError,
    MixingRule,
    attention_layers,
    capture_attention,
    choose_heads,
    choose_layers,
    neighbor_table,
    neighborhood_mask,
    observed,
)
from inline_attention.layers import attention as attention_module
from inline_attention.layers.conversion import convert_attention
from inline_attention.ops import attention_weights
from inline_attention.ops.api import attend
from inline_attention.ops.reference import kernel_weights, softmax_weights

KINDS = ("softmax", "linear", "inline", "magnitude")
NORMALIZATION = {"linear": "divide", "inline": "subtract", "magnitude": "magnitude"}
# Non-square; 40 and 72 leave windows of 3 and stripes of 2 and 7 that reach over the edge.
CASES = [
    ("inline_deit_tiny", (20, 28), {}),
    ("softmax_deit_tiny", (20, 28), {}),
    ("linear_deit_tiny", (20, 28), {}),
    ("inline_deit_tiny", (20, 28), {"attention_options": {"normalization": "magnitude", "feature_map": "exp"}}),
    ("inline_pvt_tiny", (32, 64), {}),
    ("inline_swin_tiny", (40, 72), {}),
    ("softmax_swin_tiny", (40, 72), {}),
    ("inline_cswin_tiny", (40, 72), {}),
    ("softmax_cswin_tiny", (40, 72), {}),
    ("linear_cswin_tiny", (40, 72), {}),
]


def inputs_of_projections(model, images):
    """What each attention layer really hands to its output projection."""
    seen = []
    handles = [
        layer.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for layer in attention_layers(model).values()
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("name", "size", "arguments"), CASES)
def test_explicit_weights_give_the_layers_own_output(name, size, arguments):
    model = small_model(name, **arguments)
    images = torch.randn(2, 3, *size)
    expected = inputs_of_projections(model, images)
    with observed(model, mixed_values):
        explicit = inputs_of_projections(model, images)
    torch.testing.assert_close(explicit, expected, rtol=1e-3, atol=1e-3)
    captured = capture_attention(model, images)
    assert [layer.name for layer in captured] == list(attention_layers(model))
    for layer in captured:
        tensors = (layer.q, layer.k, layer.v, layer.local_weight, layer.local_bias)
        assert not any(tensor.requires_grad for tensor in tensors if tensor is not None)
        assert layer.num_prefix_tokens + layer.grid_size[0] * layer.grid_size[1] == layer.num_tokens
        for head in range(layer.num_heads):
            rows = layer.rows(1, head)
            assert rows.dtype == torch.float64
            torch.testing.assert_close(rows.sum(1), torch.ones(layer.num_tokens).double())
            some = torch.tensor([layer.num_tokens - 1, 0])
            torch.testing.assert_close(layer.rows(1, head, some), rows[some])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature_map", ["identity", "relu", "exp"])
def test_unmasked_weights_are_the_reference(kind, feature_map):
    if kind == "softmax" and feature_map != "identity":
        return
    q, k = torch.randn(5, 4), torch.randn(7, 4)
    rule = MixingRule(NORMALIZATION.get(kind), feature_map, 0.7)
    assert rule.kind == kind
    expected = attention_weights(
        q.double()[None, :, None], k.double()[None, :, None], kind=kind, feature_map=feature_map, scale=0.7
    )
    torch.testing.assert_close(rule.weights(q, k), expected[0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_masked_weights_are_the_reference_of_each_query_alone(kind):
    q, k = torch.randn(6, 4).abs(), torch.randn(9, 4).abs()
    visible = torch.rand(6, 9) < 0.5
    visible[2] = False
    visible[2, 5] = True
    rule = MixingRule(NORMALIZATION.get(kind), "identity", 0.5)
    weights = rule.weights(q, k, visible=visible)
    for query in range(6):
        left = q[None, query, None, None], k[None, :, None], 0.5
        mask = visible[None, query]
        if kind == "softmax":
            expected = softmax_weights(*left, mask)
        else:
            expected = kernel_weights(*left, "identity", NORMALIZATION[kind], mask)
        torch.testing.assert_close(weights[query], expected[0, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_sees_nothing_gets_nothing(kind):
    visible = torch.ones(2, 3, dtype=torch.bool)
    visible[1] = False
    weights = MixingRule(NORMALIZATION.get(kind), "identity", 1.0).weights(
        torch.randn(2, 4), torch.randn(3, 4), visible=visible
    )
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 0.0]).double())


def test_a_callable_feature_map_with_float32_parameters():
    linear = nn.Linear(4, 6)
    q, k = torch.randn(5, 4).double(), torch.randn(7, 4).double()
    rule = MixingRule("subtract", linear, 1.0)
    with torch.no_grad():
        assert rule.weights(q, k).shape == (5, 7)


def test_too_many_tokens_are_refused_with_numbers_and_a_remedy(monkeypatch):
    monkeypatch.setattr(explicit_module, "LARGEST_MATRIX", 8 * 26 * 26)
    model = small_model("inline_deit_tiny")
    (small,) = capture_attention(model, torch.randn(1, 3, 20, 20), layers=[0])
    assert small.rows(0, 0).shape == (26, 26)
    (large,) = capture_attention(model, torch.randn(1, 3, 24, 24), layers=[0])
    with pytest.raises(MatrixTooLargeError, match=r"37 queries for 37 keys .* \(--size\)"):
        large.rows(0, 0)
    assert large.rows(0, 0, torch.tensor([3])).shape == (1, 37)


def test_layers_and_heads_are_chosen_or_refused():
    model = small_model("inline_deit_tiny")
    assert choose_layers(model, None) == choose_layers(model, [1, 0, -1]) == [0, 1]
    with pytest.raises(ValueError, match="has 2 attention layers, got layer 2; give 0 to 1"):
        choose_layers(model, [2])
    (layer,) = capture_attention(model, torch.randn(1, 3, 20, 20), layers=[-1])
    assert layer.index == 1
    assert choose_heads(layer, [1, 1]) == [1]
    with pytest.raises(ValueError, match=r"layer 1 \(blocks.1.attn\) has 2 heads, got head 2"):
        choose_heads(layer, [2])
    with pytest.raises(ValueError, match="has no attention layer"):
        attention_layers(nn.Linear(2, 2))


def test_replaced_values_reach_the_output_and_hooks_are_removed():
    model = small_model("inline_deit_tiny")
    images = torch.randn(1, 3, 20, 20)
    with torch.no_grad():
        before = model(images)
        with observed(model, lambda layer: torch.zeros_like(layer.v).flatten(2)):
            assert not torch.allclose(model(images), before, atol=1e-3)
        with observed(model, mixed_values):
            torch.testing.assert_close(model(images), before, rtol=1e-3, atol=1e-4)
        with pytest.raises(ValueError, match="unequal size"), observed(model, lambda layer: None):
            model(images, image_sizes=[(16, 20)])
        assert torch.equal(model(images), before)
    assert not any("mix" in vars(layer) for layer in attention_layers(model).values())


def test_a_converted_model_of_timm_whose_blocks_know_no_grid():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    convert_attention(model, local_residual=False)
    (layer,) = capture_attention(model, torch.randn(1, 3, 64, 64))
    assert (layer.grid_size, layer.num_prefix_tokens, layer.rule.kind) == ((4, 4), 1, "inline")


def test_a_token_by_row_and_column():
    (layer,) = capture_attention(small_model("inline_deit_tiny"), torch.randn(1, 3, 20, 28), layers=[0])
    assert layer.grid_size == (5, 7)
    assert layer.token(2, 3) == 1 + 2 * 7 + 3
    with pytest.raises(ValueError, match="5×7 tokens, got row 5, column 0"):
        layer.token(5, 0)


def test_neighbors_of_a_corner_an_edge_and_the_prefix():
    numbers, exists = neighbor_table((3, 4), 1)
    assert not exists[0].any()
    corner, middle = 1, 1 + 1 * 4 + 1
    assert numbers[corner][exists[corner]].tolist() == [1, 2, 5, 6]
    assert numbers[middle].tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    mask = neighborhood_mask((3, 4), 1, 3)
    for token in range(13):
        assert mask[token].nonzero().flatten().tolist() == numbers[token][exists[token]].tolist()
    assert neighborhood_mask((3, 4), 1, 7)[1:, 1:].all()
    with pytest.raises(ValueError, match="must be odd, got 4"):
        neighborhood_mask((3, 4), 0, 4)


def test_queries_that_were_looked_at_are_not_given_up(monkeypatch):
    def overwrite(call, backend):
        out = attend(call, backend)
        return call.q.copy_(out) if call.overwrite_q else out

    model, images = small_model("inline_pvt_tiny"), torch.randn(2, 3, 32, 64)
    expected = capture_attention(model, images)
    monkeypatch.setattr(attention_module, "attend", overwrite)
    for found, wanted in zip(capture_attention(model, images), expected, strict=True):
        assert torch.equal(found.q, wanted.q)
