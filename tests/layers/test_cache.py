"""Masks and indices of windows: made once, and never where what was made could not be used again."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from inline_attention.layers import cache
from inline_attention.layers.cache import cache_by_shape
from inline_attention.layers.window_attention import WindowAttention

CPU = torch.device("cpu")


def counting():
    calls = []

    @cache_by_shape
    def numbers(device, count, start=0):
        calls.append((device, count, start))
        return torch.arange(start, start + count, device=device)

    return numbers, calls


def test_made_once_for_each_device_and_numbers():
    numbers, calls = counting()
    first = numbers(CPU, 3)
    assert numbers(CPU, 3) is first
    assert numbers(CPU, 4).tolist() == [0, 1, 2, 3]
    assert numbers(CPU, 3, start=2).tolist() == [2, 3, 4]
    assert numbers(torch.device("meta"), 3).device.type == "meta"
    assert numbers(CPU, 3) is first
    assert len(calls) == 4


def test_what_was_made_in_inference_mode_serves_training():
    attention = WindowAttention(8, 2, window_size=5, shifted=True)
    x, grid_size = torch.randn(2, 7 * 9, 8), (7, 9)
    with torch.inference_mode():
        expected = attention(x, grid_size)
    found = attention(x, grid_size)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), expected)
    assert attention.relative_position_bias_table.grad.any()


def test_a_grid_may_be_a_list():
    attention = WindowAttention(8, 2, window_size=5, shifted=True)
    x = torch.randn(2, 7 * 9, 8)
    assert torch.equal(attention(x, [7, 9]), attention(x, (7, 9)))


def test_fake_tensors_are_not_kept():
    numbers, _ = counting()
    with FakeTensorMode():
        assert isinstance(numbers(CPU, 3), FakeTensor)
    assert not isinstance(numbers(CPU, 3), FakeTensor)
    with FakeTensorMode():
        assert isinstance(numbers(CPU, 3), FakeTensor)


def test_a_compiler_makes_its_own():
    numbers, _ = counting()

    def both(x):
        return x + numbers(CPU, 3)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    expected = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(compiled(torch.ones(3)), expected)
    assert torch.equal(both(torch.ones(3)), expected)


def test_large_ones_are_not_kept_and_a_full_store_is_emptied(monkeypatch):
    numbers, calls = counting()
    monkeypatch.setattr(cache, "MAX_TENSOR_BYTES", 8 * 5)
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", 8 * 11)
    assert numbers(CPU, 6) is not numbers(CPU, 6)
    kept = numbers(CPU, 5)
    numbers(CPU, 4)
    numbers(CPU, 2)
    assert numbers(CPU, 5) is kept
    numbers(CPU, 1)
    assert numbers(CPU, 5) is not kept
    assert len(calls) == 7


@pytest.mark.gpu
def test_a_cuda_graph_gets_tensors_of_its_own():
    attention = WindowAttention(32, 2, window_size=5, shifted=True).cuda().eval()
    x, grid_size = torch.randn(2, 7 * 9, 32, device="cuda"), (7, 9)
    with torch.no_grad():
        expected = attention(x, grid_size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attention(x, grid_size)
        # Forgets what eager calls made, and puts something else in its memory.
        for side in range(8, 264):
            attention(torch.randn(1, side * side, 32, device="cuda"), (side, side))
        found.zero_()
        graph.replay()
    torch.testing.assert_close(found, expected)
