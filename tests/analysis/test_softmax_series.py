"""The picture of docs/math.md: outputs by the size of scores, against what is known in closed form."""

import math

import pytest

from inline_attention.analysis import softmax_series
from inline_attention.analysis.softmax_series import SHAPE, draw_series, measure_series


def test_outputs_are_those_of_the_formulas(monkeypatch, tmp_path):
    monkeypatch.setattr(softmax_series, "QUERIES", 5)
    gaussian, two_values, skewed = curves = measure_series()
    for item in curves:
        assert item.sizes == pytest.approx((0, 0.5, 1, 1.5, 2))
        assert item.outputs["inline"] == pytest.approx(item.sizes, abs=0.03)  # the variance of the keys is about one
        assert item.outputs["linear"][1] == pytest.approx(item.outputs["linear"][4])
    assert gaussian.outputs["softmax"] == pytest.approx(gaussian.sizes, abs=0.1)
    assert two_values.outputs["softmax"] == pytest.approx([math.tanh(size) for size in two_values.sizes], abs=0.02)
    exact = [math.sqrt(SHAPE) / (1 - size / math.sqrt(SHAPE)) - math.sqrt(SHAPE) for size in skewed.sizes[:3]]
    assert skewed.outputs["softmax"][:3] == pytest.approx(exact, abs=0.05)
    pytest.importorskip("matplotlib")
    draw_series(curves, tmp_path / "series.png")
    assert (tmp_path / "series.png").stat().st_size > 1000
