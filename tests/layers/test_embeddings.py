"""A patch convolution as a matrix product: the same numbers."""

import pytest
import torch
from torch import nn

from inline_attention.layers.embeddings import PatchConvolution

CASES = [(3, 16, (32, 48)), (3, 2, (32, 32)), (64, 2, (14, 10))]


@pytest.mark.parametrize(("channels", "side", "size"), CASES)
def test_a_patch_convolution_is_a_matrix_product(channels, side, size):
    torch.manual_seed(0)
    layer = PatchConvolution(channels, 24, side).double()
    image = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)
    expected = nn.functional.conv2d(image, layer.weight, layer.bias, stride=side)
    got = layer._product(image)
    torch.testing.assert_close(got, expected)
    wanted = (image, layer.weight, layer.bias)
    grad = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
