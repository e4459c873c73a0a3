"""Memory is a true peak of a fresh process. Nothing here asserts on time: machines are busy."""

import sys

import pytest
import torch

import warm
from inline_attention.benchmark import cost
from inline_attention.benchmark.cost import ATTENTIONS, HEAD_DIM, HEADS, measure_attention_cost
from inline_attention.benchmark.environment import describe_machine

SIZES = (256, 1024)
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def points():
    seen = []
    measured = measure_attention_cost(sizes=SIZES, on_progress=seen.append)
    assert seen == measured
    return {(point.kind, point.tokens): point for point in measured}


def weights_bytes(tokens: int) -> int:
    return 4 * HEADS * tokens**2


def require_peaks(points) -> None:
    if any(point.peak_bytes is None for point in points.values()):
        pytest.skip("this platform does not tell a process's peak memory")


def test_every_kind_is_measured_at_every_size(points):
    assert list(points) == [(kind, tokens) for tokens in SIZES for kind in ATTENTIONS]
    for point in points.values():
        assert point.milliseconds > 0
        assert point.runs >= 1


def test_explicit_weights_take_at_least_their_own_bytes_and_grow(points):
    require_peaks(points)
    small, large = (points["softmax_explicit", tokens].peak_bytes for tokens in SIZES)
    assert large >= weights_bytes(SIZES[1])
    assert large <= 4 * weights_bytes(SIZES[1]) + 16 * MEBIBYTE  # nothing but the call is counted
    assert large > small + 16 * MEBIBYTE


@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_the_others_never_hold_the_weights(points, kind):
    require_peaks(points)
    assert points[kind, SIZES[1]].peak_bytes < weights_bytes(SIZES[1]) / 2


@pytest.mark.parametrize("tokens", [12, 13])
def test_every_attention_returns_heads_last(tokens):
    qkv = torch.randn(1, tokens, 3, HEADS, HEAD_DIM)
    local_weight = torch.randn(1, HEADS, HEAD_DIM, 3, 3)
    outputs = {kind: attention.run(qkv, local_weight) for kind, attention in ATTENTIONS.items()}
    assert {tuple(output.shape) for output in outputs.values()} == {(1, tokens, HEADS, HEAD_DIM)}
    torch.testing.assert_close(outputs["softmax"], outputs["softmax_explicit"])


def test_weights_beyond_the_limit_are_skipped_and_said_so(monkeypatch):
    monkeypatch.setattr(cost, "EXPLICIT_WEIGHTS_LIMIT", weights_bytes(64) - 1)
    (point,) = measure_attention_cost(["softmax_explicit"], [64])
    assert (point.milliseconds, point.runs, point.peak_bytes) == (None, 0, None)
    assert "skipped" in point.note
    assert "limit" in point.note


def test_errors_name_what_was_expected():
    with pytest.raises(ValueError, match=r"kinds must be among .*'inline'.*got 'soft'"):
        measure_attention_cost(["soft"], [64])
    with pytest.raises(ValueError, match="≥ 1"):
        measure_attention_cost(["inline"], [64, 0])


def test_a_script_without_main_guard_learns_what_to_do(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from inline_attention.analysis import measure_attention_cost\nmeasure_attention_cost(['inline'], [16])\n"
    )
    run = warm.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 1
    assert 'if __name__ == "__main__":' in run.stderr.splitlines()[-1]


def test_machine_is_described_with_threads_and_torch():
    description = describe_machine()
    assert f"{torch.get_num_threads()} thread" in description
    assert torch.__version__ in description
