"""The layer and its baselines: shapes, options, masks, drop-in use and errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.overrides import BaseTorchFunctionMode

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention, attention_weights, inline_attention
from inline_attention.layers import attention as attention_module
from inline_attention.ops.api import attend

LAYERS = [InLineAttention, LinearAttention, SoftmaxAttention]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"local_residual": True},
        {"local_residual": False, "static_local": True},
        {"local_residual": True, "static_local": True, "num_prefix_tokens": 2},
        {"fused_qkv": False},
        {"qkv_bias": False, "proj_bias": False, "num_prefix_tokens": 1},
        {"attn_drop": 0.5, "proj_drop": 0.5},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_same_constructor_same_interface(layer, options):
    attention = layer(24, 3, **options)
    x = torch.randn(2, options.get("num_prefix_tokens", 0) + 12, 24, requires_grad=True)
    out = attention(x, (3, 4))
    assert out.shape == x.shape
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    unused = [name for name, parameter in attention.named_parameters() if parameter.grad is None]
    assert not unused


def expected_inline(attention: InLineAttention, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The layer from first principles: explicit weights, grouped convolutions, unfold."""
    batch, tokens, dim = x.shape
    heads, prefix = attention.num_heads, attention.num_prefix_tokens
    q, k, v = attention.qkv(x).view(batch, tokens, 3, heads, -1).unbind(2)
    out = torch.einsum("bhnm,bmhd->bnhd", attention_weights(q, k), v).flatten(2)
    mean = x.mean(1)[:, :, None]
    first, _, last = attention.residual
    hidden = F.gelu(F.conv1d(mean, first.weight, first.bias, groups=heads))
    weight = F.conv1d(hidden, last.weight, last.bias, groups=heads).view(batch, dim, 9)
    grid = v.flatten(2)[:, prefix:].transpose(1, 2).reshape(batch, dim, height, width)
    patches = F.unfold(grid, 3, padding=1).view(batch, dim, 9, height * width)
    local = torch.einsum("bctn,bct->bnc", patches, weight)
    return attention.proj(torch.cat([out[:, :prefix], out[:, prefix:] + local], dim=1))


@pytest.mark.parametrize("prefix", [0, 1])
def test_inline_layer_equals_its_definition(prefix):
    attention = InLineAttention(12, 3, num_prefix_tokens=prefix).double()
    nn.init.normal_(attention.residual[2].weight)
    x = torch.randn(2, prefix + 20, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x, (4, 5)), expected_inline(attention, x, 4, 5))


def test_static_local_is_a_depthwise_convolution_of_the_values():
    attention = InLineAttention(8, 2, local_residual=False, static_local=True).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x).view(2, 12, 3, 2, 4).unbind(2)
    convolved = attention.static_local(v.flatten(2).transpose(1, 2).view(2, 8, 3, 4))
    out = inline_attention(q, k, v).flatten(2) + convolved.flatten(2).transpose(1, 2)
    torch.testing.assert_close(attention(x, (3, 4)), attention.proj(out))


def test_separate_projections_put_keys_before_values():
    fused, separate = InLineAttention(8, 2), InLineAttention(8, 2, fused_qkv=False)
    state = fused.state_dict()
    for kind in ("weight", "bias"):
        joined = state.pop(f"qkv.{kind}")
        state[f"q.{kind}"], state[f"kv.{kind}"] = joined[:8], joined[8:]
    separate.load_state_dict(state)
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(separate(x), fused(x))


