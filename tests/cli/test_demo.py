"""`inline demo` from the outside."""

import csv
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from inline_attention import __version__, analysis
from inline_attention.analysis.cost import ATTENTIONS
from inline_attention.cli import demo
from inline_attention.cli.main import app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("measured before checking")

    monkeypatch.setattr(demo, "measure_injectivity", fail)
    monkeypatch.setattr(demo, "measure_attention_cost", fail)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_demo_writes_pictures_and_tables_and_prints_the_path_last(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "made" / "on demand"
    result = invoke("demo", "--output", output, "--sizes", "64,256")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == str(output)
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


@pytest.mark.usefixtures("nothing_is_measured")
def test_missing_matplotlib_names_the_extra(invoke, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "inline_attention.analysis.plots", raising=False)
    monkeypatch.delattr(analysis, "plots", raising=False)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'inline-attention[plots]'" in result.output


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
