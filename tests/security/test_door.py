"""One door between data from files and `create_model`; what it lets through, and that there is no other."""

import ast
import json
from pathlib import Path

import pytest
import timm
import torch

import inline_attention
from inline_attention.models.checkpoints import CheckpointError, open_checkpoint, save_weights
from inline_attention.models.described import (
    ModelDescriptionError,
    argument_problems,
    check_description,
    create_described_model,
    describable,
    read_description,
)
from inline_attention.recipes import get_recipe, list_recipes
from inline_attention.tasks.classification.prediction import ImageClassifier

SOURCE = Path(inline_attention.__file__).parent
SMALL = {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 8, "img_size": 16, "num_classes": 3}
OBEYED_BY_TIMM = {
    "pretrained": True,
    "pretrained_cfg": {"url": "file:///etc/passwd"},
    "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"},
    "cache_dir": ".",
    "checkpoint_path": "weights.pth",
    "features_only": True,
    "scriptable": True,
    "exportable": True,
    "no_jit": True,
    "kwargs_filter": "x",
    "feature_cfg": {},
    "feature_cls": "hook",
    "out_indices": [0],
    "attention": "softmax",
    "device": "cuda",
    "dtype": "float16",
    "block_fn": "os.system",
    "norm_layer": "os.system",
    "act_layer": "x",
    "__class__": "x",
}


BUILDERS = {"create_model", "build_model_with_cfg", "load_model_config_from_hf", "model_entrypoint"}
READS_FILES = {"metadata", "parse_json", "parse_note", "load_yaml", "open_checkpoint", "read_config"}


def test_there_is_no_other_door():
    """A module that reads files, and calls timm's or our `create_model` itself, would go around the door."""
    for file in SOURCE.rglob("*.py"):
        relative = file.relative_to(SOURCE).as_posix()
        if relative in ("models/described.py", "models/registry.py"):
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        called = {
            getattr(node.func, "id", getattr(node.func, "attr", "")) for node in nodes if isinstance(node, ast.Call)
        }
        if not called & BUILDERS:
            continue
        # What the checks of settings build is on the meta device, after `check_recipe_file`.
        assert not relative.startswith(("engine/", "tasks/")) or relative == "engine/config/checks.py", relative
        used = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
        assert not used & READS_FILES or relative == "analysis/subjects.py", f"{relative} must use the door"


@pytest.mark.parametrize("name", ["inline_deit_tiny", "softmax_swin_tiny", "resnet18", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("argument", OBEYED_BY_TIMM)
def test_what_timm_would_obey_is_refused_by_name(name, argument):
    problems = argument_problems(name, {argument: OBEYED_BY_TIMM[argument]})
    assert argument in problems
    assert argument in problems[argument]
    with pytest.raises(ModelDescriptionError, match=argument):
        create_described_model(name, {argument: OBEYED_BY_TIMM[argument]})


@pytest.mark.parametrize(
    "name",
    ["hf-hub:timm/resnet18", "hf_hub:x", "local-dir:.", "timm:resnet18", "../inline_deit_tiny", "inline_deit_tiny\n",
     "", None, 3, ["resnet18"], "x" * 10**6, "resnet18.a1_in1k.x", "resnet18/../x", "\x1b[31mresnet18"],
)  # fmt: skip
def test_only_registered_names(name):
    with pytest.raises(ModelDescriptionError, match="registered model") as caught:
        create_described_model(name, {})
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inline_deit_tiny", {"depth": 10**9}),
        ("inline_deit_tiny", {"depth": -1}),
        ("inline_deit_tiny", {"depth": True}),
        ("inline_deit_tiny", {"depth": 1.5}),
        ("inline_deit_tiny", {"depth": "12"}),
        ("inline_deit_tiny", {"depth": None}),
        ("inline_deit_tiny", {"img_size": 100_000}),
        ("inline_deit_tiny", {"img_size": [224, -1]}),
        ("inline_deit_tiny", {"img_size": [224, 224, 224]}),
        ("inline_deit_tiny", {"embed_dim": 10**30}),
        ("inline_deit_tiny", {"stem": [[8, 4], [8, "2"]]}),
        ("inline_deit_tiny", {"drop_rate": float("nan")}),
        ("inline_deit_tiny", {"mlp_ratio": float("inf")}),
        ("inline_deit_tiny", {"num_classes": 10**9}),
        ("inline_deit_tiny", {"attention_options": {"feature_map": "os.system"}}),
        ("inline_deit_tiny", {"attention_options": {"device": "cuda"}}),
        ("inline_deit_tiny", {"attention_options": [1]}),
        ("inline_pvt_tiny", {"depths": [1, 1, 1]}),
        ("inline_pvt_tiny", {"depths": [1, 1, 1, 10**9]}),
        ("inline_pvt_tiny", {"embed_dim": 32}),
        ("inline_swin_tiny", {"window_size": 10**6}),
        ("inline_cswin_tiny", {"stripe_widths": [0, 1, 1]}),
        ("vit_tiny_patch16_224", {"depth": 10**9}),
        ("vit_tiny_patch16_224", {"embed_dim": 16_384, "depth": 512, "mlp_ratio": 64}),
        ("inline_deit_tiny", {"embed_dim": 16_384, "depth": 512, "mlp_ratio": 64}),
        ("inline_deit_tiny", {"embed_dim": 7, "num_heads": 3}),
        ("inline_deit_tiny", {"img_size": 16_384, "patch_size": 1, "embed_dim": 16_384}),
        ("inline_deit_tiny", {"img_size": 16_384, "patch_size": 1024}),
        ("softmax_deit_tiny", {"img_size": 3000, "patch_size": 1}),
        ("softmax_pvt_tiny", {"img_size": 4096}),
        ("vit_tiny_patch16_224", {"img_size": [4096, 8192], "patch_size": [16, 16]}),
        ("inline_deit_tiny", {"img_size": 8192, "patch_size": 2}),
        ("vit_small_patch8_224", {"img_size": 4096, "embed_dim": 12, "num_heads": 2, "depth": 1}),
        ("resnet18", {"patch_size": 16}),
        ("resnet18", {"img_size": 8192}),
        ("inline_deit_tiny", [1]),
        ("inline_deit_tiny", None),
    ],
)
def test_architectures_out_of_bounds(name, arguments):
    with pytest.raises(ModelDescriptionError) as caught:
        create_described_model(name, arguments)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("recipe", [recipe.name for recipe in list_recipes()])
