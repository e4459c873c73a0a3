"""The explicit weights: what the paper claims of them, and that the op applies exactly them."""

import pytest
import torch

from inline_attention import attention_weights, inline_attention

KINDS = {"inline": "subtract", "linear": "divide", "magnitude": "magnitude"}


@pytest.mark.parametrize("kind", [*KINDS, "softmax"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_sum_to_one_and_padding_weighs_nothing(kind, masked):
    q, k = torch.randn(2, 2, 5, 3, 4, dtype=torch.float64).abs()
    mask = torch.tensor([[True, False, True, True, False], [True] * 5]) if masked else None
    weights = attention_weights(q, k, kind=kind, key_padding_mask=mask)
    assert weights.shape == (2, 3, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    if mask is not None:
        assert (weights[0, :, :, [1, 4]] == 0).all()


@pytest.mark.parametrize(("kind", "normalization"), KINDS.items())
@pytest.mark.parametrize("feature_map", ["identity", "relu", "exp", "elu_plus_one"])
def test_the_op_applies_these_weights(kind, normalization, feature_map):
    q, k = torch.randn(2, 2, 5, 3, 4, dtype=torch.float64)
    v = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    weights = attention_weights(q, k, kind=kind, feature_map=feature_map)
    expected = torch.einsum("bhnm,bmhd->bnhd", weights, v)
    torch.testing.assert_close(
        inline_attention(q, k, v, normalization=normalization, feature_map=feature_map), expected
    )


def test_softmax_weights_are_those_of_pytorch():
    q, k, v = torch.randn(3, 2, 5, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    weights = attention_weights(q, k, kind="softmax", key_padding_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), attn_mask=mask[:, None, None, :]
    )
    torch.testing.assert_close(torch.einsum("bhnm,bmhd->bhnd", weights, v), expected)


def test_queries_on_a_ray_collide_under_linear_attention_only():
    ray = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)[None, :, None, None] * torch.rand(1, 1, 1, 4).double()
    k = torch.rand(1, 6, 1, 4, dtype=torch.float64)
    spread = {
        kind: (weights := attention_weights(ray, k, kind=kind)[0, 0]).sub(weights[0]).abs().max().item()
        for kind in ("linear", "inline", "softmax")
    }
    assert spread["linear"] < 1e-12
    assert spread["inline"] > 1e-3
    assert spread["softmax"] > 1e-3


def test_inline_confuses_two_queries_exactly_when_the_centered_keys_lack_rank():
    q = torch.randn(1, 2, 1, 3, dtype=torch.float64)
    flat = torch.randn(1, 8, 1, 3, dtype=torch.float64)
    flat[..., 2] = 1.0  # all keys in a plane: rank [K, 1] = 3, not 4
    q[0, 1] = q[0, 0]
    q[0, 1, 0, 2] += 1.0  # differs only along the plane's normal
    weights = attention_weights(q, flat)[0, 0]
    torch.testing.assert_close(weights[0], weights[1])
    flat[0, 0, 0, 2] = 2.0  # one key leaves the plane
    weights = attention_weights(q, flat)[0, 0]
    assert (weights[0] - weights[1]).abs().max() > 1e-3


def test_inline_weights_may_be_negative():
    q = torch.tensor([[[[10.0]]]])
    k = torch.tensor([-1.0, 0.0, 1.0]).view(1, 3, 1, 1)
    assert attention_weights(q, k)[0, 0, 0, 0] < 0
