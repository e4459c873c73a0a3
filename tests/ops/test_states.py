"""States of keys and values: split, merged and attended to, they give what the op gives for all keys at once."""

import os

import pytest
import torch

from inline_attention import AttentionState, attend, attention_state, inline_attention, merge_states
from inline_attention.ops import states

B, N, M, H, D, DV = 2, 5, 23, 3, 4, 6
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64
NORMALIZED = [("subtract", "identity"), ("divide", "relu"), ("magnitude", "elu_plus_one"), ("subtract", "exp")]


def inputs(dtype=torch.float64):
    q, k = torch.randn(B, N, H, D, dtype=dtype), torch.randn(B, M, H, D, dtype=dtype)
    return q, k, torch.randn(B, M, H, DV, dtype=dtype)


def in_pieces(k, v, sizes, mask=None, **options):
    """The state of keys that are split into pieces of these sizes."""
    parts = zip(k.split(sizes, 1), v.split(sizes, 1), strict=True)
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, 1)
    return merge_states(
        *(attention_state(*part, key_padding_mask=mask, **options) for part, mask in zip(parts, masks, strict=True))
    )


@pytest.mark.parametrize(("normalization", "feature_map"), NORMALIZED)
@pytest.mark.parametrize("sizes", [[23], [1, 22], [7, 7, 9], [1] * 23])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_of_the_op(normalization, feature_map, sizes, masked):
    tensors = [tensor.requires_grad_() for tensor in inputs()]
    q, k, v = tensors
    mask = torch.rand(B, M) < 0.7 if masked else None
    options = {"normalization": normalization, "feature_map": feature_map}
    expected = inline_attention(q, k, v, key_padding_mask=mask, scale=0.7, backend="reference", **options)
    state = in_pieces(k, v, sizes, mask, feature_map=feature_map)
    found = attend(q, state, scale=0.7, **options)
    torch.testing.assert_close(found, expected, **EXACT)
    grad = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(found, tensors, grad), torch.autograd.grad(expected, tensors, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 100])
def test_chunks_change_nothing(chunk_size):
    _, k, v = inputs()
    mask = torch.rand(B, M) < 0.5
    found = attention_state(k, v, key_padding_mask=mask, chunk_size=chunk_size)
    torch.testing.assert_close(found, attention_state(k, v, key_padding_mask=mask), **EXACT)


def test_the_order_of_merging_does_not_matter():
    _, k, v = inputs()
    parts = [attention_state(*part) for part in zip(k.split(6, 1), v.split(6, 1), strict=True)]
    nested = merge_states(merge_states(parts[3], parts[1]), merge_states(parts[2], parts[0]))
    torch.testing.assert_close(nested, attention_state(k, v), **EXACT)