def test_every_recipe_of_ours_describes_an_architecture(recipe):
    settings = get_recipe(recipe).config.model
    assert argument_problems(settings.name, settings.arguments) == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inline_deit_tiny", SMALL | {"attention_options": {"feature_map": "relu", "normalization": "divide"}}),
        ("inline_pvt_tiny", {"depths": [1, 1, 1, 1], "img_size": [32, 64], "num_classes": 0}),
        ("inline_deit_tiny", SMALL | {"stem": [[4, 2], [8, 2]]}),
        ("linear_swin_tiny", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 4}),
        ("softmax_cswin_tiny", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}),
        ("vit_tiny_patch16_224", {"depth": 1, "img_size": 64, "patch_size": 16, "num_classes": 5, "reg_tokens": 2}),
        ("resnet18.a1_in1k", {"num_classes": 3, "in_chans": 1}),
    ],
)
def test_honest_descriptions_are_built(name, arguments):
    assert argument_problems(name, arguments) == {}
    create_described_model(name, arguments)


def test_a_file_may_not_describe_a_model_far_larger_than_its_weights(tmp_path):
    path = tmp_path / "bomb.safetensors"
    notes = {
        "model": "inline_deit_tiny",
        "model_arguments": json.dumps({"embed_dim": 16_384, "depth": 4, "num_heads": 8}),
    }
    save_weights({"head.weight": torch.zeros(3, 16_384)}, path, metadata=notes)
    with pytest.raises(CheckpointError, match="far more than the file holds"):
        read_description(open_checkpoint(path))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_masks_that_no_memory_holds_are_refused_before_they_are_built(name):
    small = {"embed_dim": 3, "depths": [2, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    with pytest.raises(ModelDescriptionError, match="masks and indices"):
        check_description(name, small | {"img_size": 8192, "window_size": 64})
    check_description(name, small | {"img_size": 1024, "window_size": 16})


def test_only_what_describes_the_architecture_is_saved():
    arguments = SMALL | {"pretrained": True, "cache_dir": "x"}
    assert describable("inline_deit_tiny", arguments) == SMALL


@pytest.mark.parametrize(
    "argument", ["pretrained", "pretrained_cfg_overlay", "cache_dir", "checkpoint_path", "features_only"]
)
def test_hostile_metadata_is_refused_before_timm_sees_it(tmp_path, monkeypatch, argument):
    model = timm.create_model("inline_deit_tiny", **SMALL)
    path = tmp_path / "weights.safetensors"
    notes = {"model": "inline_deit_tiny", "model_arguments": json.dumps(SMALL | {argument: OBEYED_BY_TIMM[argument]})}
    save_weights(model, path, metadata=notes)
    called = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: called.append(args))
    with pytest.raises(CheckpointError, match=argument):
        ImageClassifier.from_checkpoint(path)
    assert not called


@pytest.mark.parametrize(
    "notes",
    [
        {"model_arguments": "[" * 100_000},
        {"model_arguments": "[1]"},
        {"model_arguments": '{"depth": ' + "9" * 5000 + "}"},
        {"model_arguments": "{"},
        {"crop_pct": "1e-9"},
        {"crop_pct": '"x"'},
        {"crop_pct": "NaN"},
        {"class_names": '[["a"]]'},
        {"class_names": '{"a": 1}'},
        {"model_arguments": json.dumps(SMALL | {"global_pool": ""})},
        {"model": "hf-hub:a/b"},
        {"model": "\x1b[2J"},
    ],
)
def test_damaged_notes_give_one_sentence(tmp_path, notes):
    model = timm.create_model("inline_deit_tiny", **SMALL)
    path = tmp_path / "weights.safetensors"
    described = {"model": "inline_deit_tiny", "model_arguments": json.dumps(SMALL)}
    save_weights(model, path, metadata=described | notes)
    with pytest.raises(CheckpointError) as caught:
        ImageClassifier.from_checkpoint(path)
    assert str(caught.value).isprintable()
