"""`inline convert` from the outside."""

import pytest
import torch
from typer.testing import CliRunner

from inline_attention import create_model
from inline_attention.cli.main import app
from inline_attention.models.checkpoints import open_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A training checkpoint with raw and averaged weights for 3 classes, and a bare one."""
    folder = tmp_path_factory.mktemp("weights")
    model = create_model("inline_deit_tiny", num_classes=3)
    raw = model.state_dict()
    averaged = {name: value + 1 for name, value in raw.items()}
    torch.save({"model": raw, "state_dict_ema": averaged, "epoch": 299}, folder / "training.pth")
    torch.save({f"module.{name}": value for name, value in raw.items()}, folder / "bare.pth")
    return folder


@pytest.fixture
def invoke(folder, tmp_path):
    def run(*arguments, file="bare.pth", model="inline_deit_tiny", output="out.safetensors"):
        options = ["convert", folder / file, "--model", model, "--output", tmp_path / output, *arguments]
        return CliRunner().invoke(app, [str(option) for option in options])

    return run


def only_line(result):
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_the_printed_line_loads_the_converted_weights(invoke, folder, tmp_path):
    result = invoke("--num-classes", "3")
    assert result.exit_code == 0, result.output
    assert "200 tensors, the only weights" in result.stdout
    assert "24.0 MiB" in result.stdout
    lines = [line.strip() for line in result.stdout.splitlines()]
    namespace = {}
    exec("\n".join(line for line in lines if line.startswith(("from ", "model = "))), namespace)
    weights = torch.load(folder / "bare.pth")
    for name, value in namespace["model"].state_dict().items():
        assert torch.equal(value, weights[f"module.{name}"]), name
    metadata = open_checkpoint(tmp_path / "out.safetensors").metadata
    assert (metadata["model"], metadata["source"]) == ("inline_deit_tiny", "bare.pth")


@pytest.mark.parametrize(
    ("options", "said", "shift"),
    [
        ((), "averaged (EMA) weights, from 'state_dict_ema'", 1),
        (("--use-ema",), "averaged (EMA) weights, from 'state_dict_ema'", 1),
        (("--no-ema",), "raw weights, from 'model'", 0),
    ],
)
def test_averaged_or_raw_weights(invoke, folder, tmp_path, options, said, shift):
    result = invoke("--num-classes", "3", *options, file="training.pth")
    assert said in result.stdout
    raw = torch.load(folder / "training.pth")["model"]["norm.weight"]
    assert torch.equal(open_checkpoint(tmp_path / "out.safetensors").weights["norm.weight"], raw + shift)


def test_averaged_weights_that_are_not_there(invoke):
    assert "has no averaged (EMA) weights" in only_line(invoke("--num-classes", "3", "--use-ema"))


def test_head_of_another_size_gives_the_option_to_use(invoke, tmp_path):
    result = invoke()
    assert result.exit_code == 1
    assert "a head for 3 classes, the model one for 1000" in result.stderr
    assert "num_classes=3 (--num-classes 3 on the command line)" in result.stderr
    assert "reinitialize_head" not in result.stderr, "inline convert has no such option"
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_an_existing_output_is_kept_unless_forced(invoke, tmp_path):
    target = tmp_path / "out.safetensors"
    target.write_text("precious")
    assert "--force" in only_line(invoke("--num-classes", "3"))
    assert target.read_text() == "precious"
    assert invoke("--num-classes", "3", "--force").exit_code == 0
    assert open_checkpoint(target).weights


def test_values_that_are_not_finite_are_reported(invoke, folder):
    weights = torch.load(folder / "bare.pth")
    weights["module.norm.weight"][0] = float("nan")
    torch.save(weights, folder / "nan.pth")
    result = invoke("--num-classes", "3", file="nan.pth")
    assert result.exit_code == 0
    assert result.stderr.strip() == "warning: NaN or infinite values in norm.weight"


def test_errors_are_one_line(invoke, folder):
    assert "did you mean inline_deit_tiny" in only_line(invoke(model="inline_diet_tiny"))
    assert "No such file" in only_line(invoke(file="absent.pth"))
    (folder / "page.pth").write_text("<!doctype html>")
    assert "is a web page" in only_line(invoke(file="page.pth"))
    assert "try " in only_line(invoke("--num-classes", "3", output="out.pth"))
    assert "folder exists" in only_line(invoke("--num-classes", "3", output="absent/out.safetensors"))
