"""Training timm's models with converted attention, from softmax weights or from weights of a converted model."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from engine.runs import config
from inline_attention import InLineAttention
from inline_attention.cli.main import app
from inline_attention.engine.config import ConfigError
from inline_attention.engine.config.checks import check
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.engine.train import train
from inline_attention.models.reading import open_checkpoint
from inline_attention.tasks.classification.prediction import ImageClassifier
from inline_attention.tasks.classification.task import ClassificationTask
from inline_attention.tasks.task import DataSection

VIT = [
    "model.name=vit_tiny_patch16_224",
    "model.arguments={patch_size: 2, embed_dim: 16, num_heads: 2, depth: 2}",
    "training.epochs=1",
]
INLINE = ["model.attention=inline", "model.keep_softmax=[0]", "model.conversion_options.static_local=true"]
CONVERSION = {"attention": "inline", "keep_softmax": [0], "options": {"static_local": True}}
CLASSES = [str(number) for number in range(10)]


def weights_of(run):
    return run / "checkpoints" / "last" / "model.safetensors"


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    return train(config(tmp_path_factory.mktemp("softmax"), *VIT), on_epoch=lambda _: None)[0]


@pytest.fixture(scope="module")
def converted_run(tmp_path_factory, softmax_run):
    start = f"model.initial_checkpoint={weights_of(softmax_run)}"
    return train(config(tmp_path_factory.mktemp("converted"), *VIT, *INLINE, start), on_epoch=lambda _: None)[0]


def build(tmp_path, *overrides):
    settings = config(tmp_path, *VIT, *overrides)
    return ClassificationTask(settings.data, settings.model).build_model(CLASSES)


def test_softmax_weights_are_loaded_and_then_converted(tmp_path, softmax_run):
    model = build(tmp_path, *INLINE, f"model.initial_checkpoint={weights_of(softmax_run)}")
    assert [type(block.attn).__name__ for block in model.blocks] == ["Attention", "InLineAttention"]
    weights, own = open_checkpoint(weights_of(softmax_run)).weights, model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in weights.items())
    assert {name for name in own if name not in weights} >= {"blocks.1.attn.static_local.weight"}


def test_a_run_from_softmax_weights_notes_the_conversion(converted_run):
    file = open_checkpoint(weights_of(converted_run))
    assert json.loads(file.metadata["conversion"]) == CONVERSION
    assert "blocks.1.attn.static_local.weight" in file.weights


def test_weights_of_a_converted_model_bring_their_conversion(tmp_path, converted_run):
    for overrides in ([], INLINE):
        model = build(tmp_path, *overrides, f"model.initial_checkpoint={weights_of(converted_run)}")
        own = model.state_dict()
        assert all(
            torch.equal(own[k], value) for k, value in open_checkpoint(weights_of(converted_run)).weights.items()
        )
        assert isinstance(model.blocks[1].attn, InLineAttention)


def test_a_run_is_resumed_and_evaluated_as_it_was_trained(tmp_path):
    settings = [*VIT, *INLINE, "run.experiment=a"]
    run, _ = train(config(tmp_path, *settings), on_epoch=lambda _: None)
    resumed, metrics = train(
        config(tmp_path, *settings, "training.epochs=2", "run.resume=auto"), on_epoch=lambda _: None
    )
    assert resumed == run
    found = evaluate_checkpoint(weights_of(run), DataSection("digits", workers=0), device="cpu")
    assert found.figures == pytest.approx(metrics.figures)


def test_commands_take_the_run_with_nothing_else_said(tmp_path, converted_run):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (9, 7), "red").save(pictures / "red.png")
    weights = str(weights_of(converted_run))
    run = CliRunner().invoke
    for words in (
        ["eval", "-c", weights, "--dataset", "digits", "--device", "cpu"],
        ["predict", "-c", weights, str(pictures), "--device", "cpu"],
    ):
        result = run(app, words)
        assert result.exit_code == 0, result.output
    model = ImageClassifier.from_checkpoint(weights).model
    assert [type(block.attn).__name__ for block in model.blocks] == ["Attention", "InLineAttention"]


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["model.keep_softmax=[0]"], "model.attention", "expected inline or linear"),
        (["model.attention=inline", "model.keep_softmax=[5]"], "model.attention", "from -2 to 1"),
        (["model.attention=inline", "model.keep_softmax=[600]"], "model.keep_softmax", "from -512 to 511"),
        (["model.attention=inline", "model.conversion_options={device: cuda}"], "model.conversion_options", "device"),
        (["model.attention=inline", "model.name=resnet18", "model.arguments={}", "model.img_size=null"],
         "model.attention", "found no attention to convert in ResNet"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path, overrides, path, message):
    problems = check(config(tmp_path, *VIT, "model.drop_path=0.0", *overrides))
    assert path in [problem.path for problem in problems]
    assert any(message in problem.message for problem in problems), problems


def test_another_word_is_refused_when_it_is_read(tmp_path):
    with pytest.raises(ConfigError, match="expected inline, linear or null"):
        config(tmp_path, "model.attention=softmax")
