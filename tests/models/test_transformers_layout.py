"""Folders that transformers has saved are read as timm's models, with the same outputs."""

import json
import shutil

import huggingface_hub
import pytest
import torch

from inline_attention.engine.linearize import describe_teacher
from inline_attention.models.hub import from_pretrained
from inline_attention.models.hub_layout import CheckpointError
from inline_attention.models.reading import open_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 9},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
GELU = {"hidden_act": "gelu"}
NAMES = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
# class: (configuration, arguments, what the output of timm's model is called)
MODELS = {
    "ViTForImageClassification": ("ViTConfig", {"intermediate_size": 96, **NAMES}, "logits"),
    "ViTModel": ("ViTConfig", {"intermediate_size": 50, "qkv_bias": False}, None),
    "DeiTForImageClassification": ("DeiTConfig", {"intermediate_size": 64, **NAMES}, "logits"),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", {"intermediate_size": 64, **NAMES}, "logits"),
    "Dinov2Model": ("Dinov2Config", {"mlp_ratio": 2}, None),
    "Dinov2ForImageClassification": ("Dinov2Config", {"mlp_ratio": 2, **NAMES}, None),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", {"mlp_ratio": 2, "use_swiglu_ffn": True}, None),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {"intermediate_size": 64, "num_register_tokens": 4}, None),
    "DINOv3ViTModel with a gate": (
        "DINOv3ViTConfig", {"intermediate_size": 64, "use_gated_mlp": True, "hidden_act": "silu"}, None
    ),
    "CLIPVisionModel": ("CLIPVisionConfig", {"intermediate_size": 64}, "pooler_output"),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", {"intermediate_size": 64, **GELU}, "image_embeds"),
    "CLIPModel": ("CLIPConfig", {"intermediate_size": 64}, "image_embeds"),
    "SiglipVisionModel": ("SiglipVisionConfig", {"intermediate_size": 70}, "pooler_output"),
    "SiglipModel": ("SiglipConfig", {"intermediate_size": 64}, "pooler_output"),
    "CLIPForImageClassification": ("CLIPConfig", {"intermediate_size": 64, **NAMES}, "pooler_output"),
    "SiglipForImageClassification": ("SiglipConfig", {"intermediate_size": 64, **NAMES}, "logits"),
}  # fmt: skip


def write_model(folder, kind):
    config, arguments, _ = MODELS[kind]
    arguments = {**SIZES, **arguments}
    if config in ("CLIPConfig", "SiglipConfig"):
        names = {key: arguments.pop(key) for key in NAMES if key in arguments}
        arguments = {"vision_config": arguments, "text_config": {**TEXT, "projection_size": 32}, **names}
        arguments |= {"projection_dim": 16} if kind == "CLIPModel" else {}
    torch.manual_seed(0)
    model = getattr(transformers, kind.split()[0])(getattr(transformers, config)(**arguments)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "token" in name:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def output_of(model, images, name):
    if type(model).__name__ == "CLIPModel":
        return model.visual_projection(model.vision_model(pixel_values=images).pooler_output)
    if type(model).__name__ in ("SiglipModel", "CLIPForImageClassification"):  # whose classifier is left out
        return model.vision_model(pixel_values=images).pooler_output
    model = getattr(model, "dinov2", model)
    outputs = model(pixel_values=images)
    return outputs.last_hidden_state[:, 0] if name is None else outputs[name]


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_are_those_of_transformers(kind, tmp_path):
    original = write_model(tmp_path, kind)
    model = from_pretrained(tmp_path).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found = model(images)
    torch.testing.assert_close(found, output_of(original, images, MODELS[kind][2]), rtol=1e-4, atol=1e-4)
    noted = json.loads(open_checkpoint(tmp_path).metadata.get("class_names", "null"))
    classifies = kind.startswith(("ViTFor", "DeiTFor", "SiglipFor"))
    assert noted == (["cat", "dog", "owl"] if classifies else None)
    settings = describe_teacher(tmp_path)
    assert f"model.initial_checkpoint={json.dumps(str(tmp_path))}" in settings


def test_a_preprocessor_says_how_images_are_prepared(tmp_path):
    write_model(tmp_path, "ViTModel")
    content = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "resample": 2, "do_center_crop": True}
    content |= {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    prepared = from_pretrained(tmp_path).pretrained_cfg
    assert (prepared["mean"], prepared["std"]) == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    assert (prepared["interpolation"], prepared["crop_pct"]) == ("bilinear", 0.8)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": ["/etc/passwd"]}')
    with pytest.raises(CheckpointError, match="mean"):
        from_pretrained(tmp_path)


def test_the_preprocessor_is_downloaded_too(tmp_path, monkeypatch):
    def download(_name, allow_patterns, **_other):
        for file in allow_patterns:
            if (tmp_path / "remote" / file).is_file():
                shutil.copy(tmp_path / "remote" / file, tmp_path / "cache")
        return tmp_path / "cache"

    (tmp_path / "cache").mkdir()
    write_model(tmp_path / "remote", "ViTModel")
    (tmp_path / "remote" / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3]}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert from_pretrained("user/name").pretrained_cfg["mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "beit"}, "type beit, expected one of vit, deit"),
        ({"hidden_act": "relu"}, "an MLP with relu"),
        ({"layer_norm_eps": 1e-3}, "layer_norm_eps 0.001, timm's model at most 1e-05"),
        ({"rope_theta": 10.0}, "rope_theta 10, timm's model 100"),
        ({"image_size": "../../x"}, "img_size"),
        ({"num_attention_heads": -1}, "num_heads"),
        ({"num_attention_heads": 5}, "cannot be built"),
        ({"vision_config": 3}, "damaged config.json"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, text):
    write_model(tmp_path, "ViTModel")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=text):
        from_pretrained(tmp_path)
