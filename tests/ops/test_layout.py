"""Heads before tokens, as in `scaled_dot_product_attention`: the same values, and a warning where they are mistaken."""

import warnings

import pytest
import torch

from inline_attention import (
    attention_state,
    attention_weights,
    inline_attention,
    inline_attention_qkvpacked,
    local_residual,
)
from inline_attention.ops import api

B, H, N, D = 2, 3, 6, 4


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch):
    monkeypatch.setattr(api, "_has_warned", False)
    monkeypatch.setattr(api, "_SELECTED", {})  # a call seen before is not looked at again


def swapped(*tensors):
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("feature_map", ["identity", torch.sigmoid])
def test_both_layouts_give_the_same_values_and_gradients(backend, feature_map):
    q = torch.randn(B, N, H, D, dtype=torch.float64)
    k, v = torch.randn(2, B, N, H, D, dtype=torch.float64)
    options = {
        "backend": backend,
        "feature_map": feature_map,
        "key_padding_mask": torch.tensor([[True] * N, [True] * 4 + [False] * 2]),
        "local_weight": torch.randn(B, H, D, 3, 3, dtype=torch.float64),
        "grid_size": (1, 5),
        "num_prefix_tokens": 1,
    }
    results = []
    for layout, tensors in (("bnhd", [q, k, v]), ("bhnd", swapped(q, k, v))):
        tensors = [tensor.clone().requires_grad_() for tensor in tensors]
        out = inline_attention(*tensors, layout=layout, **options)
        gradients = torch.autograd.grad(out.square().sum(), tensors)
        results.append([out, *gradients] if layout == "bnhd" else swapped(out, *gradients))
    torch.testing.assert_close(results[1], results[0])


def test_cross_attention_has_the_shape_of_softmax_attention():
    q, k, v = torch.randn(B, H, 5, D), torch.randn(B, H, 7, D), torch.randn(B, H, 7, 2 * D)
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert inline_attention(q, k, v, layout="bhnd").shape == softmax.shape
    weights = attention_weights(q, k, layout="bhnd", kind="softmax")
    torch.testing.assert_close(weights @ v, softmax)


def test_the_local_term_alone():
    v, weight = torch.randn(B, N, H, D), torch.randn(B, H, D, 3, 3)
    expected = local_residual(v, weight, grid_size=(2, 3))
    (heads_first,) = swapped(v)
    assert torch.equal(local_residual(heads_first, weight, grid_size=(2, 3), layout="bhnd").transpose(1, 2), expected)


def test_a_compiled_call_takes_both():
    q = torch.randn(1, 2, 64, 8)
    compiled = torch.compile(lambda q: inline_attention(q, q, q, layout="bhnd"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), inline_attention(q, q, q, layout="bhnd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(lambda q: inline_attention(q, q, q), backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 49), (3, 197), (12, 196), (16, 49), (32, 3136)])
def test_heads_before_tokens_are_warned_of_once(heads, tokens):
    q = torch.randn(1, heads, tokens, 2)
    with pytest.warns(UserWarning, match=rf"{heads} tokens with {tokens} heads; pass layout='bhnd'") as caught:
        inline_attention(q, q, q)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inline_attention(q, q, q)


def test_packed_tensors_of_three_heads_in_another_order():
    with pytest.warns(UserWarning, match=r"3 tokens with 197 heads; permute qkv to \[B, N, 3, H, D\]"):
        inline_attention_qkvpacked(torch.randn(1, 3, 3, 197, 2))


def self_attention(tokens, heads, **options):
    q = torch.randn(1, tokens, heads, 2)
    return lambda: inline_attention(q, q, q, **options)


ORDINARY = {
    "many tokens": self_attention(196, 12),
    "few tokens": self_attention(16, 32),
    "one token": self_attention(1, 16),
    "keys in pieces": lambda: attention_state(*torch.randn(2, 1, 196, 12, 2), chunk_size=7),
    "many heads": self_attention(49, 128),
    "in the other layout": self_attention(12, 196, layout="bhnd"),
    "with a mask": self_attention(16, 64, key_padding_mask=torch.ones(1, 16, dtype=torch.bool)),
    "with a grid": self_attention(16, 64, grid_size=(4, 4), local_weight=torch.randn(1, 64, 2, 3, 3)),
    "cross-attention": lambda: inline_attention(*(torch.randn(1, tokens, 64, 2) for tokens in (4, 16, 16))),
    "packed": lambda: inline_attention_qkvpacked(torch.randn(1, 16, 3, 32, 2)),
}


@pytest.mark.parametrize("case", ORDINARY)
def test_ordinary_calls_are_not_warned_of(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORDINARY[case]()


def test_weights_of_heads_first_are_warned_of_once():
    q = torch.randn(1, 3, 64, 8)
    with pytest.warns(UserWarning, match=r"attention_weights reads q .* pass layout='bhnd'") as caught:
        attention_weights(q, q)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_weights(q, q)


def test_states_of_heads_first_are_warned_of():
    k = torch.randn(1, 3, 64, 8)
    with pytest.warns(UserWarning, match=r"attention_state reads k .* transpose\(1, 2\) queries") as caught:
        attention_state(k, k)
    assert caught[0].filename == __file__


def test_weights_in_the_other_layout_are_not_warned_of():
    q = torch.randn(1, 3, 64, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_weights(q, q, layout="bhnd")
