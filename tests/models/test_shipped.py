"""Weights that come with the package: a tag exists if its file does, and not otherwise."""

import itertools
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

import inline_attention
from inline_attention.cli.main import app
from inline_attention.engine.config import read_config
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.models import registry
from inline_attention.models.deit import InLineDeiT
from inline_attention.models.hub import save_pretrained
from inline_attention.tasks.task import DataSection

SMALL = {"embed_dim": 16, "num_heads": 2, "depth": 1, "patch_size": 8, "img_size": 16, "num_classes": 3}
# Not a family's name: it is registered for the rest of the process, and `list_models` must not list it.
NAME = "inline_throwaway_model"
MICRO_TAG = "inline_deit_micro.cifar10"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SHIPPED", tmp_path)
    register()
    torch.manual_seed(0)
    model = inline_attention.create_model(NAME).eval()
    save_pretrained(model, tmp_path / f"{NAME}.pets", class_names=["cat", "dog", "bird"], crop_pct=1.0)
    register()
    return model


def register():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is registered again, with and without weights
        registry.register_family(InLineDeiT, {NAME: SMALL}, first_conv="patch_embed.proj")


@pytest.mark.parametrize("name", [NAME, f"{NAME}.pets"])
@pytest.mark.parametrize("create", [timm.create_model, inline_attention.create_model])
def test_created_with_weights(shipped, name, create):
    model = create(name, pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images), shipped(images))
    assert model.pretrained_cfg["tag"] == "pets"
    assert model.pretrained_cfg["crop_pct"] == 1.0
    assert list(model.pretrained_cfg["label_names"]) == ["cat", "dog", "bird"]
    assert not torch.equal(create(name).eval()(images), shipped(images))


def test_predict_without_a_checkpoint(shipped, tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.jpg")
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "photo.jpg")])
    assert result.exit_code == 0, result.output
    assert f"model: {NAME}.pets" in result.stderr
    assert {"cat", "dog", "bird"} == {line.split()[-1] for line in result.stdout.splitlines()[1:]}


def test_no_name_without_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SHIPPED", tmp_path / "nothing")
    assert registry.shipped_models() == {}
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.jpg")
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "photo.jpg")])
    assert result.exit_code == 1
    assert "--checkpoint" in result.stderr


def test_the_tag_is_there_exactly_if_the_weights_are():
    assert (MICRO_TAG in timm.list_pretrained("inline_*")) == (MICRO_TAG in registry.shipped_models())
    assert timm.is_model("inline_deit_micro")


def test_what_is_shipped_is_small_and_has_a_card():
    for folder in registry.shipped_models().values():
        assert (folder / "model.safetensors").stat().st_size <= 8_000_000
        assert "apache-2.0" in (folder / "README.md").read_text()


def test_registration_leaves_the_module_as_it_was(shipped):
    assert NAME in sys.modules[InLineDeiT.__module__].default_cfgs
    assert NAME not in inline_attention.list_models()


def test_the_model_of_the_package_knows_a_cat():
    """A photograph of a few hundred pixels, through the command that a newcomer types."""
    photo = registry.shipped_models()[MICRO_TAG] / "examples" / "cat.jpg"
    result = CliRunner().invoke(app, ["predict", str(photo), "--top", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split()[-1] == "cat"


@pytest.mark.slow
def test_the_card_states_the_accuracy_of_the_weights(tmp_path):
    archive = Path(__file__).parents[3] / "shared" / "data" / "cifar10.tar.xz"
    if not archive.is_file():
        pytest.skip("needs CIFAR-10 beside the clone")
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    folder = registry.shipped_models()[MICRO_TAG]
    metrics = evaluate_checkpoint(folder / "model.safetensors", DataSection("cifar10", str(tmp_path)))
    assert f"| CIFAR-10 test images, top-1 | {metrics.figures['top1']:.2f} % |" in (folder / "README.md").read_text()


def test_commands_take_the_name_of_a_shipped_model(shipped, tmp_path):
    for split, name in itertools.product(("train", "val"), ("cat", "dog", "bird")):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16), "gray").save(folder / f"{name}.png")
    data = ["--data-dir", str(tmp_path / "data"), "--device", "cpu"]
    run = ["--output", str(tmp_path / "runs"), "--experiment", "run", "-b", "2", "--updates", "1"]
    start = ["--initial-checkpoint", f"{NAME}.pets", "--set", "logging.tensorboard=false"]
    trained = CliRunner().invoke(app, ["train", "finetune", *data, *run, *start])
    assert trained.exit_code == 0, trained.output
    assert read_config(tmp_path / "runs" / "run" / "args.yaml").model.name == NAME, "without --model"
    predicted = CliRunner().invoke(app, ["predict", "-c", f"{NAME}.pets", str(tmp_path / "data")])
    assert predicted.exit_code == 0, predicted.output
    evaluated = CliRunner().invoke(app, ["eval", "-c", f"{NAME}.pets", *data])
    assert evaluated.exit_code == 0, evaluated.output
    assert "of 3 images" in evaluated.output


def test_the_name_of_a_model_without_weights_is_no_checkpoint(shipped):
    for command in (["eval", "-c"], ["export"], ["predict", "picture.png", "-c"]):
        result = CliRunner().invoke(app, [*command, "inline_swin_tiny"])
        assert result.exit_code == 1
        assert "is the name of a model, without weights; expected a weights file or a run of it, or" in result.output
        assert f"{NAME}.pets" in result.output
