"""Train the runs of a comparison, or resume them: one after the other, or several at a time in their own processes.

Two small files are added to the folder of a run: `timing.json` is updated every epoch, so that a stopped run keeps its
time; `outcome.json` says that the run is finished, and is all that a table needs: the checkpoints may be removed.

    python -m inline_attention.ablation.runs SETTINGS.yaml [--alone]

trains one run. `--alone` says that no other run shares the machine, so that its speed is recorded.
"""

from __future__ import annotations

import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from inline_attention.ablation.grid import Cell
from inline_attention.ablation.tables import AblationResult, RunOutcome, summarize
from inline_attention.analysis.training_curves import SETTINGS, read_training_curves
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.engine.config import TrainConfig, read_config, resolve, to_mapping, to_yaml
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.train import open_sources, train
from inline_attention.engine.trainer import DivergedError
from inline_attention.support.files import read_bounded, write_atomically
from inline_attention.support.untrusted import MAX_TEXT_BYTES, build_dataclass, parse_json

Content = TypeVar("Content")

MODULE = "inline_attention.ablation.runs"
TIMING, OUTCOME = "timing.json", "outcome.json"
# Settings that may change between two attempts at one run: where things are, not what is done.
INCIDENTAL = ("run.", "logging.", "checkpoints.", "distributed.", "data.dir", "data.workers")


class UnusableRunError(ValueError):
    """A folder holds a run with other settings, or with files that cannot be read."""


def finish_run(
    config: TrainConfig,
    *,
    stop_at: float = math.inf,
    on_epoch: Callable[[Mapping[str, Any]], None] = lambda _: None,
    is_alone: bool = True,
) -> RunOutcome:
    """Train to the end or resume; do nothing if the run is finished. `on_epoch` gets each row of summary.csv.

    After the time `stop_at` of `time.monotonic`, the run is saved and stopped at the end of an epoch. The speed is
    recorded if the run `is_alone`: no other run shares the machine.

    Raises:
        UnusableRunError: If the folder holds a run with other settings.
        ConfigError: With all that is wrong with settings or data.
        InterruptedBySignalError: After SIGTERM, SIGINT or `stop_at`, and a last checkpoint.
    """
    folder = run_folder(config)
    if (outcome := read_outcome(config)) is not None:
        return outcome
    if config.training.compile:
        torch.compiler.reset()  # code of earlier runs counts toward the recompilation limit
    clock = _Clock(folder / TIMING)

    def epoch_done(row: Mapping[str, Any]) -> None:
        clock.note_epoch(row["epoch"])
        on_epoch(row)
        if time.monotonic() > stop_at:
            signal.raise_signal(signal.SIGTERM)  # the engine saves, then stops

    top1, failure = None, ""
    try:
        train(replace(config, run=replace(config.run, resume="auto")), on_epoch=epoch_done)
        (curves,) = read_training_curves([folder])
        top1 = curves.epochs[-1].best_known_top1
        failure = "its last epoch has no top-1" if top1 is None else ""
    except DivergedError as error:
        failure = f"diverged: {str(error).partition(';')[0]}"
    finally:
        clock.write()
    outcome = RunOutcome(
        top1=top1,
        epochs=config.training.epochs,
        seconds=clock.seconds,
        images_per_second=_images_per_second(config, clock.epoch_seconds) if is_alone else None,
        environment=describe_environment(),
        failure=failure,
    )
    write_json(folder / OUTCOME, asdict(outcome))
    return outcome


