"""The CUDA C++ backend: it compiles for every architecture, cuts work without gaps, refuses, falls back, is right."""

import copy
import ctypes
import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.layers.local_weights import LocalWeightPredictor
from inline_attention.ops import dispatch
from inline_attention.ops.backends import cuda
from inline_attention.ops.backends.cuda import compiler, launch
from ops.calls import attend_over_queries
from ops.contract import OPTIONS, Option, Shape, check_call

HALF_DTYPES = [torch.bfloat16, torch.float16]


# ------------------------------------------------------------------------------------------------ without a GPU


@pytest.fixture
def _nvrtc(monkeypatch, tmp_path):
    monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(tmp_path))
    try:
        compiler._nvrtc()
    except compiler.CompilerUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
def test_compiles_for_every_architecture(architecture, head_dim):
    dtype = HALF_DTYPES[head_dim == 64]
    binary = compiler.compile_binary(architecture, launch.defines(dtype, head_dim))
    for name in compiler.signatures():
        assert name.encode() in binary


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
def test_compiles_with_the_nvrtc_of_older_pytorch(dtype, head_dim):
    """PyTorch 2.11 comes with NVRTC 12.6 to 13.0, which refuse things that NVRTC 13.2 accepts."""
    found = sorted(Path(torch.__file__).parent.parent.glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    if not found:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed; it exists for Linux on x86-64")
    options = ["--gpu-architecture=sm_90", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in launch.defines(dtype, head_dim).items()]
    binary = compiler._compile(ctypes.CDLL(str(found[0])), compiler.SOURCE.read_bytes(), options)
    for name in compiler.signatures():
        assert name.encode() in binary


@pytest.mark.usefixtures("_nvrtc")
def test_compiled_kernels_are_kept_for_the_next_process(tmp_path, monkeypatch):
    defines = launch.defines(torch.bfloat16, 32)
    binary = compiler.compile_binary("sm_90", defines)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile_binary("sm_90", defines) == binary
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


@pytest.mark.usefixtures("_nvrtc")
def test_a_kept_binary_that_was_cut_short_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_compile", lambda *_: b"a binary")
    defines = launch.defines(torch.bfloat16, 32)
    binary = compiler.compile_binary("sm_90", defines)
    (kept,) = tmp_path.iterdir()
    for rest in (b"", kept.read_bytes()[:-1]):
        kept.write_bytes(rest)
        assert compiler.compile_binary("sm_90", defines) == binary
        assert kept.stat().st_size > len(binary)


@pytest.mark.usefixtures("_nvrtc")
def test_a_full_disk_leaves_no_half_binaries(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler, "_compile", lambda *_: b"a binary")
    monkeypatch.setattr("os.replace", full)
    assert compiler.compile_binary("sm_90", launch.defines(torch.bfloat16, 32))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_nvrtc")
def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("INLINE_ATTENTION_CACHE", str(blocker / "cache"))
    assert compiler.compile_binary("sm_90", launch.defines(torch.bfloat16, 32))


@pytest.mark.usefixtures("_nvrtc")
def test_what_nvrtc_says_reaches_the_user():
    with pytest.raises(compiler.CompilerUnavailableError, match="sm_12345"):
        compiler.compile_binary("sm_12345", launch.defines(torch.bfloat16, 32))


@pytest.mark.usefixtures("_nvrtc")
def test_a_struct_that_python_packs_otherwise_does_not_compile():
    defines = launch.defines(torch.bfloat16, 32)
    with pytest.raises(compiler.CompilerUnavailableError, match=r"compiler\.py packs another struct"):
        compiler.compile_binary("sm_90", defines | {"OutputParams_BYTES": defines["OutputParams_BYTES"] + 8})


def test_divisions_by_multiplication():
    for divisor in (1, 2, 3, 6, 7, 64, 4097, 2**16 + 1, 2**31 - 1):
        for number in (0, 1, divisor - 1, divisor, divisor + 1, 3 * divisor - 1, 2**30 + 1, 2**31 - 2, 2**31 - 1):
            quotient = number * launch.inverse(divisor) >> 32  # as in `Division` of kernels.cu
            quotient += number - quotient * divisor >= divisor
            assert quotient == number // divisor


def test_what_begins_anywhere_is_copied():
    numbers = torch.arange(65).bfloat16()
    assert launch.aligned(numbers).data_ptr() == numbers.data_ptr()
    for tensor in (numbers[1:], numbers[:64].view(8, 8).t()):
        copy = launch.aligned(tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, tensor)


def test_splits_cover_every_token():
    for tokens in (1, 2, 63, 64, 65, 196, 3137, 65536, 1 << 20):
        for rows in (1, 3, 100, 5000):
            count, each = launch.choose_splits(rows, tokens, 528)
            assert (count - 1) * each < tokens <= count * each
            assert count <= launch.MOST_SPLITS


@pytest.mark.parametrize("roles", [1, 3])
def test_tiles_cover_the_grid(roles):
    for height, width in ((1, 1), (1, 4000), (4000, 1), (7, 13), (14, 14), (57, 31), (256, 256), (1024, 1024)):
        for batches in (1, 3, 700):
            tokens = 5 + height * width
            sizes = launch.Sizes(0, torch.bfloat16, batches, tokens, tokens, 6, 32, height, width, prefix=5)
            layout = launch.choose_layout(sizes, tokens, roles, 132)
            assert layout.tile_height % 2 == 0
            assert layout.tiles_across * launch.GROUPS * launch.STRIP >= width
            down = layout.tiles // layout.tiles_across
            assert (down - 1) * layout.tile_height < height <= down * layout.tile_height
            assert layout.blocks < 2**31


def test_runs_cover_the_tokens_where_there_is_no_grid():
    for tokens in (1, 17, 5000, 1 << 20):
        sizes = launch.Sizes(0, torch.bfloat16, 2, tokens, tokens, 3, 32, height=0, width=0, prefix=0)
        layout = launch.choose_layout(sizes, tokens, 1, 132)
        assert (layout.tiles - 1) * layout.run < tokens <= layout.tiles * layout.run


def queries_keys_values_weight(head_dim=32):
    return [torch.randn(2, 5, 3, head_dim) for _ in range(3)] + [torch.randn(2, 3, head_dim, 3, 3)]


def test_the_output_takes_the_memory_of_queries_that_are_given_up():
    q, *others = queries_keys_values_weight()
    saved = q * torch.ones(1, requires_grad=True)
    out = launch._output(q, *others, overwrite_q=True)
    assert out.data_ptr() == q.data_ptr()
    assert out.stride() == q.stride()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with torch.inference_mode():
        q, *others = queries_keys_values_weight()
        assert launch._output(q, *others, overwrite_q=True).data_ptr() == q.data_ptr()


@pytest.mark.parametrize("shared_with", [1, 2, 3])
def test_the_output_does_not_take_memory_that_others_share(shared_with):
    """A value may be read after its query was written over."""
    tensors = queries_keys_values_weight()
    q, shared = tensors[0], tensors[shared_with]
    buffer = torch.randn(q.numel() + shared.numel())
    tensors[0], tensors[shared_with] = buffer[: q.numel()].view_as(q), buffer[q.numel() :].view_as(shared)
    assert launch._output(*tensors, overwrite_q=True).data_ptr() != tensors[0].data_ptr()


@pytest.mark.parametrize(
    "q",
    [
        torch.randn(2, 5, 3, 64),  # two warps read what each of them writes half of
        torch.randn(2, 3, 5, 32).transpose(1, 2),
        torch.randn(2 * 5 * 3 * 32 + 1)[1:].view(2, 5, 3, 32),
        torch.randn(2, 5, 3, 32, requires_grad=True),
    ],
    ids=["wide", "strided", "misaligned", "with a gradient"],
)
def test_the_output_does_not_take_memory_of_other_layouts(q):
    _, *others = queries_keys_values_weight(q.shape[3])
    out = launch._output(q, *others, overwrite_q=True)
    assert out.data_ptr() != q.data_ptr()
    assert out.shape == q.shape
    assert out.is_contiguous()


def test_the_output_has_memory_of_its_own_unless_allowed_otherwise():
    q, *others = queries_keys_values_weight()
    assert launch._output(q, *others, overwrite_q=False).data_ptr() != q.data_ptr()


def test_refuses_by_name_on_a_cpu():
    qkv = torch.randn(1, 9, 3, 2, 32).bfloat16()
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, got cpu"):
        inline_attention_qkvpacked(qkv, backend="cuda")


def test_comes_before_triton_and_eager():
    assert [backend.name for backend in dispatch.AUTO_BACKENDS] == ["cuda", "triton", "eager"]


# ------------------------------------------------------------------------------------------------ on a GPU

GRIDS = [(1, 1), (1, 17), (17, 1), (2, 2), (7, 7), (7, 13), (13, 7), (14, 14), (15, 16), (28, 28), (57, 31), (1, 3137)]


@pytest.fixture(params=["as_chosen", "one_block", "split"])
def _path(request, monkeypatch):
    """Both ways through the forward pass, whatever the heuristics would choose."""
    launch.plan_forward.cache_clear()
    launch.plan_backward.cache_clear()
    if request.param == "one_block":
        monkeypatch.setattr(launch, "fits_one_block", lambda *_: True)
    elif request.param == "split":
        monkeypatch.setattr(launch, "fits_one_block", lambda *_: False)
        monkeypatch.setattr(
            launch, "choose_splits", lambda rows, tokens, processors: launch.Splits(-(-tokens // 64), 64)
        )
    yield
    launch.plan_forward.cache_clear()
    launch.plan_backward.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_grids(grid, head_dim, dtype):
    for prefix, heads, packed in ((0, 1, True), (1, 3, True), (5, 2, False), (19, 3, True)):
        shape = Shape("grid", batch=2, heads=heads, head_dim=head_dim, grid=grid, prefix=prefix)
        check_call(shape, Option("grid"), dtype, backend="cuda", packed=packed, device="cuda", oracle="eager")


@pytest.mark.gpu
@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("grid", [*GRIDS, (200, 333), None], ids=str)
def test_output_in_the_memory_of_the_queries(grid, head_dim, dtype):
    for prefix, heads in ((0, 1), (1, 3), (19, 2)):
        tokens = prefix + (5000 if grid is None else grid[0] * grid[1])
        q, k, v = (torch.randn(3, tokens, heads, head_dim, device="cuda").to(dtype) for _ in range(3))
        local = {}
        if grid is not None:
            weight = torch.randn(3, heads, head_dim, 3, 3, device="cuda").to(dtype)
            local = {"local_weight": weight, "grid_size": grid, "num_prefix_tokens": prefix}
        expected = inline_attention(q, k, v, backend="cuda", **local)
        for _ in range(3):
            queries = q.clone()
            out = attend_over_queries(queries, k, v, backend="cuda", **local)
            assert torch.equal(out, expected)
            assert (out.data_ptr() == queries.data_ptr()) == (head_dim == 32)


@pytest.mark.gpu
def test_overwriting_saves_one_tensor():
    q, k, v = torch.randn(3, 2, 2**19, 2, 32, device="cuda").bfloat16().unbind(0)
    q = q.clone()
    peaks = []
    for overwrite_q in (False, True, False, True):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attend_over_queries(q, k, v, overwrite_q=overwrite_q, backend="cuda")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # Less than that by what sums of splits take, before there is an output.
    assert peaks[2] - peaks[3] >= 0.9 * q.numel() * q.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("tokens", [(1, 1), (1, 9), (9, 1), (17, 15), (196, 785), (3137, 196), (1000, 5000)])
def test_no_grid_and_cross_attention(tokens, head_dim, dtype):
    shape = Shape("cross", queries=tokens[0], keys=tokens[1], heads=3, head_dim=head_dim)
    for option in (OPTIONS[0], OPTIONS[2]):
        check_call(shape, option, dtype, backend="cuda", packed=False, device="cuda", oracle="eager")


@pytest.mark.gpu
def test_a_mean_that_dominates_does_not_wash_out_the_covariance():
    """Keys and values around 50 in half precision, where a product of two rounded means would drown everything."""
    q = torch.randn(1, 8, 2, 32, device="cuda").half()
    k, v = (50 + torch.randn(2, 1, 65536, 2, 32, device="cuda")).half()
    out = inline_attention(q, k, v, backend="cuda")
    exact = inline_attention(q.double(), k.double(), v.double(), backend="eager")
    # Half a unit in the last place of 50 in float16 is 2^-6.
    assert (out.double() - exact).abs().max() <= 2**-6 + 2e-5


@pytest.mark.gpu
def test_local_weights_that_begin_anywhere():
    torch.manual_seed(0)
    qkv = torch.randn(3, 49, 3, 3, 32, device="cuda").bfloat16()
    weight = torch.randn(3 * 3 * 32 * 9 + 1, device="cuda").bfloat16()[1:].view(3, 3, 32, 3, 3)
    assert weight.data_ptr() % 16 != 0
    got, expected = (
        inline_attention_qkvpacked(qkv, local_weight=given, grid_size=(7, 7), backend="cuda")
        for given in (weight, weight.clone())
    )
    assert torch.equal(got, expected)


@pytest.mark.gpu
def test_refusals_on_a_gpu():
    qkv = torch.randn(2, 9, 3, 2, 32, device="cuda").bfloat16()
    q, k, v = qkv.unbind(2)
    mask = torch.ones(2, 9, dtype=torch.bool, device="cuda")
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for tensors, options, reason in (
        ((q.float(), k.float(), v.float()), {}, "bfloat16 and float16"),
        ((q[..., :16], k[..., :16], v[..., :16]), {}, "head dims"),
        ((q, k, v), {"feature_map": "relu"}, "feature_map"),
        ((q, k, v), {"normalization": "divide"}, "normalization"),
        ((q, k, v), {"key_padding_mask": mask}, "key_padding_mask"),
        ((heads_first, k, v), {}, "those of q are not"),
    ):
        with pytest.raises(ValueError, match=reason):
            inline_attention(*tensors, backend="cuda", **options)
        inline_attention(*tensors, **options)  # "auto" finds another


@pytest.mark.gpu
def test_falls_back_where_the_compiler_is_missing(monkeypatch):
    monkeypatch.setattr(cuda, "build_reason", lambda *_: "NVRTC was not found")
    qkv = torch.randn(2, 11, 3, 2, 32, device="cuda").bfloat16()  # a shape no other test has asked for
    with pytest.raises(ValueError, match="NVRTC was not found"):
        inline_attention_qkvpacked(qkv, backend="cuda")
    assert inline_attention_qkvpacked(qkv).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_keep_the_op(dynamic):
    def attend(qkv, weight):
        return inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(6, 5), num_prefix_tokens=1).square()

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        qkv = torch.randn(batch, 31, 3, 2, 32, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(batch, 2, 32, 3, 3, device="cuda").bfloat16().requires_grad_()
        results = []
        for function in (attend, compiled):
            out = function(qkv, weight)
            results.append((out, *torch.autograd.grad(out.float().sum(), (qkv, weight))))
        for plain, other in zip(*results, strict=True):
            torch.testing.assert_close(plain, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("tokens", [1, 31, 32, 197, 3137])
def test_predicted_local_weights(tokens, head_dim, dtype):
    torch._dynamo.reset()  # which compiles a function only so often, over all tests of a process
    torch.manual_seed(0)
    for heads in (1, 3, 6):
        layer = LocalWeightPredictor(heads * head_dim, heads, device="cuda", dtype=dtype)
        torch.nn.init.normal_(layer[2].weight)
        torch.nn.init.normal_(layer[0].bias)
        torch.nn.init.normal_(layer[2].bias)
        x = torch.randn(3, tokens, 2 * heads * head_dim, device="cuda").add_(0.2).to(dtype)[..., : heads * head_dim]
        exact = copy.deepcopy(layer).double()(x.double().mean(1))
        with torch.no_grad():
            fused = layer.predict(x)
            assert torch.equal(fused, torch.compile(layer.predict, fullgraph=True)(x))
        torch.testing.assert_close(fused.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
        composed = layer.predict(x)
        assert composed.requires_grad
        torch.testing.assert_close(fused, composed.detach(), rtol=0.1, atol=0.1)


@pytest.mark.gpu
def test_predictors_whose_parameters_begin_anywhere():
    """As after `vector_to_parameters`, which makes parameters views of one vector."""
    torch.manual_seed(0)
    layer = LocalWeightPredictor(96, 3, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.normal_(layer[2].weight)
    x = torch.randn(2, 50, 96, device="cuda").bfloat16()
    with torch.no_grad():
        expected = layer.predict(x)
        vector = torch.nn.utils.parameters_to_vector(layer.parameters())
        vector = torch.cat([vector.new_zeros(1), vector])[1:]
        torch.nn.utils.vector_to_parameters(vector, layer.parameters())
        assert all(parameter.data_ptr() % 16 != 0 for parameter in layer.parameters())
        assert torch.equal(layer.predict(x), expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_under_the_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    script = Path(__file__).with_name("sanitized_calls.py")
    arguments = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
