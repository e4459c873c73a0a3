"""Redraw every committed picture from the committed results, so that pictures and text cannot disagree.

That is all of docs/images and benchmarks/results/*.png. The page docs/report/digits.html is not redrawn:
its measurements need trained models, so that `--demo` copies it.

    python benchmarks/pictures.py                   # redraw
    python benchmarks/pictures.py --demo out/demo   # take new results from `make demo` first

The picture of the report is a screenshot of docs/report/digits.html and needs Chromium; without it that picture stays.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import cpu_attention
import gigapixel
import linearize
from inline_attention.ablation.tables import AblationFile, draw_ablation
from inline_attention.analysis.collision_cases import draw_two_queries, measure_injectivity
from inline_attention.analysis.softmax_series import draw_series, measure_series
from inline_attention.analysis.training_curves import (
    EpochFigures,
    TrainingCurves,
    draw_training_curves,
    read_training_curves,
)
from inline_attention.benchmark.attention import AttentionReport
from inline_attention.benchmark.cost import CostPoint
from inline_attention.benchmark.models import ModelReport
from inline_attention.benchmark.plots import draw_attention, draw_models
from inline_attention.benchmark.results import write_csv
from inline_attention.support.untrusted import build_dataclass

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES, PAGE = (
    ROOT / "benchmarks" / "results",
    ROOT / "docs" / "images",
    ROOT / "docs" / "report" / "digits.html",
)
ACCURACY, CURVES = RESULTS / "digits_demo.csv", RESULTS / "digits_curves.csv"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
README_WIDTH = (768, 64)  # channels and head dim of the picture in the README
WINDOW = (1280, 1180)  # pixels of the report's picture


def main(demo: Annotated[Path | None, typer.Option(help="Take new results from this demo folder.")] = None) -> None:
    if demo is not None:
        take_demo(demo)
    attention, models = read_json("gpu_attention"), read_json("gpu_models")
    draw_attention(AttentionReport.from_json(attention), RESULTS / "gpu_attention.png")
    draw_attention(AttentionReport.from_json(attention), IMAGES / "attention_speed.png", only=README_WIDTH)
    draw_models(ModelReport.from_json(models), RESULTS / "gpu_models.png")
    draw_models(ModelReport.from_json(read_json("cpu_models")), RESULTS / "cpu_models.png")
    cpu = read_json("cpu_attention")
    rows = [cpu_attention.Row(**row) for row in cpu["cases"]]
    cpu_attention.draw_plot(rows, [CostPoint(**point) for point in cpu["memory"]])
    ablation = build_dataclass(AblationFile, read_json("cifar10_ablation"))
    small_print = "inline_deit_tiny with 2×2 patches on CIFAR-10, 6 epochs; top-1 of the test images."
    draw_ablation(ablation.results, RESULTS, "cifar10_ablation", title=ablation.title, small_print=small_print)
    for name in ("digits", "cifar10-small"):
        linearized = read_json(f"linearize_{name}")
        linearize.draw(name, linearize.EXPERIMENTS[name], linearized["seeds"], RESULTS)
    gigapixel.draw(read_json("gpu_gigapixel")["cases"], IMAGES)
    draw_two_queries(measure_injectivity(), IMAGES / "injectivity.png")
    draw_series(measure_series(), IMAGES / "softmax_series.png")
    draw_training_curves(read_curves(), IMAGES, name="digits_curves", formats=("png",))
    take_screenshot()


def take_demo(demo: Path) -> None:
    """Copy accuracies, curves and page of a demo into the committed results."""
    shutil.copyfile(demo / "accuracy.csv", ACCURACY)
    shutil.copyfile(demo / "report.html", PAGE)
    folders = [demo / "digits_runs" / f"{kind}_deit_tiny" for kind in ("inline", "softmax", "linear")]
    runs = read_training_curves(folders)
    write_csv(CURVES, [{"model": run.model_name, **vars(epoch)} for run in runs for epoch in run.epochs])


def read_curves() -> list[TrainingCurves]:
    """Return the committed learning curves."""
    runs: dict[str, list[EpochFigures]] = {}
    with CURVES.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, epoch = row.pop("model"), int(row.pop("epoch"))
            values: dict[str, Any] = {key: float(value) if value else None for key, value in row.items()}
            runs.setdefault(name, []).append(EpochFigures(epoch, **values))
    return [TrainingCurves(name, name, "digits", len(epochs), tuple(epochs)) for name, epochs in runs.items()]


def take_screenshot() -> None:
    """Write docs/images/report.png, if there is a browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        typer.echo("no Chromium: docs/images/report.png stays as it is", err=True)
        return
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            size,
        ]
        picture = f"--screenshot={IMAGES / 'report.png'}"
        subprocess.run([browser, *options, picture, PAGE.as_uri()], check=True, timeout=120, capture_output=True)


def read_json(name: str) -> dict[str, Any]:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
