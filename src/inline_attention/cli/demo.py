"""`inline demo`: measure injectivity and cost, train InLine and its twins; print tables, draw pictures."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inline_attention.analysis.collision_cases import (
    COLLISION_TOLERANCE,
    InjectivityResult,
    draw_collision_cases,
    measure_injectivity,
)
from inline_attention.analysis.predictions import draw_predictions, predict_dataset
from inline_attention.analysis.subjects import trained_subject
from inline_attention.analysis.training_curves import draw_training_curves, read_training_curves
from inline_attention.benchmark.cost import ATTENTIONS, DEFAULT_SIZES, CostPoint, draw_cost, measure_attention_cost
from inline_attention.benchmark.environment import describe_machine
from inline_attention.benchmark.results import write_csv
from inline_attention.cli.demo_training import RUNS, accuracy_table, explain_lead, train_all
from inline_attention.cli.printing import fail, make_console, make_table, progress_bar, say, writing_to
from inline_attention.cli.report import run_report
from inline_attention.data.datasets import open_dataset
from inline_attention.engine.checkpoints import LAST
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.trainer import CHECKPOINTS

SHOWN_PREDICTIONS = 40


def run_demo(
    output: Path, sizes: Sequence[int] | None = None, *, training: bool = True, epochs: int | None = None
) -> None:
    """Measure, train, print the tables, write pictures, tables and a report to `output`, print its path last.

    Files and runs of an earlier demo there are replaced.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        fail("the demo draws with matplotlib, which is not installed: pip install 'inline-attention[plots]'")
    with writing_to(output):
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()  # better to learn it now than after measuring
    console = make_console(log_width=None)
    written, cost = _show_injectivity_and_cost(output, console, sizes or DEFAULT_SIZES)
    runs: list[Path] = []
    if training:
        files, runs = _show_training(output, console, epochs)
        written += files
    say(f"{', '.join(written[:-1])} and {written[-1]} are in")
    say(output)
    if runs:
        say("All of it as one page, to open in a browser:")
        run_report(runs, output / "report.html", device="cpu", cost=cost, console=console)


def _show_injectivity_and_cost(
    output: Path, console: Console, sizes: Sequence[int]
) -> tuple[list[str], list[CostPoint]]:
    """Return the names of the files, and the cost of attention."""
    results = measure_injectivity()
    with progress_bar(console) as progress:
        task = progress.add_task("measuring time and memory", total=len(sizes) * len(ATTENTIONS))
        points = measure_attention_cost(sizes=sizes, on_progress=lambda _: progress.advance(task))
    console.print(_injectivity_table(results))
    console.print(_cost_table(points))
    machine = describe_machine()
    rows = [
        {
            "queries": result.case.name,
            "feature_map": result.feature_map_name,
            "attention": result.kind,
            "largest_difference": result.largest_difference,
            "smallest_difference": result.smallest_difference,
            "verdict": result.verdict,
        }
        for result in results
    ]
    with writing_to(output):
        draw_collision_cases(results, output / "injectivity.png")
        draw_cost(points, machine, output)
        write_csv(output / "injectivity.csv", rows)
        write_csv(output / "cost.csv", [{**point._asdict(), "machine": machine} for point in points])
    return ["injectivity.png", "injectivity.csv", "cost.png", "cost.csv"], points


def _show_training(output: Path, console: Console, epochs: int | None) -> tuple[list[str], list[Path]]:
    """Return the names of the files, and the folders of the runs."""
    with writing_to(output):
        try:
            trained = train_all(output, console, epochs=epochs)
        except InterruptedBySignalError as error:
            say(f"{error}. What was measured is in {output}; the next demo trains from the start", err=True)
            raise typer.Exit(error.exit_code) from error
        console.print(accuracy_table(trained))
        say(explain_lead(trained), nl=False)
        write_csv(output / "accuracy.csv", [dataclasses.asdict(model) for model in trained])
        draw_training_curves(read_training_curves([model.folder for model in trained]), output)
        # The last weights, as in the table: the best on the test pictures would be chosen by what they are tested on.
        subject = trained_subject(trained[0].folder / CHECKPOINTS / LAST, device="cpu")
        predictions = predict_dataset(subject, open_dataset("digits", split="validation"), keep=SHOWN_PREDICTIONS)
        draw_predictions(predictions, subject.label, "handwritten digits", output)
    return ["accuracy.csv", "curves.png", "predictions.png", f"{RUNS}/"], [model.folder for model in trained]


def _injectivity_table(results: Sequence[InjectivityResult]) -> Table:
    rows = [
        [
            result.case.name,
            result.feature_map_name,
            "InLine" if result.kind == "inline" else result.kind,
            f"{result.largest_difference:.1e}",
            f"{result.smallest_difference:.1e}",
            Text(result.verdict, style="bold red" if result.verdict == "collide" else "green"),
        ]
        for result in results
    ]
    return make_table(
        ("queries on", "φ(x)", "attention", "max |Δw|", "min |Δw|", "verdict"),
        rows,
        texts=3,
        group_by=lambda row: row[0],
        title="Do different queries get different weights?",
        caption=f"|Δw|: largest difference between the weights of two queries. collide: ≤ {COLLISION_TOLERANCE:g}",
    )


def _cost_table(points: Sequence[CostPoint]) -> Table:
    notes = [f"{ATTENTIONS[point.kind].label}, N = {point.tokens}: {point.note}" for point in points if point.note]
    notes.append("SDPA on a CPU never stores the N × N weights: its memory grows like N too")
    inline = {point.tokens: point for point in points if point.kind == "inline"}
    rows = [
        [
            f"{point.tokens:,}",
            ATTENTIONS[point.kind].label,
            _number(point.milliseconds),
            _ratio(point.milliseconds, inline[point.tokens].milliseconds),
            _number(None if point.peak_bytes is None else point.peak_bytes / 2**20),
            _ratio(point.peak_bytes, inline[point.tokens].peak_bytes),
        ]
        for point in points
    ]
    return make_table(
        ("tokens N", "attention", "time\nms", "time\n÷ InLine", "peak memory\nMiB", "memory\n÷ InLine"),
        rows,
        texts=2,
        group_by=lambda row: row[0],
        title="Cost of one forward call",
        caption="\n".join(notes),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "n/a" if value is None or not reference else f"{_number(value / reference)}×"
