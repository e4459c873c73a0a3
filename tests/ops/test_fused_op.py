"""From kernels to ops: opcheck, compilation, autocast, second derivatives, and what a call keeps."""

import os
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops import dispatch, fused_op
from inline_attention.ops.api import attend
from inline_attention.ops.call import AttentionCall
from ops.calls import use_backends

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
pytestmark = interpreted

OPS = torch.ops.inline_attention
SETTINGS = (0.5, "exp", "divide", 2, 3, 1)


def arguments(packed, masked, requires_grad=True):
    tensors = [torch.randn(2, 7, 3, 2, 4)] if packed else list(torch.randn(3, 2, 7, 2, 4))
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2]) if masked else None
    weight = torch.randn(2, 2, 4, 3, 3)
    for tensor in (*tensors, weight):
        tensor.requires_grad_(requires_grad)
    return tensors, mask, weight


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed, masked):
    tensors, mask, weight = arguments(packed, masked)
    forward = OPS.triton_packed_forward if packed else OPS.triton_forward
    backward = OPS.triton_packed_backward if packed else OPS.triton_backward
    torch.library.opcheck(forward, (*tensors, mask, weight, *SETTINGS))
    inference = OPS.triton_packed_inference if packed else OPS.triton_inference
    torch.library.opcheck(inference, (*(tensor.detach() for tensor in tensors), mask, weight.detach(), *SETTINGS))
    out, *state = forward(*tensors, mask, weight, *SETTINGS)
    plain = [tensor.detach() for tensor in (*tensors, weight)]
    torch.library.opcheck(
        backward, (torch.randn_like(out), *(s.detach() for s in state), *plain[:-1], mask, plain[-1], *SETTINGS)
    )
    without = (0.5, "identity", "subtract", 0, 0, 0)
    torch.library.opcheck(forward, (*tensors, mask, None, *without))
    out, *state = forward(*tensors, mask, None, *without)
    torch.library.opcheck(
        backward, (torch.randn_like(out), *(s.detach() for s in state), *plain[:-1], mask, None, *without)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_one_compiled_graph_keeps_the_op_and_serves_every_size(packed):
    seen = []

    def remember(graph, inputs):
        seen.append(graph)
        return graph.forward

    def attend(qkv, weight, height, width):
        options = {"local_weight": weight, "grid_size": (height, width), "num_prefix_tokens": 1, "backend": "triton"}
        if packed:
            return inline_attention_qkvpacked(qkv, **options)
        return inline_attention(*qkv.unbind(2), **options)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=remember)
    for batch, height, width in [(2, 3, 4), (3, 5, 7), (4, 2, 9)]:
        qkv = torch.randn(batch, 1 + height * width, 3, 5, 8)
        weight = torch.randn(batch, 5, 8, 3, 3)
        torch.testing.assert_close(compiled(qkv, weight, height, width), attend(qkv, weight, height, width))
    assert len(seen) == 1
    name = "triton_packed_inference" if packed else "triton_inference"
    assert any(name in str(node.target) for node in seen[0].graph.nodes)


