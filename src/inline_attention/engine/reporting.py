"""Reports of a run: console progress, summary.csv, args.yaml, environment.json, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inline_attention.engine.config import ConfigError, Problem, TrainConfig, to_mapping, to_yaml
from inline_attention.engine.run_folder import CURVES, SETTINGS_FILE
from inline_attention.support.files import write_atomically
from inline_attention.support.text import install_command, printable

SUMMARY = "summary.csv"


class Curves(NamedTuple):
    """A destination of curves: `add` takes values by name and the number of updates."""

    add: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


class RunReport:
    """Writes to the run's folder and the console, on rank 0 only."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        is_main: bool,
        total_updates: int,
        on_epoch: Callable[[Mapping[str, Any]], None] | None = None,
    ):
        """Create the folder; write settings and environment. `on_epoch` gets rows instead of console output."""
        self._folder, self._interval, self._is_main = folder, config.logging.interval, is_main
        self._on_epoch = on_epoch
        speaks = is_main and on_epoch is None
        self._console = Console(quiet=not speaks)
        self._curves: list[Curves] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not speaks or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("update", total=total_updates, status="")
        self._since, self._images_since, self._update = time.perf_counter(), 0, 0
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / SETTINGS_FILE, to_yaml(config))
        write_atomically(folder / "environment.json", json.dumps(_environment(), indent=2) + "\n")
        if config.logging.tensorboard:
            self._curves += self._tensorboard()
        if config.logging.wandb:
            self._curves.append(_weights_and_biases(folder, config))

    def __enter__(self) -> RunReport:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        for curves in self._curves:
            curves.close()

    def say(self, line: str) -> None:
        """Print a line on the console."""
        text = "\n".join(map(printable, line.split("\n")))  # it may name files
        self._console.print(text, highlight=False, markup=False)

    def update_done(self, update: int, epoch: int, images: int, loss: float, lr: float) -> None:
        """Report an update of some images, over all ranks. Some become a line of the log and a point of the curves."""
        self._images_since += images
        self._update = update
        if update % self._interval:
            self._progress.update(self._task, completed=update)
            return
        now = time.perf_counter()
        speed = self._images_since / max(now - self._since, 1e-9)
        self._since, self._images_since = now, 0
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if torch.cuda.is_available() else ""
        status = f"epoch {epoch + 1}, loss {loss:.4f}, lr {lr:.2e}, {speed:,.0f} images/s{memory}"
        self._progress.update(self._task, completed=update, status=status)
        if not self._console.is_terminal:
            self.say(f"update {update}: {status}")
        self._draw({"train/loss": loss, "train/lr": lr, "train/images_per_second": speed})

    def epoch_done(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write summary.csv and print its last row."""
        row = rows[-1]
        # Zeros and NaN are in the file, but not on the console.
        self.say(
            ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
                if (not math.isnan(value) if isinstance(value, float) else value != 0)
            )
        )
        if not self._is_main:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._folder / SUMMARY, text.getvalue())
        self._draw({f"epoch/{key}": value for key, value in row.items() if isinstance(value, float)})
        if self._on_epoch is not None:
            self._on_epoch(row)

    def _draw(self, values: Mapping[str, float]) -> None:
        for curves in self._curves:
            curves.add(values, self._update)

    def _tensorboard(self) -> list[Curves]:
        try:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self._folder / CURVES))
        except ImportError:
            self.say(f"no curves for TensorBoard: it is not installed ({install_command('train')})")
            return []
        except UnicodeError:
            self.say("no curves for TensorBoard: it needs a folder whose name is UTF-8")
            return []

        def add(values: Mapping[str, float], update: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, update)

        return [Curves(add, writer.close)]


def _weights_and_biases(folder: Path, config: TrainConfig) -> Curves:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = f"expected Weights & Biases to be installed ({install_command('wandb')}), or false"
        raise ConfigError([Problem("logging.wandb", message)]) from error
    # One curve per run folder: a resumed run continues its own.
    run: Any = wandb.init(
        project=config.logging.wandb_project, name=folder.name, id=folder.name, resume="allow", dir=str(folder),
        config=to_mapping(config),
    )  # fmt: skip
    return Curves(lambda values, update: run.log(dict(values), step=update), run.finish)


def _environment() -> dict[str, Any]:
    try:
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": platform.platform(),
        "commit": commit,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
