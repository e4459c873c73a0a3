"""Large sums, huge values, degenerate queries, padding full of rubbish, and memory that stays linear."""

import math
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inline_attention import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual
from inline_attention.ops.backends import eager

NORMALIZATIONS = ["subtract", "divide", "magnitude"]
FEATURE_MAPS = ["identity", "relu", "leaky_relu", "exp", "elu_plus_one"]


@pytest.fixture(params=["blocked", "composed"])
def _path(request, monkeypatch):
    if request.param == "composed":
        monkeypatch.setattr(eager, "_can_block", lambda call: False)


@pytest.mark.usefixtures("_path")
def test_half_precision_sums_over_65536_keys_neither_overflow_nor_lose_the_mean():
    tokens = 65536
    q = torch.randn(1, 8, 1, 8).half()
    k, v = (50 + torch.randn(2, 1, tokens, 1, 8)).half()
    out = inline_attention(q, k, v)
    exact = inline_attention(q.double(), k.double(), v.double(), backend="reference")
    # The answer is about 50 everywhere; what is at stake is the last bit of float16 at 50, 2^-5.
    assert (out.double() - exact).abs().max() <= 2**-6 + 1e-6
    assert out.double().std() > 0


@pytest.mark.usefixtures("_path")
def test_a_large_common_offset_does_not_wash_out_the_covariance():
    q, k, v = torch.randn(3, 1, 500, 2, 8)
    exact = inline_attention(q.double(), k.double() + 1000, v.double() + 1000, backend="reference")
    out = inline_attention(q, k + 1000, v + 1000)
    # k + 1000 itself is rounded to 6e-5; the literal formula's error is a thousand times that.
    assert (out - exact).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_never_nan_from_finite_input(dtype, normalization, feature_map):
    largest = torch.finfo(dtype).max
    for magnitude in (1e-30, 1.0, 1e4, largest / 4, largest):
        q, k, v = (
            (torch.rand(2, 20, 2, 4) * 2 - 1).mul(min(magnitude, largest)).to(dtype).requires_grad_() for _ in range(3)
        )
        out = inline_attention(q, k, v, normalization=normalization, feature_map=feature_map)
        out.backward(torch.ones_like(out))
        for tensor in (out, q.grad, k.grad, v.grad):
            assert not tensor.isnan().any(), f"magnitude {magnitude}"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", ["identity", "relu", "elu_plus_one"])
def test_no_nan_gradient_where_the_output_is_still_finite(normalization, feature_map):
    for exponent in range(10, 19):
        tensors = [(torch.randn(1, 9, 1, 4) * 10.0**exponent).bfloat16().requires_grad_() for _ in range(3)]
        out = inline_attention(*tensors, normalization=normalization, feature_map=feature_map)
        for grad in torch.autograd.grad(out, tensors, torch.full_like(out, 1e4)):
            assert not grad.isnan().any(), f"1e{exponent}"


def test_huge_float32_values_give_the_exact_answer_where_it_is_representable():
    q, k, v = torch.randn(3, 1, 30, 1, 4)
    exact = inline_attention(q.double() * 1e-30, k.double() * 1e30, v.double() * 1e30, backend="reference")
    out = inline_attention(q * 1e-30, k * 1e30, v * 1e30)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("normalization", ["divide", "magnitude"])
def test_a_query_with_nothing_to_divide_by_attends_uniformly_without_a_gradient(normalization):
    q = torch.randn(1, 3, 1, 4)
    q[:, 1] = -q[:, 1].abs()  # ReLU leaves nothing
    q.requires_grad_()
    k, v = torch.randn(2, 1, 7, 1, 4)
    out = inline_attention(q, k, v, feature_map="relu", normalization=normalization)
    torch.testing.assert_close(out[:, 1], v.mean(1))
    out.sum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[:, 1] == 0).all()
    weights = attention_weights(q, k, kind="linear" if normalization == "divide" else "magnitude", feature_map="relu")
    torch.testing.assert_close(weights[0, 0, 1], torch.full((7,), 1 / 7))


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 1e30])
def test_padding_leaks_nowhere(rubbish):
    real = 6
    q, k, v = torch.randn(3, 2, 9, 2, 4)
    weight = torch.randn(2, 2, 4, 3, 3)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, real:] = False
    padded_k, padded_v = k.clone(), v.clone()
    padded_k[:, real:], padded_v[:, real:] = rubbish, rubbish
    options = {"local_weight": weight, "feature_map": "exp"}
    out = inline_attention(q, padded_k, padded_v, key_padding_mask=mask, grid_size=(3, 3), **options)
    alone = inline_attention(q[:, :real], k[:, :real], v[:, :real], grid_size=(2, 3), **options)
    torch.testing.assert_close(out[:, :real], alone)


