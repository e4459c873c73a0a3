"""timm's flags on the command line of `inline train`."""

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from inline_attention.cli import train
from inline_attention.cli.flags import flags_help, overrides_of, read_settings
from inline_attention.cli.main import app
from inline_attention.engine.config import TrainConfig, check, with_overrides
from inline_attention.engine.processes import Precision
from inline_attention.models import create_model
from inline_attention.models.checkpoints import save_weights
from inline_attention.recipes import list_recipes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--amp"], ["training.amp=auto"]),
        (["--amp", "bf16"], ["training.amp=bf16"]),
        (["--amp=fp16"], ["training.amp=fp16"]),
        (["--amp", "off", "-b", "64"], ["training.amp=off", "training.batch_size=64"]),
        (["--amp", "-b", "64"], ["training.amp=auto", "training.batch_size=64"]),
        (["-b", "64", "--amp", "--model-ema"], ["training.batch_size=64", "training.amp=auto", "ema.enabled=true"]),
        (["--scale", "0.5", "1"], ["augmentation.scale=[0.5, 1]"]),
    ],
    ids=" ".join,
)
def test_flags_are_settings(arguments, expected):
    assert with_overrides(TrainConfig(), overrides_of(arguments)) == with_overrides(TrainConfig(), expected)


def test_help_says_what_may_be_left_out():
    text = flags_help()
    assert "--amp [VALUE]:" in text
    assert "--scale A B:" in text
    assert "--model-ema:" in text


@pytest.mark.parametrize("arguments", [["--amp", "half"], ["--epochs"], ["--scale", "1"]], ids=" ".join)
def test_bad_values_end_the_command(arguments):
    done = CliRunner().invoke(app, ["train", "digits", *arguments])
    assert done.exit_code == 1
    assert "Traceback" not in done.output


def test_the_recipe_comes_first():
    done = CliRunner().invoke(app, ["train", "--amp", "digits"])
    assert done.exit_code == 1
    assert "inline train digits --amp" in done.output


@pytest.mark.parametrize(("model", "count"), [("softmax_swin_tiny", 1), ("inline_dyt_tiny", 0)])
def test_settings_for_another_model_are_named_if_the_model_exists(model, count, capsys):
    read_settings("digits", [f"model.name={model}"])
    assert capsys.readouterr().err.count("fit only inline_deit_tiny; they are not used") == count


def test_a_total_batch_larger_than_the_dataset(tmp_path):
    for split in ("train", "validation"):
        for number in range(6):
            path = tmp_path / "cls" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), "gray").save(path)
    words = ["train", "digits", "--dataset", "folder", "--data-dir", str(tmp_path / "cls"), "--epochs", "1"]
    words += ["--output", str(tmp_path / "runs"), "--experiment", "run", "--set", "logging.tensorboard=false"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1
    assert "add -b 6 --set training.total_batch_size=null" in refused.output
    done = CliRunner().invoke(app, [*words, "-b", "3"])
    assert done.exit_code == 0, done.output
    assert "training.total_batch_size 128 is not used: there are 6 images" in done.output
    assert "2 classes (taken from the data)" in done.output


def test_an_unknown_flag_is_refused():
    with pytest.raises(typer.Exit):
        overrides_of(["--ampp"])


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_is_what_the_device_has(has_bfloat16, dtype, monkeypatch):
    monkeypatch.setattr("inline_attention.engine.processes._has_bfloat16", lambda _: has_bfloat16)
    with Precision("auto", torch.device("cpu")).autocast():
        assert torch.get_autocast_dtype("cpu") == dtype


@pytest.mark.parametrize(
    ("model", "size", "drop_path"),
    [("inline_swin_tiny", 32, 0.0), ("softmax_pvt_tiny", 32, 0.0), ("vgg11", None, None)],
)
def test_a_model_of_another_family_drops_what_fits_the_recipe_s_alone(model, size, drop_path, capsys):
    config = read_settings("digits", overrides_of(["--model", model]))
    assert (config.model.arguments, config.model.img_size, config.model.drop_path) == ({}, size, drop_path)
    assert [problem for problem in check(config) if problem.path.startswith("model")] == []
    note = f"--model {model}: the recipe's patch_size, embed_dim, num_heads, depth, mlp_ratio, img_size fit"
    assert note in capsys.readouterr().err


def test_a_twin_keeps_the_recipe_s_arguments_and_the_user_s_own_win(capsys):
    assert read_settings("digits", ["model.name=softmax_deit_tiny"]).model.arguments["depth"] == 3
    assert capsys.readouterr().err == ""
    given = ["model.name=inline_swin_tiny", "model.arguments={embed_dim: 32}", "model.img_size=64"]
    chosen = read_settings("digits", given).model
    assert (chosen.arguments, chosen.img_size) == ({"embed_dim": 32}, 64)


def test_the_classes_come_from_the_data_unless_they_are_set(tmp_path):
    assert all(recipe.config.model.num_classes is None for recipe in list_recipes())
    assert read_settings("digits", overrides_of(["--num-classes", "7"])).model.num_classes == 7
    own = tmp_path / "own.yaml"  # another dataset than the file's has classes of its own
    own.write_text("model: {name: inline_deit_tiny, num_classes: 10}\ndata: {dataset: cifar10}\n")
    assert read_settings(str(own), []).model.num_classes == 10
    assert read_settings(str(own), overrides_of(["--dataset", "folder"])).model.num_classes is None


def test_a_recipe_of_cifar10_takes_the_classes_of_a_folder_of_pictures(tmp_path):
    for split in ("train", "val"):
        for number, name in enumerate(("blue", "green", "red")):
            (tmp_path / split / name).mkdir(parents=True)
            for picture in range(4):
                Image.new("RGB", (32, 32), (90 * number, 40, 0)).save(tmp_path / split / name / f"{picture}.png")
    words = ["train", "cifar10_micro", "--data-dir", str(tmp_path), "-b", "4", "--updates", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "runs"), "--set", "logging.tensorboard=false"])
    assert done.exit_code == 0, done.output
    assert "3 classes (taken from the data)" in done.output


def test_model_flag_wins_over_the_checkpoint(tmp_path):
    save_weights(create_model("inline_pvt_tiny", num_classes=3), tmp_path / "pvt.safetensors")
    chosen = overrides_of(["--initial-checkpoint", str(tmp_path / "pvt.safetensors"), "--model", "inline_swin_tiny"])
    assert train._settings_of_start("finetune", chosen) == []
    assert train._settings_of_start("finetune", chosen[:1]) == ['model.name="inline_pvt_tiny"', "model.arguments={}"]
    assert train._settings_of_start("finetune", []) == []
