"""The part of `inline demo` that trains: InLine and its twins on handwritten digits, with one recipe."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from inline_attention.cli.printing import make_table, progress_bar
from inline_attention.data.datasets import open_dataset
from inline_attention.engine.checkpoints import LAST
from inline_attention.engine.config import TrainConfig
from inline_attention.engine.train import train
from inline_attention.engine.trainer import CHECKPOINTS
from inline_attention.models.reading import open_checkpoint
from inline_attention.models.registry import TWINS
from inline_attention.recipes.small import DIGITS as RECIPE
from inline_attention.tasks.classification.task import ClassificationMetrics

RUNS = "digits_runs"
WITHOUT_LOCAL_TERM = "model.arguments.attention_options={local_residual: false}"
ATTENTION_LABELS = {"inline": "InLine", "softmax": "softmax", "linear": "linear"}


@dataclass(frozen=True)
class TrainedModel:
    """One run of the comparison.

    Attributes:
        attention: "inline", "softmax" or "linear".
        folder: Folder of the run.
        parameters: Number of parameters.
        top1: Percent of the test pictures, after the last epoch.
        test_images: Number of test pictures.
        epochs: Number of epochs.
        seconds: Time of the whole run, with evaluation and checkpoints.
        images_per_second: Training pictures over `seconds`.
    """

    attention: str
    folder: Path
    parameters: int
    top1: float
    test_images: int
    epochs: int
    seconds: float
    images_per_second: float


def train_all(output: Path, console: Console, *, epochs: int | None = None) -> list[TrainedModel]:
    """Train InLine, softmax and linear attention with the recipe `digits`, one after the other.

    Args:
        output: The demo's folder; the runs in `digits_runs/MODEL` replace those of an earlier demo.
        console: Shows progress, or a line per run if it is no terminal.
        epochs: Number of epochs; the recipe's by default.

    Raises:
        ConfigError: If the settings do not fit together.
        InterruptedBySignalError: After SIGTERM or SIGINT, and a last checkpoint.
        OSError: If an earlier run cannot be removed, or nothing can be written.
    """
    configs = {attention: _config(attention, output / RUNS, epochs) for attention in ("inline", *TWINS)}
    trained: list[TrainedModel] = []
    with progress_bar(console) as progress, _one_thread():
        for attention, config in configs.items():
            name, planned = config.model.name, config.training.epochs
            task = progress.add_task(name, total=planned)
            if not console.is_terminal:
                console.print(f"training {name} for {planned} epochs")

            def show(row: Mapping[str, Any], task: TaskID = task, name: str = name) -> None:
                top1 = row.get("top1")
                accuracy = "" if top1 is None else f": {top1:.1f} %"
                progress.update(task, advance=1, description=f"{name}{accuracy}")

            result = _train(attention, config, show)
            trained.append(result)
            progress.remove_task(task)
            console.print(f"{name}: {result.top1:.1f} % after {planned} epochs and {result.seconds:.0f} s")
    return trained


def accuracy_table(trained: Sequence[TrainedModel]) -> Table:
    """Return accuracy, size and speed of the three models, with the uncertainty."""
    rows = [
        [
            ATTENTION_LABELS[model.attention],
            f"{model.parameters:,}",
            f"{model.top1:.1f}",
            f"{model.images_per_second:,.0f}",
            f"{model.seconds:.0f}",
        ]
        for model in trained
    ]
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread.

    Models this small gain a fifth from a second core, and become ten times as slow when another program uses it,
    because threads wait for each other in every operation. Results then do not depend on the number of cores either.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