def test_padding_receives_no_gradient():
    qkv = torch.randn(2, 6, 3, 2, 4, requires_grad=True)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    out = inline_attention_qkvpacked(
        qkv, key_padding_mask=mask, local_weight=torch.randn(2, 2, 4, 3, 3), grid_size=(2, 3)
    )
    out.square().sum().backward()
    assert (qkv.grad[:, 4:, 1:] == 0).all()
    assert (qkv.grad[:, :4, 1:] != 0).any()


def test_packed_gradient_is_one_tensor_of_the_packed_shape():
    qkv = torch.randn(2, 6, 3, 2, 4, requires_grad=True)
    seen = []
    qkv.register_hook(lambda grad: seen.append((grad.shape, grad.is_contiguous())))
    inline_attention_qkvpacked(qkv).sum().backward()
    assert seen == [(qkv.shape, True)]


def test_non_contiguous_and_expanded_inputs():
    q = torch.randn(2, 4, 6, 8)[:, :, ::2, ::2].transpose(1, 2).permute(0, 2, 1, 3)[:, :, :2]
    k = torch.randn(1, 1, 2, 4).expand(2, 5, 2, 4)
    v = torch.randn(4, 2, 5, 2).permute(3, 2, 1, 0)
    torch.testing.assert_close(
        inline_attention(q, k, v), inline_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="reference")
    )


def test_empty_batch():
    out = inline_attention_qkvpacked(
        torch.randn(0, 6, 3, 2, 4), local_weight=torch.randn(0, 2, 4, 3, 3), grid_size=(2, 3)
    )
    assert out.shape == (0, 6, 2, 4)


def test_local_residual_alone_is_what_the_op_adds():
    v, q = torch.randn(2, 2, 7, 2, 4)
    weight = torch.randn(2, 2, 4, 3, 3)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    where = {"grid_size": (2, 3), "num_prefix_tokens": 1, "key_padding_mask": mask}
    with_local = inline_attention(q, q, v, local_weight=weight, **where)
    without = inline_attention(q, q, v, key_padding_mask=mask)
    torch.testing.assert_close(local_residual(v, weight, **where), with_local - without)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_no_tensor_is_larger_than_a_small_multiple_of_the_input(normalization):
    side = 24
    tokens = side * side
    qkv = torch.randn(1, tokens, 3, 1, 4, requires_grad=True)
    weight = torch.randn(1, 1, 4, 3, 3, requires_grad=True)
    mask = torch.rand(1, tokens) > 0.2
    with LargestTensor() as largest:
        inline_attention_qkvpacked(
            qkv,
            normalization=normalization,
            feature_map="exp",
            key_padding_mask=mask,
            local_weight=weight,
            grid_size=(side, side),
        ).sum().backward()
    assert 0 < largest.elements <= 2 * qkv.numel() < tokens * tokens


class LearnedMap(torch.nn.Module):
    """A feature map with float32 parameters."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x):
        return torch.nn.functional.softplus(self.linear(x))


@pytest.mark.parametrize("magnitude", [1.0, 1e20])
def test_a_feature_map_with_parameters_runs_everywhere(magnitude):
    feature_map = LearnedMap()
    q, k, v = torch.randn(3, 1, 9, 2, 4) * magnitude  # the larger one takes the way through float64
    out = inline_attention(q, k, v, feature_map=feature_map)
    assert not out.isnan().any()
    exact = inline_attention(q, k, v, feature_map=feature_map, backend="reference")
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    attention_weights(q, k, feature_map=feature_map)
    if magnitude == 1:  # beyond, the map's own float32 gradients overflow
        out.sum().backward()
        assert feature_map.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_an_unchecked_row_of_padding_is_zero_and_not_nan(backend):
    mask = torch.tensor([[True] * 5, [False] * 5])

    def loss(q):
        return inline_attention(q, q, q, key_padding_mask=mask, backend=backend).square().sum()

    grad = torch.func.grad(loss)(torch.randn(2, 5, 1, 3))
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()


@pytest.mark.gpu
def test_an_all_padding_row_stops_a_gpu_program():
    """A device-side assertion ends the CUDA context, so it needs a process of its own."""
    program = """
import torch
from inline_attention import inline_attention
q, k, v = torch.randn(3, 2, 6, 2, 4, device="cuda")
mask = torch.tensor([[True] * 6, [False] * 6], device="cuda")
inline_attention(q, k, v, key_padding_mask=mask)
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "row without any real key" in result.stderr
