"""timm's contract, over every registered model; and what ours promise beyond it: any size, unequal batches."""

import weakref

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import inline_attention
from inline_attention.layers.attention import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.layers.window_attention import StripeAttention, WindowAttention
from inline_attention.models.base import blocks_of
from inline_attention.models.registry import FAMILIES
from models.shallow_models import create, family_of

ALL = inline_attention.list_models()
PYRAMIDS = ("pvt", "swin", "cswin")
SMALL = [f"{kind}_{family}_tiny" for family in ("deit", *PYRAMIDS) for kind in ("inline", "softmax", "linear")]


def test_the_zoo_is_complete():
    sizes = {
        "deit": ("micro", "tiny", "small", "base"),
        "pvt": ("tiny", "small", "medium", "large"),
        "swin": ("tiny", "small", "base", "base_384"),
        "cswin": ("tiny", "small", "base", "base_384"),
    }
    expected = {
        f"{kind}_{family}_{size}"
        for family in sizes
        for size in sizes[family]
        for kind in ("inline", "softmax", "linear")
    }
    assert set(ALL) == expected
    assert len(inline_attention.list_models("inline_*")) == 16
    assert set(timm.list_models("inline_*")) == set(inline_attention.list_models("inline_*"))


@pytest.mark.parametrize("name", ALL)
def test_every_model_builds_on_the_meta_device_with_its_configuration(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    config = model.pretrained_cfg
    state = model.state_dict()
    assert config["architecture"] == name
    assert f"{config['classifier']}.weight" in state
    assert f"{config['first_conv']}.weight" in state
    classes = 10 if name.endswith("_micro") else 1000
    assert model.num_classes == config["num_classes"] == classes
    out = model(torch.randn(1, *config["input_size"], device="meta"))
    assert out.shape == (1, classes)
    kinds = {type(block.attn) for block in blocks_of(model)}
    wanted = {"inline": InLineAttention, "linear": LinearAttention}.get(name.split("_")[0])
    assert (wanted in kinds) if wanted else not kinds & {InLineAttention, LinearAttention}
    assert kinds <= {wanted, SoftmaxAttention, WindowAttention, StripeAttention}


@pytest.mark.parametrize("name", ALL)
def test_stochastic_depth_only_on_request_as_in_timm(name):
    with torch.device("meta"):
        rates = [
            [module.drop_prob for module in timm.create_model(name, **asked).modules() if isinstance(module, DropPath)]
            for asked in ({}, {"drop_path_rate": 0.3})
        ]
    assert rates[0] == []
    assert max(rates[1]) == pytest.approx(0.3)


@pytest.mark.parametrize("name", SMALL)
def test_forward_backward_reaches_every_parameter(name):
    model = create(name).train()
    out = model(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 7)
    out.mean().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_features_head_and_classifier(name):
    model = create(name)
    x = torch.randn(2, 3, 64, 96)
    features = model.forward_features(x)
    assert features.shape[-1] == model.num_features
    torch.testing.assert_close(model.forward_head(features), model(x))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(x), features)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features)
    model.reset_classifier(5, "avg")
    assert model(x).shape == (2, 5)
    assert model.get_classifier().out_features == 5
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(5, "median")


