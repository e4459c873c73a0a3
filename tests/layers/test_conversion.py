"""Putting InLine attention into models that people already have."""

import pytest
import torch
from torch import nn

from inline_attention import InLineAttention, LinearAttention, convert_attention

timm = pytest.importorskip("timm")


def test_from_softmax_reuses_the_projections():
    attention = timm.layers.Attention(24, num_heads=3, qkv_bias=True, proj_drop=0.1).eval()
    converted = InLineAttention.from_softmax(attention, num_prefix_tokens=1)
    assert converted.qkv is attention.qkv
    assert converted.proj is attention.proj
    assert converted.proj_drop.p == 0.1
    assert not converted.training
    x = torch.randn(2, 10, 24)
    plain = InLineAttention(24, 3, local_residual=False)
    plain.qkv, plain.proj = attention.qkv, attention.proj
    torch.testing.assert_close(converted(x), plain.eval()(x))  # the local residual starts at zero
    converted(x).sum().backward()
    assert converted.residual[2].bias.grad.abs().sum() > 0  # and learns


def test_from_softmax_keeps_query_and_key_norms_device_and_dtype():
    attention = timm.layers.Attention(24, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm).double()
    converted = InLineAttention.from_softmax(attention)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    out = converted(x)
    assert out.dtype == torch.float64
    nn.init.constant_(attention.q_norm.weight, 3.0)
    assert not torch.allclose(out, converted(x))


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_convert_a_vision_transformer_in_place(size):
    model = timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = convert_attention(model)
    assert len(names) == len(model.blocks)
    assert all(isinstance(block.attn, InLineAttention) for block in model.blocks)
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    model(torch.randn(2, 3, *size)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_convert_to_another_layer_with_options():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    convert_attention(model, attention=LinearAttention, feature_map="exp")
    assert model.blocks[0].attn.feature_map == "exp"
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_converting_twice_or_what_cannot_be_converted_explains_itself():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    convert_attention(model)
    with pytest.raises(ValueError, match="found no attention to convert in VisionTransformer"):
        convert_attention(model)
    with pytest.raises(ValueError, match="relative_position_bias_table"):
        convert_attention(timm.create_model("swin_tiny_patch4_window7_224"))
    with pytest.raises(ValueError, match="forward also takes rope"):
        convert_attention(timm.create_model("vit_small_patch16_rope_224", depth=1))
    with pytest.raises(ValueError, match="`qkv` and `proj` linear layers"):
        InLineAttention.from_softmax(nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match="heads of another width"):
        InLineAttention.from_softmax(timm.layers.Attention(24, num_heads=3, attn_head_dim=16))


def create_empty(name: str, **arguments) -> nn.Module:
    """A model of timm's without values: enough for deciding what it is made of."""
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def test_attention_over_channels_is_left_alone_with_a_warning():
    model = create_empty("davit_tiny")
    with pytest.warns(UserWarning, match=r"6 attentions of DaVit are left .*ChannelAttention.*over the tokens"):
        names = convert_attention(model)
    kinds = [type(block.attn).__name__ for stage in model.stages for pair in stage.blocks for block in pair]
    assert kinds.count("InLineAttention") == kinds.count("ChannelAttention") == len(names) == 6
    assert model(torch.randn(1, 3, 224, 224, device="meta")).shape == (1, 1000)


def test_tied_attention_stays_tied():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3)
    model.blocks[2].attn = model.blocks[0].attn
    assert convert_attention(model) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert isinstance(model.blocks[0].attn, InLineAttention)
    assert model.blocks[2].attn is model.blocks[0].attn
    assert model.blocks[1].attn is not model.blocks[0].attn


def test_an_attention_itself_is_refused():
    with pytest.raises(ValueError, match=r"Attention is an attention itself.*InLineAttention\.from_softmax"):
        convert_attention(timm.layers.Attention(24, num_heads=3))


@pytest.mark.parametrize("name", ["volo_d1_224", "nest_tiny", "sam2_hiera_tiny", "fastvit_t8", "fastvit_sa12"])
def test_what_takes_no_tokens_is_refused_and_unchanged(name):
    model = create_empty(name)
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="found no attention to convert"):
        convert_attention(model)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("name", ["pit_ti_224", "crossvit_tiny_240", "convit_tiny"])
def test_an_unknown_prefix_is_refused_where_it_matters(name):
    model = create_empty(name)
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"cls_token.* but no num_prefix_tokens.*local_residual=False"):
        convert_attention(model)
    assert dict(model.named_modules()) == before
    names = convert_attention(model, local_residual=False)
    assert all(isinstance(model.get_submodule(name), InLineAttention) for name in names)


def test_conversion_calls_nothing_that_is_watched():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    weight = model.blocks[0].attn.qkv.weight.clone()
    convert_attention(model, local_residual=False)
    assert not seen
    assert torch.equal(model.blocks[0].attn.qkv.weight, weight)
