"""What a run writes for people: progress on the console, summary.csv, args.yaml, environment.json, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inline_attention.engine.config import TrainConfig, to_yaml
from inline_attention.engine.durable_files import unfinished, write_durably

SUMMARY = "summary.csv"


class RunReport:
    """The run's folder and console, in the main process; in others it says and writes nothing."""

    def __init__(self, folder: Path, config: TrainConfig, *, is_main: bool, total_updates: int):
        """Write the settings and where they run.

        Args:
            folder: Of the run; made here.
            config: Its settings.
            is_main: Whether this process reports.
            total_updates: Of the whole run, for the time that remains.
        """
        self._folder, self._interval, self._is_main = folder, config.logging.interval, is_main
        self._console = Console(quiet=not is_main)
        self._board = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not is_main or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("update", total=total_updates, status="")
        self._since, self._images_since = time.perf_counter(), 0
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "args.yaml", to_yaml(config))
        _replace(folder / "environment.json", json.dumps(_environment(), indent=2) + "\n")
        if config.logging.tensorboard:
            self._board = _open_board(folder / "tensorboard", self.say)

    def __enter__(self) -> RunReport:
        """Start the progress display."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._progress.stop()
        if self._board is not None:
            self._board.close()

    def say(self, line: str) -> None:
        """A line on the console."""
        self._console.print(line, highlight=False, markup=False)

    def update_done(self, update: int, epoch: int, images: int, loss: float, lr: float) -> None:
        """One update; every so many of them are a line of the log and a point of the curves.

        Args:
            update: Updates done since the start of training.
            epoch: From 0.
            images: Images of this update, over all processes.
            loss: Of this update.
            lr: Learning rate it was made with.
        """
        self._images_since += images
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
        if self._board is not None:
            for name, value in (("loss", loss), ("lr", lr), ("images_per_second", speed)):
                self._board.add_scalar(f"train/{name}", value, update)

    def epoch_done(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table of all epochs so far; the last row is news."""
        row = rows[-1]
        parts = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
        self.say(", ".join(parts))
        if not self._is_main:
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _replace(self._folder / SUMMARY, text.getvalue())
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"epoch/{key}", value, row["epoch"])


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, over the one from before."""
    fresh = unfinished(path)
    write_durably(fresh, text.encode())
    fresh.replace(path)


def _open_board(folder: Path, say: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no curves for TensorBoard: it is not installed (pip install tensorboard)")
        return None
    return SummaryWriter(str(folder))


def _environment() -> dict[str, Any]:
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": platform.platform(),
        "commit": _git_commit(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
