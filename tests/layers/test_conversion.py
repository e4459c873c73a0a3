"""Putting InLine attention into models that people already have."""

import copy
import pickle

import pytest
import torch
from torch import nn

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention, convert_attention, create_model
from inline_attention.models.base import blocks_of

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
    with pytest.raises(ValueError, match="in VisionTransformer: its attention is converted already"):
        convert_attention(model)
    with pytest.raises(ValueError, match="relative_position_bias_table"):
        convert_attention(timm.create_model("swin_tiny_patch4_window7_224"))
    with pytest.raises(ValueError, match="`qkv` and `proj` linear layers"):
        InLineAttention.from_softmax(nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match="heads of another width"):
        InLineAttention.from_softmax(timm.layers.Attention(24, num_heads=3, attn_head_dim=16))


SWIN = {"embed_dim": 16, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2), "global_blocks": (1, 2, 1, 0)}


@pytest.mark.parametrize(
    ("family", "arguments", "options"),
    [
        ("deit_tiny", {"embed_dim": 32, "num_heads": 2, "depth": 3, "img_size": 64}, {}),
        ("pvt_tiny", {"depths": (1, 1, 1, 1), "img_size": 64}, {}),
        ("swin_tiny", SWIN, {"drop_position_bias": True, "keep_softmax": [-1]}),
    ],
    ids=["deit", "pvt", "swin"],
)
def test_softmax_models_of_this_library_become_their_inline_twins(family, arguments, options):
    softmax = create_model(f"softmax_{family}", num_classes=5, **arguments).eval()
    twin = create_model(f"inline_{family}", num_classes=5, **arguments).eval()
    missing = twin.load_state_dict(softmax.state_dict(), strict=False).missing_keys
    assert missing
    assert all(".attn.residual." in name for name in missing)
    attentions = [block.attn for block in blocks_of(twin) if isinstance(block.attn, InLineAttention)]
    for attention in attentions:
        attention.residual.zero_last_layer()
    assert len(convert_attention(softmax, **options)) == len(attentions)
    assert softmax.state_dict().keys() == twin.state_dict().keys()
    images = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(softmax(images), twin(images))
    sizes = [(64, 80), (50, 96)]
    torch.testing.assert_close(softmax(images, image_sizes=sizes), twin(images, image_sizes=sizes))


def test_blocks_of_this_library_can_stay_softmax():
    model = create_model("softmax_deit_tiny", embed_dim=32, num_heads=2, depth=3)
    attentions = [block.attn for block in model.blocks]
    assert convert_attention(model, keep_softmax=[-1], static_local=True) == ["blocks.0.attn", "blocks.1.attn"]
    assert model.blocks[2].attn is attentions[2]
    assert model.blocks[0].attn.qkv is attentions[0].qkv
    assert model.blocks[0].attn.static_local is not None
    assert model.attention_conversion == {"attention": "inline", "keep_softmax": [2], "options": {"static_local": True}}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("softmax_swin_tiny", "within windows, where softmax is cheap; drop_position_bias=True puts"),
        ("softmax_cswin_tiny", "within stripes, where softmax is cheap"),
    ],
)
def test_windows_and_stripes_of_this_library_are_left_alone(name, reason):
    with torch.device("meta"):
        model = create_model(name)
    with pytest.raises(ValueError, match=reason):
        convert_attention(model)


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


@pytest.mark.parametrize("name", ["nest_tiny", "sam2_hiera_tiny", "fastvit_t8", "fastvit_sa12"])
def test_what_takes_no_tokens_is_refused_and_unchanged(name):
    model = create_empty(name)
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="found no attention to convert"):
        convert_attention(model)
    assert dict(model.named_modules()) == before


def test_attention_over_maps_is_replaced():
    model = timm.create_model("volo_d1_224", img_size=64, num_classes=3).eval()
    image = torch.randn(1, 3, 64, 64)
    expected = model(image)
    twin = copy.deepcopy(model)
    assert len(convert_attention(twin, attention=SoftmaxAttention)) == 14
    torch.testing.assert_close(twin(image), expected)
    convert_attention(model)
    assert model(image).shape == expected.shape


