"""timm's flags on the command line of `inline train`."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from inline_attention.cli.flags import flags_help, overrides_of
from inline_attention.cli.main import app
from inline_attention.engine.config import TrainConfig, with_overrides
from inline_attention.engine.processes import Precision


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


def test_an_unknown_flag_is_refused():
    with pytest.raises(typer.Exit):
        overrides_of(["--ampp"])


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_is_what_the_device_has(has_bfloat16, dtype, monkeypatch):
    monkeypatch.setattr("inline_attention.engine.processes._has_bfloat16", lambda _: has_bfloat16)
    with Precision("auto", torch.device("cpu")).autocast():
        assert torch.get_autocast_dtype("cpu") == dtype
