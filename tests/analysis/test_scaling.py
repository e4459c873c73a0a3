"""Costs against size: counted memory, and points for every twin."""

import functools

import pytest
import torch
from torch import nn

from inline_attention import create_model
from inline_attention.analysis import scaling
from inline_attention.analysis.scaling import measure_scaling, peak_tensor_bytes, twins_of
from inline_attention.benchmark.model_size import ModelSize, measure_model_size

CPU = torch.device("cpu")


def test_peak_memory_counts_what_is_alive_at_once():
    def work():
        first = torch.zeros(1000)  # 4 kB
        second = first + 1  # 8 kB
        del first
        second += 1  # in place
        view = second.view(10, 100)[:5]
        third = view.clone()  # 4 + 2 kB
        return third.sum()

    assert peak_tensor_bytes(work, CPU) == 8000
    kept = torch.zeros(1000)
    assert peak_tensor_bytes(lambda: kept * 2, CPU) == 4000
    assert peak_tensor_bytes(lambda: kept.mul_(2), CPU) == 0


def test_peak_memory_of_a_module_is_its_activations():
    layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(100, 16)

    def forward():
        with torch.inference_mode():
            return layer(x)

    assert peak_tensor_bytes(forward, CPU) == 2 * 100 * 64 * 4


@pytest.fixture
def one_block(monkeypatch):
    """Models of one block: what is measured of them does not matter here."""
    monkeypatch.setattr(scaling, "create_model", functools.partial(create_model, depth=1))
    monkeypatch.setattr(scaling, "measure_model_size", functools.partial(measure_model_size, depth=1))


@pytest.fixture
def nothing_counted(monkeypatch):
    monkeypatch.setattr(scaling, "measure_model_size", lambda *_, **__: ModelSize(0, 7, (3, 32, 32)))


@pytest.mark.usefixtures("one_block")
def test_a_model_and_its_twins_at_growing_sizes():
    seen = []
    points = measure_scaling("softmax_deit_tiny", sizes=[32, 64], seconds=0, on_progress=seen.append)
    assert seen == points
    assert [(point.size, point.attention) for point in points] == [
        (size, kind) for size in (32, 64) for kind in ("inline", "softmax", "linear")
    ]
    for point in points:
        assert point.model == f"{point.attention}_deit_tiny"
        assert point.milliseconds > 0
        assert point.peak_bytes > 0
        size = (3, point.size, point.size)
        assert point.macs == measure_model_size(point.model, input_size=size, depth=1).macs
    assert points[3].peak_bytes > 2 * points[0].peak_bytes  # 17 tokens against 5


@pytest.mark.usefixtures("nothing_counted")
def test_windows_are_for_models_that_have_some(monkeypatch):
    monkeypatch.setattr(scaling, "create_model", lambda name, window_size=7: nn.Conv2d(3, window_size, 1))
    points = measure_scaling("inline_swin_tiny", sizes=[32], windows=[7, 14], seconds=0)
    assert [(point.axis, point.window) for point in points[::3]] == [
        ("resolution", None), ("window", 7), ("window", 14),
    ]  # fmt: skip
    assert points[6].peak_bytes == 2 * points[3].peak_bytes
    with pytest.raises(ValueError, match="has no windows to enlarge"):
        measure_scaling("inline_deit_tiny", sizes=[32], windows=[7])


@pytest.mark.usefixtures("nothing_counted")
def test_a_model_that_fails_does_not_stop_the_others(monkeypatch):
    def create(name, **_):
        if name.startswith("softmax"):
            raise MemoryError("no room for it\nand a stack")
        return nn.Conv2d(3, 2, 1)

    monkeypatch.setattr(scaling, "create_model", create)
    points = {point.attention: point for point in measure_scaling("inline_deit_tiny", sizes=[32], seconds=0)}
    assert (points["softmax"].milliseconds, points["softmax"].note) == (None, "no room for it")
    assert points["inline"].milliseconds is not None


def test_unknown_models_are_refused():
    assert twins_of("linear_pvt_tiny")["softmax"] == "softmax_pvt_tiny"
    for name in ("resnet50", "inline_deit_huge"):
        with pytest.raises(ValueError, match=f"no model '{name}' in this library"):
            twins_of(name)
