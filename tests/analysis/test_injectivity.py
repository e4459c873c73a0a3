"""Collisions are found where there are some, and only there; the rank condition says the same."""

import pytest
import torch

from analysis.small_models import small_model
from inline_attention.analysis.injectivity import (
    DISTINCT_QUERIES,
    EQUAL_ROWS,
    POSITIVE_MAPS,
    collision_rate,
    constructed_partners,
    key_condition,
    measure_collisions,
    measure_key_condition,
    relative_difference,
    rules_to_try,
    search_partner,
    weight_gradients,
)
from inline_attention.analysis.probes import MixingRule, capture_attention
from inline_attention.ops.feature_maps import FEATURE_MAPS

RULES = rules_to_try(MixingRule(None, "identity", 0.5))


def rule_id(rule):
    return f"{rule.kind}-{rule.feature_map_name}"


def random_queries_and_keys(queries=6, keys=30, dim=5):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(queries, dim, generator=generator, dtype=torch.float64)
    return q, torch.randn(keys, dim, generator=generator, dtype=torch.float64)


def expected_collisions(rule, q):
    """Of docs/math.md: division always; ReLU for queries with a negative coordinate; nothing else on ordinary keys."""
    if rule.kind == "linear":
        return len(q)
    return int((q < 0).any(1).sum()) if rule.feature_map == "relu" else 0


def square(x):
    return x**2


def test_all_rules_are_tried():
    assert len({rule_id(rule) for rule in RULES}) == 1 + 2 * len(FEATURE_MAPS) + 2


@pytest.mark.parametrize("feature_map", ["identity", "leaky_relu", square])
def test_a_layers_own_rule_is_always_tried(feature_map):
    own = MixingRule("magnitude", feature_map, 0.5)
    assert rules_to_try(own) == [*RULES, own]
    assert rules_to_try(RULES[3]) == RULES


@pytest.mark.parametrize("rule", [*RULES, MixingRule("divide", square, 0.5)], ids=rule_id)
def test_derivatives_of_weights_are_those_of_autograd(rule):
    q, k = random_queries_and_keys()
    rounding = 1e-9 if isinstance(rule.feature_map, str) else 1e-4  # callables compute in float32
    for query, found in zip(q, weight_gradients(rule, q, k), strict=True):
        expected = torch.autograd.functional.jacobian(lambda x: rule.weights(x[None], k)[0], query)
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * expected.abs().max().item())


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_collisions_on_ordinary_keys_are_those_of_the_propositions(rule):
    q, k = random_queries_and_keys()
    q[0] = q[0].abs()
    rate = collision_rate(rule, q, k)
    expected = expected_collisions(rule, q)
    assert (rate.constructed, rate.found, rate.colliding) == (expected, expected, expected)
    assert (rate.smallest_difference <= EQUAL_ROWS) == (expected > 0)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.feature_map in ("identity", "leaky_relu")], ids=rule_id
)
def test_nearly_uniform_rows_are_not_equal_for_that_reason(rule):
    q, k = random_queries_and_keys()
    q *= 1e-7  # as far from what untrained models say as that is from saying a lot
    rate = collision_rate(rule, q, k)
    assert rate.colliding == expected_collisions(rule, q)
    if rule.kind != "linear":
        rows = rule.weights(q, k)
        assert relative_difference(rows[:1], rows).max() < 1e-6
        assert rate.smallest_difference > 1e-3


@pytest.mark.parametrize("normalization", ["divide", "subtract"])
def test_rows_that_are_exactly_uniform_are_equal(normalization):
    q, k = random_queries_and_keys()
    rule = MixingRule(normalization, "relu", 0.5)
    rate = collision_rate(rule, -q.abs(), k)
    assert rate.colliding == len(q)
    assert rate.smallest_difference == 0


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_partners_are_distinct_queries(rule):
    q, k = random_queries_and_keys()
    q[:, 0] = q[:, 0].abs() + 1  # no query is all negative: to ReLU it would be zero, and so would its double
    parallel = constructed_partners(rule, q, k)[0]
    torch.testing.assert_close(rule.features(parallel), 2 * rule.features(q))
    for partner in (parallel, search_partner(rule, q, k)):
        assert (relative_difference(partner, q) >= DISTINCT_QUERIES).all()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.feature_map == "identity"], ids=rule_id)
def test_keys_of_low_rank_confuse_every_attention(rule):
    q, k = random_queries_and_keys()
    k[:, -1] = 0.3  # constant: softmax and InLine cannot see this channel of the query
    rate = collision_rate(rule, q, k)
    assert rate.constructed == rate.found == rate.queries
    condition = key_condition(rule, k)
    assert (condition.rank, condition.needed, condition.injective) == (5, 6, False)
    assert condition.smallest < 1e-12 * condition.largest


