"""The Triton backend under Triton's interpreter: the contract on small shapes, odd memory layouts, derivatives.

On a machine with a GPU the compiler takes the interpreter's place, and the GPU cases of test_contract.py that of this
file.
"""

import os

import pytest
import torch
from torch.autograd import forward_ad

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops import dispatch
from inline_attention.ops.backends import triton as triton_backend
from inline_attention.ops.backends.triton import tuning
from ops.contract import OPTIONS, SHAPES, Option, Shape, check_call

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: see the GPU tests"
)

SHAPE = {shape.name: shape for shape in SHAPES}
OPTION = {option.name: option for option in OPTIONS}
DTYPES = [torch.float32, torch.float16]  # bfloat16 arithmetic is wrong in the interpreter
LOCAL = {"grid_size": (3, 4), "num_prefix_tokens": 1}


@pytest.fixture
def _many_chunks(monkeypatch):
    """Blocks of 16 tokens, a chunk each: everything is merged."""
    monkeypatch.setattr(tuning, "LARGEST_CHUNK", 16)


@pytest.fixture
def _poisoned_memory(monkeypatch):
    """Whatever is not written reads as NaN."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("shape", ["value_dim", "grid_registers"])
def test_every_option(shape, option, dtype):
    check_call(SHAPE[shape], option, dtype, backend="triton", packed=SHAPE[shape].grid is not None)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape(shape, dtype):
    check_call(shape, OPTION["inline_masked"], dtype, backend="triton", packed=False)


@pytest.mark.usefixtures("_poisoned_memory", "_many_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", ["inline_masked", "linear_elu_masked"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape("cross", queries=37, keys=50, heads=3, head_dim=33, value_dim=20),
        Shape("grid", batch=1, grid=(5, 9), heads=2, head_dim=32, prefix=1),
    ],
    ids=lambda shape: shape.name,
)
def test_many_chunks(shape, option, dtype):
    check_call(shape, OPTION[option], dtype, backend="triton", packed=shape.grid is not None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_common_offset_does_not_wash_out_the_covariance(dtype):
    q, k, v = torch.randn(3, 1, 150, 2, 8).to(dtype)
    k, v = k + 1000, v + 1000
    exact = inline_attention(q.double(), k.double(), v.double(), backend="reference")
    out = inline_attention(q, k, v, backend="triton")
    # Half a unit in the last place of a float16 near 1000, or what a rounding of float32 inputs does.
    assert (out.double() - exact).abs().max() < (0.2501 if dtype == torch.float16 else 2e-3)
    assert (out.double() - exact).abs().mean() < (0.13 if dtype == torch.float16 else 1e-3)


def test_a_narrow_block_among_wide_ones_keeps_half_precision_products_exact(monkeypatch):
    """The first block lies within a factor of two, the second does not: one reference cannot serve both."""
    monkeypatch.setattr(tuning, "DEFAULT_MULTIPROCESSORS", 1)
    q, k, v = torch.randn(3, 1, 128, 1, 16)
    k[:, :64], v[:, :64] = 1 + torch.rand(2, 1, 64, 1, 16)
    q, k, v = q.half(), k.half(), v.half()
    exact = inline_attention(q.double(), k.double(), v.double(), backend="reference")
    out = inline_attention(q, k, v, backend="triton").double()
    assert ((out - exact).abs() <= exact.abs() * 2**-11 + 1e-6).all()


def test_packed_strided_and_expanded_inputs():
    q = torch.randn(2, 4, 6, 8)[:, :, ::2, ::2].transpose(1, 2).permute(0, 2, 1, 3)[:, :, :2]
    k = torch.randn(1, 1, 2, 4).expand(2, 5, 2, 4)
    v = torch.randn(4, 2, 5, 2).permute(3, 2, 1, 0)
    expected = inline_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="reference")
    torch.testing.assert_close(inline_attention(q, k, v, backend="triton"), expected)
    heads_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    torch.testing.assert_close(inline_attention(*heads_first, backend="triton"), expected)
    weight = torch.randn(3, 3, 4, 2, 2).permute(4, 3, 2, 1, 0)
    mask = (torch.rand(5, 2) > 0.2).t()
    mask[:, 0] = True
    options = {"local_weight": weight, "grid_size": (1, 4), "num_prefix_tokens": 1, "key_padding_mask": mask}
    torch.testing.assert_close(
        inline_attention(v, k, v, backend="triton", **options),
        inline_attention(v, k, v, backend="reference", **options),
    )


@pytest.mark.parametrize("grad", ["expanded", "transposed"])
def test_output_gradients_of_any_layout(grad):
    grads = {}
    for backend in ("triton", "eager"):
        torch.manual_seed(1)
        qkv = torch.randn(2, 13, 3, 2, 4, requires_grad=True)
        weight = torch.randn(2, 2, 4, 3, 3, requires_grad=True)
        out = inline_attention_qkvpacked(qkv, local_weight=weight, backend=backend, **LOCAL)
        upstream = torch.ones(()).expand_as(out) if grad == "expanded" else torch.randn(4, 2, 13, 2).permute(3, 2, 1, 0)
        grads[backend] = torch.autograd.grad(out, (qkv, weight), upstream)
    for got, wanted in zip(grads["triton"], grads["eager"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_packed_gradient_is_one_contiguous_tensor():
    qkv = torch.randn(2, 6, 3, 2, 4, requires_grad=True)
    seen = []
    qkv.register_hook(lambda grad: seen.append((grad.shape, grad.is_contiguous())))
    inline_attention_qkvpacked(qkv, backend="triton").sum().backward()
    assert seen == [(qkv.shape, True)]


def test_padding_leaks_nowhere_and_receives_nothing():
    q, k, v = torch.randn(3, 2, 9, 2, 4)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    weight = torch.randn(2, 2, 4, 3, 3)
    alone = inline_attention(q[:, :6], k[:, :6], v[:, :6], local_weight=weight, grid_size=(2, 3))
    k[:, 6:], v[:, 6:] = float("nan"), float("inf")
    k.requires_grad_()
    v.requires_grad_()
    out = inline_attention(q, k, v, key_padding_mask=mask, local_weight=weight, grid_size=(3, 3), backend="triton")
    torch.testing.assert_close(out[:, :6], alone)
    out[:, :6].square().sum().backward()
    for tensor in (k, v):
        assert tensor.grad.isfinite().all()
        assert (tensor.grad[:, 6:] == 0).all()
        assert (tensor.grad[:, :6] != 0).all()


def test_a_row_without_any_key_is_finite():
    """Validation refuses it where it can look; kernels must not make a NaN of it where it cannot."""
    q = torch.randn(2, 5, 1, 3, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False] * 5])
    op = torch.ops.inline_attention.triton_forward
    out = op(q, q, q, mask, None, 0.5, "identity", "subtract", 0, 0, 0)[0]
    out.square().sum().backward()
    assert (out[1] == 0).all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("normalization", ["divide", "magnitude"])
def test_a_query_with_nothing_to_divide_by_attends_uniformly_without_a_gradient(normalization):
    q = torch.randn(1, 3, 1, 4)
    q[:, 1] = -q[:, 1].abs()  # ReLU leaves nothing
    q.requires_grad_()
    k, v = torch.randn(2, 1, 7, 1, 4)
    out = inline_attention(q, k, v, feature_map="relu", normalization=normalization, backend="triton")
    torch.testing.assert_close(out[:, 1], v.mean(1))
    out.sum().backward()
    assert q.grad.isfinite().all()
    assert (q.grad[:, 1] == 0).all()


def test_the_exp_map_saturates_without_a_gradient():
    q, k, v = torch.randn(3, 1, 5, 1, 4)
    q[:, 1] = 1e4
    q.requires_grad_()
    inline_attention(q, k, v, feature_map="exp", backend="triton").sum().backward()
    assert (q.grad[:, 1] == 0).all()
    assert (q.grad[:, 0] != 0).all()


def test_empty_batch():
    qkv = torch.randn(0, 6, 3, 2, 4, requires_grad=True)
    weight = torch.randn(0, 2, 4, 3, 3, requires_grad=True)
    out = inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(2, 3), backend="triton")
    out.sum().backward()
    assert out.shape == (0, 6, 2, 4)
    assert qkv.grad.shape == qkv.shape
    assert weight.grad.shape == weight.shape


@pytest.mark.usefixtures("_many_chunks")
def test_repeats_are_bitwise_equal():
    qkv = torch.randn(1, 49, 3, 2, 8, requires_grad=True)
    weight = torch.randn(1, 2, 8, 3, 3, requires_grad=True)

    def results():
        out = inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(7, 7), backend="triton")
        return out, *torch.autograd.grad(out.square().sum(), (qkv, weight))

    for first, second in zip(results(), results(), strict=True):
        assert torch.equal(first, second)


def test_refusals_name_their_reason():
    q, k, v = torch.randn(3, 2, 6, 2, 4)
    for tensors, reason in (
        ([tensor.double() for tensor in (q, k, v)], "computes in float32, got float64"),
        ([torch.randn(1, 4, 1, 129)] * 3, "head dims up to 128, got D = 129"),
        ([tensor.to("meta") for tensor in (q, k, v)], "needs a CUDA or ROCm device, got meta"),
    ):
        with pytest.raises(ValueError, match=reason):
            inline_attention(*tensors, backend="triton")
    with pytest.raises(ValueError, match="no batching rule"):
        torch.func.vmap(lambda x: inline_attention(x, x, x, backend="triton"))(torch.randn(3, 2, 6, 2, 4))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivative"):
        inline_attention(forward_ad.make_dual(q, k), k, v, backend="triton")


def test_auto_never_interprets_on_a_cpu(monkeypatch):
    monkeypatch.setattr(triton_backend, "run", None)
    q, k, v = torch.randn(3, 2, 6, 2, 4)
    call_backend = dispatch.select("auto", _call(q, k, v))
    assert call_backend.name == "eager"


def test_without_triton_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(triton_backend.importlib.util, "find_spec", lambda name: None)
    assert triton_backend._cached_device_reason.__wrapped__("cpu", None) == "Triton is not installed"


def _call(q, k, v):
    from inline_attention.ops.call import AttentionCall

    return AttentionCall(q, k, v, None, 0.5, "identity", "subtract", None, None, None, 0, False)


def test_export_takes_pytorch_operations():
    class Attention(torch.nn.Module):
        def forward(self, q):
            return inline_attention(q, q, q)

    program = torch.export.export(Attention(), (torch.randn(2, 6, 2, 4),))
    assert "inline_attention" not in str(program.graph)


def test_head_dims_beyond_the_kernels_by_way_of_a_callable():
    def widen(x):
        return torch.cat([x, x.square(), x.abs()], dim=-1)

    option = Option("wide", {"feature_map": widen})
    check_call(Shape("wide", batch=1, heads=1, head_dim=64), option, torch.float32, backend="triton", packed=False)
