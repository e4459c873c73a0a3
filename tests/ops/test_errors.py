"""Bad input: a ValueError that names what was expected, what came, and what to do."""

import numpy
import pytest
import torch

from inline_attention import attention_weights, inline_attention, inline_attention_qkvpacked, local_residual
from inline_attention.ops import dispatch
from inline_attention.ops.dispatch import Backend

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
    "unknown_feature_map": (lambda: attend(feature_map="rleu"), r"feature_map must be .*did you mean 'relu'"),
    "feature_map_type": (lambda: attend(feature_map=3), r"feature_map must be one of"),
    "feature_map_list": (lambda: attend(feature_map=["relu"]), r"feature_map must be one of"),
    "normalization_list": (lambda: attend(normalization=["divide"]), r"normalization must be one of"),
    "feature_map_result": (lambda: attend(feature_map=lambda x: x.sum(1)), r"must keep every dimension but the last"),
    "unknown_normalization": (lambda: attend(normalization="substract"), r"did you mean 'subtract'"),
    "unknown_backend": (lambda: attend(backend="eagre"), r"backend must be .*did you mean 'eager'"),
    "scale_nan": (lambda: attend(scale=float("nan")), r"scale must be a finite number"),
    "scale_inf": (lambda: attend(scale=float("inf")), r"scale must be a finite number"),
    "scale_huge": (lambda: attend(scale=10**400), r"scale must be a finite number"),
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
    "local_cross": (
        lambda: attend(q=T(2, 5, 2, 4), local_weight=WEIGHT, grid_size=(2, 3)),
        r"needs self-attention.*N = 5 and M = 6",
    ),
    "packed_rank": (lambda: inline_attention_qkvpacked(T(2, 6, 24)), r"qkv must be \[B, N, 3, H, D\].*unflatten"),
    "packed_order": (lambda: inline_attention_qkvpacked(T(2, 3, 6, 2, 4)), r"qkv must be \[B, N, 3, H, D\]"),
    "packed_type": (lambda: inline_attention_qkvpacked(None), r"qkv must be a torch\.Tensor"),
    "weights_kind": (lambda: attention_weights(Q, Q, kind="sofmax"), r"did you mean 'softmax'"),
    "weights_kind_list": (lambda: attention_weights(Q, Q, kind=["softmax"]), r"kind must be one of"),
    "weights_softmax_map": (lambda: attention_weights(Q, Q, kind="softmax", feature_map="relu"), r"no feature map"),
    "local_residual_rank": (lambda: local_residual(T(2, 6, 8), WEIGHT, grid_size=(2, 3)), r"v must have 4 dimensions"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


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
    monkeypatch.setattr(dispatch, "AUTO_BACKENDS", (never, *dispatch.AUTO_BACKENDS))
    with pytest.raises(ValueError, match="'never' cannot run this call: needs a moon phase, got cpu; backend='auto'"):
        attend(backend="never")
    torch.testing.assert_close(attend(backend="auto"), attend(backend="eager"))


def test_auto_takes_the_first_backend_that_can_run(monkeypatch):
    marker = Backend("marker", lambda call: None, lambda call: torch.full_like(call.v, 7))
    monkeypatch.setattr(dispatch, "AUTO_BACKENDS", (marker, *dispatch.AUTO_BACKENDS))
    assert (attend() == 7).all()
