"""The table of docs/conversion.md, row by row, on small models with random weights."""

import copy
import pickle
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention, convert_attention, load_checkpoint
from inline_attention.analysis.probes import capture_attention
from inline_attention.layers.adapted_attention import AdaptedAttention
from inline_attention.layers.attention import TokenAttention
from inline_attention.models.checkpoints import save_weights

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

TABLE = (Path(__file__).parents[2] / "docs" / "conversion.md").read_text()
ROWS = re.findall(r"^\| (timm|transformers) \| .*`(\w+)` \| (yes|opt-in|no) \|", TABLE, re.MULTILINE)
CONVERTIBLE = [(library, name, answer) for library, name, answer in ROWS if answer != "no"]
SQUARE, OBLONG = (32, 32), (32, 48)


def test_the_table_names_every_family_once():
    assert len(ROWS) == len(set(ROWS)) > 30
    assert len(re.findall(r"^\| (?:timm|transformers) ", TABLE, re.MULTILINE)) == len(ROWS)


def build(library, name, size):
    """A small model with random weights that matter, and a function that runs it on an image."""
    torch.manual_seed(0)
    if library == "timm":
        small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
        if "samvit" in name:
            small |= {"global_attn_indexes": (1,), "window_size": 2}
        model = timm.create_model(name, img_size=size, num_classes=3, **small)
    else:
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        kind = getattr(transformers, name)
        more = {"num_register_tokens": 4} if "DINOv3" in name else {}
        model = kind(kind.config_class(**small, image_size=32, patch_size=8, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def run(model, image):
    if not hasattr(model, "config"):
        return model(image)
    takes_any_size = "Dinov2" in type(model).__name__ or "DINOv3" in type(model).__name__
    return model(image, **({} if takes_any_size else {"interpolate_pos_encoding": True})).last_hidden_state


def convert(model, answer, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 attentions of VisionTransformerSAM are left")  # it has a window
        return convert_attention(model, drop_position_bias=answer == "opt-in", **arguments)


def image_of(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def without_position_bias(model):
    """Set biases to zero: what a conversion with `drop_position_bias` keeps."""
    for module in model.modules():
        for name in ("relative_position_bias_table", "rel_pos_h", "rel_pos_w"):
            if isinstance(getattr(module, name, None), nn.Parameter) and getattr(model, "blocks", None) is not None:
                nn.init.zeros_(getattr(module, name))
        if "RelPosMlp" in type(module).__name__:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)


@pytest.mark.parametrize(("library", "name", "answer"), CONVERTIBLE)
def test_the_softmax_twin_gives_the_outputs_of_the_original(library, name, answer):
    model = build(library, name, SQUARE)
    if answer == "opt-in":
        without_position_bias(model)
    expected = run(model, image_of(SQUARE))
    names = convert(model, answer, attention=SoftmaxAttention)
    assert all(isinstance(model.get_submodule(name), SoftmaxAttention) for name in names)
    torch.testing.assert_close(run(model, image_of(SQUARE)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("library", "name", "answer"), CONVERTIBLE)
def test_a_converted_model_trains_keeps_its_weights_names_and_can_be_copied(library, name, answer):
    model, image = build(library, name, OBLONG), image_of(OBLONG)
    before = dict(model.state_dict())
    names = convert(model, answer)
    layers = [model.get_submodule(name) for name in names]
    after = model.state_dict()
    if answer == "yes":
        assert all(torch.equal(after[name], value) for name, value in before.items())
    else:
        assert before.keys() - after.keys()
    assert all(".residual." in name for name in after.keys() - before.keys())

    grids = []
    for layer in layers:
        assert isinstance(layer, InLineAttention)
        layer.resolve_grid = lambda *args, found=layer.resolve_grid: grids.append(found(*args)) or grids[-1]
    features = model.forward_features(image) if library == "timm" else run(model, image)
    features.square().mean().backward()  # of all tokens, not only of the class token
    assert grids == [(4, 6)] * len(layers)  # of patches, with nothing said
    for layer in layers:
        del layer.resolve_grid
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            # The last layer of the predictor is zero at first, so the layers before it get no gradient.
            assert parameter.grad.abs().sum() > 0 or name.startswith("residual.0."), name

    with torch.no_grad():
        for layer in layers:
            for parameter in layer.residual.parameters():
                parameter.normal_(std=0.1)
        expected = run(model, image)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(run(twin, image), expected)


@pytest.mark.parametrize(("library", "name", "answer"), CONVERTIBLE)
def test_a_file_is_loaded_into_a_model_converted_the_same_way(tmp_path, library, name, answer):
    model, path = build(library, name, SQUARE), tmp_path / "model.safetensors"
    options = {"static_local": True, "attention": LinearAttention, "keep_softmax": [-1] if name != SAM else []}
    convert(model, answer, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        expected = run(model, image_of(SQUARE))
        save_weights(model, path)
        other = build(library, name, SQUARE)
        convert(other, answer, **options)
        load_checkpoint(other, path)
        assert torch.equal(run(other, image_of(SQUARE)), expected)


SAM = "samvit_base_patch16"  # one global block in the small model


@pytest.mark.parametrize(("library", "name", "answer"), [row for row in ROWS if row[2] == "no"])
def test_what_does_not_convert_is_refused_and_unchanged(library, name, answer):
    if library == "timm":
        with torch.device("meta"):
            model = timm.create_model(name)
    else:
        kind = getattr(transformers, name)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
        model = kind(kind.config_class(**sizes, use_relative_position_bias=True))
    before = dict(model.named_modules())
    for drop in (False, True):
        with pytest.raises(ValueError, match="found no attention to convert"):
            convert_attention(model, drop_position_bias=drop)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(("library", "name", "answer"), [row for row in ROWS if row[2] == "opt-in"])
def test_relative_positions_are_lost_only_if_asked_for(library, name, answer):
    text = r"adds relative positions .* every pair of tokens.*drop_position_bias=True"
    with pytest.raises(ValueError, match=text) as found:
        convert_attention(build(library, name, SQUARE))
    assert str(found.value).count("drop_position_bias=True") == 1  # once, not for each block


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("timm", "eva02_base_patch16_clip_224"),
        ("timm", "vit_small_patch16_rope_mixed_224"),
        ("transformers", "ViTModel"),
    ],
)
def test_analysis_reads_adapted_layers(library, name):
    """Weights from queries and keys that an analysis reads give the layer's own output."""
    model = build(library, name, SQUARE)
    first = convert(model, "yes", local_residual=False)[0]
    layer = model.get_submodule(first)
    assert isinstance(layer, TokenAttention)
    seen = []
    hook = layer.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        captured = capture_attention(model, image_of(SQUARE), layers=[0])[0]
        hook.remove()
        mixed = torch.stack(
            [captured.rows(slice(None), head).float() @ captured.v[:, :, head] for head in range(2)], dim=2
        ).flatten(2)
        norm = nn.Identity() if layer.norm is None else layer.norm
        torch.testing.assert_close(norm(mixed), seen[0], rtol=1e-4, atol=1e-5)


def test_rotary_positions_change_the_output():
    model = build("timm", "vit_small_patch16_dinov3", SQUARE)
    convert_attention(model)
    tokens = torch.randn(1, 21, 32)
    layer, rope = model.blocks[0].attn, torch.randn(16, 32)
    assert not torch.allclose(layer(tokens, rope=rope), layer(tokens))


def test_grouped_queries():
    model = timm.models.eva.Eva(
        img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=4, num_kv_heads=2, num_classes=3,
        attn_type="rope", qkv_fused=False, use_rot_pos_emb=True, qk_norm=True,
    ).eval()  # fmt: skip
    expected = model(image_of(SQUARE))
    convert_attention(model, attention=SoftmaxAttention)
    torch.testing.assert_close(model(image_of(SQUARE)), expected)


def test_gates_and_inner_norms():
    attention = timm.layers.Attention(32, 4, gated=True, scale_norm=True, qk_norm=True, norm_layer=nn.LayerNorm).eval()
    tokens = torch.randn(2, 9, 32)
    twin = SoftmaxAttention.from_softmax(attention)
    torch.testing.assert_close(twin(tokens), attention(tokens))


def test_a_layer_of_ones_own_can_replace_plain_attention_only():
    class Own(InLineAttention):
        pass

    assert convert_attention(build("timm", "vit_tiny_patch16_224", SQUARE), attention=Own)
    with pytest.raises(ValueError, match="cannot convert EvaAttention to Own: it can become one of InLineAttention"):
        convert_attention(build("timm", "eva02_tiny_patch14_224", SQUARE), attention=Own)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_with_the_grid_of_its_call(use_reentrant):
    model, image = build("transformers", "Dinov2Model", SQUARE).train(), image_of(OBLONG)
    convert_attention(model)
    for layer in model.modules():
        if isinstance(layer, AdaptedAttention):
            nn.init.normal_(layer.residual[-1].weight, std=0.1)
    gradients = []
    for is_enabled in (False, True):
        checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
        model._set_gradient_checkpointing(is_enabled, checkpoint)
        model.zero_grad()
        run(model, image).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_the_text_tower_stays():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.CLIPConfig(
        vision_config=sizes | {"image_size": 32, "patch_size": 8},
        text_config=sizes | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    )
    model = transformers.CLIPModel(config).eval()
    with pytest.warns(UserWarning, match="1 attentions of CLIPModel are left .* not patches of an image"):
        assert convert_attention(model) == ["vision_model.encoder.layers.0.self_attn"]


def test_masked_patches_and_tokens_without_a_grid_have_no_local_residual():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**sizes, image_size=32, patch_size=8))
    with pytest.raises(ValueError, match=r"drops 75% of its patches.*mask_ratio=0"):
        convert_attention(model)
    assert convert_attention(model, local_residual=False)
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=8, num_patches=16)
    model = transformers.Siglip2VisionModel(config)
    with pytest.raises(ValueError, match="does not tell the grid of its tokens"):
        convert_attention(model)
    assert convert_attention(model, local_residual=False)
