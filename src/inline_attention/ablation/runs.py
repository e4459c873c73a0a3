"""One run of a comparison: trained, resumed, or recognised as finished, with what it cost.

The run's folder is the engine's. Two small files are added to it: `timing.json` grows with the epochs, so that a run
that was stopped still knows what it cost; `outcome.json` says that the run is over, and is all that a table needs: the
checkpoints may be removed.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from inline_attention.analysis.training_curves import SETTINGS, read_training_curves
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json
from inline_attention.engine.config import TrainConfig, read_config, resolve, to_mapping
from inline_attention.engine.train import open_sources, train
from inline_attention.engine.trainer import DivergedError
from inline_attention.support.files import read_bounded
from inline_attention.support.untrusted import MAX_TEXT_BYTES, UntrustedDataError, build_dataclass, parse_json

Content = TypeVar("Content")

TIMING, OUTCOME = "timing.json", "outcome.json"
# What may change between two attempts at one run without making it another: where things are, not what is done.
INCIDENTAL = ("run.", "logging.", "checkpoints.", "distributed.", "data.dir", "data.workers")


class UnusableRunError(ValueError):
    """A folder holds a run with other settings, or with files that cannot be read."""


@dataclass(frozen=True)
class RunOutcome:
    """What came of one run.

    Attributes:
        top1: Percent of the validation images after the last epoch, with averaged weights where there are any; None
            where there is no such figure, most of all because the run diverged.
        epochs: Those it was trained for.
        seconds: From settings to last checkpoint, over all attempts it took.
        images_per_second: Training images of an epoch over the median time from one epoch's end to the next, which
            holds an evaluation or a checkpoint only if most epochs do; None after a single epoch, and where other
            runs had a share of the machine.
        environment: Machine, versions, commit and date of the last attempt.
        failure: Why there is no figure; empty if there is one.
    """

    top1: float | None
    epochs: int
    seconds: float
    images_per_second: float | None
    environment: dict[str, str]
    failure: str = ""


def finish_run(
    config: TrainConfig,
    *,
    stop_at: float | None = None,
    on_epoch: Callable[[Mapping[str, Any]], None] | None = None,
    is_alone: bool = True,
) -> RunOutcome:
    """Train to the end, from wherever the run is; do nothing if it is over.

    Args:
        config: The settings; `run.experiment` names the folder under `run.output`.
        stop_at: Time on `time.monotonic`'s clock after which the run is stopped at the end of an epoch, and saved.
        on_epoch: Called with each row of summary.csv as it is written.
        is_alone: Whether no other run takes its share of the machine, so that its speed is worth noting.

    Raises:
        UnusableRunError: If the folder holds a run with other settings.
        ConfigError: With all that is wrong with settings or data.
        InterruptedBySignalError: After SIGTERM, SIGINT or `stop_at`, and a last checkpoint.
    """
    folder = run_folder(config)
    outcome = read_outcome(config)
    if outcome is not None:
        return outcome
    if config.training.compile:
        torch.compiler.reset()  # what was compiled for earlier runs counts against the limit after which nothing is
    clock = _Clock(folder)

    def epoch_done(row: Mapping[str, Any]) -> None:
        clock.note_epoch(row["epoch"])
        if on_epoch is not None:
            on_epoch(row)
        if stop_at is not None and time.monotonic() > stop_at:
            signal.raise_signal(signal.SIGTERM)  # the engine saves before it leaves

    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))
    failure = ""
    try:
        train(resumed, on_epoch=epoch_done)
    except DivergedError as error:
        # What to do about it, and where its checkpoints are, is no part of a table.
        failure = f"diverged: {str(error).partition(';')[0]}"
    finally:
        clock.stop()
    top1 = None if failure else _last_top1(folder)
    if top1 is None and not failure:
        failure = "its last epoch has no top-1, by which runs are compared"
    outcome = RunOutcome(
        top1=top1,
        epochs=config.training.epochs,
        seconds=clock.seconds,
        images_per_second=_images_per_second(config, clock) if is_alone else None,
        environment=describe_environment(),
        failure=failure,
    )
    write_json(folder / OUTCOME, dataclasses.asdict(outcome))
    return outcome


def read_outcome(config: TrainConfig) -> RunOutcome | None:
    """The outcome of a run that is over; None if it is not, or was never begun.

    Raises:
        UnusableRunError: If the folder holds a run with other settings, finished or not.
    """
    folder = run_folder(config)
    if (folder / SETTINGS).is_file():
        differences = list(_differences(read_config(folder / SETTINGS), config))
        if differences:
            raise UnusableRunError(
                f"{folder} holds a run with other settings ({'; '.join(differences[:3])}); choose another folder, or "
                "remove that one"
            )
    path = folder / OUTCOME
    return _read_file(path, RunOutcome) if path.exists() else None


def run_folder(config: TrainConfig) -> Path:
    """Where the run is, or will be."""
    assert config.run.experiment is not None, "a run of a comparison has a name"
    return Path(config.run.output) / config.run.experiment


def _read_file(path: Path, kind: type[Content]) -> Content:
    try:
        return build_dataclass(kind, parse_json(read_bounded(path, MAX_TEXT_BYTES)))
    except (OSError, UntrustedDataError, ValueError) as error:
        raise UnusableRunError(f"{path} cannot be read ({error}); remove it, or choose another folder") from error


@dataclass(frozen=True)
class _Timing:
    seconds: float
    epoch_seconds: dict[str, float]


class _Clock:
    """Seconds of a run and of its epochs, kept in its folder across attempts."""

    def __init__(self, folder: Path):
        self._path = folder / TIMING
        earlier = _read_file(self._path, _Timing) if self._path.exists() else _Timing(0.0, {})
        self.epoch_seconds = dict(earlier.epoch_seconds)
        self._seconds_before = earlier.seconds
        self._start = time.perf_counter()
        self._last_end: float | None = None  # an attempt's first epoch comes after decoding, compiling and loading

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._start

    def note_epoch(self, epoch: int) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            self.epoch_seconds[str(epoch)] = now - self._last_end
        self._last_end = now
        self._write()

    def stop(self) -> None:
        if self._path.parent.is_dir():  # settings that were refused have made no folder
            self._write()

    def _write(self) -> None:
        write_json(self._path, {"seconds": self.seconds, "epoch_seconds": self.epoch_seconds})


def _images_per_second(config: TrainConfig, clock: _Clock) -> float | None:
    if not clock.epoch_seconds:
        return None
    batch = resolve(config).total_batch_size
    images = len(open_sources(config).train) // batch * batch  # full batches only
    return images / statistics.median(clock.epoch_seconds.values())


def _last_top1(folder: Path) -> float | None:
    (curves,) = read_training_curves([folder])
    last = curves.epochs[-1]
    return last.top1 if last.averaged_top1 is None else last.averaged_top1


def _differences(earlier: TrainConfig, now: TrainConfig) -> Iterator[str]:
    old, new = to_mapping(earlier), to_mapping(now)
    for section, fields in new.items():
        for name, value in fields.items():
            path = f"{section}.{name}"
            if not path.startswith(INCIDENTAL) and old[section][name] != value:
                yield f"{path} was {old[section][name]}, now {value}"
