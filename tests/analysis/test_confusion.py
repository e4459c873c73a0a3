"""Confusions are counted where they are known, and nowhere else."""

import pytest
import torch

from inline_attention.analysis.confusion import (
    TOLERANCES,
    ConfusedImage,
    by_image,
    connected_groups,
    count_confusion,
    pairwise_difference,
    worst_images,
)
from inline_attention.analysis.probes import LayerAttention, MixingRule

GRID = (2, 4)


def layer_of(q, rule, *, prefix=0, groups=None, grid=GRID):
    """A layer of one image and one head with given queries `[N, D]` and ordinary keys."""
    k = torch.randn(len(q), q.shape[1], generator=torch.Generator().manual_seed(5))
    tokens = [tensor[None, :, None] for tensor in (q, k, k)]
    return LayerAttention("blocks.2.attn", 2, rule, *tokens, None, None, grid, prefix, groups)


def queries_with_a_ray():
    """Eight queries in three dimensions: numbers 1, 3 and 6 lie on one ray, all others point elsewhere."""
    q = torch.randn(8, 3, generator=torch.Generator().manual_seed(2)).abs()
    q[3], q[6] = 2.0 * q[1], 0.4 * q[1]
    return q


RULES = {
    "linear": MixingRule("divide", "relu", 0.6),
    "inline": MixingRule("subtract", "identity", 0.6),
    "softmax": MixingRule(None, "identity", 0.6),
}


@pytest.mark.parametrize("kind", RULES)
def test_collinear_queries_are_confused_by_division_alone(kind):
    layer = layer_of(queries_with_a_ray(), RULES[kind])
    count, confused = count_confusion(layer, 0, 0, "picture", tolerance=1e-4)
    pairs = [(1, 3), (1, 6), (3, 6)] if kind == "linear" else []
    assert [tuple(pair) for pair in confused.triu(1).nonzero().tolist()] == pairs
    assert (count.confused_pairs, count.confused_tokens) == (len(pairs), len(pairs))
    assert (count.image, count.layer, count.attention, count.tokens) == ("picture", 2, kind, 8)
    assert count.distinct_pairs == 8 * 7 // 2
    assert list(count.by_tolerance) == sorted(count.by_tolerance)
    assert count.by_tolerance[TOLERANCES.index(1e-4)] == len(pairs)


def test_queries_that_relu_maps_to_zero_are_confused_and_uniform():
    q = queries_with_a_ray()
    q[0], q[5] = -q[0], -3 * q[5]
    layer = layer_of(q, RULES["linear"])
    torch.testing.assert_close(layer.rows(0, 0)[0], torch.full((8,), 1 / 8).double())
    _, confused = count_confusion(layer, 0, 0, tolerance=1e-4)
    assert confused[0].nonzero().flatten().tolist() == [5]


def test_equal_queries_are_not_confused():
    q = queries_with_a_ray()[[0, 1, 2, 0, 1, 2, 0, 1]]
    count, _ = count_confusion(layer_of(q, RULES["softmax"]), 0, 0, tolerance=1e-2)
    assert count.confused_pairs == 0
    assert count.distinct_pairs == 28 - (3 + 3 + 1)


def test_nearly_uniform_rows_differ_by_their_deviations():
    layer = layer_of(1e-4 * queries_with_a_ray(), RULES["inline"])
    rows = layer.rows(0, 0)
    assert pairwise_difference(rows).max() < 1e-3
    count, _ = count_confusion(layer, 0, 0, tolerance=1e-2)
    assert count.confused_pairs == 0


def test_tokens_of_different_windows_are_never_confused():
    q = queries_with_a_ray()
    groups = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    _, confused = count_confusion(layer_of(q, RULES["linear"], groups=groups), 0, 0, tolerance=1e-4)
    assert [tuple(pair) for pair in confused.triu(1).nonzero().tolist()] == [(1, 3)]


def test_pairwise_difference_is_the_definition():
    rows = torch.randn(6, 9, dtype=torch.float64)
    rows[2] = 0
    expected = torch.tensor(
        [
            [((a - b).norm() / max(a.norm(), b.norm())).item() if i != j else 0.0 for j, b in enumerate(rows)]
            for i, a in enumerate(rows)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(pairwise_difference(rows), expected)
    assert pairwise_difference(torch.zeros(3, 2)).max() == 0


def test_groups_are_connected_and_numbered_by_size():
    confused = torch.zeros(9, 9, dtype=torch.bool)
    for first, second in ((0, 4), (5, 6), (6, 7), (7, 8)):
        confused[first, second] = confused[second, first] = True
    assert connected_groups(confused).tolist() == [2, 0, 0, 0, 2, 1, 1, 1, 1]


def test_the_picture_of_an_image_leaves_prefix_tokens_out():
    q = torch.cat([torch.ones(1, 3), queries_with_a_ray()])
    layer = layer_of(q, RULES["linear"], prefix=1)
    count, confused = count_confusion(layer, 0, 0, tolerance=1e-4)
    assert count.tokens == 9
    groups = connected_groups(confused)[layer.num_prefix_tokens :].view(layer.grid_size)
    assert groups.tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]


def test_only_the_worst_images_are_kept():
    images = [
        ConfusedImage(name, torch.zeros(3, 2, 2), pairs, 0, 0, torch.zeros(1, 1))
        for name, pairs in (("a", 3), ("b", 0), ("c", 9), ("d", 3), ("e", 1))
    ]
    assert [image.name for image in worst_images(images, 2)] == ["c", "a"]
    assert [image.name for image in worst_images(images, 9)] == ["c", "a", "d", "e"]


def test_pairs_are_added_up_per_image():
    layer = layer_of(queries_with_a_ray(), RULES["linear"])
    counts = [count_confusion(layer, 0, 0, name, tolerance=1e-4)[0] for name in ("a", "b", "a")]
    assert {image.image: image.confused_pairs for image in by_image(counts)} == {"a": 6, "b": 3}
