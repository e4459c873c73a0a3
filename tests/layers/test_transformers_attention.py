"""`attn_implementation="inline"`: registered by the import, equal to a conversion, clear about what it cannot do."""

import subprocess
import sys

import pytest
import torch

from inline_attention import convert_attention

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
TEXT = SIZES | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def pair(kind, **settings):
    """The same random weights with "inline", and converted without a local residual."""
    torch.manual_seed(0)
    words = kind(kind.config_class(**VISION, **settings, attn_implementation="inline")).eval()
    with torch.no_grad():
        for parameter in words.parameters():
            parameter.normal_(std=0.5)
    converted = kind(kind.config_class(**VISION, **settings)).eval()
    converted.load_state_dict(words.state_dict())
    softmax = converted(IMAGES).last_hidden_state
    convert_attention(converted, local_residual=False)
    assert (softmax - words(IMAGES).last_hidden_state).abs().max() > 1e-3
    return words, converted


@pytest.mark.parametrize(
    "imports",
    [
        "import inline_attention, transformers",
        pytest.param(
            "from transformers import ViTModel\nimport inline_attention, transformers", marks=pytest.mark.slow
        ),
    ],
    ids=["we first", "transformers first"],
)
def test_it_is_registered_in_either_order(imports):
    program = f"""
import sys
{imports}
if "transformers.modeling_utils" not in sys.modules:  # nothing heavy until a model of transformers is imported
    assert "inline_attention.layers" not in sys.modules
config = transformers.ViTConfig(**{VISION!r}, attn_implementation="inline")
model = transformers.ViTModel(config)
assert model.config._attn_implementation == "inline"
import torch
assert model(torch.zeros(1, 3, 32, 32)).last_hidden_state.shape == (1, 17, 32)
assert not [finder for finder in sys.meta_path if getattr(finder, "theirs", "") == "transformers.modeling_utils"]
inline_attention.convert_attention(model)
assert model(torch.zeros(1, 3, 32, 32)).last_hidden_state.shape == (1, 17, 32)
assert "timm" not in sys.modules  # nor is there half an import of it, which would leave our models unregistered
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel"])
def test_it_is_the_conversion_without_local_residual(name):
    words, converted = pair(getattr(transformers, name))
    expected = converted(IMAGES).last_hidden_state
    torch.testing.assert_close(words(IMAGES).last_hidden_state, expected)
    words.train()(IMAGES).last_hidden_state.square().mean().backward()
    weights = {name: value for name, value in words.named_parameters() if name.endswith("_proj.weight")}
    weights.pop("head.attention.out_proj.weight", None)  # of pooling, which comes after the tokens
    assert len(weights) >= 8
    assert all(value.grad.abs().sum() > 0 for value in weights.values())


def test_padding_is_masked():
    words, converted = pair(transformers.ViTModel)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 12:] = 0
    masked = words(IMAGES, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(converted(IMAGES, attention_mask=mask).last_hidden_state, masked)
    torch.testing.assert_close(masked[0], words(IMAGES).last_hidden_state[0])
    # Padded tokens have no influence on others: other content there gives the same.
    embedded = {}

    def change(_module, _args, output):
        output = output.clone()
        output[1, 12:] += embedded.get("noise", 0)
        return output

    hook = words.embeddings.register_forward_hook(change)
    embedded["noise"] = torch.randn(5, 32)
    torch.testing.assert_close(words(IMAGES, attention_mask=mask).last_hidden_state[1, :12], masked[1, :12])
    hook.remove()


def test_other_masks_are_refused():
    words, converted = pair(transformers.ViTModel)
    mask = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    for model in (words, converted):
        with pytest.raises(ValueError, match="hides tokens from some queries only"):
            model(IMAGES, attention_mask=mask)


def test_text_and_position_biases_are_refused():
    config = transformers.CLIPConfig(vision_config=VISION, text_config=TEXT, attn_implementation="inline")
    model = transformers.CLIPModel(config).eval()
    model.get_image_features(pixel_values=IMAGES)
    with pytest.raises(ValueError, match="CLIPAttention is causal"):
        model.get_text_features(input_ids=torch.tensor([[1, 5, 6, 2]]))
    config = transformers.BeitConfig(**VISION, use_relative_position_bias=True, attn_implementation="inline")
    with pytest.raises(ValueError, match="relative positions of each head cannot be kept"):
        transformers.BeitModel(config).eval()(IMAGES)


@torch.no_grad()
def test_it_is_exported():  # while torch.export traces, transformers makes a mask that hides nothing
    words, _ = pair(transformers.Dinov2Model, mlp_ratio=2)
    exported = torch.export.export(words, (IMAGES,)).module()
    torch.testing.assert_close(exported(IMAGES).last_hidden_state, words(IMAGES).last_hidden_state)


def test_only_the_vision_tower():
    config = transformers.CLIPConfig(vision_config=VISION, text_config=TEXT)
    model = transformers.CLIPModel._from_config(config, attn_implementation={"vision_config": "inline"}).eval()
    assert model.vision_model.config._attn_implementation == "inline"
    model.get_image_features(pixel_values=IMAGES)
    model.get_text_features(input_ids=torch.tensor([[1, 5, 6, 2]]))