def test_compiled_forward_and_backward():
    tensors, mask, weight = arguments(packed=True, masked=True)
    counter = CompileCounterWithBackend("aot_eager")

    def attend(qkv, weight):
        return inline_attention_qkvpacked(
            qkv, local_weight=weight, grid_size=(2, 3), num_prefix_tokens=1, key_padding_mask=mask, backend="triton"
        )

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    expected = attend(*tensors, weight)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(compiled(*tensors, weight), expected)
    for got, wanted in zip(
        torch.autograd.grad(compiled(*tensors, weight), (*tensors, weight), grad),
        torch.autograd.grad(expected, (*tensors, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_op_and_the_same_result():
    tensors, _, weight = arguments(packed=True, masked=False)
    options = {"local_weight": weight, "grid_size": (2, 3), "num_prefix_tokens": 1, "backend": "triton"}
    plain = inline_attention_qkvpacked(*tensors, **options)
    with Recorder() as recorder:
        out = inline_attention_qkvpacked(*tensors, **options)
        grads = torch.autograd.grad(out.sum(), (*tensors, weight))
    assert torch.equal(out, plain)
    for got, wanted in zip(grads, torch.autograd.grad(plain.sum(), (*tensors, weight)), strict=True):
        assert torch.equal(got, wanted)
    ours = [name for name in recorder.names if "inline_attention" in name]
    assert ours == ["inline_attention.triton_packed_forward.default", "inline_attention.triton_packed_backward.default"]


@pytest.mark.parametrize("through_op", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives(packed, through_op):
    tensors, mask, weight = arguments(packed, masked=True)
    op = OPS.triton_packed_forward if packed else OPS.triton_forward
    keywords = {
        "scale": 0.5, "feature_map": "exp", "normalization": "divide", "key_padding_mask": mask,
        "local_weight": weight, "grid_size": (2, 3), "num_prefix_tokens": 1,
    }  # fmt: skip

    def penalty(backend):
        if through_op and backend == "triton":
            out = op(*tensors, mask, weight, *SETTINGS)[0]
        else:
            q, k, v = tensors[0].unbind(2) if packed else tensors
            packed_call = packed and backend == "triton"
            out = (
                inline_attention_qkvpacked(*tensors, backend=backend, **keywords)
                if packed_call
                else inline_attention(q, k, v, backend=backend, **keywords)
            )
        grads = torch.autograd.grad(out.square().sum(), (*tensors, weight), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), (*tensors, weight))

    for got, wanted in zip(penalty("triton"), penalty("reference"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_one_tensor_in_three_places_to_second_order():
    x = torch.randn(1, 4, 1, 3, requires_grad=True)

    def penalty(backend):
        (grad,) = torch.autograd.grad(inline_attention(x, x, x, backend=backend).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    torch.testing.assert_close(penalty("triton"), penalty("reference"), rtol=1e-3, atol=1e-4)


def test_autocast_casts_inputs():
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = inline_attention(q, k.half(), v, backend="triton")
    assert out.dtype == torch.float16
    assert torch.equal(out, inline_attention(q.half(), k.half(), v.half(), backend="triton"))


def test_gradient_only_where_it_is_asked_for():
    q, k, v = torch.randn(3, 1, 4, 1, 3)
    v.requires_grad_()
    inline_attention(q, k, v, backend="triton").sum().backward()
    assert q.grad is None
    assert v.grad is not None
    with torch.no_grad():
        assert inline_attention(q, k, v, backend="triton").grad_fn is None
    assert inline_attention(q, k, v.detach(), backend="triton").grad_fn is None


def test_saved_for_backward_are_the_inputs_and_the_small_state():
    qkv = torch.randn(1, 64, 3, 2, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        inline_attention_qkvpacked(qkv, backend="triton")
    assert sorted(tensor.numel() for tensor in saved) == [8 + 8 + 32, qkv.numel()]
    assert any(tensor.data_ptr() == qkv.data_ptr() for tensor in saved)


def test_checkpointing_recomputes():
    tensors, _, weight = arguments(packed=True, masked=False)

    def attend(qkv, weight):
        return inline_attention_qkvpacked(
            qkv, local_weight=weight, grid_size=(2, 3), num_prefix_tokens=1, backend="triton"
        )

    expected = torch.autograd.grad(attend(*tensors, weight).sum(), (*tensors, weight))
    out = torch.utils.checkpoint.checkpoint(attend, *tensors, weight, use_reentrant=False)
    for got, wanted in zip(torch.autograd.grad(out.sum(), (*tensors, weight)), expected, strict=True):
        assert torch.equal(got, wanted)


def test_kernels_receive_unit_strides_and_views_of_one_packed_gradient():
    seen = {}

    def forward(call, keep_state):
        assert all(tensor.stride(-1) == 1 for tensor in (call.q, call.k, call.v))
        return fused_op._empty_results(call)

    def backward(call, grad_out, state, grads):
        assert grad_out.stride(-1) == 1
        seen["storages"] = {grad.untyped_storage().data_ptr() for grad in grads}
        for grad in grads:
            grad.zero_()

    run = fused_op.register("test_double", forward, backward, largest_head_dim=8, can_make_state_again=False)
    qkv = torch.randn(8, 2, 3, 6, 2).permute(4, 3, 2, 1, 0).requires_grad_()
    call = AttentionCall(*qkv.unbind(2), qkv, 0.5, "identity", "subtract", None, None, None, 0, False)
    run(call).sum().backward()
    assert len(seen["storages"]) == 1


def test_compiled_graphs_save_only_states_that_are_small_beside_the_inputs():
    kept, given = [], []

    def forward(call, keep_state):
        kept.append(keep_state)
        out, state = fused_op._empty_results(call)
        return out.zero_(), state.fill_(3.0) if keep_state else None

    def backward(call, grad_out, state, grads):
        given.append(None if state is None else state[0].item())
        for grad in grads:
            grad.zero_()

    run = fused_op.register("test_states", forward, backward, largest_head_dim=8, can_make_state_again=True)

    def attend(qkv):
        return run(AttentionCall(*qkv.unbind(2), qkv, 0.5, "identity", "subtract", None, None, None, 0, False))

    # Of a head, the state is 8 · 8 + 16 numbers, the inputs 24 a token.
    for tokens, is_saved in ((8, False), (600, True)):
        for function in (torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False), attend):
            qkv = torch.randn(2, tokens, 3, 1, 8, requires_grad=True)
            function(qkv).sum().backward()
        assert kept[-2:] == [is_saved, True]  # a plain call keeps its state whatever its size
        assert given[-2:] == [3.0 if is_saved else None, 3.0]


def test_queries_are_overwritten_only_where_they_are_not_needed():
    allowed = []

    def forward(call, keep_state):
        allowed.append(call.overwrite_q)
        return fused_op._empty_results(call)

    def backward(*arguments):
        raise AssertionError("nobody asked for gradients")

    run = fused_op.register("test_overwriting", forward, backward, largest_head_dim=8, can_make_state_again=True)
    q, k, v = torch.randn(3, 2, 6, 1, 8)
    call = AttentionCall(q, k, v, None, 0.5, "identity", "subtract", None, None, None, 0, overwrite_q=True)
    for wanted in (True, False):
        run(call._replace(overwrite_q=wanted))
        assert allowed.pop() == wanted
    run(call._replace(v=v.clone().requires_grad_()))
    assert not allowed.pop()
    with Recorder():  # may keep what it sees
        run(call)
    assert not allowed.pop()
    run(call._replace(feature_map=torch.nn.Identity()))  # q may be what the map was given
    assert not allowed.pop()


def test_a_call_seen_before_overwrites_only_where_allowed(monkeypatch):
    seen = []

    def run(call):
        seen.append(call.overwrite_q)
        return call.v

    recording = dispatch.Backend("recording", lambda call: None, run)
    use_backends(monkeypatch, recording)
    wanted = [False, True, True, False, False, True]
    for overwrite_q in wanted:
        call = AttentionCall(*torch.randn(3, 2, 6, 1, 8), None, 1.0, "identity", "subtract", None, None, None, 0)
        attend(call._replace(overwrite_q=overwrite_q), "auto")
    assert seen == wanted


def unusual_layout(*shape):
    """The last dimension is not the one that lies densely in memory."""
    return torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("make", [torch.randn, unusual_layout])
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_seen_before_reads_the_new_data(packed, make, backend):
    """The second of its kind takes a shorter way: without gradients, with them, and again without."""

    def attend(tensors, weight, name):
        function = inline_attention_qkvpacked if packed else inline_attention
        return function(*tensors, local_weight=weight, grid_size=(2, 3), num_prefix_tokens=1, backend=name)

    for needs_grad in (False, False, True, True, False):
        tensors = [make(2, 7, 3, 2, 4)] if packed else [make(2, 7, 2, 4) for _ in range(3)]
        leaves = [tensor.requires_grad_(needs_grad) for tensor in (*tensors, torch.randn(2, 2, 4, 3, 3))]
        out, expected = (attend(leaves[:-1], leaves[-1], name) for name in (backend, "reference"))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert out.requires_grad == needs_grad
        if needs_grad:
            got, wanted = (torch.autograd.grad(result.square().sum(), leaves) for result in (out, expected))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_an_empty_batch_seen_before():
    for _ in range(2):
        assert inline_attention(*torch.randn(3, 0, 5, 2, 4), backend="triton").shape == (0, 5, 2, 4)


def test_what_watches_sees_a_call_seen_before():
    seen = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    qkv = torch.randn(2, 5, 3, 2, 4)
    plain = [inline_attention_qkvpacked(qkv, backend="triton") for _ in range(2)][1]
    with Watcher():
        watched = inline_attention_qkvpacked(qkv, backend="triton")
    assert OPS.triton_packed_inference.default in seen
    assert torch.equal(plain, watched)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_calls_seen_before_keep_no_tensor(backend):
    qkv, weight = torch.randn(2, 6, 3, 2, 5), torch.randn(2, 2, 5, 3, 3)
    watched = [weakref.ref(tensor) for tensor in (qkv, weight)]
    inline_attention_qkvpacked(qkv, local_weight=weight, grid_size=(2, 3), backend=backend)
    del qkv, weight
    assert [reference() for reference in watched] == [None, None]
