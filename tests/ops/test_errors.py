"""Bad input: a ValueError that names what was expected, what came, and what to do."""

import numpy
import pytest
import torch

from inline_attention import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual
from inline_attention.ops import dispatch
from inline_attention.ops.dispatch import Backend
from ops.calls import use_backends

T = torch.randn
Q = T(2, 6, 2, 4)
WEIGHT = T(2, 2, 4, 3, 3)


def attend(**changes):
    arguments = {"q": Q, "k": Q, "v": Q} | changes
    return inline_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


CASES = {
    "not_a_tensor": (lambda: attend(q=[1.0]), r"q must be a torch\.Tensor, got list"),
    "integer_dtype": (lambda: attend(q=Q.long()), r"got torch\.int64; use q\.float\(\)"),
    "complex_dtype": (lambda: attend(v=Q.to(torch.complex64)), r"v must be float64"),
    "three_dimensions": (lambda: attend(q=Q.flatten(2)), r"q must have 4 dimensions.*unflatten"),
    "five_dimensions": (lambda: attend(k=Q[None]), r"k must have 4 dimensions"),
    "heads_mismatch": (lambda: attend(k=T(2, 6, 3, 4)), r"must agree in B, H and D.*transpose"),
    "batch_mismatch": (lambda: attend(k=T(3, 6, 2, 4)), r"must agree in B, H and D"),
    "head_dim_mismatch": (lambda: attend(k=T(2, 6, 2, 5)), r"must agree in B, H and D"),
    "value_length": (lambda: attend(v=T(2, 5, 2, 4)), r"v must be \[B, M, H, Dv\]"),
    "dtype_mix": (lambda: attend(k=Q.half()), r"one dtype, got torch\.float32 and torch\.float16; cast"),
    "value_dtype_mix": (lambda: attend(v=Q.double()), r"q and v must share one dtype"),
    "device_mix": (lambda: attend(k=Q.to("meta")), r"one device, got cpu and meta; move"),
    "no_tokens": (lambda: attend(q=T(2, 0, 2, 4)), r"got tokens = 0"),
    "no_keys": (lambda: attend(k=T(2, 0, 2, 4), v=T(2, 0, 2, 4)), r"got tokens = 0"),
    "no_channels": (lambda: attend(v=T(2, 6, 2, 0)), r"got head dim = 0"),
    "no_heads": (lambda: attend(q=T(2, 6, 0, 4), k=T(2, 6, 0, 4)), r"got heads = 0"),
    "unknown_feature_map": (lambda: attend(feature_map="rleu"), r"feature_map must be .*did you mean relu"),
    "feature_map_type": (lambda: attend(feature_map=3), r"feature_map must be one of"),
    "feature_map_list": (lambda: attend(feature_map=["relu"]), r"feature_map must be one of"),
    "normalization_list": (lambda: attend(normalization=["divide"]), r"normalization must be one of"),
    "feature_map_nothing": (lambda: attend(feature_map=lambda x: None), r"must return a dense tensor, got NoneType"),
    "feature_map_sparse": (lambda: attend(feature_map=torch.Tensor.to_sparse), r"dense tensor, got .*torch.sparse_coo"),
    "feature_map_widths": (
        lambda: inline_attention(Q[:, :3], Q, Q, feature_map=lambda x: x[..., : x.shape[1]]),
        r"same last dimension, got 3 for queries and \d for keys",
    ),
    "feature_map_device": (lambda: attend(feature_map=lambda x: x.to("meta")), r"and the device.* on meta"),
    "feature_map_result": (lambda: attend(feature_map=lambda x: x.sum(1)), r"must keep every dimension but the last"),
    "unknown_normalization": (lambda: attend(normalization="substract"), r"did you mean subtract"),
    "unknown_backend": (lambda: attend(backend="eagre"), r"backend must be .*did you mean eager"),
    "unknown_layout": (lambda: attend(layout="bhn"), r"layout must be one of 'bnhd', 'bhnd'.*did you mean bhnd"),
    "layout_three_dimensions": (lambda: attend(q=Q.flatten(2), layout="bhnd"), r"q must have 4 dimensions"),
    "layout_not_a_tensor": (lambda: attend(q=[1.0], layout="bhnd"), r"q must be a torch\.Tensor, got list"),
    "layout_of_weights": (lambda: attention_weights(Q, Q, layout="bhn"), r"layout must be one of"),
    "layout_of_local_residual": (lambda: local_residual(Q, WEIGHT, grid_size=(2, 3), layout=1), r"layout must be one"),
    "scale_nan": (lambda: attend(scale=float("nan")), r"scale must be a finite number"),
    "scale_inf": (lambda: attend(scale=float("inf")), r"scale must be a finite number"),
    "scale_huge": (lambda: attend(scale=10**400), r"scale must be a finite number"),
    "scale_flag": (lambda: attend(scale=True), r"scale must be a finite number"),
    "scale_type": (lambda: attend(scale="big"), r"scale must be a finite number"),
    "mask_dtype": (lambda: attend(key_padding_mask=torch.ones(2, 6)), r"bool tensor, True for a real key.*~mask"),
    "mask_type": (lambda: attend(key_padding_mask=[[True]]), r"bool tensor.*got list"),
    "mask_shape": (lambda: attend(key_padding_mask=torch.ones(2, 5).bool()), r"\[B, M\] = \(2, 6\), got \(2, 5\)"),
    "mask_rank": (lambda: attend(key_padding_mask=torch.ones(2, 1, 6).bool()), r"\[B, M\]"),
    "mask_empty_row": (
        lambda: attend(key_padding_mask=torch.tensor([[True] * 6, [False] * 6])),
        r"no real key \(True\) in row\(s\) \[1\]",
    ),
    "local_without_grid": (lambda: attend(local_weight=WEIGHT), r"local_weight needs grid_size"),
    "local_without_grid_hint": (
        lambda: inline_attention(*[T(1, 10, 2, 4)] * 3, local_weight=T(1, 2, 4, 3, 3), num_prefix_tokens=1),
        r"grid_size=\(3, 3\)",
    ),
    "local_shape": (lambda: attend(local_weight=T(2, 2, 3, 3, 3), grid_size=(2, 3)), r"\[B, H, Dv, 3, 3\]"),
    "local_dtype": (lambda: attend(local_weight=WEIGHT.half(), grid_size=(2, 3)), r"local_weight\.to\(v\.dtype\)"),
    "grid_mismatch": (lambda: attend(local_weight=WEIGHT, grid_size=(2, 2)), r"0 \+ 2·2 = 4 ≠ 6"),
    "grid_prefix": (lambda: attend(local_weight=WEIGHT, grid_size=(2, 3), num_prefix_tokens=1), r"1 \+ 2·3 = 7 ≠ 6"),
    "grid_type": (lambda: attend(local_weight=WEIGHT, grid_size=6), r"grid_size must be a pair"),
    "grid_float": (lambda: attend(local_weight=WEIGHT, grid_size=(2.0, 3)), r"two integers ≥ 1"),
    "grid_negative": (lambda: attend(local_weight=WEIGHT, grid_size=(-2, -3)), r"two integers ≥ 1"),
    "prefix_negative": (
        lambda: attend(local_weight=WEIGHT, grid_size=(2, 3), num_prefix_tokens=-1),
        r"num_prefix_tokens must be an integer ≥ 0",
    ),
    "grid_without_local": (lambda: attend(grid_size=(2, 3)), r"need local_weight, got grid_size=\(2, 3\)"),
    "prefix_without_local": (lambda: attend(num_prefix_tokens=1), r"need local_weight.*num_prefix_tokens=1"),
    "wrong_prefix_without_local": (lambda: attend(num_prefix_tokens=-1), r"num_prefix_tokens must be an integer ≥ 0"),
    "packed_grid_without_local": (
        lambda: inline_attention_qkvpacked(T(2, 6, 3, 2, 4), grid_size=(2, 3)),
        r"grid_size and num_prefix_tokens need local_weight",
    ),
    "packed_prefix_without_local": (
        lambda: inline_attention_qkvpacked(T(2, 6, 3, 2, 4), num_prefix_tokens=2),
        r"grid_size and num_prefix_tokens need local_weight",
    ),
    "local_residual_none": (lambda: local_residual(Q, None, grid_size=(2, 3)), r"local_weight must be a torch\.Tensor"),
    "local_cross": (
        lambda: attend(q=T(2, 5, 2, 4), local_weight=WEIGHT, grid_size=(2, 3)),
        r"needs self-attention.*N = 5 and M = 6",
    ),
    "packed_rank": (lambda: inline_attention_qkvpacked(T(2, 6, 24)), r"qkv must be \[B, N, 3, H, D\].*unflatten"),
    "packed_order": (lambda: inline_attention_qkvpacked(T(2, 3, 6, 2, 4)), r"qkv must be \[B, N, 3, H, D\]"),
    "packed_type": (lambda: inline_attention_qkvpacked(None), r"qkv must be a torch\.Tensor"),
    "weights_kind": (lambda: attention_weights(Q, Q, kind="sofmax"), r"did you mean softmax"),
    "weights_kind_list": (lambda: attention_weights(Q, Q, kind=["softmax"]), r"kind must be one of"),
    "weights_softmax_map": (lambda: attention_weights(Q, Q, kind="softmax", feature_map="relu"), r"no feature map"),
    "local_residual_rank": (lambda: local_residual(T(2, 6, 8), WEIGHT, grid_size=(2, 3)), r"v must have 4 dimensions"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("integer", [numpy.int64, numpy.int32])
def test_integers_of_numpy_make_a_grid(integer):
    expected = attend(local_weight=WEIGHT, grid_size=(2, 3))
    for _ in range(2):
        assert torch.equal(attend(local_weight=WEIGHT, grid_size=(integer(2), integer(3))), expected)


@pytest.mark.parametrize(
    ("valid", "invalid", "message"),
    [
        ({"scale": 0.5}, {"scale": numpy.float32(0.5)}, "scale must be a finite number"),
        ({"grid_size": (2, 3)}, {"grid_size": (2.0, 3)}, "two integers ≥ 1"),
        ({"grid_size": (2, 3)}, {"grid_size": (2, 3.0)}, "two integers ≥ 1"),
        ({"grid_size": (6, 1)}, {"grid_size": (6, True)}, "two integers ≥ 1"),
        ({"grid_size": (5, 1), "num_prefix_tokens": 1}, {"num_prefix_tokens": True}, "num_prefix_tokens must be"),
        ({"grid_size": (5, 1), "num_prefix_tokens": 1}, {"num_prefix_tokens": 1.0}, "num_prefix_tokens must be"),
    ],
)
def test_what_equals_an_argument_that_passed_does_not_pass(valid, invalid, message):
    valid = {"grid_size": (2, 3), "local_weight": WEIGHT} | valid
    attend(**valid)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            attend(**(valid | invalid))
    attend(**valid)


def test_a_huge_integer_that_is_finite_is_a_scale():
    torch.testing.assert_close(attend(q=Q * 0, scale=10**300), Q.mean(1, keepdim=True).expand_as(Q))


def test_named_backend_that_cannot_run_says_why(monkeypatch):
    never = Backend("never", lambda call: f"needs a moon phase, got {call.q.device}", lambda call: call.q)
    use_backends(monkeypatch, never, *dispatch.AUTO_BACKENDS)
    with pytest.raises(ValueError, match="'never' cannot run this call: needs a moon phase, got cpu; backend='auto'"):
        attend(backend="never")
    torch.testing.assert_close(attend(backend="auto"), attend(backend="eager"))


def test_auto_takes_the_first_backend_that_can_run(monkeypatch):
    marker = Backend("marker", lambda call: None, lambda call: torch.full_like(call.v, 7))
    use_backends(monkeypatch, marker, *dispatch.AUTO_BACKENDS)
    assert (attend() == 7).all()


NOT_DENSE = {
    "none": (lambda x: None, r"torch\.Tensor, got NoneType"),
    "number": (lambda x: 1.0, r"torch\.Tensor, got float"),
    "array": (lambda x: x.numpy(), r"torch\.Tensor, got ndarray"),
    "coo": (lambda x: x.to_sparse(), r"dense tensor, got torch\.sparse_coo; use .*\.to_dense\(\)"),
    "csr": (lambda x: x.flatten(0, -2).to_sparse_csr(), r"dense tensor, got torch\.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), r"got a nested one.*to_padded_tensor"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), r"got a nested one"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_what_is_no_dense_tensor_is_refused_by_name(kind, autocast):
    make, message = NOT_DENSE[kind]
    mask = torch.ones(2, 6, dtype=torch.bool)
    calls = {
        "q": lambda: attend(q=make(Q)),
        "k": lambda: attend(k=make(Q)),
        "v": lambda: attend(v=make(Q)),
        "qkv": lambda: inline_attention_qkvpacked(make(T(2, 6, 3, 2, 4))),
    }
    if kind != "none":  # None leaves these out
        calls["local_weight"] = lambda: attend(local_weight=make(WEIGHT), grid_size=(2, 3))
    if kind in ("coo", "csr", "nested", "jagged"):
        calls["key_padding_mask"] = lambda: attend(key_padding_mask=make(mask))
    weights = {"q": lambda: attention_weights(make(Q), Q), "k": lambda: attention_weights(Q, make(Q))}
    local = {"v": lambda: local_residual(make(Q), WEIGHT, grid_size=(2, 3))}
    for group in (calls, weights, local):
        for name, call in group.items():
            with (
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
                pytest.raises(ValueError, match=f"{name} must be a.*{message}"),
            ):
                call()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for backend in ("eager", "reference") for dtype in (torch.float32, torch.float64)]
    + [("triton", torch.float32)],  # which computes in float32
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_feature_map_that_works_in_place_changes_nothing_of_the_callers(backend, packed, dtype):
    def attend_with(feature_map):
        x = torch.randn(2, 6, 3, 2, 16, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
        before = x.detach().clone()
        if packed:
            out = inline_attention_qkvpacked(x, feature_map=feature_map, backend=backend)
        else:
            q = x[:, :, 0]
            out = inline_attention(q, q, x[:, :, 2], feature_map=feature_map, backend=backend)  # q is k
        out.square().sum().backward()
        assert torch.equal(x.detach(), before)
        return out, x.grad

    def in_place(x):
        return x.mul_(2).add_(1).relu_()

    for found, expected in zip(attend_with(in_place), attend_with(lambda x: (2 * x + 1).relu()), strict=True):
        torch.testing.assert_close(found, expected)


def test_weights_of_a_feature_map_that_works_in_place():
    before = Q.clone()
    found = attention_weights(Q, Q, feature_map=lambda x: x.mul_(2))
    assert torch.equal(Q, before)
    torch.testing.assert_close(found, attention_weights(Q, Q, feature_map=lambda x: 2 * x))
