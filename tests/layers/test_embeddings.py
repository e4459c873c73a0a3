"""A patch convolution as a matrix product: the same numbers, and nothing kept for the backward pass but the images."""

import pytest
import torch
from torch import nn

from inline_attention.layers.embeddings import PatchConvolution, embed_again_for_gradients

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


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_patches_are_not_kept(compiled):
    layer = PatchConvolution(3, 8, 16).cuda()
    images = torch.randn(16, 3, 512, 512, device="cuda")
    runnable = embed_again_for_gradients
    if compiled:
        runnable = torch.compile(runnable, fullgraph=True)

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            return runnable(layer, images)

    run().sum().backward()
    before = torch.cuda.memory_allocated()
    out = run()
    kept = torch.cuda.memory_allocated() - before
    assert kept < 1.5 * out.numel() * out.element_size()
    layer.zero_grad()
    out.float().square().sum().backward()
    exact = nn.Conv2d(3, 8, 16, 16).cuda().double()
    exact.load_state_dict(layer.double().state_dict())
    exact(images.double()).square().sum().backward()
    for name in ("weight", "bias"):
        got, expected = getattr(layer, name).grad.double(), getattr(exact, name).grad
        assert (got - expected).norm() < 1e-2 * expected.norm()