def test_local_input_predicts_the_weights():
    attention = InLineAttention(8, 2)
    x, other = torch.randn(2, 2, 9, 8)
    assert not torch.allclose(attention(x), attention(x, local_input=other), atol=1e-6, rtol=0)
    torch.testing.assert_close(attention(x, local_input=x), attention(x))
    # Only the mean counts.
    shuffled = other[:, torch.randperm(9)]
    torch.testing.assert_close(attention(x, local_input=shuffled), attention(x, local_input=other))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_padded_image_gives_what_it_gives_alone(layer):
    attention = layer(8, 2, local_residual=True, static_local=True, num_prefix_tokens=1)
    alone = torch.randn(1, 1 + 6, 8)
    padded = torch.full((1, 1 + 12, 8), 1e3)
    real = torch.zeros(1, 1 + 12, dtype=torch.bool)
    grid = [1 + row * 4 + column for row in range(2) for column in range(3)]  # 2×3 in the corner of 3×4
    padded[:, [0, *grid]] = alone
    real[:, [0, *grid]] = True
    out = attention(padded, (3, 4), real)[:, [0, *grid]]
    torch.testing.assert_close(out, attention(alone, (2, 3)), rtol=1e-5, atol=1e-5)


def test_square_grids_are_inferred_and_others_explained():
    attention = InLineAttention(8, 2, num_prefix_tokens=1)
    x = torch.randn(2, 17, 8)
    torch.testing.assert_close(attention(x), attention(x, (4, 4)))
    with pytest.raises(ValueError, match=r"16 tokens with num_prefix_tokens=1 leave 15, not a square"):
        attention(torch.randn(2, 16, 8))
    with pytest.raises(ValueError, match=r"1 \+ 3·5 = 16 ≠ 17"):
        attention(x, (3, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: InLineAttention(10, 4), r"dim=10, num_heads=4; try num_heads=2"),
        (lambda: InLineAttention(10, 0), r"num_heads must be an integer ≥ 1, got 0"),
        (lambda: InLineAttention(8, 2, feature_map="gelu"), r"feature_map must be one of"),
        (lambda: InLineAttention(8, 2, normalization="softmax"), r"normalization must be one of"),
        (lambda: InLineAttention(8, 2, backend="trition"), r"backend must be one of.*'triton'"),
        (lambda: InLineAttention(8, 2, scale=float("nan")), r"scale must be a finite number"),
        (lambda: SoftmaxAttention(8, 2, feature_map="relu"), r"softmax attention has no feature_map"),
        (lambda: InLineAttention(8, 2)(torch.randn(1, 4, 6)), r"x must be \[B, N, 8\].*flatten"),
        (lambda: InLineAttention(8, 2)(torch.randn(1, 8, 2, 2)), r"x must be \[B, N, 8\].*flatten"),
        (lambda: InLineAttention(8, 2)(torch.randn(1, 4, 8), is_causal=True), r"is_causal=True is not possible"),
        (lambda: InLineAttention(8, 2)(torch.randn(1, 4, 8), attn_mask=torch.zeros(4, 4)), r"\[B, 1, 1, N\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_attn_mask_in_timms_form_is_a_key_padding_mask():
    attention = InLineAttention(8, 2)
    x = torch.randn(2, 9, 8)
    mask = torch.rand(2, 9) > 0.3
    torch.testing.assert_close(attention(x, attn_mask=mask[:, None, None]), attention(x, key_padding_mask=mask))
    with pytest.raises(ValueError, match="not both"):
        attention(x, attn_mask=mask[:, None, None], key_padding_mask=mask)


@pytest.mark.parametrize("layer", [InLineAttention, LinearAttention, SoftmaxAttention])
def test_masks_that_are_none_are_refused(layer):
    attention, x, mask = layer(8, 2), torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)
    for wrong, message in (
        (mask.float(), "must be a bool tensor"),
        (mask.long(), "must be a bool tensor"),
        (mask[:, :1], r"must be \[B, M\]"),
        (mask & torch.tensor([[True], [False]]), "no real key"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(x, key_padding_mask=wrong)


def test_dropout_acts_in_training_only():
    attention = InLineAttention(8, 2, attn_drop=0.5)
    x = torch.randn(2, 9, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    torch.testing.assert_close(attention(x), attention(x), rtol=0, atol=0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_autocast(layer, dtype):
    # A query that ReLU all but erases has a gradient of 1/|phi(q)| under division: beyond float16, by its nature.
    options = {"feature_map": "elu_plus_one"} if layer is LinearAttention else {}
    attention = layer(8, 2, local_residual=True, static_local=True, dtype=dtype, **options)
    assert attention(torch.randn(2, 9, 8, dtype=dtype)).dtype == dtype
    if dtype != torch.float64:
        attention = attention.float()
        with torch.autocast("cpu", dtype=dtype):
            attention(torch.randn(2, 9, 8)).float().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())


def test_separate_projections_share_one_cast_under_autocast():
    attention = InLineAttention(8, 2, fused_qkv=False, local_residual=False)
    seen: list[torch.Tensor] = []
    for projection in (attention.q, attention.kv):
        projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(torch.randn(2, 9, 8))
    assert seen[0] is seen[1]
    assert seen[0].dtype == torch.bfloat16


@pytest.fixture
def given_up(monkeypatch) -> list[bool]:
    """Whether the layer gave up its queries, for every call of the op."""
    seen = []

    def record(call, backend):
        seen.append(call.overwrite_q)
        return attend(call, backend)

    monkeypatch.setattr(attention_module, "attend", record)
    return seen


def with_hook(attention):
    attention.q.register_forward_hook(lambda *_: None)


def with_hook_that_removes_itself(attention):
    handle = attention.q.register_forward_hook(lambda *_: handle.remove())


def with_forward_on_the_instance(attention):
    attention.q.forward = attention.q.forward


def with_norm(attention):
    attention.q_norm = nn.Identity()  # of somebody else's making, and may keep what it was given


def with_another_linear_layer(attention):
    attention.q = type("AdaptedLinear", (nn.Linear,), {})(8, 8)


def test_private_queries_may_be_overwritten(given_up):
    attention = InLineAttention(8, 2, fused_qkv=False)
    for _ in range(2):
        attention(torch.randn(2, 9, 8))
    assert given_up == [True, True]


@pytest.mark.parametrize(
    "change",
    [with_hook, with_hook_that_removes_itself, with_forward_on_the_instance, with_norm, with_another_linear_layer],
)
def test_queries_that_other_code_may_hold_are_kept(change, given_up):
    attention = InLineAttention(8, 2, fused_qkv=False)
    change(attention)
    attention(torch.randn(2, 9, 8))
    assert given_up == [False]


def test_keeps_queries_where_modes_or_hooks_on_all_modules_look_on(given_up):
    attention = InLineAttention(8, 2, fused_qkv=False)
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        attention(torch.randn(2, 9, 8))
    with BaseTorchFunctionMode():
        attention(torch.randn(2, 9, 8))
    packed = InLineAttention(8, 2)
    packed.q_norm = packed.k_norm = nn.LayerNorm(4)
    packed(torch.randn(2, 9, 8))
    assert given_up == [False, False, False]


def test_one_compiled_graph_serves_every_size():
    attention = InLineAttention(8, 2, num_prefix_tokens=1, static_local=True)
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for side in (3, 4, 7, 14):
        x = torch.randn(2 + side, 1 + side * side, 8)
        torch.testing.assert_close(compiled(x), attention(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_cost_is_linear():
    """Doubling the tokens doubles the multiplications."""
    attention = InLineAttention(16, 2)
    small, large = (count_flops(attention, tokens) for tokens in (1024, 4096))
    assert math.isclose(large / small, 4, rel_tol=0.01)


def count_flops(module: nn.Module, tokens: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, tokens, 16))
    return counter.get_total_flops()


class OfMap(nn.Module):
    """Attention over a feature map, whose grid is read off the map."""

    def __init__(self):
        super().__init__()
        self.attention = InLineAttention(24, 3)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.attention(tokens, x.shape[2:]) + self.attention(tokens)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_recorded_by_jit_with_sizes_that_are_tensors():
    model = OfMap().eval()
    x = torch.randn(2, 24, 4, 4)
    recorded = torch.jit.trace(model, x)
    x = torch.randn(3, 24, 4, 4)
    torch.testing.assert_close(recorded(x), model(x), rtol=1e-4, atol=1e-5)
