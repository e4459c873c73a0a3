"""Attention inside neighborhoods against a count by hand."""

import pytest
import torch

from analysis.small_models import small_model
from inline_attention.analysis.locality import average, measure_locality
from inline_attention.analysis.probes import capture_attention, neighborhood_mask

CASES = [("inline_deit_tiny", 0, (20, 28)), ("softmax_deit_tiny", 1, (20, 28)), ("inline_cswin_tiny", 1, (40, 72))]


def effective_rows(layer, image, head):
    """Rows of every channel, the local kernel added: `[D, N, N]`, by hand."""
    rows = layer.rows(image, head).repeat(layer.head_dim, 1, 1)
    if layer.local_weight is None:
        return rows
    height, width = layer.grid_size
    prefix = layer.num_prefix_tokens
    reach = layer.reach(head)
    for token in range(height * width):
        for tap in range(9):
            row, column = token // width + tap // 3 - 1, token % width + tap % 3 - 1
            other = row * width + column
            if 0 <= row < height and 0 <= column < width and (reach is None or reach[prefix + token, prefix + other]):
                kernel = layer.local_weight[image, head, :, tap // 3, tap % 3]
                rows[:, prefix + token, prefix + other] += kernel
    return rows


@pytest.mark.parametrize(("name", "index", "size"), CASES)
def test_share_and_sum_are_those_of_the_definition(name, index, size):
    (layer,) = capture_attention(small_model(name), torch.randn(2, 3, *size), layers=[index])
    measured = {(item.local_term, item.side): item for item in measure_locality(layer, 1, 1, sides=(3, 5))}
    assert len(measured) == (4 if layer.local_weight is not None else 2)
    prefix = layer.num_prefix_tokens
    reach = layer.reach(1)
    reach = torch.ones(layer.num_tokens, layer.num_tokens, dtype=torch.bool) if reach is None else reach
    variants = {"without": layer.rows(1, 1)[None], "with": effective_rows(layer, 1, 1)}
    for (local_term, side), item in measured.items():
        near = neighborhood_mask(layer.grid_size, prefix, side) & reach
        rows = variants[local_term]
        share = (rows.abs() * near).sum(2) / rows.abs().sum(2)
        assert item.share == pytest.approx(share[:, prefix:].mean().item(), rel=1e-6)
        assert item.signed == pytest.approx((rows * near).sum(2)[:, prefix:].mean().item(), rel=1e-5, abs=1e-7)
        assert item.uniform == pytest.approx((near.sum(1) / reach.sum(1))[prefix:].mean().item())
        assert (item.layer, item.head, item.attention) == (index, 1, layer.rule.kind)


def test_attention_to_itself_alone_is_all_local():
    (layer,) = capture_attention(small_model("softmax_deit_tiny"), torch.randn(1, 3, 20, 20), layers=[0])
    eye = 100 * torch.eye(layer.num_tokens)[None, :, None]
    object.__setattr__(layer, "q", eye)
    object.__setattr__(layer, "k", eye)
    assert [item.share for item in measure_locality(layer, 0, 0)] == pytest.approx([1, 1, 1])


def test_images_are_averaged_per_head():
    model = small_model("inline_deit_tiny")
    (layer,) = capture_attention(model, torch.randn(2, 3, 20, 20), layers=[0])
    single = [item for image in (0, 1) for head in (0, 1) for item in measure_locality(layer, image, head, sides=(3,))]
    averaged = average(single)
    assert [(item.head, item.local_term) for item in averaged] == [
        (0, "without"),
        (0, "with"),
        (1, "without"),
        (1, "with"),
    ]
    assert averaged[1].share == pytest.approx((single[1].share + single[5].share) / 2)


def test_a_side_that_cannot_hold_the_kernel_is_refused():
    (layer,) = capture_attention(small_model("inline_deit_tiny"), torch.randn(1, 3, 20, 20), layers=[0])
    with pytest.raises(ValueError, match="at least 3 tokens wide"):
        list(measure_locality(layer, 0, 0, sides=(1,)))
