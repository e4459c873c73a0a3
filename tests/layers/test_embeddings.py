"""Patch convolutions as matrix products, and position embeddings of very large grids: the same numbers."""

import pytest
import torch
from torch import nn

from inline_attention.layers import grids
from inline_attention.layers.embeddings import PatchConvolution

CASES = [(3, 16, (32, 48)), (3, 2, (32, 32)), (64, 2, (14, 10))]


@pytest.mark.parametrize(("channels", "side", "size"), CASES)
def test_a_patch_convolution_is_a_matrix_product(channels, side, size):
    torch.manual_seed(0)
    layer = PatchConvolution(channels, 24, side, stride=side).double()
    image = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)
    expected = nn.functional.conv2d(image, layer.weight, layer.bias, stride=side)
    got = layer.as_product(image)
    torch.testing.assert_close(got, expected)
    wanted = (image, layer.weight, layer.bias)
    grad = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("most", [1, 35 * 3, 35 * 8 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_are_interpolated_in_pieces(monkeypatch, most, dtype):
    positions = torch.randn(1, 1 + 3 * 4, 8, dtype=dtype)
    whole = grids.resample_positions(positions, (3, 4), (5, 7), num_prefix_tokens=1)
    monkeypatch.setattr(grids, "MOST_INTERPOLATED", most)
    sizes = []
    interpolate = grids._interpolated
    monkeypatch.setattr(
        grids, "_interpolated", lambda image, size: sizes.append(image.shape[1]) or interpolate(image, size)
    )
    torch.testing.assert_close(grids.resample_positions(positions, (3, 4), (5, 7), num_prefix_tokens=1), whole)
    assert sum(sizes) == 8
    assert all(size == 1 or size * 35 <= most for size in sizes)
    assert len(sizes) > 1


@pytest.mark.gpu
def test_positions_of_more_than_two_to_the_31_elements():
    positions = torch.randn(1, 14 * 14, 132, device="cuda", dtype=torch.bfloat16)
    resampled = grids.resample_positions(positions, (14, 14), (4096, 4096))
    assert resampled.numel() > 2**31
    some = grids.resample_positions(positions[..., -4:], (14, 14), (4096, 4096))
    torch.testing.assert_close(resampled[..., -4:], some)
