"""Reports on runs from strangers: hostile names stay text, unreadable files give one sentence."""

import json
import os
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from analysis.written_runs import write_run
from inline_attention.ablation.runs import OUTCOME, TIMING, UnusableRunError, finish_run, read_outcome
from inline_attention.benchmark.cost import CostPoint
from inline_attention.cli.main import app
from inline_attention.report import measurement

SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "\"'><img src=x onerror=alert(2)>"
ESCAPES = "\x1b[31mred\x1b[0m\x07"
HOSTILE = f"{SCRIPT}{IMAGE}{ESCAPES}$x^2$ {{{{ 7 * 7 }}}} [bold]"


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    sizes = {"attention": 1, "masking": 4, "answers": 4}
    monkeypatch.setattr(measurement, "sample_sizes", lambda tokens, device: sizes)
    points = [CostPoint("inline", tokens, 1.0, 1, 1) for tokens in (4, 16)]
    monkeypatch.setattr(measurement, "measure_attention_cost", lambda sizes: points)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.scripts, self.attributes, self.current = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.current = tag
        self.attributes += attrs

    def handle_data(self, data):
        if self.current == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self.current = ""


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(os.fspath, arguments), "--device", "cpu"])


def check_page(page, result):
    text = page.read_text(encoding="utf-8")
    tags = Tags(text)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert not [value for name, value in tags.attributes if name in ("src", "href") and "alert" in (value or "")]
    assert not [script for script in tags.scripts if "alert" in script]
    assert "7 * 7" not in text or "{{ 7 * 7 }}" in text
    assert "\x1b" not in text
    assert "\x1b[31mred" not in result.output
    return text


def write_pictures(folder, names):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in names:
            (folder / split / name).mkdir(parents=True)
            for number in range(2):
                pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}{IMAGE.replace('/', '')}.png")


def test_hostile_names_of_folders_classes_and_pictures_stay_text(tmp_path):
    classes = sorted(HOSTILE.replace("/", "∕") + str(number) for number in range(10))
    data = tmp_path / "data"
    write_pictures(data, classes)
    for number in range(2):  # two of one model, so that folders become labels
        folder = tmp_path / "runs" / f"{HOSTILE.replace('/', '∕')}{number}"
        write_run(folder, class_names=classes)
        settings = (folder / "args.yaml").read_text().replace("dataset: digits", "dataset: folder")
        (folder / "args.yaml").write_text(settings.replace("dir: null", f"dir: {data}"))
    page = tmp_path / "page.html"
    result = report(tmp_path / "runs", "--output", page)
    assert result.exit_code == 0, result.output
    text = check_page(page, result)
    assert "&lt;script&gt;alert(1)" in text
    assert "Left out" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes only on Linux")
def test_a_name_that_is_not_utf8_is_shown_escaped(tmp_path):
    for number in (b"1", b"2"):
        plain = write_run(tmp_path / f"run{number.decode()}", weights=number == b"1")
        (tmp_path / "runs").mkdir(exist_ok=True)
        os.rename(plain, os.path.join(os.fsencode(tmp_path), b"runs", b"caf\xe9-" + number))
    page = tmp_path / "page.html"
    result = report(tmp_path / "runs", "--output", page)
    assert result.exit_code == 0, result.output
    assert r"caf\udce9-1" in check_page(page, result)


RUN = {"top1": 69.0, "epochs": 1, "seconds": 2.0, "images_per_second": None, "environment": {"machine": HOSTILE}}


def ablation(**changes):
    result = {
        "label": HOSTILE, "values": {"feature_map": HOSTILE}, "top1_mean": 70.0, "top1_std": 1.0, "seeds": 1,
        "parameters": 1e6, "macs": 2e6, "images_per_second": None, "note": HOSTILE, "runs": {"0": RUN},
    }  # fmt: skip
    return {"title": HOSTILE, "environment": {"machine": HOSTILE}, "results": [result | changes]}


def test_a_hostile_ablation_stays_text(tmp_path):
    run = write_run(tmp_path / "run", weights=False)
    (tmp_path / "ablation.json").write_text(json.dumps(ablation()))
    page = tmp_path / "page.html"
    result = report(run, "--ablation", tmp_path, "--output", page)
    assert result.exit_code == 0, result.output
    check_page(page, result)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"title": ' + "9" * 10_000 + "}",
        json.dumps(ablation(top1_mean="70")),
        json.dumps(ablation(top1_mean=1e999)),
        json.dumps(ablation(seeds=[])),
        json.dumps(ablation(runs={"0": RUN | {"top1": {"a": 1}}})),
        json.dumps(ablation(runs=[])),
        json.dumps(ablation() | {"results": []}),
        json.dumps(ablation() | {"environment": "a machine"}),
        "\udcff",
    ],
    ids=lambda content: content[:20],
)
def test_a_malformed_ablation_gives_one_sentence(tmp_path, content):
    run = write_run(tmp_path / "run", weights=False)
    (tmp_path / "ablation.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    result = report(run, "--ablation", tmp_path, "--output", tmp_path / "page.html")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "is no result of `inline ablate`" in result.output
    assert not (tmp_path / "page.html").exists()


def test_a_table_of_epochs_is_read_up_to_a_limit_and_never_from_a_pipe(tmp_path):
    piped, large = (write_run(tmp_path / name, weights=False) for name in ("piped", "large"))
    (piped / "summary.csv").unlink()
    os.mkfifo(piped / "summary.csv")
    with (large / "summary.csv").open("ab") as file:
        file.truncate(1 << 26)
    result = report(piped, large, "--output", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "not a regular file" in result.output
    assert "more than" in result.output


@pytest.mark.parametrize("content", ["", "[]", '{"top1": "high"}', "[" * 100_000, '{"seconds": 1e999}'])
@pytest.mark.parametrize("name", [OUTCOME, TIMING])
def test_a_damaged_file_of_a_comparison_is_named(tmp_path, name, content):
    from dataclasses import replace

    from analysis.written_runs import small_digits_config

    config = small_digits_config()
    config = replace(config, run=replace(config.run, output=str(tmp_path), experiment="one"))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / name).write_text(content)
    with pytest.raises(UnusableRunError, match=f"{name} cannot be read"):
        read_outcome(config) if name == OUTCOME else finish_run(config)


def test_tables_of_runs_with_markup_in_their_names_are_printed(tmp_path):
    runs = [write_run(tmp_path / name, class_names=list("0123456789")) for name in ("[bold]", "[\x1b]")]
    checkpoints = [argument for run in runs for argument in ("--checkpoint", str(run / "checkpoints" / "last"))]
    arguments = ["analyze", "confusion", *checkpoints, "--images", "1", "--output", str(tmp_path / "out"), "--device"]
    result = CliRunner().invoke(app, [*arguments, "cpu"])
    assert result.exit_code == 0, result.output
    assert "([bold])" in result.output
