"""Folders in the hub's layout: saved here or by timm, created again by both, bit for bit."""

import json

import huggingface_hub
import pytest
import timm
import torch

import inline_attention
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.deit import InLineDeiT
from inline_attention.models.described import read_description
from inline_attention.models.hub import ModelCard, from_pretrained, push_to_hub, save_pretrained
from inline_attention.models.reading import open_checkpoint
from inline_attention.models.registry import NoPretrainedWeightsError
from inline_attention.models.swin import InLineSwin
from inline_attention.tasks.classification.prediction import ImageClassifier

SMALL = {
    "inline_deit_tiny": {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 8, "img_size": (16, 32)},
    "softmax_deit_tiny": {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 8, "img_size": 16},
    "inline_swin_tiny": {
        "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "global_blocks": (1, 1, 0, 0)
    },
    "linear_cswin_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
}  # fmt: skip
NAMES = ["ant", "bee", "cat"]


def small(name="inline_deit_tiny", **arguments):
    torch.manual_seed(0)
    return inline_attention.create_model(name, num_classes=3, **(SMALL[name] | arguments)).eval()


def assert_equal(model, other):
    assert type(model) is type(other)
    own, theirs = model.state_dict(), other.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    images = torch.randn(2, model.in_chans, 32, 48)
    with torch.no_grad():
        assert torch.equal(model(images), other.eval()(images))


@pytest.fixture
def folder(tmp_path):
    model = small()
    model.save_pretrained(tmp_path / "d", class_names=NAMES, crop_pct=1.0, card=ModelCard(license="mit"))
    return model, tmp_path / "d"


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("saved_by", ["us", "timm"])
@pytest.mark.parametrize("created_by", ["us", "timm"])
def test_round_trip(tmp_path, name, saved_by, created_by):
    model = small(name, drop_path_rate=0.1)
    if saved_by == "us":
        model.save_pretrained(tmp_path)
    else:
        timm.models.save_for_hf(model, str(tmp_path), safe_serialization=True)
    create = inline_attention.create_model if created_by == "us" else timm.create_model
    assert_equal(model, create(f"local-dir:{tmp_path}", pretrained=True))


def test_class_methods(folder):
    model, path = folder
    assert_equal(model, InLineDeiT.from_pretrained(path))
    with pytest.raises(ValueError, match="is of InLineDeiT"):
        InLineSwin.from_pretrained(str(path))


def test_changes_after_construction_are_saved(tmp_path):
    model = small(in_chans=1)
    model.set_input_size((24, 40))
    model.reset_classifier(5, "avg")
    for number, save in enumerate((save_pretrained, timm.models.save_for_hf)):
        save(model, str(tmp_path / str(number)))
        assert_equal(model, from_pretrained(tmp_path / str(number)))


def test_swin_windows_that_were_changed(tmp_path):
    model = small("inline_swin_tiny")
    model.set_input_size(window_size=5)
    model.save_pretrained(tmp_path)
    assert_equal(model, from_pretrained(tmp_path))
    assert_equal(model, from_pretrained(f"{tmp_path}/model.safetensors"))