def test_a_search_finds_collisions_of_an_unknown_map():
    q, k = random_queries_and_keys()
    rule = MixingRule("divide", square, 0.5)
    assert constructed_partners(rule, q, k) == []
    assert collision_rate(rule, q, k).found == len(q)


def with_one(x):
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


@pytest.mark.parametrize("normalization", ["subtract", "magnitude"])
def test_a_callable_is_not_known_to_be_one_to_one(normalization):
    _, k = random_queries_and_keys()
    condition = key_condition(MixingRule(normalization, square, 0.5), k)
    assert condition.injective is None
    assert condition.reason == "φ = square is not built in: it may be one-to-one or not"


def test_division_may_be_one_to_one_where_a_callable_adds_channels():
    """With a constant channel, the length of phi(q) is known from its direction."""
    q, k = random_queries_and_keys()
    assert key_condition(MixingRule("divide", square, 0.5), k).injective is False
    rule = MixingRule("divide", with_one, 0.5)
    assert key_condition(rule, k).injective is None
    assert collision_rate(rule, q, k).colliding == 0


def test_a_callable_on_keys_of_low_rank_is_not_one_to_one():
    _, k = random_queries_and_keys()
    k[:, -1] = 0.3
    condition = key_condition(MixingRule("subtract", square, 0.5), k)
    assert condition.injective is False
    assert condition.reason == "the centered keys lose 1 of 5 directions of φ(q)"


@pytest.mark.parametrize("feature_map", ["identity", "leaky_relu"])
def test_the_magnitude_rule_is_not_one_to_one_unless_phi_is_positive(feature_map):
    q, k = random_queries_and_keys()
    k += 1  # so that the mean key is not nearly zero
    rule = MixingRule("magnitude", feature_map, 0.5)
    features = rule.features(q)
    mean_key = rule.features(k).mean(0)
    features -= ((0.5 * features @ mean_key + 1) / (0.5 * mean_key @ mean_key))[:, None] * mean_key
    q = features if feature_map == "identity" else torch.where(features > 0, features, 100 * features)
    torch.testing.assert_close(rule.weights(q, k), torch.full((6, 30), 1 / 30).double())
    assert collision_rate(rule, q, k).found > 0
    condition = key_condition(rule, k)
    assert condition.injective is False
    assert "mean score -1" in condition.reason
    for positive in POSITIVE_MAPS:
        assert key_condition(MixingRule("magnitude", positive, 0.5), k).injective is True


def test_singular_values_and_rank_are_those_of_the_definition():
    _, k = random_queries_and_keys()
    for rule in RULES:
        condition = key_condition(rule, k)
        features = rule.features(k)
        with_ones = torch.cat([features, torch.ones(len(k), 1)], dim=1)
        assert condition.rank == torch.linalg.matrix_rank(with_ones) == condition.needed == 6
        centred = features - features.mean(0)
        torch.testing.assert_close(torch.tensor(condition.singular_values), torch.linalg.svdvals(centred).float())
        assert condition.injective == (rule.kind != "linear" and rule.feature_map != "relu")


def test_fewer_keys_than_channels_are_never_enough():
    _, k = random_queries_and_keys(keys=4)
    condition = key_condition(MixingRule("subtract", "identity", 1.0), k)
    assert (condition.rank, condition.needed) == (4, 6)
    assert condition.condition == torch.inf
    assert condition.reason == "4 keys cannot span 5 channels: 2 directions of φ(q) are lost"


def test_the_own_rule_of_a_layer_is_marked_even_if_it_is_not_meant_to_be():
    model = small_model("inline_deit_tiny", attention_options={"feature_map": square, "normalization": "magnitude"})
    layer = capture_attention(model, torch.randn(1, 3, 40, 60))[0]
    (own,) = [rate for rate in measure_collisions(layer, 0, 0, queries=2) if rate.is_own]
    assert (own.attention, own.feature_map) == ("magnitude", "square")


@pytest.mark.parametrize("name", ["inline_deit_tiny", "softmax_swin_tiny"])
def test_a_layer_of_a_model(name):
    layer = capture_attention(small_model(name), torch.randn(2, 3, 40, 60))[-1]
    rates = measure_collisions(layer, 1, 0, queries=3)
    assert [rate.is_own for rate in rates].count(True) == 1
    assert {(rate.layer, rate.head, rate.queries) for rate in rates} == {(layer.index, 0, 3)}
    by_rule = {(rate.attention, rate.feature_map): rate for rate in rates}
    condition = measure_key_condition(layer, 1, 0)
    own = by_rule[condition.attention, condition.feature_map]
    assert own.is_own
    assert (own.colliding == 0) == condition.injective
    assert condition.keys == (4 if "swin" in name else layer.num_tokens)  # one window spans the last stage's 2×2


def test_relative_difference_of_zeros_is_zero():
    assert relative_difference(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]
