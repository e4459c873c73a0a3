"""`inline ablate` from the outside, with models that take no time."""

import json

import pytest
from typer.testing import CliRunner

from analysis.written_runs import small_digits_config
from inline_attention.ablation import runs as ablation_runs
from inline_attention.cli.main import app
from inline_attention.engine.config import to_yaml


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(small_digits_config(depth=1)), encoding="utf-8")
    return path


@pytest.fixture
def invoke(tmp_path, recipe):
    fixed = ["--output", tmp_path / "out", "--epochs", 1, "-b", 256, "--set", "training.total_batch_size=256",
             "--set", "logging.tensorboard=false"]  # fmt: skip

    def run(*arguments):
        return CliRunner().invoke(app, [str(word) for word in ("ablate", recipe, *arguments, *fixed)])

    return run


def test_a_grid_is_trained_once_and_shown(invoke, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    options = ("--axis", "normalization", "--axis", "heads=2,3", "--seeds", 1)
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert "skipped divide, heads 3" in result.output
    assert "divisible" in result.output
    content = json.loads((tmp_path / "out" / "ablation.json").read_text(encoding="utf-8"))
    trained = {row["normalization"]: row["runs"] for row in content["results"] if row["heads"] == 2}
    assert set(trained) == {"divide", "subtract"}
    for runs in trained.values():
        assert list(runs) == ["42"]
        assert f"{runs['42']['top1']:.2f}" in result.output
    for ending in ("csv", "md", "png"):
        assert (tmp_path / "out" / f"ablation.{ending}").stat().st_size > 0
    monkeypatch.setattr(ablation_runs, "train", lambda *_, **__: pytest.fail("trained again"))
    again = invoke(*options)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "out" / "ablation.json").read_text(encoding="utf-8")) == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--axis", "hats"), "did you mean heads"),
        (("--axis", "heads=3"), "nothing is left to train"),
        (("--axis", "heads", "--model", "inline_deit_tin"), "did you mean inline_deit_tiny"),
        (("--axis", "heads", "--dataset", "folder"), "data.dir"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(invoke, tmp_path, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_beside_others_fails_the_command(invoke, tmp_path):
    result = invoke(
        "--axis", "heads=2", "--seeds", 1, "--at-once", 2, "--dataset", "folder", "--data-dir", tmp_path / "no"
    )
    assert result.exit_code == 1
    assert "1 of the runs failed" in result.output
