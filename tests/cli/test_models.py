"""`inline models` from the outside."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from inline_attention import list_models
from inline_attention.benchmark.model_size import PUBLISHED_TOP1
from inline_attention.cli.main import app


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, ["models", *arguments])


def listed(result):
    return [line.split()[0] for line in result.stdout.splitlines() if "_" in line and "×" in line]


def test_the_models_of_the_paper_by_default_and_the_twins_on_demand(invoke):
    assert set(listed(invoke())) == set(list_models("inline_*"))
    assert set(listed(invoke("--all"))) == set(list_models())
    assert set(listed(invoke("softmax_pvt_*"))) == set(list_models("softmax_pvt_*"))
    assert len(listed(invoke("*swin_tiny"))) == 6
    assert listed(invoke("inline_pvt_*"))[-1] == "inline_pvt_large", "by multiply-adds within a family"


def test_table_of_one_model(invoke):
    result = invoke("inline_deit_tiny")
    assert result.exit_code == 0
    (row,) = (line for line in result.stdout.splitlines() if "inline_deit_tiny" in line)
    assert row.split() == ["inline_deit_tiny", "6.48", "1.11", "224×224", "74.5"]
    assert "top-1 (paper)" in result.stdout
    assert result.stderr == ""


def test_no_published_figure_is_a_dash(invoke):
    assert invoke("linear_deit_tiny").stdout.count("–") == 1


def test_json(invoke):
    result = invoke("*pvt_tiny", "--json")
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == ["inline_pvt_tiny", "softmax_pvt_tiny", "linear_pvt_tiny"]
    assert set(rows[0]) == {"name", "param_count", "gmacs", "input_size", "top1_paper"}
    assert rows[0]["param_count"] == pytest.approx(12.03, rel=1e-3)
    assert rows[0]["gmacs"] == pytest.approx(1.98, rel=1e-2)
    assert rows[0]["input_size"] == [3, 224, 224]
    assert [row["top1_paper"] for row in rows] == [78.2, None, None]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("swin", "try '*swin*'"),
        ("inline_diet_tiny", "did you mean inline_deit_tiny"),
        ("resnet50", "`inline models --all`"),
        ("[", "`inline models --all`"),
    ],
)
def test_no_match_is_one_line_with_a_hint(invoke, pattern, hint):
    result = invoke(pattern)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: no model matches {pattern!r}")
    assert hint in line


def test_published_figures_are_of_models_that_exist():
    assert set(PUBLISHED_TOP1) <= set(list_models("inline_*"))


def test_no_pytorch_is_imported_to_list_them():
    program = """
import sys
from typer.testing import CliRunner
from inline_attention.cli.main import app
assert CliRunner().invoke(app, ["models", "--json"]).exit_code == 0
assert not {"torch", "timm", "numpy"} & set(sys.modules), "listing takes seconds"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
