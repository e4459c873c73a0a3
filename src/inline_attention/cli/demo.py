"""`inline demo`: measure injectivity and cost, train InLine and its twins; print tables, draw pictures."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from inline_attention.analysis import collision_cases
from inline_attention.analysis.predictions import draw_predictions, predict_dataset
from inline_attention.analysis.subjects import trained_subject
from inline_attention.analysis.training_curves import draw_training_curves, read_training_curves
from inline_attention.benchmark.cost import ATTENTIONS, DEFAULT_SIZES, CostPoint, draw_cost, measure_attention_cost
from inline_attention.benchmark.environment import describe_machine
from inline_attention.benchmark.results import write_csv
from inline_attention.benchmark.timing import torch_threads
from inline_attention.cli.printing import counting, make_console, make_folder, make_table, progress_bar, say, writing_to
from inline_attention.cli.report import run_report
from inline_attention.data.datasets import open_dataset
from inline_attention.engine.checkpoints import LAST
from inline_attention.engine.config import TrainConfig
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.train import train
from inline_attention.engine.trainer import CHECKPOINTS
from inline_attention.models.reading import open_checkpoint
from inline_attention.models.registry import ATTENTIONS as KINDS
from inline_attention.recipes.small import DIGITS as RECIPE
from inline_attention.support.figures import KIND_LABELS
from inline_attention.tasks.classification.task import ClassificationMetrics

SHOWN_PREDICTIONS = 40
RUNS = "digits_runs"
WITHOUT_LOCAL_TERM = "model.arguments.attention_options={local_residual: false}"


@dataclass(frozen=True)
class TrainedModel:
    """One run of the comparison."""

    attention: str  # "inline", "softmax" or "linear"
    folder: Path
    parameters: int
    top1: float  # percent of the test pictures, after the last epoch
    test_images: int
    epochs: int
    seconds: float  # time of the whole run, with evaluation and checkpoints
    images_per_second: float  # training pictures over `seconds`


def run_demo(
    output: Path, sizes: Sequence[int] | None = None, *, training: bool = True, epochs: int | None = None
) -> None:
    """Measure, train, print the tables, write pictures, tables and a report to `output`, print its path last.

    Files and runs of an earlier demo there are replaced.
    """
    import matplotlib  # noqa: F401  # better to learn that it is missing now than after measuring

    make_folder(output)
    console = make_console(log_width=None)
    written, cost = _show_injectivity_and_cost(output, console, sizes or DEFAULT_SIZES)
    runs: list[Path] = []
    if training:
        files, runs = _show_training(output, console, epochs)
        written += files
    say(f"Results written to {output}: {', '.join(written)}")
    if runs:
        run_report(runs, output / "report.html", device="cpu", cost=cost, console=console)


def _show_injectivity_and_cost(
    output: Path, console: Console, sizes: Sequence[int]
) -> tuple[list[str], list[CostPoint]]:
    """Return the names of the files, and the cost of attention."""
    results = collision_cases.measure_injectivity()
    with counting("measuring time and memory", len(sizes) * len(ATTENTIONS), console) as advance:
        points = measure_attention_cost(sizes=sizes, on_progress=advance)
    console.print(_injectivity_table(results))
    console.print(_cost_table(points))
    machine = describe_machine()
    names = ("largest_difference", "smallest_difference", "verdict")
    rows = [
        {"queries": result.case.name, "feature_map": result.feature_map_name, "attention": result.kind}
        | {name: getattr(result, name) for name in names}
        for result in results
    ]
    with writing_to(output):
        collision_cases.draw_collision_cases(results, output / "injectivity.png")
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
        write_csv(output / "accuracy.csv", [asdict(model) for model in trained])
        draw_training_curves(read_training_curves([model.folder for model in trained]), output)
        # The last weights, as in the table: the best on the test pictures would be chosen by what they are tested on.
        subject = trained_subject(trained[0].folder / CHECKPOINTS / LAST, device="cpu")
        predictions = predict_dataset(subject, open_dataset("digits", split="validation"), keep=SHOWN_PREDICTIONS)
        draw_predictions(predictions, subject.label, "handwritten digits", output)
    return ["accuracy.csv", "curves.png", "predictions.png", f"{RUNS}/"], [model.folder for model in trained]


def _injectivity_table(results: Sequence[collision_cases.InjectivityResult]) -> Table:
    rows = []
    for result in results:
        differences = [f"{value:.1e}" for value in (result.largest_difference, result.smallest_difference)]
        verdict = Text(result.verdict, style="bold red" if result.verdict == "collide" else "green")
        rows.append([result.case.name, result.feature_map_name, KIND_LABELS[result.kind], *differences, verdict])
    return make_table(
        ("queries on", "φ(x)", "attention", "max |Δw|", "min |Δw|", "verdict"),
        rows,
        texts=3,
        group_by=lambda row: row[0],
        title="Do different queries get different weights?",
        caption="|Δw|: largest difference between the weights of two queries. "
        f"collide: ≤ {collision_cases.COLLISION_TOLERANCE:g}",
    )


def _cost_table(points: Sequence[CostPoint]) -> Table:
    notes = [f"{ATTENTIONS[point.kind].label}, N = {point.tokens}: {point.note}" for point in points if point.note]
    notes.append("SDPA on a CPU never stores the N × N weights: its memory grows like N too")
    inline = {point.tokens: point for point in points if point.kind == "inline"}
    rows = []
    for point in points:
        ours, mebibytes = inline[point.tokens], None if point.peak_bytes is None else point.peak_bytes / 2**20
        time_and_ratio = [_number(point.milliseconds), _ratio(point.milliseconds, ours.milliseconds)]
        memory_and_ratio = [_number(mebibytes), _ratio(point.peak_bytes, ours.peak_bytes)]
        rows.append([f"{point.tokens:,}", ATTENTIONS[point.kind].label, *time_and_ratio, *memory_and_ratio])
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


def train_all(output: Path, console: Console, *, epochs: int | None = None) -> list[TrainedModel]:
    """Train InLine, softmax and linear attention with the recipe `digits`, one after the other.

    The runs in `digits_runs/MODEL` replace those of an earlier demo. SIGTERM and SIGINT leave a last checkpoint and
    raise `InterruptedBySignalError`.
    """
    configs = {attention: _config(attention, output / RUNS, epochs) for attention in KINDS}
    trained: list[TrainedModel] = []
    # Models this small gain a fifth from a second core, and become ten times as slow when another program uses it,
    # because threads wait for each other in every operation. One thread also gives the same results on all machines.
    with progress_bar(console) as progress, torch_threads(1):
        for attention, config in configs.items():
            name, planned = config.model.name, config.training.epochs
            task = progress.add_task(name, total=planned)
            if not console.is_terminal:
                console.print(f"training {name} for {planned} epochs")

            def show(row: Mapping[str, Any], task: TaskID = task, name: str = name) -> None:
                top1 = row.get("top1")
                accuracy = "" if top1 is None else f": {top1:.1f} %"
                progress.update(task, advance=1, description=f"{name}{accuracy}")

            trained.append(_train(attention, config, show))
            progress.remove_task(task)
            console.print(f"{name}: {trained[-1].top1:.1f} % after {planned} epochs and {trained[-1].seconds:.0f} s")
    return trained


def accuracy_table(trained: Sequence[TrainedModel]) -> Table:
    """Return accuracy, size and speed of the three models, with the uncertainty."""
    rows = []
    for model in trained:
        speed = [f"{model.images_per_second:,.0f}", f"{model.seconds:.0f}"]
        rows.append([KIND_LABELS[model.attention], f"{model.parameters:,}", f"{model.top1:.1f}", *speed])
    best = max(trained, key=lambda model: model.top1)
    share = best.top1 / 100
    error = 100 * math.sqrt(share * (1 - share) / best.test_images)
    caption = (
        f"One recipe, {best.epochs} epochs and one seed for all. With {best.test_images} test pictures, differences "
        f"of ± {error:.1f} points are chance, and another seed changes accuracy about as much. "
        "The recipe was chosen by accuracy on these same pictures. "
        "Times are of one thread, with evaluation and checkpoints."
    )
    header = ("attention", "parameters", "top-1 %", "training images/s", "time s")
    return make_table(header, rows, texts=1, title="Trained on handwritten digits", caption=caption)


def explain_lead(trained: Sequence[TrainedModel]) -> str:
    """Return where InLine's lead comes from, and how to check that; "" if it does not lead."""
    if max(trained, key=lambda model: model.top1).attention != "inline":
        return ""
    return (
        "InLine's lead comes with its 3×3 term, which knows the neighbors of a token; the others must learn them.\n"
        f"To train without it: inline train {RECIPE.name} --set '{WITHOUT_LOCAL_TERM}'\n"
    )


