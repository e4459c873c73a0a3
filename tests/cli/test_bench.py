"""`inline bench` from the outside."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from inline_attention.benchmark import attention, models, timing
from inline_attention.cli.main import app
from inline_attention.ops import dispatch
from ops.calls import use_backends

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch):
    """Plain InLine alone, few rounds: fused backends would run in Triton's interpreter here."""
    eager = tuple(backend for backend in dispatch.AUTO_BACKENDS if backend.name == "eager")
    use_backends(monkeypatch, *eager)
    monkeypatch.setattr(attention, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(models, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "CPU_COPY_BYTES", 1 << 16)


def test_attention_prints_tables_and_writes_results(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "made" / "on demand"
    sizes = ["--tokens", "16,9", "--channels", "8", "--head-dim", "4", "--elements", "300"]
    result = invoke("attention", "--device", "cpu", *sizes, "--quick", "--output", output)
    assert result.exit_code == 0, result.output
    for word in ("forward, ms", "forward+backward, ms", "softmax, SDPA", "InLine ÷ floor", "best softmax ÷ InLine"):
        assert word in result.output
    content = json.loads((output / "attention.json").read_text())
    assert [(case["tokens"], case["batch"]) for case in content["cases"]] == [(9, 4), (16, 2)]
    assert content["dtype"] == "float32"
    assert "## Forward, ms" in (output / "attention.md").read_text()
    assert (output / "attention.png").read_bytes().startswith(PNG_SIGNATURE)


def test_models_print_a_table_and_write_results(invoke, tmp_path, monkeypatch):
    real = models.create_model
    monkeypatch.setattr(models, "create_model", lambda name, **options: real(name, depth=1, **options))
    result = invoke(
        "models", "--device", "cpu", "--sizes", 32, "--batch-size", 1, "--rivals", "softmax,plain",
        "--execution", "eager", "--mode", "inference", "--quick", "--output", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "inline_deit_tiny" in result.output
    (case,) = json.loads((tmp_path / "models.json").read_text())["cases"]
    assert [row["contestant"] for row in case["contestants"]] == ["inline", "plain", "softmax"]
    assert all(row["status"] == "timed" for row in case["contestants"])
    assert (tmp_path / "models.md").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["attention", "--passes", "sideways"], "--passes takes forward, forward+backward"),
        (["attention", "--dtype", "int8"], "--dtype must be one of"),
        (["attention", "--device", "tpu"], "--device must be auto, cuda or cpu"),
        (["attention", "--channels", "12", "--head-dim", "8"], "try a head dim of 4"),
        (["attention", "--compiled", "some"], "--compiled takes none, first, all"),
        (["models", "--models", "resnet50"], "no InLine model 'resnet50'"),
        (["models", "--rivals", "everyone"], "--rivals takes timm, plain, softmax"),
        (["models", "--mode", ""], "--mode takes inference, training"),
    ],
)
def test_bad_arguments_are_one_line(invoke, arguments, hint, tmp_path):
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert hint in line


def test_everyday_prints_tables_and_keeps_what_it_has(invoke, tmp_path):
    options = ["everyday", "--smoke", "--only", "attention", "--output", tmp_path]
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert "attention from packed qkv, ms" in result.output
    assert "cu_seqlens: not available" in (tmp_path / "everyday.md").read_text()
    before = json.loads((tmp_path / "everyday.json").read_text())
    result = invoke(*options, "--add")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "everyday.json").read_text())["cells"] == before["cells"]
    for content in ("{", "[1]", '{"cells": 3}', None):
        (tmp_path / "everyday.json").unlink()
        if content is None:
            os.mkfifo(tmp_path / "everyday.json")
        else:
            (tmp_path / "everyday.json").write_text(content)
        result = invoke(*options, "--add")
        assert result.exit_code == 1
        assert "run without --add" in result.output
    result = invoke("everyday", "--smoke", "--only", "nothing like it")
    assert result.exit_code == 1


@pytest.mark.parametrize("option", ["--tokens", "--channels", "--head-dim"])
def test_bad_sizes_are_refused_by_name(invoke, option):
    result = invoke("attention", option, "many")
    assert result.exit_code == 2
    assert option in result.output


def test_a_missing_gpu_is_one_line(invoke, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("attention", "--device", "cuda")
    assert result.exit_code == 1
    assert "--device cpu" in result.output


def test_unwritable_output_is_one_line(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "measure_attention", lambda *_, **__: pytest.fail("measured before checking"))
    blocker = tmp_path / "file"
    blocker.touch()
    result = invoke("attention", "--output", blocker / "bench")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert "--output" in line
