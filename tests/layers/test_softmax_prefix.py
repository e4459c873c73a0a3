"""Class and register tokens whose queries attend by softmax, in a layer that is linear for all others."""

import copy

import pytest
import timm
import torch
from torch.nn.functional import scaled_dot_product_attention

from inline_attention import InLineAttention, convert_attention
from inline_attention.analysis.masking import mixed_values
from inline_attention.analysis.probes import capture_attention, observed
from inline_attention.layers.attention import LinearAttention, SoftmaxAttention
from inline_attention.ops.states import merge_softmax_states, softmax_state

PREFIX = 2


def layer_of(kind=InLineAttention, **options):
    torch.manual_seed(0)
    options = {"num_prefix_tokens": PREFIX, "softmax_prefix": True, "local_residual": True} | options
    layer = kind(16, 2, **options).double()
    torch.nn.init.normal_(layer.qkv.weight)
    torch.nn.init.normal_(layer.residual[-1].weight)
    return layer.eval()


def tokens(batch=3, side=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, PREFIX + side * side, 16, dtype=torch.float64, generator=generator)


def softmax_of(layer):
    twin = SoftmaxAttention(16, 2).double().eval()
    twin.qkv, twin.proj = layer.qkv, layer.proj
    return twin


@pytest.mark.parametrize("kind", [InLineAttention, LinearAttention])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_prefix_tokens_get_softmax_and_the_grid_what_it_had(kind, masked, grad):
    layer, x = layer_of(kind), tokens()
    plain = copy.deepcopy(layer)
    plain.softmax_prefix = False
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[1, -3:] = False
    options = {"key_padding_mask": mask} if masked else {}
    before = x.clone()
    with torch.set_grad_enabled(grad):
        out = layer(x, **options)
    assert torch.equal(x, before)
    torch.testing.assert_close(out[:, :PREFIX], softmax_of(layer)(x, **options)[:, :PREFIX])
    torch.testing.assert_close(out[:, PREFIX:], plain(x, **options)[:, PREFIX:])
    assert not torch.allclose(out[:, :PREFIX], plain(x, **options)[:, :PREFIX], rtol=1e-2)


def test_gradients():
    layer = layer_of()
    assert torch.autograd.gradcheck(layer, (tokens(1, 2).requires_grad_(),))
    assert torch.autograd.gradcheck(lambda weight: torch.func.functional_call(
        layer, {"qkv.weight": weight}, (tokens(1, 2),)), (layer.qkv.weight,))  # fmt: skip


def test_separate_queries_whose_memory_the_output_may_take():
    torch.manual_seed(0)
    layer = InLineAttention(16, 2, fused_qkv=False, num_prefix_tokens=PREFIX, softmax_prefix=True).eval()
    x = tokens().float()
    with torch.no_grad():
        found = layer(x)
    torch.testing.assert_close(found, layer(x))


def test_a_compiled_and_an_exported_layer_agree():
    layer, x = layer_of(), tokens()
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), expected)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), expected)


@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_analysis_sees_the_weights_of_softmax(gain):
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2)
    convert_attention(model, softmax_prefix=True, prefix_gain=True)
    model = model.double().eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight)
        torch.nn.init.constant_(block.attn.prefix_gain, gain)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    first = capture_attention(model, images)[0]
    scores = first.rule.scale * first.q[0, 0, 1] @ first.k[0, :, 1].T
    torch.testing.assert_close(first.rows(0, 1)[0], scores.softmax(-1))
    tokens = model.blocks[0].norm1(model._pos_embed(model.patch_embed(images)))
    torch.testing.assert_close(first.q[:, 0], gain * model.blocks[0].attn.project(tokens).q[:, 0])
    with torch.no_grad():
        expected = model(images)
        with observed(model, mixed_values):
            torch.testing.assert_close(model(images), expected)


def test_softmax_over_parts_of_the_keys_merges():
    q, k, v = torch.randn(3, 2, 9, 3, 4, dtype=torch.float64)
    k[:, 4:] += 400  # scores of a later part are far larger
    q, scale = q[:, :2], 0.5
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False  # a part without keys
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask[:, None, None], scale=scale
    ).transpose(1, 2)
    parts = [slice(0, 4), slice(4, 4), slice(4, 6), slice(6, 9)]
    states = [softmax_state(q, k[:, at], v[:, at], scale=scale, key_padding_mask=mask[:, at]) for at in parts]
    whole = merge_softmax_states(merge_softmax_states(*states[:2]), *states[2:])
    torch.testing.assert_close(whole.out, expected)
    weights = torch.cat([whole.weights(q, k[:, at], scale) for at in parts], dim=-1)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(3, 2, dtype=torch.float64))


def test_softmax_over_parts_of_the_keys_sums_in_float32_under_autocast():
    q, k, v = torch.randn(3, 2, 300, 2, 8).bfloat16()
    expected = scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q[:, :1], k, v))).transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        state = softmax_state(q[:, :1], k, v, scale=8**-0.5)
    torch.testing.assert_close(state.out.double(), expected, atol=1e-6, rtol=1e-5)


def test_gradients_through_merged_softmax():
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def merged(q, k, v):
        states = [softmax_state(q, k[:, at], v[:, at], scale=0.7) for at in (slice(0, 1), slice(1, 4))]
        return merge_softmax_states(*states).out

    assert torch.autograd.gradcheck(merged, (q, k, v))


def test_an_untrained_class_token_keeps_what_it_reads():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    torch.nn.init.normal_(model.blocks[0].attn.qkv.weight)
    student = copy.deepcopy(model)
    convert_attention(student, softmax_prefix=True)
    assert student.attention_conversion["options"] == {"softmax_prefix": True}
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(student.eval()(images), model.eval()(images))  # one block: the head sees no grid token
