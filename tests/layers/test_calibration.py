"""Calibration: converted attention is fitted to softmax, by a factor per head in the weights of its queries."""

import json

import pytest
import timm
import torch

from inline_attention import InLineAttention, LinearAttention, calibrate_attention, convert_attention
from inline_attention.layers.attention import SoftmaxAttention
from inline_attention.models.checkpoints import load_checkpoint, save_weights
from inline_attention.models.described import create_described_model, read_description
from inline_attention.models.reading import open_checkpoint

SMALL = {"num_classes": 5, "img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 32, "num_heads": 2}


def sharp_vit(name="vit_tiny_patch16_224", **arguments):
    """A softmax model with scores as large as in trained ones."""
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | arguments)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    for block in model.blocks:
        projection = block.attn.qkv if getattr(block.attn, "qkv", None) is not None else block.attn.q_proj
        torch.nn.init.normal_(projection.weight[: model.embed_dim], std=0.8)
        if getattr(block.attn, "q_norm", None) is not None and hasattr(block.attn.q_norm, "weight"):
            torch.nn.init.constant_(block.attn.q_norm.weight, 4.0)
    return model


def pictures(number=4):
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def tokens_of(model):
    with torch.no_grad():
        return model.forward_features(pictures())


MODELS = {
    "class token": ("vit_tiny_patch16_224", {}),
    "no class token": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "no biases": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "normed queries": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "own biases, rotary": ("eva02_tiny_patch14_224", {}),
    "three projections": ("eva02_base_patch14_224", {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("softmax_prefix", [False, True])
def test_a_calibrated_model_is_closer_to_softmax(name, softmax_prefix):
    model_name, arguments = MODELS[name]
    expected = tokens_of(sharp_vit(model_name, **arguments))
    errors = []
    for is_calibrated in (False, True):
        model = sharp_vit(model_name, **arguments)
        convert_attention(model, softmax_prefix=softmax_prefix)
        if is_calibrated:
            gains = calibrate_attention(model, pictures())
            assert list(gains) == [f"blocks.{number}.attn" for number in range(3)]
            assert all(gain.shape == (2,) and (gain < 0.95).any() for gain in gains.values())
            assert all((gain[0] == gain[1]) == (name == "normed queries") for gain in gains.values())
        errors.append((tokens_of(model) - expected).norm().item())
    assert errors[1] < 0.9 * errors[0], errors


def layer_and_twin(gain=None, *, calibrate=False):
    """A converted layer of 2 prefix tokens, and softmax with the same first weights."""
    torch.manual_seed(0)
    twin = SoftmaxAttention(32, 4, num_prefix_tokens=2).double().eval()
    torch.nn.init.normal_(twin.qkv.weight, std=0.4)
    layer = InLineAttention(32, 4, num_prefix_tokens=2, softmax_prefix=True, local_residual=False).double().eval()
    layer.load_state_dict(twin.state_dict())
    model = torch.nn.Sequential(layer)
    model.attention_conversion = {"attention": "inline", "keep_softmax": [], "options": {}}
    x = torch.randn(3, 2 + 36, 32, dtype=torch.float64)
    if calibrate:
        calibrate_attention(model, x)
    return model, layer, twin, x


def test_gains_are_the_best_ones():
    plain, _, twin, x = layer_and_twin()
    _, layer, _, _ = layer_and_twin(calibrate=True)
    gains = layer.qkv.weight[:32].view(4, -1).norm(dim=1) / plain[0].qkv.weight[:32].view(4, -1).norm(dim=1)

    def error(factors):
        changed = InLineAttention(32, 4, local_residual=False).double()
        changed.load_state_dict(twin.state_dict())
        with torch.no_grad():
            changed.qkv.weight[:32].view(4, -1).mul_(factors[:, None])
            changed.qkv.bias[:32].view(4, -1).mul_(factors[:, None])
            return (changed.attend(x) - twin.attend(x))[:, 2:].square().sum().item()

    best = error(gains)
    for head in range(4):
        for factor in (0.95, 1.05):
            other = gains.clone()
            other[head] *= factor
            assert error(other) > best


def test_queries_that_keep_softmax_do_not_change():
    _, layer, twin, x = layer_and_twin(calibrate=True)
    torch.testing.assert_close(layer(x)[:, :2], twin(x)[:, :2], rtol=1e-5, atol=1e-6)
    assert layer.prefix_gain.shape == (4,)
    assert layer.prefix_gain.requires_grad
    assert not torch.allclose(layer.prefix_gain, torch.ones(4, dtype=torch.float64))


def test_small_scores_need_no_calibration():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    convert_attention(model)
    gains = torch.cat([*calibrate_attention(model, pictures()).values()])
    torch.testing.assert_close(gains, torch.ones(6), rtol=0.02, atol=0)


def test_files_say_that_a_model_is_calibrated(tmp_path):
    model = sharp_vit()
    convert_attention(model, softmax_prefix=True)
    calibrate_attention(model, pictures())
    notes = {"model": "vit_tiny_patch16_224", "model_arguments": json.dumps(SMALL)}
    save_weights(model, tmp_path / "model.safetensors", metadata=notes)
    file = open_checkpoint(tmp_path / "model.safetensors")
    described = read_description(file)
    assert described.conversion.options == {"softmax_prefix": True, "prefix_gain": True}
    again = create_described_model(described.name, described.arguments, described.conversion).eval()
    load_checkpoint(again, file)
    assert torch.equal(tokens_of(again), tokens_of(model))


def test_state_of_the_model_is_kept():
    model = sharp_vit().train()
    convert_attention(model)
    hooks = [len(block.attn._forward_pre_hooks) for block in model.blocks]
    calibrate_attention(model, pictures())
    assert model.training
    assert [len(block.attn._forward_pre_hooks) for block in model.blocks] == hooks
    assert all(parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters())


def test_transformers_models():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=4, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.8 if "query" in name or "q_proj" in name else 0.3)
    with torch.no_grad():
        expected = model(pixel_values=pictures()).last_hidden_state
    convert_attention(model, softmax_prefix=True)
    with torch.no_grad():
        before = (model(pixel_values=pictures()).last_hidden_state - expected).norm()
        calibrate_attention(model, pixel_values=pictures())
        after = (model(pixel_values=pictures()).last_hidden_state - expected).norm()
    assert after < 0.9 * before


@pytest.mark.parametrize("prefix_gain", [False, True])
def test_a_model_that_cannot_be_calibrated_to_the_end_is_unchanged(prefix_gain):
    model = sharp_vit()
    convert_attention(model, softmax_prefix=True, prefix_gain=prefix_gain)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = json.dumps(model.attention_conversion)
    bad = pictures()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        calibrate_attention(model, bad)

    def fail(*_):
        raise MemoryError

    hook = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        calibrate_attention(model, pictures())
    hook.remove()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert json.dumps(model.attention_conversion) == record
    calibrate_attention(model, pictures())


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="convert_attention"):
        calibrate_attention(sharp_vit(), pictures())
    model = sharp_vit()
    convert_attention(model, attention=LinearAttention)
    with pytest.raises(ValueError, match="InLine"):
        calibrate_attention(model, pictures())
    model = sharp_vit()
    convert_attention(model)
    calibrate_attention(model, pictures())
    with pytest.raises(ValueError, match="only once"):
        calibrate_attention(model, pictures())


def test_attention_over_maps_of_sam():
    torch.manual_seed(0)
    arguments = {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2, "global_attn_indexes": (1,)}
    model = timm.create_model("samvit_base_patch16", **arguments, num_classes=0).eval()
    torch.nn.init.normal_(model.blocks[1].attn.qkv.weight[:32], std=0.8)
    with pytest.warns(UserWarning, match="within windows"):
        convert_attention(model, drop_position_bias=True)
    gains = calibrate_attention(model, torch.randn(2, 3, 64, 64))
    assert list(gains) == ["blocks.1.attn"]
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()
