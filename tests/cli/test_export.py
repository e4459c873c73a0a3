"""`inline export` from the outside, on a tiny model."""

import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

from inline_attention import convert_attention, create_model
from inline_attention.cli import export
from inline_attention.cli.main import app
from inline_attention.engine.config import with_overrides
from inline_attention.engine.train import train
from inline_attention.models import registry
from inline_attention.models.checkpoints import save_weights
from inline_attention.models.hub import from_pretrained, save_pretrained
from inline_attention.recipes import get_recipe

SMALL = {"embed_dim": 32, "num_heads": 2, "depth": 1, "patch_size": 4, "img_size": 16, "num_classes": 10}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = create_model("inline_deit_tiny", **SMALL).eval()
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    notes = {"model_arguments": json.dumps(SMALL), "class_names": json.dumps([str(n) for n in range(10)])}
    save_weights(model, path, metadata=notes | {"crop_pct": "1.0"})
    return model, path


def invoke(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def rows(result):
    lines = [line.split() for line in result.stdout.splitlines()]
    return {line[0] if line[1] != "int8" else "int8": line[-5:] for line in lines if len(line) > 5 and "%" in line[-2]}


def test_onnx_int8_beside_the_checkpoint(checkpoint):
    runtime = pytest.importorskip("onnxruntime")
    model, path = checkpoint
    result = invoke(path, "--int8", "--images", 16)
    assert result.exit_code == 0, result.output
    target = path.with_suffix(".onnx")
    assert f"Model written to {target}." in result.stdout
    table = rows(result)
    assert set(table) == {"PyTorch", "ONNX", "int8"}
    assert float(table["int8"][0]) <= float(table["ONNX"][0])
    assert float(table["ONNX"][2]) < 1e-3
    assert table["ONNX"][3] == "100.0%"
    assert all(row[4].endswith("%") for row in table.values()), "digits are labeled"
    session = runtime.InferenceSession(target, providers=["CPUExecutionProvider"])
    notes = session.get_modelmeta().custom_metadata_map
    assert json.loads(notes["class_names"]) == [str(n) for n in range(10)]
    assert json.loads(notes["size"]) == [16, 16]
    images = torch.randn(3, 3, 16, 16)
    (got,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = model(images)
    assert 0 < np.abs(got - expected.numpy()).max() < 0.05 * expected.abs().max()
    assert "exists already" in invoke(path, "--int8").stderr


def test_dynamic_torch_export_of_a_model_of_small_pictures(checkpoint, tmp_path):
    """A model of 16×16 pictures has a grid of 4×4 tokens there: the graph must take that size, too."""
    model, path = checkpoint
    target = tmp_path / "model.pt2"
    result = invoke(path, "--format", "torch-export", "--size", "dynamic", "--images", 2, "-o", target)
    assert result.exit_code == 0, result.output
    program = torch.export.load(target).module()
    for size in ((16, 16), (5, 9), (40, 72)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-4)


def test_a_model_of_one_size_is_not_exported_for_another(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=1, num_classes=10)
    convert_attention(model)
    save_pretrained(model, tmp_path / "hub")
    result = invoke(tmp_path / "hub", "--size", "48", "--images", 2, "-o", tmp_path / "model.onnx")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: the model does not take images of 48×48: ")
    assert result.stderr.endswith("Leave --size out\n")
    assert not (tmp_path / "model.onnx").exists()


def test_torch_export_on_own_pictures(checkpoint, tmp_path):
    model, path = checkpoint
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 30), "red").save(tmp_path / "pictures" / "a.png")
    (tmp_path / "pictures" / "b.png").write_bytes(b"broken")
    target = tmp_path / "model.pt2"
    result = invoke(
        path,
        "--size",
        "16x24",
        "--pictures",
        tmp_path / "pictures",
        "-o",
        target,  # the format by the ending
    )
    assert result.exit_code == 0, result.output
    assert "b.png" in result.stderr
    assert rows(result)["torch.export"][4] == "–"
    images = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(target).module()(images), model(images), rtol=1e-4, atol=1e-5)


def test_web_folder_in_8_bit_integers(checkpoint, tmp_path):
    pytest.importorskip("onnxruntime")
    target = tmp_path / "page"
    arguments = [checkpoint[1], "--format", "web", "--int8", "--no-speed", "--images", 8, "-o", target]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert f"Page written to {target / 'index.html'}: open it in a browser" in result.stdout
    assert set(rows(result)) == {"PyTorch", "ONNX", "int8"}
    assert '"name": "7"' in (target / "index.html").read_text(), "digits are examples for a model of digits"
    assert "exists already" in invoke(*arguments).stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    assert "not a page of an earlier export" in invoke(*arguments[:-1], tmp_path / "other", "--force").stderr
    assert (tmp_path / "other" / "mine.txt").exists()