def read_outcome(config: TrainConfig) -> RunOutcome | None:
    """Return the outcome of a finished run, else None; `UnusableRunError` if its folder's run has other settings."""
    folder = run_folder(config)
    if (folder / SETTINGS).is_file() and (differences := _differences(read_config(folder / SETTINGS), config)):
        raise UnusableRunError(
            f"{folder} holds a run with other settings ({'; '.join(differences[:3])}); choose another folder, or "
            "remove that one"
        )
    path = folder / OUTCOME
    return _read_file(path, RunOutcome) if path.exists() else None


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of the run."""
    assert config.run.experiment is not None, "a run of a comparison has a name"
    return Path(config.run.output) / config.run.experiment


def _read_file(path: Path, kind: type[Content]) -> Content:
    try:
        return build_dataclass(kind, parse_json(read_bounded(path, MAX_TEXT_BYTES)))
    except (OSError, ValueError) as error:
        raise UnusableRunError(f"{path} cannot be read ({error}); remove it, or choose another folder") from error


@dataclass(frozen=True)
class _Timing:
    seconds: float
    epoch_seconds: dict[str, float]


class _Clock:
    """Seconds of a run and of its epochs, kept in a file across attempts."""

    def __init__(self, path: Path):
        earlier = _read_file(path, _Timing) if path.exists() else _Timing(0.0, {})
        self._path, self.epoch_seconds = path, earlier.epoch_seconds
        self._start = time.perf_counter() - earlier.seconds
        self._last_end: float | None = None  # the first epoch of an attempt includes loading and compiling

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def note_epoch(self, epoch: int) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            self.epoch_seconds[str(epoch)] = now - self._last_end
        self._last_end = now
        self.write()

    def write(self) -> None:
        if self._path.parent.is_dir():  # refused settings create no folder
            write_json(self._path, asdict(_Timing(self.seconds, self.epoch_seconds)))


def _images_per_second(config: TrainConfig, epoch_seconds: Mapping[str, float]) -> float | None:
    if not epoch_seconds or statistics.median(epoch_seconds.values()) <= 0:  # of a file that someone has changed
        return None
    batch = resolve(config).total_batch_size
    images = len(open_sources(config).train) // batch * batch  # full batches only
    return images / statistics.median(epoch_seconds.values())


def _differences(earlier: TrainConfig, now: TrainConfig) -> list[str]:
    old = to_mapping(earlier)
    return [
        f"{section}.{name} was {old[section][name]}, now {value}"
        for section, fields in to_mapping(now).items()
        for name, value in fields.items()
        if not f"{section}.{name}".startswith(INCIDENTAL) and old[section][name] != value
    ]


class FinishedRun(NamedTuple):
    """The run of a cell with one seed, and its outcome."""

    cell: Cell
    seed: int
    outcome: RunOutcome


def _runs(cells: Sequence[Cell], seeds: Sequence[int], output: Path) -> Iterator[tuple[Cell, int, TrainConfig]]:
    """Yield all cells with one seed, then with the next, so that a partial grid is a fair comparison."""
    for seed in seeds:
        for cell in cells:
            if cell.problem is None:
                yield cell, seed, cell.run(str(output), seed)


def train_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    output: Path,
    *,
    stop_at: float = math.inf,
    on_epoch: Callable[[Cell, int, Mapping[str, Any]], None] = lambda *_: None,
) -> Iterator[FinishedRun]:
    """Train each cell that can be trained with every seed, in folders below `output`; finished runs are not repeated.

    `on_epoch` gets cell, seed and each row of summary.csv. After the time `stop_at` no run is started, and the current
    one is stopped. Raises what `finish_run` raises; the same call resumes.
    """
    for cell, seed, config in _runs(cells, seeds, output):
        if time.monotonic() > stop_at and read_outcome(config) is None:
            return
        yield FinishedRun(cell, seed, finish_run(config, stop_at=stop_at, on_epoch=partial(on_epoch, cell, seed)))


def train_side_by_side(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    output: Path,
    *,
    at_once: int,
    time_limit: float | None = None,
    on_trouble: Callable[[str], None],
) -> Iterator[FinishedRun]:
    """Train like `train_cells`, but `at_once` runs at a time, each in its own process with a log in `output`.

    Speeds are recorded if that is 1. After `time_limit` seconds, runs are saved and stopped; the same call resumes.
    `on_trouble` is called with a message for each run that did not finish.
    """
    jobs: dict[Command, tuple[Cell, int, TrainConfig]] = {}
    for cell, seed, config in _runs(cells, seeds, output):
        if (outcome := read_outcome(config)) is not None:
            yield FinishedRun(cell, seed, outcome)
            continue
        command = run_command(f"{cell.label}, seed {seed}", config, is_alone=at_once == 1)
        jobs[command] = cell, seed, config
    for ended in run_side_by_side(list(jobs), at_once=at_once, time_limit=time_limit):
        cell, seed, config = jobs[ended.command]
        if (outcome := read_outcome(config)) is not None:
            yield FinishedRun(cell, seed, outcome)
        elif ended.outcome == "failed":
            on_trouble(f"{ended.command.name}: failed; the end of its output:\n{ended.command.last_lines()}")
        else:
            on_trouble(f"{ended.command.name}: {ended.outcome}: the time was up")


def run_command(name: str, config: TrainConfig, *, is_alone: bool) -> Command:
    """Write the settings beside the run's folder; return the command of a process that finishes the run."""
    settings = run_folder(config).with_suffix(".yaml")
    settings.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(settings, to_yaml(config))  # not through a link that is there
    arguments = (sys.executable, "-m", MODULE, str(settings), *(["--alone"] if is_alone else []))
    return Command(name, arguments, settings.with_suffix(".log"))


def collect(cells: Sequence[Cell], seeds: Sequence[int], output: Path) -> list[AblationResult]:
    """Return the results of each cell from the folders of its runs."""
    return [
        summarize(
            cell,
            {seed: found for _, seed, run in _runs([cell], seeds, output) if (found := read_outcome(run)) is not None},
        )
        for cell in cells
    ]


def main(settings: Path, *, is_alone: bool) -> int:
    """Train one run to the end, or resume it; return the exit code of the process."""
    try:
        finish_run(
            read_config(settings),
            is_alone=is_alone,
            on_epoch=lambda row: print(f"epoch {row['epoch']}, loss {row['train_loss']:.3f}", flush=True),
        )
    except InterruptedBySignalError as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_alone="--alone" in sys.argv[2:]))
