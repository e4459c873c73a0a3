"""`inline demo`: measure injectivity and cost, train InLine and its twins; print tables, draw pictures."""

from __future__ import annotations

import csv
import dataclasses
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer
from rich import box
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
from inline_attention.benchmark.cost import (
    ATTENTIONS,
    DEFAULT_SIZES,
    CostPoint,
    draw_cost,
    measure_attention_cost,
)
from inline_attention.benchmark.environment import describe_machine
from inline_attention.cli.demo_training import RUNS, TrainedModel, accuracy_table, explain_lead, train_all
from inline_attention.cli.printing import fail, make_console, progress_bar, say, writing_to
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

    Args:
        output: Folder to write to; made if missing. What an earlier demo wrote there is replaced, its runs included.
        sizes: Numbers of tokens to measure, ascending; `DEFAULT_SIZES` by default.
        training: Whether to train InLine and its twins on handwritten digits.
        epochs: Training epochs; the recipe's by default.

    Raises:
        typer.Exit: With code 1 where matplotlib is missing, the folder cannot be written or training fails, with 130 or
            143 after SIGINT or SIGTERM while training; the reason is printed.
    """
    _require_matplotlib()
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


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        fail("the demo draws with matplotlib, which is not installed: pip install 'inline-attention[plots]'")


def _show_injectivity_and_cost(
    output: Path, console: Console, sizes: Sequence[int]
) -> tuple[list[str], list[CostPoint]]:
    """Measure, print, write; the files' names, and what attention costs."""
    results = measure_injectivity()
    points = _measure_cost_with_progress(console, sizes)
    console.print(_injectivity_table(results))
    console.print(_cost_table(points))
    machine = describe_machine()
    with writing_to(output):
        draw_collision_cases(results, output / "injectivity.png")
        draw_cost(points, machine, output)
        _write_csv(
            output / "injectivity.csv",
            ("queries", "feature_map", "attention", "largest_difference", "smallest_difference", "verdict"),
            (
                (r.case.name, r.feature_map_name, r.kind, r.largest_difference, r.smallest_difference, r.verdict)
                for r in results
            ),
        )
        _write_csv(output / "cost.csv", (*CostPoint._fields, "machine"), ((*point, machine) for point in points))
    return ["injectivity.png", "injectivity.csv", "cost.png", "cost.csv"], points


def _show_training(output: Path, console: Console, epochs: int | None) -> tuple[list[str], list[Path]]:
    """Train the three, print, write; the files' names, and the folders of the runs."""
    with writing_to(output):
        trained = _train_or_fail(output, console, epochs)
        console.print(accuracy_table(trained))
        say(explain_lead(trained), nl=False)
        _write_csv(
            output / "accuracy.csv",
            [field.name for field in dataclasses.fields(TrainedModel)],
            (dataclasses.astuple(model) for model in trained),
        )
        draw_training_curves(read_training_curves([model.folder for model in trained]), output)
        # The last weights, as in the table: the best on the test pictures would be chosen by what they are tested on.
        subject = trained_subject(trained[0].folder / CHECKPOINTS / LAST, device="cpu")
        predictions = predict_dataset(subject, open_dataset("digits", split="validation"), keep=SHOWN_PREDICTIONS)
        draw_predictions(predictions, subject.label, "handwritten digits", output)
    return ["accuracy.csv", "curves.png", "predictions.png", f"{RUNS}/"], [model.folder for model in trained]


def _train_or_fail(output: Path, console: Console, epochs: int | None) -> list[TrainedModel]:
    try:
        return train_all(output, console, epochs=epochs)
    except InterruptedBySignalError as error:
        say(f"{error}. What was measured is in {output}; the next demo trains anew", err=True)
        raise typer.Exit(error.exit_code) from error


def _measure_cost_with_progress(console: Console, sizes: Sequence[int]) -> list[CostPoint]:
    with progress_bar(console) as progress:
        task = progress.add_task("measuring time and memory", total=len(sizes) * len(ATTENTIONS))
        return measure_attention_cost(sizes=sizes, on_progress=lambda _: progress.advance(task))


def _injectivity_table(results: Sequence[InjectivityResult]) -> Table:
    table = Table(
        title="Do different queries get different weights?",
        caption=f"|Δw|: largest difference between the weights of two queries. collide: ≤ {COLLISION_TOLERANCE:g}",
        box=box.SIMPLE_HEAD,
    )
    for header in ("queries on", "φ(x)", "attention"):
        table.add_column(header, no_wrap=True)
    table.add_column("max |Δw|", justify="right")
    table.add_column("min |Δw|", justify="right")
    table.add_column("verdict")
    for index, result in enumerate(results):
        verdict = Text(result.verdict, style="bold red" if result.verdict == "collide" else "green")
        table.add_row(
            result.case.name,
            result.feature_map_name,
            "InLine" if result.kind == "inline" else result.kind,
            f"{result.largest_difference:.1e}",
            f"{result.smallest_difference:.1e}",
            verdict,
            end_section=index + 1 < len(results) and results[index + 1].case.name != result.case.name,
        )
    return table


def _cost_table(points: Sequence[CostPoint]) -> Table:
    notes = [f"{ATTENTIONS[point.kind].label}, N = {point.tokens}: {point.note}" for point in points if point.note]
    notes.append("SDPA on a CPU never stores the N × N weights: its memory grows like N too")
    table = Table(title="Cost of one forward call", caption="\n".join(notes), box=box.SIMPLE_HEAD)
    table.add_column("tokens N", justify="right")
    table.add_column("attention", no_wrap=True)
    for header in ("time\nms", "time\n÷ InLine", "peak memory\nMiB", "memory\n÷ InLine"):
        table.add_column(header, justify="right")
    inline = {point.tokens: point for point in points if point.kind == "inline"}
    for index, point in enumerate(points):
        reference = inline[point.tokens]
        starts_size = index == 0 or points[index - 1].tokens != point.tokens
        table.add_row(
            f"{point.tokens:,}" if starts_size else "",
            ATTENTIONS[point.kind].label,
            _number(point.milliseconds),
            _ratio(point.milliseconds, reference.milliseconds),
            _number(None if point.peak_bytes is None else point.peak_bytes / 2**20),
            _ratio(point.peak_bytes, reference.peak_bytes),
            end_section=index + 1 < len(points) and points[index + 1].tokens != point.tokens,
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def _ratio(value: float | None, reference: float | None) -> str:
    return "n/a" if value is None or not reference else f"{_number(value / reference)}×"


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
