"""The contract suite: path × dtype × awkward shape × option, outputs and gradients, against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops.backends import eager
from inline_attention.ops.backends.eager import blocked
from ops.contract import OPTIONS, SHAPES, Option, Shape, check_call

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PATHS = ["blocked", "tiny_blocks", "composed"]


@pytest.fixture
def path(request, monkeypatch):
    """The eager backend's two implementations, and the blocked one with blocks that split everything."""
    if request.param == "composed":
        monkeypatch.setattr(eager, "_can_block", lambda call: False)
    elif request.param == "tiny_blocks":
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 24)
    return request.param


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_shape(path, dtype, option):
    for shape in SHAPES:
        packed = shape.value_dim is None and shape.tokens[0] == shape.tokens[1]
        try:
            check_call(shape, option, dtype, backend="eager", packed=packed)
        except AssertionError as error:
            raise AssertionError(f"shape {shape.name}: {error}") from error


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.grid], ids=lambda shape: shape.name)
def test_separate_tensors_with_local_term(path, shape):
    check_call(shape, Option("masked", masked=True), torch.float32, backend="eager", packed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_in_other_dtypes(dtype):
    for shape in SHAPES:
        check_call(shape, OPTIONS[1], dtype, backend="reference", packed=False)


shapes = st.builds(
    Shape,
    name=st.just("random"),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    prefix=st.integers(0, 3),
)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, option=st.sampled_from(OPTIONS), seed=st.integers(0, 2**31), packed=st.booleans())
def test_random_shapes_and_masks(shape, option, seed, packed):
    check_call(shape, option, torch.float32, backend="auto", packed=packed, seed=seed)


# Every GPU test runs for each of these.
GPU_BACKENDS = ["auto", "triton"]
GPU_DTYPES = [torch.float32, torch.bfloat16, torch.float16]

gpu_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)
gpu_dtype = pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def _poisoned_memory(monkeypatch):
    """Whatever a kernel does not write reads as NaN."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.gpu
@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@gpu_backend
@gpu_dtype
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_shape_on_a_gpu(option, dtype, backend, packed):
    for shape in SHAPES:
        if packed and (shape.value_dim is not None or shape.tokens[0] != shape.tokens[1]):
            continue
        try:
            check_call(shape, option, dtype, backend=backend, packed=packed, device="cuda")
        except AssertionError as error:
            raise AssertionError(f"shape {shape.name}: {error}") from error


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_float64_on_a_gpu(option):
    for shape in SHAPES:
        check_call(shape, option, torch.float64, backend="auto", packed=False, device="cuda")


TILING_GRIDS = [(1, tokens) for tokens in (1, 2, 15, 17, 196, 197, 785, 3137)] + [
    (197, 1), (3137, 1), (7, 13), (14, 14), (28, 28), (56, 56),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("head_dim", [32, 64, 33, 128])
@gpu_backend
@gpu_dtype
@pytest.mark.parametrize("grid", TILING_GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_token_counts_that_break_tilings(grid, dtype, backend, head_dim):
    for prefix, masked in ((0, False), (1, True)):
        shape = Shape("tiling", batch=2, heads=3, head_dim=head_dim, grid=grid, prefix=prefix)
        check_call(
            shape, Option("tiling", masked=masked), dtype, backend=backend, packed=True, device="cuda", oracle="eager"
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("_poisoned_memory")
@gpu_backend
@gpu_dtype
def test_cross_attention_in_many_chunks(dtype, backend):
    shape = Shape("cross", batch=1, queries=5000, keys=7001, heads=3, head_dim=40, value_dim=72)
    for option in OPTIONS:
        check_call(shape, option, dtype, backend=backend, packed=False, device="cuda", oracle="eager")


@pytest.mark.gpu
@gpu_backend
@gpu_dtype
def test_a_huge_batch_of_small_samples(dtype, backend):
    shape = Shape("batch", batch=70_000, heads=2, head_dim=8, grid=(2, 2))
    check_call(shape, Option("batch"), dtype, backend=backend, packed=True, device="cuda", oracle="eager")


@pytest.mark.gpu
@gpu_backend
@gpu_dtype
def test_a_million_tokens(dtype, backend):
    shape = Shape("long", batch=1, heads=1, head_dim=32, grid=(1024, 1024))
    check_call(shape, Option("long"), dtype, backend=backend, packed=True, device="cuda", oracle="eager")


@pytest.mark.gpu
@gpu_backend
def test_inputs_of_any_layout_on_a_gpu(backend):
    q = torch.randn(2, 40, 60, 8, device="cuda")[:, :, ::2, ::2].transpose(1, 2)  # strided channels
    k = torch.randn(1, 1, 40, 4, device="cuda").expand(2, 30, 40, 4)
    v = torch.randn(2, 40, 30, 4, device="cuda").transpose(1, 2)  # heads first in memory
    weight = torch.randn(3, 3, 4, 40, 2, device="cuda").permute(4, 3, 2, 1, 0)
    mask = (torch.rand(30, 2, device="cuda") > 0.3).t()
    mask[:, 0] = True
    options = {"local_weight": weight, "grid_size": (5, 6), "key_padding_mask": mask}
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    grad = torch.randn(30, 4, 40, 2, device="cuda").permute(3, 0, 2, 1)
    results = []
    for name in (backend, "reference"):
        out = inline_attention(*leaves, backend=name, **options)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@gpu_backend
@gpu_dtype
def test_fifty_repeats_are_bitwise_equal(dtype, backend):
    qkv = torch.randn(3, 1 + 57 * 31, 3, 6, 32, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(3, 6, 32, 3, 3, device="cuda").to(dtype).requires_grad_()
    grad = torch.randn(3, 1 + 57 * 31, 6, 32, device="cuda").to(dtype)
    first = None
    for _ in range(50):
        out = inline_attention_qkvpacked(
            qkv, local_weight=weight, grid_size=(57, 31), num_prefix_tokens=1, backend=backend
        )
        results = (out, *torch.autograd.grad(out, (qkv, weight), grad))
        first = results if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.gpu
@gpu_backend
@pytest.mark.parametrize("layout", ["many_samples", "one_long_sample"])
def test_more_than_two_to_the_31_elements(layout, backend):
    """Samples and heads are independent: a few of them, cut out, must give the same."""
    B, side, H, D = (720, 32, 32, 32) if layout == "many_samples" else (1, 1024, 22, 32)
    qkv = torch.randn(B, side * side, 3, H, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    assert qkv.numel() > 2**31
    weight = torch.randn(B, H, D, 3, 3, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(B, side * side, H, D, device="cuda", dtype=torch.bfloat16)
    out = inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(side, side), backend=backend)
    out.backward(grad)
    for sample, head in {(0, 0), (0, H - 1), (B // 2, H // 2), (B - 1, H - 1)}:
        at = (slice(sample, sample + 1), slice(None))
        one = qkv.detach()[(*at, slice(None), slice(head, head + 1))].double().requires_grad_()
        expected = inline_attention_qkvpacked(
            one, local_weight=weight[at[0], head : head + 1].double(), grid_size=(side, side), backend="eager"
        )
        expected.backward(grad[(*at, slice(head, head + 1))].double())
        for got, wanted in (
            (out[(*at, slice(head, head + 1))], expected),
            (qkv.grad[(*at, slice(None), slice(head, head + 1))], one.grad),
        ):
            torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)