@pytest.mark.parametrize("create", [inline_attention.create_model, timm.create_model])
def test_adapted_to_other_classes_channels_and_features(folder, create):
    model, path = folder
    other = create(f"local-dir:{path}", pretrained=True, num_classes=7, in_chans=1)
    assert other.num_classes == 7
    assert torch.equal(other.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    backbone = create(f"local-dir:{path}", pretrained=True, features_only=True)
    assert backbone(torch.randn(1, 3, 16, 32))[0].shape == (1, 16, 2, 4)


@pytest.mark.parametrize("create", [inline_attention.create_model, timm.create_model])
def test_one_channel_adapted_to_three(tmp_path, create, caplog):
    model = small("inline_swin_tiny", in_chans=1)
    model.save_pretrained(tmp_path)
    assert_equal(model, create(f"local-dir:{tmp_path}", pretrained=True))
    assert not caplog.records, "timm finds no mismatch"
    own, other = (m.embeddings[0].proj.weight for m in (model, create(f"local-dir:{tmp_path}", True, in_chans=3)))
    assert torch.allclose(other.sum(1, keepdim=True), own, atol=1e-6)


@pytest.mark.parametrize("create", [inline_attention.create_model, timm.create_model])
def test_features_of_a_converted_model(tmp_path, create):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    inline_attention.convert_attention(model, keep_softmax=[2], softmax_prefix=True)
    save_pretrained(model, tmp_path)
    backbone = create(f"local-dir:{tmp_path}", pretrained=True, features_only=True, out_indices=(0, 1)).eval()
    images = torch.randn(1, 3, 16, 16)
    expected = model.forward_intermediates(images, indices=(0, 1), intermediates_only=True)
    for found, wanted in zip(backbone(images), expected, strict=True):
        assert torch.equal(found, wanted)
    assert backbone.feature_info.channels() == [16, 16]


def test_without_weights_only_the_architecture_is_taken(folder):
    model, path = folder
    other = inline_attention.create_model(f"local-dir:{path}")
    assert not torch.equal(other.head.weight, model.head.weight)
    assert other.pretrained_cfg["crop_pct"] == 1.0
    assert "state_dict" not in inline_attention.create_model(f"local-dir:{path}", pretrained=True).pretrained_cfg


def test_config_is_timms(folder):
    _, path = folder
    config = json.loads((path / "config.json").read_text())
    assert config["architecture"] == "inline_deit_tiny"
    assert config["num_classes"] == 3
    assert config["label_names"] == NAMES
    assert config["model_args"]["img_size"] == [16, 32]
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 32]
    timm.models._pretrained.PretrainedCfg(**config["pretrained_cfg"])  # refuses unknown entries


def test_images_are_prepared_as_the_folder_says(tmp_path):
    model = small(img_size=16)
    statistics = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "crop_pct": 0.5, "interpolation": "bilinear"}
    config = {"label_names": NAMES}
    timm.models.save_for_hf(model, str(tmp_path), model_config=config | {"pretrained_cfg": {}}, data_config=statistics)
    assert not (tmp_path / "model.safetensors").exists(), "timm pickles by default"
    classifier = ImageClassifier.from_checkpoint(tmp_path)
    assert classifier.class_names == NAMES
    for name, value in statistics.items():
        assert classifier.preparation[name] == value or tuple(classifier.preparation[name]) == value
    created = inline_attention.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert tuple(created.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)


def test_timms_models_too(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, img_size=32, num_classes=4).eval()
    save_pretrained(model, tmp_path)
    other = inline_attention.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), other(images))


@pytest.mark.parametrize("create", [timm.create_model, inline_attention.create_model])
def test_converted_models_too(tmp_path, create):
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, img_size=32, num_classes=4).eval()
    inline_attention.convert_attention(model, keep_softmax=[1])
    save_pretrained(model, tmp_path)
    other = create(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), other(images))
    assert create(f"local-dir:{tmp_path}", pretrained=True, num_classes=2)(images).shape == (1, 2)
    assert "InLine, by `convert_attention`; softmax is kept in blocks 1" in (tmp_path / "README.md").read_text()


