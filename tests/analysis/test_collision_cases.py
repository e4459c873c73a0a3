"""The measurement says what the paper proves: linear attention collides, softmax and InLine do not."""

import itertools
import sys

import pytest
import torch

import warm
from inline_attention.analysis.collision_cases import (
    COLLISION_TOLERANCE,
    KINDS,
    InjectivityResult,
    collision_cases,
    measure_injectivity,
)

RAY, SHIFTED = collision_cases()
RESULTS = {(result.case.name, result.kind): result for result in measure_injectivity()}
CASE_NAMES = [RAY.name, SHIFTED.name]


def cross(a: torch.Tensor, b: torch.Tensor) -> float:
    """Zero when a and b lie on one line through the origin."""
    return (a[0] * b[1] - a[1] * b[0]).item()


def test_every_case_is_measured_with_every_attention():
    assert list(RESULTS) == list(itertools.product(CASE_NAMES, KINDS))


@pytest.mark.parametrize("name", CASE_NAMES)
def test_linear_attention_gives_all_queries_the_same_weights(name):
    result = RESULTS[name, "linear"]
    assert (result.weights - result.weights[0]).abs().max() < 1e-12
    assert result.largest_difference < 1e-12
    assert result.verdict == "collide"


@pytest.mark.parametrize("kind", ["softmax", "inline"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_softmax_and_inline_give_every_two_queries_different_weights(name, kind):
    result = RESULTS[name, kind]
    for one, other in itertools.combinations(result.weights, 2):
        assert (one - other).abs().max() > 1e-3
    assert result.smallest_difference > 1e-3
    assert result.verdict == "distinct"


@pytest.mark.parametrize("case", [RAY, SHIFTED], ids=CASE_NAMES)
def test_queries_differ_and_their_features_are_parallel_positive_and_different(case):
    features = case.feature_map(case.queries)
    assert (features > 0).all()
    for i, j in itertools.combinations(range(len(features)), 2):
        assert (case.queries[i] - case.queries[j]).norm() > 0.1
        assert abs(cross(features[i], features[j])) < 1e-12
        assert (features[i] - features[j]).norm() > 0.1


def test_queries_of_the_first_case_share_a_ray_and_of_the_second_no_two_do():
    for one, other in itertools.combinations(RAY.queries, 2):
        assert abs(cross(one, other)) < 1e-12
    for one, other in itertools.combinations(SHIFTED.queries, 2):
        assert abs(cross(one, other)) > 0.1


def test_colliding_queries_lie_on_a_ray_from_the_apex():
    assert SHIFTED.apex.norm() > 1
    torch.testing.assert_close(SHIFTED.matrix @ SHIFTED.apex + SHIFTED.bias, torch.zeros(2, dtype=torch.float64))
    for one, other in itertools.combinations(SHIFTED.queries - SHIFTED.apex, 2):
        assert abs(cross(one, other)) < 1e-12


def test_rows_sum_to_one_and_inline_has_negative_weights_to_show():
    for result in RESULTS.values():
        torch.testing.assert_close(result.weights.sum(1), torch.ones(len(result.weights), dtype=torch.float64))
    for name in CASE_NAMES:
        assert RESULTS[name, "inline"].weights.min() < -0.05
        assert RESULTS[name, "softmax"].weights.min() > 0


def test_one_colliding_pair_is_enough_for_the_verdict():
    weights = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
    result = InjectivityResult(RAY, "softmax", weights, largest_difference=0.4, smallest_difference=0.0)
    assert result.verdict == "collide"
    assert result._replace(smallest_difference=2 * COLLISION_TOLERANCE).verdict == "distinct"


def test_measuring_needs_no_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import inline_attention.analysis, inline_attention.cli.main"
    warm.run([sys.executable, "-c", code], check=True)
