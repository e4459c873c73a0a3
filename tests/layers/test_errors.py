"""Bad arguments of layers: a ValueError that names what was expected, what came, and what to do."""

import pytest
import torch

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.layers.window_attention import StripeAttention, WindowAttention

LAYERS = [InLineAttention, LinearAttention, SoftmaxAttention]
X = torch.randn(2, 9, 8)
MAKE = {
    "inline": lambda: InLineAttention(8, 2),
    "linear": lambda: LinearAttention(8, 2),
    "softmax": lambda: SoftmaxAttention(8, 2),
    "window": lambda: WindowAttention(8, 2, window_size=2, shifted=True),
    "stripe": lambda: StripeAttention(8, 2, stripe_width=1),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("value", [-1, True, False, "1", 1.0, None, [1]])
def test_prefix_tokens_are_checked_at_construction(layer, value):
    with pytest.raises(ValueError, match="num_prefix_tokens must be an integer ≥ 0, got"):
        layer(8, 2, num_prefix_tokens=value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 0), "num_heads must be an integer ≥ 1"),
        ((0, 1), "dim must be an integer ≥ 1"),
        ((-8, 2), "dim must be an integer ≥ 1"),
        (("8", 2), "dim must be an integer ≥ 1"),
        ((8, 2.0), "num_heads must be an integer ≥ 1"),
        ((8, True), "num_heads must be an integer ≥ 1"),
        ((8, 3), "dim must be divisible by num_heads"),
    ],
)
def test_sizes_are_checked_at_construction(arguments, message):
    for layer in LAYERS:
        with pytest.raises(ValueError, match=message):
            layer(*arguments)
    with pytest.raises(ValueError, match=message):
        WindowAttention(*arguments, window_size=2, shifted=False)
    with pytest.raises(ValueError, match=message):
        StripeAttention(*arguments, stripe_width=None)


def test_windows_are_checked_at_construction():
    for size in (0, -2, 2.0, True, None):
        with pytest.raises(ValueError, match="window_size must be an integer ≥ 1"):
            WindowAttention(8, 2, window_size=size, shifted=False)
    for width in (0, -2, 2.0, True):
        with pytest.raises(ValueError, match="stripe_width must be an integer ≥ 1"):
            StripeAttention(8, 2, stripe_width=width)
    for rate in (-0.1, 1.5, float("nan"), "0"):
        with pytest.raises(ValueError, match="attn_drop must be a number from 0 to 1"):
            WindowAttention(8, 2, window_size=2, shifted=False, attn_drop=rate)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, r"x must be a torch\.Tensor, got NoneType"),
        ([1.0], r"x must be a torch\.Tensor, got list"),
        (X.to_sparse(), r"x must be a dense tensor, got torch\.sparse_coo"),
        (torch.nested.nested_tensor(list(X)), "x must be a dense tensor, got a nested one"),
        (torch.nested.nested_tensor(list(X), layout=torch.jagged), "x must be a dense tensor, got a nested one"),
        (X.long(), r"x must be float64, float32, bfloat16 or float16, got torch\.int64"),
        (X[0], r"x must be \[B, N, 8\], got shape \(9, 8\)"),
        (X[..., :6], r"x must be \[B, N, 8\]"),
    ],
)
def test_inputs_are_checked(name, x, message):
    with pytest.raises(ValueError, match=message):
        MAKE[name]()(x, (3, 3))


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("grid_size", "message"),
    [
        ((2, 3), r"0 \+ 2·3 = 6 ≠ 9"),
        (9, r"grid_size must be a pair"),
        ((3.0, 3), "two integers ≥ 1"),
        ((-3, -3), "two integers ≥ 1"),
        ("33", "grid_size must be a pair"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_with_and_without_a_local_term(name, grid_size, message):
    with pytest.raises(ValueError, match=message):
        MAKE[name]()(X, grid_size)


def test_a_prefix_without_a_local_term_changes_nothing():
    layer = LinearAttention(8, 2, num_prefix_tokens=5)
    torch.testing.assert_close(layer(X, (2, 2)), layer(X))
    with pytest.raises(ValueError, match=r"5 \+ 3·3 = 14 ≠ 9"):
        layer(X, (3, 3))


def test_masks_and_local_inputs_are_checked():
    layer = InLineAttention(8, 2)
    for mask in (torch.ones(2, 9), [[True]], torch.ones(2, 8).bool(), torch.ones(2, 9).bool().to_sparse()):
        with pytest.raises(ValueError, match="key_padding_mask must be"):
            layer(X, (3, 3), mask)
    for mask in ([[True]], torch.ones(2, 1, 1, 9).bool().to_sparse(), torch.ones(2, 9).bool()):
        with pytest.raises(ValueError, match="attn_mask must be"):
            layer(X, attn_mask=mask)
    for local_input in (None, X[:1], X[..., :4], [1.0], X.to_sparse()):
        if local_input is not None:
            with pytest.raises(ValueError, match="local_input must"):
                layer(X, (3, 3), local_input=local_input)