def _config(attention: str, runs: Path, epochs: int | None) -> TrainConfig:
    recipe = RECIPE.config
    name = recipe.model.name.replace("inline", attention)
    return replace(
        recipe,
        run=replace(recipe.run, output=str(runs), experiment=name, device="cpu"),
        model=replace(recipe.model, name=name),
        training=replace(recipe.training, epochs=epochs or recipe.training.epochs),
    )


def _train(attention: str, config: TrainConfig, on_epoch: Callable[[Mapping[str, Any]], None]) -> TrainedModel:
    earlier = Path(config.run.output, str(config.run.experiment))
    if earlier.exists():
        shutil.rmtree(earlier)
    start = time.perf_counter()
    folder, metrics = train(config, on_epoch=on_epoch)
    seconds = time.perf_counter() - start
    assert isinstance(metrics, ClassificationMetrics), "the last epoch is always evaluated"
    batch, epochs = config.training.batch_size, config.training.epochs
    images = epochs * (len(open_dataset(config.data.dataset)) // batch * batch)  # full batches only
    weights = open_checkpoint(folder / CHECKPOINTS / LAST / "model.safetensors").weights
    parameters = sum(tensor.numel() for tensor in weights.values())
    return TrainedModel(
        attention, folder, parameters, metrics.top1, metrics.count, epochs, seconds, images_per_second=images / seconds
    )