def test_a_folder_of_a_converted_model_gives_no_arguments(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, img_size=32, num_classes=4)
    inline_attention.convert_attention(model)
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": {"checkpoint": "/etc/passwd"}}))
    with pytest.raises(ValueError, match="no model_args, got checkpoint"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    with pytest.raises(ValueError, match="local-dir:FOLDER"):
        timm.create_model("converted_attention")


def test_from_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place, commit = tmp_path / "models--user--name", "a" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    model = small()
    model.save_pretrained(place / "snapshots" / commit)
    for create in (inline_attention.create_model, timm.create_model):
        assert_equal(model, create("hf-hub:user/name", pretrained=True, cache_dir=str(tmp_path)))
    assert_equal(model, from_pretrained("user/name", cache_dir=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"hf-hub:user/other cannot be fetched .*; check its name"):
        inline_attention.create_model("hf-hub:user/other", cache_dir=str(tmp_path))


def test_push(monkeypatch, tmp_path):
    done = {}

    class Api:
        def __init__(self, token=None):
            done["token"] = token

        def create_repo(self, repository, private, exist_ok):
            return type("Repository", (), {"repo_id": repository})

        def file_exists(self, repository, file):
            return done.get("card", False)

        def upload_folder(self, repo_id, folder_path, commit_message):
            from pathlib import Path

            done[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())
            return "address"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert small().push_to_hub("user/name", token="t") == "address"
    assert done == {"token": "t", "user/name": ["README.md", "config.json", "model.safetensors"]}
    done["card"] = True
    push_to_hub(small(), "user/name")
    assert done["user/name"] == ["config.json", "model.safetensors"], "a card on the hub is not replaced"


def test_card_states_what_was_given_and_counted(tmp_path):
    card = ModelCard(
        license="cc-by-4.0", description="Insects.", datasets=["user/insects"], figures={"top-1 | test": "91 %"},
        training={"seed": 3},
    )  # fmt: skip
    model = small()
    model.save_pretrained(tmp_path / "full", class_names=NAMES, card=card)
    text = (tmp_path / "full" / "README.md").read_text()
    loaded = huggingface_hub.ModelCard(text)
    assert loaded.data.license == "cc-by-4.0"
    assert loaded.data.datasets == ["user/insects"]
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    for words in ("Insects.", "top-1 \\| test | 91 %", "seed | 3", f"{count:.2f} M", "3×16×32"):
        assert words in text
    model.save_pretrained(tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert "license | not stated" in bare
    assert "license:" not in bare
    assert "Results" not in bare
    (tmp_path / "bare" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "bare")
    assert (tmp_path / "bare" / "README.md").read_text() == "mine"


def test_models_that_no_file_can_describe(tmp_path):
    with pytest.raises(CheckpointError, match="registry"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match="expected 3 class_names, got 1"):
        small().save_pretrained(tmp_path, class_names=["a"])
    with pytest.raises(CheckpointError, match="feature_map"):
        small(attention_options={"feature_map": torch.relu}).save_pretrained(tmp_path)


def test_pretrained_without_weights_names_the_paper_and_the_command():
    with pytest.raises(NoPretrainedWeightsError, match=r"arxiv.org/abs/2412.06590.*inline convert") as caught:
        inline_attention.create_model("inline_deit_tiny", pretrained=True)
    assert "docs/checkpoints.md" in str(caught.value)
    with pytest.raises(NoPretrainedWeightsError, match="inline train") as caught:
        inline_attention.create_model("softmax_deit_tiny", pretrained=True)
    assert "authors" not in str(caught.value), "they publish none of the twins"


@pytest.mark.parametrize("name", ["inline_deit_micro", "inline_pvt_tiny"])  # with classes of its own, and without
def test_transformers_reads_a_folder(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    model = inline_attention.create_model(name, num_classes=4).eval()
    model.save_pretrained(tmp_path, class_names=["a", "b", "c", "d"])
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert wrapped.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d"}
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(images).logits, model(images))
    assert timm.create_model(f"local-dir:{tmp_path}").num_classes == 4


@pytest.mark.parametrize("classes", [10**12, -1, "ten"])
def test_classes_of_a_stranger_are_checked(tmp_path, classes):
    inline_attention.create_model("inline_deit_micro").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_classes": classes}))
    with pytest.raises(ValueError, match=r"describes a model that is refused: .*num_classes"):
        timm.create_model(f"local-dir:{tmp_path}")


def test_a_model_of_timm_from_a_folder_says_how_its_own_images_are_prepared(tmp_path):
    arguments = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    source = timm.create_model("vit_base_patch16_224", **arguments)
    save_pretrained(source, tmp_path)
    for model in (from_pretrained(tmp_path), timm.create_model(f"local-dir:{tmp_path}", pretrained=True)):
        assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 32, 32)
        config = model.pretrained_cfg
        assert config["num_classes"] == 3
    config = from_pretrained(tmp_path).pretrained_cfg
    assert not any(config.get(name) for name in ("hf_hub_id", "url", "license"))


def test_a_network_of_any_size_keeps_the_size_it_was_trained_at(tmp_path):
    model = inline_attention.create_model("resnet10t", img_size=48, num_classes=4)
    folder = save_pretrained(model, tmp_path / "network")
    for made in (timm.create_model, inline_attention.create_model):
        assert made(f"local-dir:{folder}", pretrained=True).pretrained_cfg["input_size"] == (3, 48, 48)
    assert read_description(open_checkpoint(folder)).image_size == (48, 48)
    timm.models.save_for_hf(model, tmp_path / "plain", model_args={"num_classes": 4})  # metadata without a model
    assert read_description(open_checkpoint(tmp_path / "plain")).image_size == (48, 48)
    config = tmp_path / "plain" / "config.json"
    config.write_text(config.read_text().replace('"resnet10t"', '"resnet10t.nobody"'))
    with pytest.raises(CheckpointError, match="Invalid pretrained tag"):
        read_description(open_checkpoint(tmp_path / "plain"))
