"""Autograd to second order, functional transforms, compilation, export, autocast, fake tensors."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops.tracing import constant_when_compiled


def with_local_term(qkv, weight, height, width):
    return inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(height, width), num_prefix_tokens=1)


@pytest.mark.parametrize("normalization", ["subtract", "divide", "magnitude"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_to_second_order(normalization, masked):
    qkv = torch.randn(2, 7, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5 + [False] * 2, [True] * 7]) if masked else None

    def attend(qkv, weight):
        return inline_attention_qkvpacked(
            qkv,
            local_weight=weight,
            grid_size=(2, 3),
            num_prefix_tokens=1,
            key_padding_mask=mask,
            normalization=normalization,
            feature_map="exp",
        )

    assert torch.autograd.gradcheck(attend, (qkv, weight))
    assert torch.autograd.gradgradcheck(attend, (qkv, weight))


def test_second_order_with_one_tensor_in_three_places():
    x = torch.randn(1, 4, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: inline_attention(x, x, x), (x,))


def test_constant_functions_are_marked_as_pytorch_marks_them():
    def ours(): ...
    def theirs(): ...

    assert vars(constant_when_compiled(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_gradient_only_where_it_is_asked_for():
    q, k, v = torch.randn(3, 1, 4, 1, 3)
    v.requires_grad_()
    inline_attention(q, k, v).sum().backward()
    assert q.grad is None
    assert v.grad is not None
    assert inline_attention(q, k, v.detach()).grad_fn is None


def test_vmap_and_jvp_and_hessian():
    stacked = torch.randn(3, 2, 6, 2, 4, dtype=torch.float64)
    weight = torch.randn(2, 2, 4, 3, 3, dtype=torch.float64)

    def attend(x):
        return inline_attention(x, x, x, local_weight=weight, grid_size=(2, 3))

    torch.testing.assert_close(torch.func.vmap(attend)(stacked), torch.stack([attend(x) for x in stacked]))
    x, tangent = stacked[0], stacked[1]
    out, derivative = torch.func.jvp(attend, (x,), (tangent,))
    step = 1e-6
    torch.testing.assert_close(out, attend(x))
    torch.testing.assert_close(
        derivative, (attend(x + step * tangent) - attend(x - step * tangent)) / (2 * step), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(torch.func.jacrev(attend)(x), torch.func.jacfwd(attend)(x))
    with forward_ad.dual_level():
        dual = attend(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, derivative)


def test_per_sample_gradients():
    x = torch.randn(5, 6, 2, 4)

    def loss(sample):
        return inline_attention(sample[None], sample[None], sample[None]).square().sum()

    expected = torch.stack([torch.func.grad(loss)(sample) for sample in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)


def test_one_compiled_graph_serves_every_size():
    counter = CompileCounter()
    compiled = torch.compile(with_local_term, fullgraph=True, dynamic=True, backend=counter)
    for batch, height, width in [(2, 3, 4), (3, 5, 7), (4, 8, 8), (2, 14, 14), (5, 9, 31)]:
        qkv = torch.randn(batch, 1 + height * width, 3, 4, 4)
        weight = torch.randn(batch, 4, 4, 3, 3)
        torch.testing.assert_close(
            compiled(qkv, weight, height, width), with_local_term(qkv, weight, height, width), rtol=1e-5, atol=1e-5
        )
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("masked", "backend"),
    [
        (False, "aot_eager"),
        (True, "aot_eager"),
        pytest.param(False, "inductor", marks=pytest.mark.slow),  # compiles what the masked case does, and less
        (True, "inductor"),
    ],
)
def test_compiled_forward_and_backward(backend, masked):
    if backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler on a CPU")
    qkv = torch.randn(2, 13, 3, 2, 8, requires_grad=True)
    weight = torch.randn(2, 2, 8, 3, 3, requires_grad=True)
    mask = torch.rand(2, 13) > 0.3 if masked else None

    def attend(qkv, weight):
        return inline_attention_qkvpacked(
            qkv, local_weight=weight, grid_size=(3, 4), num_prefix_tokens=1, key_padding_mask=mask
        )

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    expected = attend(qkv, weight)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(compiled(qkv, weight), expected, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(
        torch.autograd.grad(compiled(qkv, weight), (qkv, weight), grad),
        torch.autograd.grad(expected, (qkv, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class GridAttention(torch.nn.Module):
    def forward(self, qkv, weight):
        height, width = qkv.shape[1:3]
        return inline_attention_qkvpacked(qkv.flatten(1, 2), local_weight=weight, grid_size=(height, width))


def test_export_with_dynamic_batch_height_and_width():
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    example = (torch.randn(2, 4, 5, 3, 2, 4), torch.randn(2, 2, 4, 3, 3))
    program = torch.export.export(
        GridAttention(), example, dynamic_shapes=({0: batch, 1: height, 2: width}, {0: batch})
    )
    for b, h, w in [(2, 4, 5), (3, 9, 2), (1, 1, 6), (2, 6, 1), (1, 1, 1)]:
        inputs = torch.randn(b, h, w, 3, 2, 4), torch.randn(b, 2, 4, 3, 3)
        torch.testing.assert_close(program.module()(*inputs), GridAttention()(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_and_keeps_sums_in_float32(dtype):
    q, k, v = torch.randn(3, 1, 64, 2, 8)
    k, v = k + 30, v + 30
    low = [tensor.to(dtype) for tensor in (q, k, v)]
    with torch.autocast("cpu", dtype=dtype):
        out = inline_attention(q, k.to(dtype), v)  # a mix, as autocast leaves it
    assert out.dtype == dtype
    torch.testing.assert_close(out, inline_attention(*low), rtol=0, atol=0)
    with torch.autocast("cpu", dtype=dtype):
        assert inline_attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_fake_and_meta_tensors_give_shapes():
    with FakeTensorMode():
        assert inline_attention(*torch.randn(3, 2, 6, 2, 4)).shape == (2, 6, 2, 4)
    mask = torch.ones(2, 6, dtype=torch.bool, device="meta")
    assert inline_attention(*torch.randn(3, 2, 6, 2, 4, device="meta"), key_padding_mask=mask).shape == (2, 6, 2, 4)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_traced_by_make_fx(tracing_mode):
    inputs = torch.randn(3, 2, 6, 2, 4)
    traced = make_fx(lambda q, k, v: inline_attention(q, k, v), tracing_mode=tracing_mode)(*inputs)
    others = torch.randn(3, 2, 6, 2, 4)
    torch.testing.assert_close(traced(*others), inline_attention(*others), rtol=1e-5, atol=1e-5)


def test_inference_mode_and_no_grad():
    qkv = torch.randn(2, 6, 3, 2, 4, requires_grad=True)
    with torch.inference_mode():
        out = inline_attention_qkvpacked(qkv)
    with torch.no_grad():
        torch.testing.assert_close(out, inline_attention_qkvpacked(qkv))
    assert not out.requires_grad