def test_name_of_a_shipped_model(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "shipped_models", lambda: {"inline_deit_tiny.test": checkpoint[1]})
    monkeypatch.chdir(tmp_path)
    result = invoke("inline_deit_tiny.test", "--format", "torch-export", "--images", 2)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "inline_deit_tiny.test.pt2").exists()


def test_large_pictures_are_compared_on_fewer(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MOST_PIXELS", 2 * 16 * 16)
    result = invoke(checkpoint[1], "--format", "torch-export", "--output", tmp_path / "m.pt2")
    assert "2 pictures" in result.stdout, result.output


def test_a_single_example_is_not_all_that_is_compared(tmp_path):
    create_model("inline_deit_tiny", **SMALL).save_pretrained(tmp_path / "d")
    (tmp_path / "d" / "examples").mkdir()
    Image.new("RGB", (20, 16)).save(tmp_path / "d" / "examples" / "cat.png")
    result = invoke(tmp_path / "d", "--format", "torch-export", "--images", 2)
    assert "3 pictures (the model's examples and handwritten" in result.stdout, result.output


def test_the_card_of_a_run_states_what_the_run_measured(tmp_path):
    settings = ["training.epochs=1", "model.arguments.depth=1", f"run.output={tmp_path}", "run.experiment=run"]
    train(with_overrides(get_recipe("digits").config, settings))
    result = invoke(tmp_path / "run", "--format", "hub", "-o", tmp_path / "d")
    assert result.exit_code == 0, result.output
    assert "it lacks a license." in result.stdout.replace("\n", " ")
    row = r"\| top-1 on the run's own validation images \| \d+\.\d\d % \|"
    assert re.search(row, (tmp_path / "d" / "README.md").read_text())


def test_hub_folder(checkpoint, tmp_path):
    model, path = checkpoint
    result = invoke(path, "--format", "hub", "-o", tmp_path / "d")
    assert result.exit_code == 0, result.output
    images = torch.randn(2, 3, 16, 16)
    other = from_pretrained(tmp_path / "d").eval()
    assert torch.equal(other(images), model(images))
    assert json.loads((tmp_path / "d" / "config.json").read_text())["pretrained_cfg"]["crop_pct"] == 1.0
    evaluated = CliRunner().invoke(app, ["eval", "-c", str(tmp_path / "d"), "--dataset", "digits", "-j", "0"])
    assert evaluated.exit_code == 0, evaluated.output
    assert "360 images" in evaluated.stdout
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    predicted = CliRunner().invoke(app, ["predict", str(tmp_path / "photo.png"), "-c", str(tmp_path / "d")])
    assert predicted.exit_code == 0, predicted.output
    assert len(predicted.stdout.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "hub", "--int8"], "--int8 is for --format onnx"),
        (["--format", "web", "--size", "dynamic"], "--size dynamic is for onnx"),
        (["--no-speed"], "--no-speed is for --format web"),
        (["--format", "hub", "--size", "32"], "--size is for onnx"),
        (["--data-dir", "x", "--pictures", "y"], "not both"),
        (["--pictures", "/nowhere"], "no picture"),
        (["--size", "100000"], "67,108,864 at most"),
    ],
)
def test_options_that_do_not_fit(checkpoint, tmp_path, arguments, words):
    result = invoke(checkpoint[1], *arguments, "-o", tmp_path / "x")
    assert result.exit_code == 1
    assert words in result.stderr.splitlines()[-1]
    assert not (tmp_path / "x").exists()


def test_a_model_of_one_size_is_not_exported_for_every_size(tmp_path):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 10}
    model = create_model("vit_tiny_patch16_224", **arguments)
    path = tmp_path / "vit.safetensors"
    notes = {"model": "vit_tiny_patch16_224", "model_arguments": json.dumps(arguments)}
    save_weights(model, path, metadata=notes)
    result = invoke(path, "--size", "dynamic")
    assert result.exit_code == 1
    assert "takes images of one size" in result.stderr


def test_size_in_other_words(checkpoint):
    assert "dynamic" in invoke(checkpoint[1], "--size", "large").stderr
