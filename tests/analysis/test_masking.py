"""Hidden tokens have no influence on their query; what is left is normalised as if they had never been there."""

import pytest
import torch

from analysis.small_models import small_model
from inline_attention.analysis import masking
from inline_attention.analysis.masking import (
    Hiding,
    hidden_keys,
    hidden_tokens,
    measure_masking,
    mixed_values,
    planned_hidings,
)
from inline_attention.analysis.probes import capture_attention, neighborhood_mask
from inline_attention.data.batch import Batch
from inline_attention.ops.reference import kernel_weights, softmax_weights

LOCAL = Hiding("neighborhood", 3, "hidden")
RANDOM = Hiding("random", 3, "hidden")


def layer_of(name, size=(20, 28), index=0, batch=2):
    (layer,) = capture_attention(small_model(name), torch.randn(batch, 3, *size), layers=[index])
    return layer


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "softmax_deit_tiny", "linear_deit_tiny"])
@pytest.mark.parametrize("hide_from_local_term", [True, False])
def test_masked_values_are_those_of_brute_force(name, hide_from_local_term):
    layer = layer_of(name)
    hidden = hidden_keys(layer, LOCAL, generator())
    mixed = mixed_values(layer, hidden, hide_from_local_term=hide_from_local_term)
    mixed = mixed.unflatten(2, (layer.num_heads, layer.head_dim))
    image, head, width = 1, 1, layer.grid_size[1]
    for token in range(layer.num_tokens):
        # The reference hides keys from a whole sample: one query at a time is a sample.
        q, k = layer.q[image, token, head].view(1, 1, 1, -1), layer.k[image, :, head].view(1, -1, 1, layer.head_dim)
        visible = ~hidden[head, token][None]
        rule = layer.rule
        if rule.normalization is None:
            weights = softmax_weights(q, k, rule.scale, visible)
        else:
            weights = kernel_weights(q, k, rule.scale, rule.feature_map, rule.normalization, visible)
        expected = weights[0, 0, 0] @ layer.v[image, :, head].double()
        if layer.local_weight is not None and token > 0 and not hide_from_local_term:
            row, column = (token - 1) // width, (token - 1) % width
            for tap in range(9):
                i, j = row + tap // 3 - 1, column + tap % 3 - 1
                if 0 <= i < layer.grid_size[0] and 0 <= j < width:
                    kernel = layer.local_weight[image, head, :, tap // 3, tap % 3]
                    expected = expected + kernel * layer.v[image, 1 + i * width + j, head]
        torch.testing.assert_close(mixed[image, token, head].double(), expected.double(), rtol=1e-3, atol=1e-4)


def test_a_hidden_token_changes_nothing():
    """Values of hidden tokens may be anything, NaN excepted."""
    layer = layer_of("inline_deit_tiny")
    hidden = hidden_keys(layer, LOCAL, generator())
    before = mixed_values(layer, hidden)
    token = layer.token(2, 3)
    neighbors = hidden[0, token].nonzero().flatten()
    layer.v[:, neighbors] += 100
    changed = (mixed_values(layer, hidden) - before).abs().amax((0, 2))
    assert changed[token] == 0
    assert changed[layer.token(0, 0)] > 1


@pytest.mark.parametrize(
    ("name", "size", "index"),
    [("inline_deit_tiny", (20, 28), 0), ("softmax_swin_tiny", (40, 72), 1), ("softmax_cswin_tiny", (40, 72), 1)],
)
def test_as_many_random_tokens_are_hidden(name, size, index):
    layer = layer_of(name, size, index)
    local, random = (hidden_keys(layer, hiding, generator()) for hiding in (LOCAL, RANDOM))
    assert torch.equal(local.sum(2), random.sum(2))
    assert not torch.equal(local, random)
    near = neighborhood_mask(layer.grid_size, layer.num_prefix_tokens, 3)
    for head in range(layer.num_heads):
        reach = layer.reach(head)
        assert torch.equal(local[head], near if reach is None else near & reach)
        assert reach is None or not (random[head] & ~reach).any()
    prefix = layer.num_prefix_tokens
    for hidden in (local, random):
        assert not hidden[:, :prefix].any()  # class tokens lose nothing
        assert not hidden[:, :, :prefix].any()  # and are not lost


def test_random_tokens_depend_on_the_seed_and_on_nothing_else():
    model = small_model("inline_deit_tiny")
    images = torch.randn(2, 3, 20, 20)

    def logits(seed):
        with torch.no_grad(), hidden_tokens(model, RANDOM, seed=seed):
            return model(images)

    first = logits(1)
    torch.rand(3)
    assert torch.equal(logits(1), first)
    assert not torch.allclose(logits(2), first)
    with torch.no_grad():
        assert not torch.allclose(model(images), first)


def test_a_small_memory_gives_the_same(monkeypatch):
    layer = layer_of("inline_deit_tiny", batch=3)
    hidden = hidden_keys(layer, LOCAL, generator())
    whole = mixed_values(layer, hidden)
    monkeypatch.setattr(masking, "BYTES_AT_ONCE", 1)
    torch.testing.assert_close(mixed_values(layer, hidden), whole)


def test_plans_treat_the_local_term_both_ways_only_where_there_is_one():
    plan = planned_hidings(small_model("softmax_deit_tiny"), [3, 5])
    assert [(hiding.where, hiding.side) for hiding in plan] == [
        ("nothing", 0), ("neighborhood", 3), ("random", 3), ("neighborhood", 5), ("random", 5),
    ]  # fmt: skip
    assert {hiding.local_term for hiding in plan} == {"none"}
    assert [hiding.local_term for hiding in planned_hidings(small_model("inline_deit_tiny"), [3])] == [
        "kept", "hidden", "hidden", "kept", "kept",
    ]  # fmt: skip


def test_accuracy_is_counted_over_all_batches():
    model = small_model("inline_deit_tiny")
    images = torch.randn(5, 3, 20, 20)
    with torch.no_grad():
        targets = model(images).argmax(1)
    targets[0] = (targets[0] + 1) % 3
    batches = [Batch(0, n, images[part], targets[part], part) for n, part in enumerate(torch.arange(5).split(2))]
    results = measure_masking(model, lambda: batches, sides=[3])
    assert (results[0].hiding.where, results[0].top1, results[0].drop) == ("nothing", 80.0, 0.0)
    assert all(result.baseline_top1 == 80 and result.images == 5 for result in results)
    assert results[0].standard_error == pytest.approx(100 * (0.8 * 0.2 / 5) ** 0.5)
    with pytest.raises(ValueError, match="no image to evaluate on"):
        measure_masking(model, lambda: [], sides=[3])
