"""Maps of single tokens, and where they are taken from."""

import pytest
import torch

from analysis.small_models import CSWIN, DEIT, SWIN
from inline_attention.analysis.attention_map import (
    corresponding_tokens,
    interesting_tokens,
    kernel_rows,
    measure_attention_maps,
    weight_rows,
)
from inline_attention.analysis.probes import capture_attention
from inline_attention.analysis.subjects import untrained_subject


def subject_of(name, size, **arguments):
    return untrained_subject(name, size=size, device="cpu", **arguments)


def pixels_of(*size):
    return torch.randint(0, 256, (3, *size), dtype=torch.uint8)


def test_a_map_is_the_mean_row_of_its_heads():
    subject, pixels = subject_of("inline_deit_tiny", (20, 28), **DEIT), pixels_of(20, 28)
    maps = measure_attention_maps(subject, pixels, layer=-1, tokens=[(2, 3), (0, 6)])
    (layer,) = capture_attention(subject.model, subject.normalize(pixels[None]), layers=[1])
    expected = (layer.rows(0, 0) + layer.rows(0, 1))[1 + 2 * 7 + 3] / 2
    first, second = maps.maps
    assert (maps.layer, maps.layer_name, maps.heads, maps.grid_size) == (1, "blocks.1.attn", (0, 1), (5, 7))
    torch.testing.assert_close(first.weights.flatten(), expected[1:])
    torch.testing.assert_close(first.prefix_weights, expected[:1])
    assert second.token == (0, 6)
    assert first.uniform == pytest.approx(1 / 36)
    assert (first.times_uniform.sum() + first.prefix_weights.sum() * 36).item() == pytest.approx(36)
    torch.testing.assert_close(maps.kernels, layer.local_weight[0].double().mean(1))
    single = measure_attention_maps(subject, pixels, layer=-1, heads=[1], tokens=[(2, 3)])
    torch.testing.assert_close(single.maps[0].weights.flatten(), layer.rows(0, 1)[18, 1:])
    assert single.kernels.shape == (1, 3, 3)


@pytest.mark.parametrize(("name", "arguments"), [("softmax_swin_tiny", SWIN), ("softmax_cswin_tiny", CSWIN)])
def test_weights_outside_of_windows_are_zero_and_uniform_counts_what_is_inside(name, arguments):
    maps = measure_attention_maps(subject_of(name, (40, 72), **arguments), pixels_of(40, 72), layer=0, tokens=[(4, 4)])
    (token_map,) = maps.maps
    inside = (token_map.weights > 0).float()
    if "cswin" in name:  # a column of 10 for one head, a row of 18 for the other
        assert inside.sum() == 10 + 18 - 1
        assert token_map.uniform == pytest.approx((1 / 10 + 1 / 18) / 2)
        assert maps.kernels is not None
    else:
        assert inside.sum() == 9
        assert inside[3:6, 3:6].all()
        assert token_map.uniform == pytest.approx(1 / 9)
        assert maps.kernels is None


def test_interesting_tokens_have_contrast_and_keep_their_distance():
    pixels = torch.full((3, 80, 120), 100, dtype=torch.uint8)
    for row, column in ((2, 2), (2, 3), (5, 9)):
        pixels[:, row * 10 : row * 10 + 5, column * 10 : column * 10 + 10] = 255
    assert interesting_tokens(pixels, (8, 12), count=2) in ([(2, 2), (5, 9)], [(2, 3), (5, 9)])
    assert len(interesting_tokens(pixels, (1, 2))) == 2
    noise = torch.randint(0, 256, (3, 80, 120), dtype=torch.uint8)
    assert all(0 < row < 7 and 0 < column < 11 for row, column in interesting_tokens(noise, (8, 12)))


def test_tokens_of_another_grid_lie_at_the_same_place():
    assert corresponding_tokens([(0, 0), (3, 3), (1, 2)], (4, 4), (8, 8)) == [(1, 1), (7, 7), (3, 5)]
    assert corresponding_tokens([(13, 7)], (14, 14), (7, 7)) == [(6, 3)]
    subject = subject_of("inline_deit_tiny", (20, 28), **DEIT)
    maps = measure_attention_maps(subject, pixels_of(20, 28), tokens=[(9, 13)], token_grid=(10, 14))
    assert maps.maps[0].token == (4, 6)


def test_rows_of_result_files_hold_every_weight():
    subject = subject_of("inline_deit_tiny", (20, 20), **DEIT)
    maps = measure_attention_maps(subject, pixels_of(20, 20), tokens=[(1, 1), (2, 4)])
    rows = list(weight_rows([maps]))
    assert len(rows) == 2 * 25
    found = next(r for r in rows if (r["token_row"], r["token_column"], r["key_row"], r["key_column"]) == (2, 4, 3, 0))
    assert found["weight"] == maps.maps[1].weights[3, 0].item()
    kernels = list(kernel_rows([maps]))
    assert [row["weight"] for row in kernels] == maps.kernels.flatten().tolist()
    assert kernels[10] == {
        "model": "inline_deit_tiny", "layer": 1, "head": 1, "kernel_row": 0, "kernel_column": 1,
        "weight": maps.kernels[1, 0, 1].item(),
    }  # fmt: skip