def test_a_state_without_keys_changes_nothing():
    _, k, v = inputs()
    empty = attention_state(k, v, key_padding_mask=torch.zeros(B, M, dtype=torch.bool))
    assert not any(part.any() for part in empty)
    torch.testing.assert_close(merge_states(empty, attention_state(k, v)), attention_state(k, v), **EXACT)
    assert not any(part.isnan().any() for part in merge_states(empty, empty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_means_far_from_zero_do_not_cancel(dtype):
    q, k, v = inputs(torch.float32)
    k, v = (k + 300).to(dtype), (v - 1000).to(dtype)
    state = in_pieces(k, v, [8, 8, 7])
    assert {part.dtype for part in state} == {torch.int64, torch.float32}
    exact = inline_attention(q.to(dtype).double(), k.double(), v.double(), backend="reference")
    found = attend(q.to(dtype), state)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() / exact.abs()).max() <= tolerance


def test_autocast_as_in_the_op():
    q, k, v = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = inline_attention(q, k, v)
        found = attend(q, attention_state(k, v, chunk_size=4))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_one_compiled_graph_serves_every_size():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(q, k, v):
        return attend(q, merge_states(attention_state(k[:, :3], v[:, :3]), attention_state(k[:, 3:], v[:, 3:])))

    for tokens in (9, 14):
        q, k, v = torch.randn(3, 2, tokens, 2, 4)
        torch.testing.assert_close(function(q, k, v), inline_attention(q, k, v))


def attend_local(v):
    return attend(inputs()[0], state(), v=v, local_weight=torch.randn(B, H, DV, 3, 3), grid_size=(1, N))


def state():
    return attention_state(*inputs()[1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: merge_states(), "at least one state"),
        (lambda: merge_states(state(), attention_state(*torch.randn(2, B, 3, H, 9))), "must agree in B, H, D"),
        (lambda: attend(torch.randn(B, N, H, D + 1), state()), "agree with the state in B, H and D"),
        (lambda: attend(torch.randn(B, N, H, D), state(), normalization="add"), "normalization"),
        (lambda: attend(torch.randn(B, N, H, D), tuple(state())), "must be an AttentionState, got tuple"),
        (lambda: merge_states([state()]), "each an argument of its own, got list"),
        (lambda: attend_local(inputs()[2]), r"values \[B, N, H, Dv\] = \(2, 5, 3, 6\) of the queries' own tokens"),
        (lambda: attention_state(*inputs()[1:], chunk_size=0), "chunk_size must be an integer ≥ 1"),
        (lambda: attention_state(*inputs()[1:], key_padding_mask=torch.ones(B, M)), "must be a bool tensor"),
        (lambda: attention_state(inputs()[1], inputs()[2].float()), "k and v must share one dtype"),
        (lambda: attention_state(inputs()[1], inputs()[2][:, 1:]), "every key needs a value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_is_a_tuple_of_tensors_that_ranks_can_exchange():
    gathered = AttentionState(*(part.clone() for part in state()))
    assert [tuple(part.shape) for part in gathered] == [(B,), (B, H, D), (B, H, DV), (B, H, D, DV)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off: see the GPU tests")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("normalization", "feature_map"), NORMALIZED)
def test_kernels_without_a_gradient(normalization, feature_map, masked, dtype, monkeypatch):
    check_kernels("cpu", normalization, feature_map, masked, dtype, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("normalization", "feature_map"), NORMALIZED)
def test_kernels_on_a_gpu(normalization, feature_map, masked, dtype, monkeypatch):
    check_kernels("cuda", normalization, feature_map, masked, dtype, monkeypatch)


def check_kernels(device, normalization, feature_map, masked, dtype, monkeypatch):
    """States and outputs by the kernels are those of the composed operations, also where bands meet."""
    q, k, v, own = (torch.randn(B, n, H, d, dtype=dtype, device=device) for n, d in ((6, D), (M, D), (M, DV), (6, DV)))
    own, v = own.transpose(-1, -2).contiguous().transpose(-1, -2), v + 5
    mask = torch.tensor([[True] * M, [False] * M], device=device) if masked else None
    weight = torch.randn(B, H, DV, 3, 3, dtype=dtype, device=device)
    options = {"normalization": normalization, "feature_map": feature_map, "scale": 0.7}

    def run():
        first = attention_state(k[:, :9], v[:, :9], feature_map=feature_map)
        rest = attention_state(
            k[:, 9:], v[:, 9:], feature_map=feature_map, key_padding_mask=None if mask is None else mask[:, 9:]
        )
        merged = merge_states(first, rest)
        return (
            *rest,
            *merged,
            attend(q, merged, **options),
            attend(q, merged, v=own, local_weight=weight, grid_size=(2, 3), **options),
        )

    monkeypatch.setattr(states, "KERNEL_DEVICES", ())
    expected = run()
    monkeypatch.setattr(states, "KERNEL_DEVICES", (device,))
    used = [count_calls(monkeypatch, states.triton, name) for name in ("state_of_keys", "attend_to_state")]
    found = run()
    assert [len(calls) for calls in used] == [2, 2]
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max().clamp(min=1)))
    k.requires_grad_()
    assert run()[-1].requires_grad
    assert [len(calls) for calls in used] == [2, 2], "the kernels of a state have no derivative"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off")
def test_calls_that_kernels_do_not_suit_are_composed_or_refused(monkeypatch):
    q, k, v = inputs()
    wide = torch.randn(B, M, H, 150)
    expected = attend(q.float(), attention_state(k, v)), attend(q.float(), attention_state(k.float(), wide))
    monkeypatch.setattr(states, "KERNEL_DEVICES", ("cpu",))
    used = count_calls(monkeypatch, states.triton, "attend_to_state")
    torch.testing.assert_close(attend(q.float(), attention_state(k, v)), expected[0], **EXACT)
    torch.testing.assert_close(attend(q.float(), attention_state(k.float(), wide)), expected[1], **EXACT)
    with pytest.raises(ValueError, match="agree with the state in B, H and D"):
        attend(q.float()[..., 1:].contiguous(), attention_state(k.float(), v.float()))
    assert not used


def count_calls(monkeypatch, module, name):
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: calls.append(arguments) or function(*arguments))
    return calls


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_no_keys_give_a_state_that_changes_nothing(chunk_size):
    q, k, v = inputs()
    empty = attention_state(k[:, :0], v[:, :0], chunk_size=chunk_size)
    assert not any(part.any() for part in empty)
    torch.testing.assert_close(merge_states(attention_state(k, v), empty), attention_state(k, v), **EXACT)
    one = attention_state(k[:, :1], v[:, :1])
    torch.testing.assert_close(attend(q, one), v[:, :1].expand(-1, N, -1, -1), **EXACT)


def test_meta_tensors():
    q, k, v = (tensor.to("meta") for tensor in inputs())
    assert attend(q, attention_state(k, v)).shape == (B, N, H, DV)
    with pytest.raises(ValueError, match="on one device, got cpu and meta"):
        attend(inputs()[0], attention_state(k, v))
    with pytest.raises(ValueError, match=r"must agree in .* device"):
        merge_states(state(), attention_state(k, v))