@pytest.mark.parametrize("name", ["pit_ti_224", "crossvit_tiny_240"])
def test_an_unknown_prefix_is_refused_where_it_matters(name):
    model = create_empty(name)
    vars(model).pop("num_prefix_tokens", None)  # ConViT says it from timm 1.0.31 on
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"cls_token.* but no num_prefix_tokens.*local_residual=False"):
        convert_attention(model)
    assert dict(model.named_modules()) == before
    names = convert_attention(model, local_residual=False)
    assert all(isinstance(model.get_submodule(name), InLineAttention) for name in names)


def test_a_class_token_added_half_way_is_known_from_the_model_or_refused():
    model = timm.create_model("convit_tiny", img_size=64, depth=3, local_up_to_layer=2)
    if getattr(model, "num_prefix_tokens", None) is None:  # timm before 1.0.31 does not say it
        with pytest.raises(ValueError, match=r"cls_token.* but no num_prefix_tokens"):
            convert_attention(model)
        return
    (name,) = convert_attention(model)  # the two blocks before have no class token and another attention
    assert name == "blocks.2.attn"
    assert model.get_submodule(name).num_prefix_tokens == 1
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()


def test_conversion_calls_nothing_that_is_watched():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    weight = model.blocks[0].attn.qkv.weight.clone()
    convert_attention(model, local_residual=False)
    assert not seen
    assert torch.equal(model.blocks[0].attn.qkv.weight, weight)


def _grids_in_use(model, image):
    """What the local terms of a forward pass take for their grids."""
    seen = set()
    resolve = InLineAttention.resolve_grid

    def noting(self, *arguments):
        grid = resolve(self, *arguments)
        seen.add(tuple(grid))
        return grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InLineAttention, "resolve_grid", noting)
        model(image)
    return seen


def test_the_grid_of_patches_is_that_of_the_image():
    """Of (28, 7) and (8, 18) tokens the number is a square."""
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    convert_attention(model)
    model.set_input_size((448, 112))
    for converted in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _grids_in_use(converted, torch.randn(1, 3, 448, 112)) == {(28, 7)}
    model = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True)
    convert_attention(model)
    for height, width in ((128, 288), (224, 224), (288, 128)):
        assert _grids_in_use(model, torch.randn(1, 3, height, width)) == {(height // 16, width // 16)}


def test_a_converted_model_compiles_for_any_image():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True).eval()
    convert_attention(model)
    nn.init.normal_(model.blocks[0].attn.residual[2].weight)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for size in ((64, 64), (32, 128), (48, 80)):
            image = torch.randn(1, 3, *size)
            torch.testing.assert_close(compiled(image), model(image))


def test_patches_that_are_dropped_have_no_grid():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, patch_drop_rate=0.5)
    with pytest.raises(ValueError, match=r"drops 50% of its patches in training.*local_residual=False"):
        convert_attention(model)
    assert convert_attention(model, local_residual=False) == ["blocks.0.attn"]


def test_images_of_unequal_shapes_share_no_grid():
    """NaFlexViT's patches, with what it adds to scores."""
    attention = InLineAttention.from_softmax(timm.layers.Attention(24, num_heads=3))
    x, added = torch.randn(2, 9, 24), torch.zeros(2, 1, 1, 9)
    added[1, ..., 6:] = torch.finfo(torch.float32).min
    with pytest.raises(ValueError, match="share no grid"):
        attention(x, attn_mask=added)
    attention = InLineAttention.from_softmax(timm.layers.Attention(24, num_heads=3), local_residual=False)
    torch.testing.assert_close(attention(x, attn_mask=added)[1:, :6], attention(x[1:, :6]))
    with pytest.raises(ValueError, match="no scores that a bias could be added to"):
        attention(x, attn_mask=torch.full((2, 1, 1, 9), -1.5))
    with pytest.raises(ValueError, match="cannot mask single query-key pairs"):
        attention(x, attn_mask=added.expand(2, 1, 9, 9))


def test_the_default_device_does_not_matter():
    """As under `torch.set_default_device("cuda")`; meta stands for any device that is not the CPU."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    with torch.device("meta"):
        convert_attention(vit)
    assert {parameter.device.type for parameter in vit.parameters()} == {"cpu"}
