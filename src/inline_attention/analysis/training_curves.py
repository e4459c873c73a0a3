"""What runs of `inline train` have written about their epochs, read back for pictures and reports."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inline_attention.engine.config import ConfigError, TrainConfig, read_config
from inline_attention.engine.reporting import SUMMARY
from inline_attention.support.files import read_bounded
from inline_attention.support.text import printable

SETTINGS = "args.yaml"
MAX_SUMMARY_BYTES = 2**25


class RunFolderError(ValueError):
    """A folder is not that of a run, or the run has written nothing to draw yet."""


@dataclass(frozen=True)
class EpochFigures:
    """One row of a run's summary.csv. What was not measured in that epoch, or was not finite, is None.

    Attributes:
        epoch: From 1.
        train_loss: Mean over the epoch's updates, in training mode and with augmentation.
        validation_loss: After the epoch.
        top1: Percent of the validation images, after the epoch.
        averaged_top1: As `top1`, of the averaged weights.
    """

    epoch: int
    train_loss: float | None
    validation_loss: float | None
    top1: float | None
    averaged_top1: float | None


@dataclass(frozen=True)
class TrainingCurves:
    """A run, epoch by epoch.

    Attributes:
        label: What it is called in pictures.
        model_name: The model it trains.
        dataset: As its settings name it.
        planned_epochs: Those of its settings; the run may have fewer, being stopped or still under way.
        epochs: What it has written, in order.
    """

    label: str
    model_name: str
    dataset: str
    planned_epochs: int
    epochs: tuple[EpochFigures, ...]


def read_training_curves(folders: Sequence[Path]) -> list[TrainingCurves]:
    """Read runs; each is labelled by its model, or by its folder where several are of one model.

    Args:
        folders: Of runs, as `inline train` makes them.

    Raises:
        RunFolderError: If one of them is no run, or has not finished an epoch.
    """
    settings = [_read_settings(folder) for folder in folders]
    names = [config.model.name for config in settings]
    return [
        TrainingCurves(
            label=printable(config.model.name if names.count(config.model.name) == 1 else folder.resolve().name),
            model_name=config.model.name,
            dataset=config.data.dataset,
            planned_epochs=config.training.epochs + config.schedule.cooldown_epochs,
            epochs=_read_epochs(folder / SUMMARY),
        )
        for folder, config in zip(folders, settings, strict=True)
    ]


def _read_settings(folder: Path) -> TrainConfig:
    try:
        return read_config(folder / SETTINGS)
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunFolderError(
            f"{folder} is not the folder of a run, or an older version's ({SETTINGS}: {reason}); expected one that "
            "`inline train` made"
        ) from error


def _read_epochs(path: Path) -> tuple[EpochFigures, ...]:
    try:
        text = read_bounded(path, MAX_SUMMARY_BYTES).decode()
        rows = [_figures(row) for row in csv.DictReader(io.StringIO(text, newline=""))]
    except FileNotFoundError:
        rows = []
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RunFolderError(f"{path} cannot be read as a table of epochs ({error}); was it edited?") from error
    if not rows:
        raise RunFolderError(f"the run in {path.parent} has not finished an epoch yet; try again when it has")
    return tuple(rows)


def _figures(row: Mapping[str, str]) -> EpochFigures:
    return EpochFigures(
        epoch=int(row["epoch"]),
        train_loss=_number(row["train_loss"]),
        validation_loss=_number(row.get("val_loss")),
        top1=_number(row.get("top1")),
        averaged_top1=_number(row.get("ema_top1")),
    )


def _number(text: str | None) -> float | None:
    value = float(text) if text else None
    return value if value is not None and math.isfinite(value) else None