@pytest.mark.parametrize("name", SMALL)
def test_features_only_and_intermediates(name):
    pyramid = family_of(name) in PYRAMIDS
    arguments = {} if pyramid else {"depth": 12}
    backbone = create(name, features_only=True, **arguments)
    reductions = [4, 8, 16, 32] if pyramid else [16, 16, 16, 16]
    assert backbone.feature_info.reduction() == reductions
    x = torch.randn(2, 3, 64, 96)
    features = backbone(x)
    for feature, channels, reduction in zip(features, backbone.feature_info.channels(), reductions, strict=True):
        assert feature.shape == (2, channels, 64 // reduction, 96 // reduction)
    sizes = [(64, 96), (40, 50)]
    torch.testing.assert_close(
        backbone(x, image_sizes=sizes)[-1],
        backbone.model.forward_intermediates(x, backbone.out_indices, intermediates_only=True, image_sizes=sizes)[-1],
    )
    model = create(name, num_classes=0)
    final, intermediates = model.forward_intermediates(x, indices=2, norm=True)
    assert len(intermediates) == 2
    torch.testing.assert_close(final, model.forward_features(x))
    if pyramid:
        torch.testing.assert_close(intermediates[-1].permute(0, 2, 3, 1), final)
    early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True, output_fmt="NHWC")
    everything = model.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(early[0].permute(0, 3, 1, 2), everything[0])
    assert model.prune_intermediate_layers([0], prune_norm=True) == [0]
    torch.testing.assert_close(model.forward_intermediates(x, [0], intermediates_only=True)[0], everything[0])


def test_features_of_another_depth_are_those_of_its_quarters():
    for depth, indices in ((12, [2, 5, 8, 11]), (8, [1, 3, 5, 7]), (3, [0, 1, 2])):
        assert create("inline_deit_tiny", depth=depth, features_only=True).feature_info.get_dicts(["index"]) == [
            {"index": index} for index in indices
        ]


def test_out_indices_and_channels():
    backbone = create("inline_pvt_tiny", features_only=True, out_indices=(1, 3), in_chans=4)
    assert [f.shape[1] for f in backbone(torch.randn(1, 4, 64, 64))] == [128, 512]


@pytest.mark.parametrize("name", SMALL)
def test_gradient_checkpointing_changes_nothing(name):
    model = create(name)
    x = torch.randn(1, 3, 64, 64)
    out = model(x)
    out.sum().backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing()
    again = model(x)
    again.sum().backward()
    torch.testing.assert_close(again, out)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[key])


@pytest.mark.parametrize("name", SMALL)
def test_parameter_groups(name):
    from timm.optim import create_optimizer_v2

    model = create(name)
    create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    undecayed = model.no_weight_decay()
    assert undecayed <= set(dict(model.named_parameters()))
    if family_of(name) == "deit":
        assert undecayed == {"pos_embed", "cls_token"}
    if family_of(name) == "pvt":
        assert not undecayed
    if name == "softmax_swin_tiny":
        assert len(undecayed) == len(blocks_of(model))


