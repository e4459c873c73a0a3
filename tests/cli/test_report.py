"""`inline report` from the outside."""

import pytest
from typer.testing import CliRunner

from analysis.written_runs import write_run
from inline_attention.benchmark.cost import CostPoint
from inline_attention.cli.main import app
from inline_attention.report import measurement


@pytest.fixture
def invoke(monkeypatch):
    def measure(sizes):
        return [CostPoint(kind, tokens, 1.0, 1, 1) for tokens in sizes for kind in ("softmax", "inline")]

    monkeypatch.setattr(measurement, "measure_attention_cost", measure)
    return lambda *arguments: CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])


def test_a_page_is_written_and_its_path_printed(invoke, tmp_path):
    write_run(tmp_path / "runs" / "first", "inline_deit_tiny")
    write_run(tmp_path / "runs" / "second", "linear_deit_tiny", weights=False)
    page = tmp_path / "new" / "page.html"
    result = invoke(tmp_path / "runs", "--output", page, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"Report written to {page}: open it in a browser"
    assert "left out of confusion: linear_deit_tiny" in result.output
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(file.name for file in page.parent.iterdir()) == ["page.html", "page.measurements.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere does not exist"),
        ((".", "--ablation", "nowhere"), "holds no run"),
        (("nowhere", "--output", "."), "expected a file to write"),
        (("nowhere", "--output", "ablation.json"), "expected a name such as ablation.html, got ablation.json"),
        (("nowhere", "--output", "ablation"), "expected a name such as ablation.html, got ablation"),
    ],
)
def test_what_is_wrong_is_said(invoke, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert list(tmp_path.glob("*.html")) == []


def test_results_of_the_same_name_are_not_touched(invoke, tmp_path):
    """The page of an ablation, beside the results it shows."""
    run = write_run(tmp_path / "run", weights=False)
    results = tmp_path / "ablation.json"
    results.write_text('{"title": "mine"}')
    result = invoke(run, "--output", tmp_path / "ablation.html", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert results.read_text() == '{"title": "mine"}'


def test_a_file_where_measurements_would_be_kept_is_not_written_over(invoke, tmp_path):
    run = write_run(tmp_path / "run", weights=False)
    foreign = tmp_path / "page.measurements.json"
    foreign.write_text('{"temperature": 12}')
    result = invoke(run, "--output", tmp_path / "page.html", "--device", "cpu")
    assert result.exit_code == 1
    assert "choose another --output" in result.output
    assert foreign.read_text() == '{"temperature": 12}'
    assert not (tmp_path / "page.html").exists()
