"""docs/math.md, section 8: InLine attention is softmax attention, cut after the second cumulant."""

import pytest
import torch

from inline_attention import inline_attention


def softmax_attention(q, k, v, scale):
    """Softmax attention of `[N, D]` queries over `[M, D]` keys."""
    return torch.softmax(scale * q @ k.T, dim=-1) @ v


def one_head(attention, q, k, v, scale, **options):
    return attention(q[None, :, None], k[None, :, None], v[None, :, None], scale=scale, **options)[0, :, 0]


def drawn(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def gaussian_pairs(count, dim, seed):
    """`count` keys and values with a joint normal distribution, mixed and shifted."""
    mixing, shift = drawn((2 * dim, 2 * dim), (2 * dim,), seed=1)
    (noise,) = drawn((count, 2 * dim), seed=seed)
    return (noise @ mixing.T / (2 * dim) ** 0.5 + shift).split(dim, dim=1)


def test_the_first_derivative_along_the_scale_is_inline():
    q, k, v = drawn((5, 8), (40, 8), (40, 8))
    step = 1e-4
    derivative = (softmax_attention(q, k, v, step) - softmax_attention(q, k, v, -step)) / (2 * step)
    torch.testing.assert_close(v.mean(0) + derivative, one_head(inline_attention, q, k, v, 1.0), rtol=1e-6, atol=1e-6)


def test_the_error_is_half_the_third_cumulant_for_small_scores():
    q, k, v = drawn((5, 8), (40, 8), (40, 8))
    scale = 1e-3
    scores = scale * q @ k.T
    third = ((scores - scores.mean(1, keepdim=True)) ** 2 @ (v - v.mean(0))) / len(k)
    error = softmax_attention(q, k, v, scale) - one_head(inline_attention, q, k, v, scale)
    assert torch.linalg.norm(error - third / 2) < 0.01 * torch.linalg.norm(error)


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_error_stays_below_the_bound(scale, seed):
    q, k, v = drawn((20, 4), (30, 4), (30, 6), seed=seed)
    scores = scale * q @ k.T
    bound = (scores.amax(1) - scores.amin(1)) ** 2 / 8 * torch.cdist(v, v).max()
    error = softmax_attention(q, k, v, scale) - one_head(inline_attention, q, k, v, scale)
    assert (torch.linalg.norm(error, dim=1) <= bound * (1 + 1e-9)).all()


def test_gaussian_keys_and_values_leave_an_error_of_one_over_root_m():
    """A hundred times the keys: a tenth of the deviation, up to the luck of 24 draws."""
    (q,) = drawn((16, 8))
    scale = 8**-0.5
    deviation = {"subtract": [], "divide": []}
    for count in (1_000, 100_000):
        for normalization, found in deviation.items():
            relative = []
            for seed in range(24):
                k, v = gaussian_pairs(count, 8, seed=100 + seed)
                softmax = softmax_attention(q, k, v, scale)
                other = one_head(inline_attention, q, k, v, scale, normalization=normalization)
                relative.append(torch.linalg.norm(other - softmax) / torch.linalg.norm(softmax - v.mean(0)))
            found.append(torch.stack(relative).square().mean().sqrt())
    few, many = deviation["subtract"]
    assert 6 < few / many < 16
    assert deviation["divide"][1] > 0.5 > 10 * many  # linear attention stays away from softmax, with any number of keys


def test_a_shift_of_all_keys_changes_linear_attention_only():
    q, k, v = drawn((5, 8), (40, 8), (40, 8))
    shift = 3.0
    torch.testing.assert_close(softmax_attention(q, k + shift, v, 1.0), softmax_attention(q, k, v, 1.0))
    torch.testing.assert_close(
        one_head(inline_attention, q, k + shift, v, 1.0), one_head(inline_attention, q, k, v, 1.0)
    )
    linear = one_head(inline_attention, q, k, v, 1.0, normalization="divide")
    assert not torch.allclose(
        one_head(inline_attention, q, k + shift, v, 1.0, normalization="divide"), linear, atol=0.1
    )
