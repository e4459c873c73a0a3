"""`inline demo` from the outside."""

import csv
import errno
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from inline_attention import __version__
from inline_attention.benchmark.cost import ATTENTIONS
from inline_attention.cli import demo
from inline_attention.cli.main import app
from inline_attention.engine.checkpoints import CheckpointWriteError
from inline_attention.engine.config import with_overrides
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.models import create_model
from inline_attention.recipes import get_recipe
from inline_attention.support.text import install_command
from inline_attention.tasks.classification.task import ClassificationMetrics

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("measured before checking")

    monkeypatch.setattr(demo.collision_cases, "measure_injectivity", fail)
    monkeypatch.setattr(demo, "measure_attention_cost", fail)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_demo_writes_pictures_and_tables_and_prints_the_path_last(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "made" / "on demand"
    result = invoke("demo", "--output", output, "--sizes", "64,256", "--no-train")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith(f"Results written to {output}: injectivity.")
    for name in ("injectivity.png", "cost.png"):
        assert (output / name).read_bytes().startswith(PNG_SIGNATURE)
    verdicts = {(row["queries"], row["attention"]): row["verdict"] for row in rows(output / "injectivity.csv")}
    assert len(verdicts) == 6
    assert {attention for (_, attention), verdict in verdicts.items() if verdict == "collide"} == {"linear"}
    cost = rows(output / "cost.csv")
    assert [(row["kind"], row["tokens"]) for row in cost] == [(kind, n) for n in ("64", "256") for kind in ATTENTIONS]
    assert all(float(row["milliseconds"]) > 0 and "torch" in row["machine"] for row in cost)
    for word in ("collide", "distinct", *(attention.label for attention in ATTENTIONS.values())):
        assert word in result.output
    assert not (output / "digits_runs").exists()


def test_demo_trains_all_three_through_the_engine(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    runs = tmp_path / "digits_runs"
    stale, foreign = runs / "linear_deit_tiny" / "checkpoints" / "step-1", runs / "of my own"
    for folder in (stale, foreign):
        folder.mkdir(parents=True)
    result = invoke("demo", "--output", tmp_path, "--sizes", "64", "--epochs", "1")
    assert result.exit_code == 0, result.output
    report = tmp_path / "report.html"
    assert result.output.splitlines()[-1] == f"Report written to {report}: open it in a browser"
    assert "softmax_deit_tiny" in report.read_text(encoding="utf-8")
    assert "lr" not in result.output.split()  # the engine leaves the console to the demo
    for name in ("curves.png", "predictions.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG_SIGNATURE)
    assert foreign.exists()
    assert not stale.exists()
    table = rows(tmp_path / "accuracy.csv")
    assert [row["attention"] for row in table] == ["inline", "softmax", "linear"]
    for row in table:
        folder = runs / f"{row['attention']}_deit_tiny"
        assert row["folder"] == str(folder)
        (epoch,) = rows(folder / "summary.csv")
        assert float(row["top1"]) == float(epoch["top1"])
        with safe_open(folder / "checkpoints" / "last" / "model.safetensors", "pt") as file:
            assert file.metadata()["model"] == folder.name
            assert json.loads(file.metadata()["class_names"]) == list("0123456789")
            assert int(row["parameters"]) == sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        assert f"{int(row['parameters']):,}" in result.output
        assert f"{float(row['top1']):.1f}" in result.output


def test_the_three_differ_in_their_attention_alone(tmp_path):
    configs = {kind: demo._config(kind, tmp_path, None) for kind in ("inline", "softmax", "linear")}
    recipe = get_recipe("digits").config
    for kind, config in configs.items():
        assert config.model.name == f"{kind}_deit_tiny"
        assert config.model.arguments == recipe.model.arguments
        for section in ("data", "augmentation", "optimizer", "schedule", "loss", "training"):
            assert getattr(config, section) == getattr(recipe, section)


def test_speed_counts_full_batches_over_the_whole_run(monkeypatch, tmp_path):
    """And torch has its threads back afterwards."""
    clock = iter(range(0, 1000, 10))

    def pretend_to_train(config, on_epoch):
        assert torch.get_num_threads() == 1
        weights = tmp_path / config.model.name / "checkpoints" / "last" / "model.safetensors"
        weights.parent.mkdir(parents=True)
        save_file({"a": torch.zeros(3, 4)}, weights)
        on_epoch({"epoch": 1})
        return tmp_path / config.model.name, ClassificationMetrics(50.0, 90.0, 1.0, 360)

    monkeypatch.setattr(demo, "train", pretend_to_train)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        trained = demo.train_all(tmp_path / "out", Console(quiet=True), epochs=5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for model in trained:
        assert (model.seconds, model.parameters, model.top1) == (10, 12, 50.0)
        assert model.images_per_second == 5 * 11 * 128 / 10  # of 1,437 pictures 29 sit each epoch out


@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (InterruptedBySignalError(2), 130, "stopped by SIGINT"),
        (InterruptedBySignalError(15), 143, "stopped by SIGTERM"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "--output"),
        (CheckpointWriteError("no room for a checkpoint"), 1, "no room for a checkpoint"),
    ],
    ids=["ctrl-c", "terminated", "disk full", "no checkpoint"],
)
def test_training_that_ends_early_says_why(invoke, monkeypatch, tmp_path, error, code, hint):
    pytest.importorskip("matplotlib")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demo, "_show_injectivity_and_cost", lambda *_: ([], []))
    monkeypatch.setattr(demo, "train", fail)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == code
    assert hint in result.output.splitlines()[-1]


@pytest.mark.parametrize(("inline", "leads"), [(95.0, True), (80.0, False)])
def test_a_lead_is_explained_where_there_is_one(tmp_path, inline, leads):
    trained = [
        demo.TrainedModel(kind, tmp_path, 100, top1, 360, 60, 1.0, 1.0)
        for kind, top1 in (("inline", inline), ("softmax", 88.0), ("linear", 89.0))
    ]
    assert ("3×3 term" in demo.explain_lead(trained)) == leads
    assert "one seed" in str(demo.accuracy_table(trained).caption)


def test_the_command_without_the_local_term_is_valid():
    config = with_overrides(get_recipe("digits").config, [demo.WITHOUT_LOCAL_TERM])
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.model_arguments())
    assert all(block.attn.residual is None for block in model.blocks)


@pytest.mark.usefixtures("nothing_is_measured")
def test_missing_matplotlib_names_the_extra(invoke, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert install_command("plots") in result.output


@pytest.mark.usefixtures("nothing_is_measured")
def test_unwritable_output_is_one_line(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    blocker = tmp_path / "file"
    blocker.touch()
    result = invoke("demo", "--output", blocker / "demo")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert str(blocker) in line
    assert "--output" in line


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("sizes", ["", "64,", "0", "-4", "many", "1.5"])
def test_bad_sizes_are_refused(invoke, sizes, tmp_path):
    result = invoke("demo", "--output", tmp_path, "--sizes", sizes)
    assert result.exit_code == 2
    assert "--sizes" in result.output


def test_version_and_help(invoke):
    assert invoke("--version").output.strip() == f"inline-attention {__version__}"
    assert "demo" in invoke("--help").output


def test_module_runs_as_a_command():
    run = subprocess.run([sys.executable, "-m", "inline_attention", "--version"], capture_output=True, text=True)
    assert run.stdout.strip() == f"inline-attention {__version__}"