@pytest.mark.parametrize("name", SMALL)
def test_any_image_size_gives_ceiling_grids(name):
    model = create(name)
    for height, width in [(224, 224), (97, 161), (33, 250), (64, 40)]:
        features = model.forward_intermediates(torch.randn(1, 3, height, width), intermediates_only=True)
        for feature, info in zip(features, model.feature_info, strict=True):
            stride = info["reduction"]
            assert feature.shape[2:] == (-(-height // stride), -(-width // stride))
            assert feature.isfinite().all()


@pytest.mark.parametrize("name", SMALL)
def test_an_image_in_a_padded_batch_is_what_it_is_alone(name):
    model = create(name)
    sizes = [(97, 161), (160, 130), (128, 160), (40, 33), (160, 161)]
    images = [torch.randn(3, *size) for size in sizes]
    canvas = torch.full((len(sizes), 3, 160, 161), 1e3)  # what padding holds must not matter
    for index, image in enumerate(images):
        canvas[index, :, : image.shape[1], : image.shape[2]] = image
    mask = canvas[:, 0] != 1e3
    with torch.no_grad():
        together = model(canvas, image_sizes=sizes)
        torch.testing.assert_close(model(canvas, pixel_mask=mask), together)
        features = model.forward_intermediates(canvas, intermediates_only=True, image_sizes=sizes)
        for index, image in enumerate(images):
            scale = together[index].abs().max()
            assert (model(image[None])[0] - together[index]).abs().max() <= 1e-5 * scale
            alone = model.forward_intermediates(image[None], intermediates_only=True)
            for level, expected in zip(features, alone, strict=True):
                height, width = expected.shape[2:]
                got = level[index].clone()
                assert (got[:, :height, :width] - expected[0]).abs().max() <= 1e-5 * expected.abs().max()
                got[:, :height, :width] = 0
                assert (got == 0).all()  # padding leaves as zeros, which is what a convolution's border is
        single = model(canvas[:1], image_sizes=sizes[:1])
        torch.testing.assert_close(single, together[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_padding_that_fills_whole_tokens_only_where_they_are_fine(name):
    model = create(name)
    image = torch.randn(2, 3, 97, 161)
    canvas = torch.zeros(2, 3, 128, 192)  # has the tokens of the image at stride 32, more at 4
    canvas[:, :, :97, :161] = image
    with torch.no_grad():
        expected = model(image)
        got = model(canvas, image_sizes=[(97, 161)] * 2)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_sizes_of_images_are_not_read_back_from_a_device(name):
    # Fake tensors have no values: to ask for one is an error. On a GPU it would be a wait for all that was launched.
    model = create(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.randn(2, 3, 96, 160)
        assert model(images, image_sizes=[(90, 160), (96, 133)]).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, r"images must be a torch.Tensor, got NoneType"),
        ({"x": torch.randn(1, 3, 64, 64).to_sparse()}, r"images must be a dense tensor, got torch.sparse_coo"),
        ({"x": torch.nested.nested_tensor([torch.randn(3, 64, 64)])}, r"images must be a dense tensor, got a nested"),
        ({"x": torch.randn(1, 3, 64, 64), "pixel_mask": [1]}, r"pixel_mask must be a torch.Tensor, got list"),
        ({"x": torch.randn(1, 3, 64, 64), "image_sizes": torch.ones(1, 2).to_sparse()}, r"1 pairs .* got tensor"),
        ({"x": torch.randn(3, 64, 64)}, r"images must be \[B, 3, H, W\].*x\[None\]"),
        ({"x": torch.randn(1, 4, 64, 64)}, r"in_chans"),
        ({"x": torch.randn(1, 3, 31, 64)}, r"at least 32 pixels high and wide, got 31×64"),
        ({"x": torch.randn(1, 3, 64, 64), "image_sizes": [(16, 64)]}, r"down to 16"),
        ({"x": torch.randn(1, 3, 64, 64), "image_sizes": [(65, 64)]}, r"fit into the canvas 64×64"),
        ({"x": torch.randn(1, 3, 64, 64), "image_sizes": [(64, 64)] * 2}, r"1 pairs"),
        ({"x": torch.randn(1, 3, 64, 64), "image_sizes": [(64.0, 64.0)]}, r"of integers, got \[\(64.0"),
        (
            {"x": torch.randn(1, 3, 64, 64), "image_sizes": torch.tensor([64, 64])},
            r"of integers, got tensor",
        ),
        ({"x": torch.randn(1, 3, 64, 64), "pixel_mask": torch.eye(64)[None]}, r"one rectangle at the top left"),
        ({"x": torch.randn(1, 3, 64, 64), "pixel_mask": torch.ones(1, 8, 8)}, r"\[B, H, W\]"),
    ],
)
def test_errors(arguments, message):
    model = create("inline_pvt_tiny")
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_no_images_are_as_good_as_some():
    model = create("inline_pvt_tiny")
    assert model(torch.randn(0, 3, 64, 64), pixel_mask=torch.ones(0, 64, 64)).shape == (0, 7)
    assert model(torch.randn(0, 3, 64, 64), image_sizes=[]).shape == (0, 7)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_has_a_gradient_of_its_own(name):
    model = create(name)
    model(torch.randn(1, 3, 64, 96)).square().sum().backward()  # one image: sums over the batch are not copies
    places = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
@torch.no_grad()
def test_what_a_stage_began_with_is_let_go(name):
    """At inference nobody needs those tokens once the first block has others, and at high resolution they are many."""
    model = inline_attention.create_model(name).eval()
    began, alive = [], []
    model.embeddings[2].register_forward_hook(lambda module, inputs, output: began.append(weakref.ref(output[0])))
    model.stages[2][1].register_forward_pre_hook(lambda module, inputs: alive.append(began[0]() is not None))
    model(torch.randn(1, 3, 64, 64))
    assert alive == [False]


def test_both_image_sizes_and_pixel_mask_is_an_error():
    with pytest.raises(ValueError, match="not both"):
        create("inline_deit_tiny")(torch.randn(1, 3, 32, 32), image_sizes=[(32, 32)], pixel_mask=torch.ones(1, 32, 32))


def test_set_input_size_fixes_another_native_size():
    x = torch.randn(1, 3, 96, 128)
    for name in ("inline_deit_tiny", "inline_pvt_tiny"):
        model = create(name)
        out = model(x)
        model.set_input_size((96, 128))
        torch.testing.assert_close(model(x), out)  # the same resampling, done once
    swin = create("softmax_swin_tiny")
    swin.set_input_size(window_size=12)
    assert swin.stages[0][0].attn.relative_position_bias_table.shape == (23 * 23, 3)
    assert swin(x).shape == (1, 7)
    cswin = create("inline_cswin_tiny")
    cswin.set_input_size(stripe_widths=(1, 2, 12))
    assert cswin.stages[2][0].attn.stripe_width == 12


def test_unknown_names_get_suggestions():
    with pytest.raises(ValueError, match="did you mean inline_swin_tiny"):
        inline_attention.create_model("inline_swin_tny")
    with pytest.raises(ValueError, match="attention must be"):
        inline_attention.create_model("inline_deit_tiny", attention="sofmax")


def test_an_image_size_of_a_model_of_any_size_is_noted():
    model = inline_attention.create_model("resnet10t", img_size=(48, 64), num_classes=3)
    assert model.pretrained_cfg["input_size"] == (3, 48, 64)
    assert timm.create_model("resnet10t").pretrained_cfg["input_size"] != (3, 48, 64)
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 3)
    for wrong in ({"image_size": 64}, {"img_size": 64, "nonsense": 1}):
        with pytest.raises(TypeError, match=next(reversed(wrong))):
            inline_attention.create_model("resnet10t", **wrong)


def test_the_attention_argument_makes_the_twin():
    by_argument = timm.create_model("inline_deit_tiny", attention="linear", depth=1)
    assert isinstance(by_argument.blocks[0].attn, LinearAttention)
    assert by_argument.pretrained_cfg["architecture"] == "linear_deit_tiny"
    with_options = timm.create_model("inline_deit_tiny", attention_options={"feature_map": "exp"}, depth=1)
    assert with_options.blocks[0].attn.feature_map == "exp"


def test_pretrained_says_how_to_get_weights():
    for create_model in (timm.create_model, inline_attention.create_model):
        with pytest.raises(RuntimeError, match=r"inline convert FILE\.pth --model inline_swin_tiny --output"):
            create_model("inline_swin_tiny", pretrained=True)


def test_pretrained_from_a_file_adapts_channels_classes_and_size(tmp_path):
    from inline_attention.models.checkpoints import save_weights

    source = timm.create_model("inline_deit_tiny", depth=1)
    save_weights(source, tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    same = timm.create_model("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, depth=1)
    for key, value in source.state_dict().items():
        assert torch.equal(same.state_dict()[key], value), key
    other = timm.create_model(
        "inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, depth=1,
        num_classes=5, in_chans=1, img_size=96,
    )  # fmt: skip
    assert other(torch.randn(1, 1, 96, 96)).shape == (1, 5)
    assert torch.equal(other.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)


def test_pretrained_from_a_file_keeps_a_head_of_its_own_size(tmp_path):
    from inline_attention.models.checkpoints import save_weights

    source = timm.create_model("inline_deit_tiny", depth=1, num_classes=5)
    save_weights(source, tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors")}
    for arguments in ({"num_classes": 5}, {}):
        model = timm.create_model(
            "inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, depth=1, **arguments
        )
        assert torch.equal(model.head.weight, source.head.weight)
    other = timm.create_model(
        "inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, depth=1, num_classes=9
    )
    assert other.head.out_features == 9


def test_class_tokens_of_intermediates():
    model = create("inline_deit_tiny", num_classes=0)
    x = torch.randn(2, 3, 64, 96)
    ((feature, prefix),) = model.forward_intermediates(
        x, 1, norm=True, intermediates_only=True, return_prefix_tokens=True
    )
    assert feature.shape == (2, 192, 4, 6)
    torch.testing.assert_close(prefix[:, 0], model(x))


@pytest.mark.parametrize("name", SMALL)
def test_an_empty_batch(name):
    assert create(name)(torch.empty(0, 3, 64, 96)).shape == (0, 7)


@pytest.mark.parametrize("kind", ["inline", "softmax", "linear"])
def test_the_last_mlp_computes_the_class_token_alone_without_hooks(kind):
    torch.manual_seed(0)
    model = create(f"{kind}_deit_tiny", depth=3)
    images = torch.randn(2, 3, 64, 48)
    alone = model(images)
    seen = []
    handle = model.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    torch.testing.assert_close(model(images), alone)
    assert seen == [1 + 4 * 3]
    handle.remove()
    widths = []
    hidden = model.blocks[-1].mlp.fc1
    hidden.forward = lambda x: widths.append(x.shape[1]) or nn.functional.linear(x, hidden.weight, hidden.bias)
    torch.testing.assert_close(model(images), alone)
    torch.testing.assert_close(model.forward_head(model.forward_features(images)), alone)
    assert widths == [1, 1 + 4 * 3]


def hook_into(model: nn.Module, place: str, notice) -> torch.utils.hooks.RemovableHandle:
    """Have `notice` called with the tokens, or their gradients, that somebody sees at a place of a DeiT."""
    block, norm = model.blocks[-1], model.norm
    module_hooks = nn.modules.module
    register = {
        "norm": lambda: norm.register_forward_hook(lambda module, inputs, output: notice(output)),
        "before_norm": lambda: norm.register_forward_pre_hook(lambda module, inputs: notice(inputs[0])),
        "norm_backward": lambda: norm.register_full_backward_hook(lambda module, grads, outer: notice(outer[0])),
        "block_backward": lambda: block.register_full_backward_hook(lambda module, grads, outer: notice(outer[0])),
        "before_block_backward": lambda: block.register_full_backward_pre_hook(lambda module, outer: notice(outer[0])),
        "anywhere": lambda: module_hooks.register_module_forward_hook(
            lambda module, inputs, output: notice(output) if module is block else None
        ),
        "before_anything": lambda: module_hooks.register_module_forward_pre_hook(
            lambda module, inputs: notice(inputs[0]) if module is norm else None
        ),
        "anywhere_backward": lambda: module_hooks.register_module_full_backward_hook(
            lambda module, grads, outer: notice(outer[0]) if module is norm else None
        ),
        "before_anything_backward": lambda: module_hooks.register_module_full_backward_pre_hook(
            lambda module, outer: notice(outer[0]) if module is norm else None
        ),
    }
    return register[place]()


@pytest.mark.parametrize(
    "place",
    [
        "norm", "before_norm", "norm_backward", "block_backward", "before_block_backward",
        "anywhere", "before_anything", "anywhere_backward", "before_anything_backward",
    ],
)  # fmt: skip
def test_hooks_from_the_last_block_on_get_all_tokens(place):
    model = create("inline_deit_tiny", depth=1)
    seen = []
    handle = hook_into(model, place, lambda tokens: seen.append(tokens.shape[1]))
    model(torch.randn(2, 3, 64, 48)).sum().backward()
    handle.remove()
    assert seen == [1 + 4 * 3]
    assert model.num_head_tokens() == 1


def test_a_compiled_model_shows_its_watchers_all_tokens():
    torch.compiler.reset()
    model = create("inline_deit_tiny", depth=1)
    images = torch.randn(2, 3, 64, 48)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(images)
        seen = []
        model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(images), expected)
    assert seen == [1 + 4 * 3]


@pytest.mark.parametrize(
    ("name", "pool"),
    [("inline_deit_tiny", "token"), *((f"inline_{f}_tiny", pool) for f in ("deit", *PYRAMIDS) for pool in ("avg", ""))],
)
def test_the_head_of_the_features_of_a_padded_batch(name, pool):
    model = create(name, global_pool=pool)
    images, sizes = torch.randn(2, 3, 96, 128), [(96, 70), (41, 100)]
    mask = torch.zeros(2, 96, 128, dtype=torch.bool)
    for index, (height, width) in enumerate(sizes):
        mask[index, :height, :width] = True
    with torch.no_grad():
        for padding in ({"image_sizes": sizes}, {"pixel_mask": mask}):
            features = model.forward_features(images, **padding)
            torch.testing.assert_close(model.forward_head(features, **padding), model(images, **padding))
            pooled = model.forward_head(features, pre_logits=True, **padding)
            torch.testing.assert_close(model.head(pooled), model(images, **padding))
    with pytest.raises(ValueError, match="not both"):
        model.forward_head(features, image_sizes=sizes, pixel_mask=mask)
    with pytest.raises(ValueError, match="2 pairs"):
        model.forward_head(features, image_sizes=sizes[:1])
    with pytest.raises(ValueError, match=r"pass what forward_features was given"):
        model.forward_head(features, image_sizes=[(96, 70), (960, 1280)])


@pytest.mark.gpu
@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("family", ["pvt_tiny", "swin_tiny"])
def test_a_backbone_takes_less_memory_than_its_softmax_twin(family, is_training):
    def step(model, images):
        with torch.set_grad_enabled(is_training), torch.autocast("cuda", torch.bfloat16, enabled=is_training):
            features = model(images)
        if is_training:
            sum(feature.float().mean() for feature in features).backward()
            model.zero_grad()

    def peak(name):
        model = timm.create_model(f"{name}_{family}", features_only=True).cuda().train(is_training)
        images = torch.randn(2, 3, 800, 1333, device="cuda")
        if not is_training:
            model, images = model.bfloat16(), images.bfloat16()
        step(model, images)  # what libraries keep for good is not counted
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, images)
        return torch.cuda.max_memory_allocated() - before

    assert peak("inline") < peak("softmax")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("inline_deit_tiny", {key: value}) for key in ("depth", "num_heads") for value in (-1, 0, 1.5, "2", True)),
        *((f"inline_{family}_tiny", {"img_size": size}) for family in FAMILIES for size in (-32, (9, -1), (1, 2, 3))),
        ("inline_deit_tiny", {"patch_size": 0}),
        *(("inline_deit_tiny", {"stem": stem}) for stem in (((8, 5),), ((8, 2),), ((0, 4),), (8, 4), ((8, 4), (8, 7)))),
        *((f"inline_{family}_tiny", {"drop_rate": rate}) for family in FAMILIES for rate in ("1", float("nan"))),
        *((f"inline_{family}_tiny", {"drop_path_rate": rate}) for family in FAMILIES for rate in (-1, "1")),
        *((f"inline_{family}_tiny", {"depths": (1, -1, 1, 1)}) for family in ("pvt", "swin", "cswin")),
        *((f"inline_{family}_tiny", {"num_classes": -1}) for family in FAMILIES),
        *((f"inline_{family}_tiny", {"in_chans": 0}) for family in FAMILIES),
        ("inline_swin_tiny", {"window_size": -7}),
        ("inline_swin_tiny", {"global_blocks": (-1, 0, 0, 0)}),
        ("inline_cswin_tiny", {"stripe_widths": (1, 0, 7)}),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused_at_construction(name, arguments):
    with torch.device("meta"), pytest.raises(ValueError, match=next(iter(arguments))):
        timm.create_model(name, **arguments)
