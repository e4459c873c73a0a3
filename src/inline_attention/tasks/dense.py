"""What the tasks with a backbone inside their model share: how they are described in files, and built again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from inline_attention.data.batch import Normalize
from inline_attention.data.findings import DataReport
from inline_attention.data.unequal_batch import Target, UnequalBatch
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.described import (
    ModelDescriptionError,
    check_description,
    parse_class_names,
    parse_note,
)
from inline_attention.models.reading import Checkpoint
from inline_attention.tasks.pyramid import PyramidBackbone
from inline_attention.tasks.task import UnusableDataError
from inline_attention.tasks.weights import TASK

OPTIONS = "task_options"
CLASS_NAMES = "class_names"


def normalization(backbone: PyramidBackbone) -> Normalize:
    """By the mean and deviation that the backbone is used to."""
    described = resolve_data_config({}, model=backbone.model)
    return Normalize(described["mean"], described["std"])


def describe(task: str, model: str, options: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, str]:
    """What a file of weights says of itself."""
    return {
        TASK: task,
        "model": model,
        OPTIONS: json.dumps(dict(options)),
        CLASS_NAMES: json.dumps(list(class_names)),
    }


def described_in(file: Checkpoint, task: str, expected: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The options and the names of classes that `describe` wrote.

    Args:
        file: Of weights.
        task: That it must be of.
        expected: Names of the options.

    Raises:
        CheckpointError: If the file is of another task, of another version, or damaged, or its backbone is refused.
    """
    if file.metadata.get(TASK) != task:
        recorded = file.metadata.get(TASK, "classification")
        raise CheckpointError(f"{file.path} is of a model for {recorded}, not for {task}; choose another file")
    options, names = parse_note(file, OPTIONS, dict), parse_class_names(file)
    if options is None or names is None:
        raise CheckpointError(f"{file.path} does not say how its model was built; train it again")
    if differing := sorted(set(cast("dict[str, Any]", options)) ^ set(expected)):
        raise CheckpointError(
            f"{file.path} is of another version of inline-attention: {', '.join(differing[:3])} is known to one of the "
            "two alone; use the version that wrote it"
        )
    try:
        options["backbone"], options["backbone_arguments"] = check_description(
            options["backbone"], options["backbone_arguments"], file.weights
        )
    except ModelDescriptionError as error:
        raise CheckpointError(f"{file.path} describes a backbone that is refused: {error}") from error
    return options, names


def notes_of(reports: Sequence[DataReport]) -> tuple[str, ...]:
    """What was repaired."""
    return tuple(str(report) for report in reports if report)


def unusable(problems: Sequence[str], reports: Sequence[DataReport]) -> UnusableDataError:
    """The error of data with these problems; with advice, where some are in the reports, which say how to repair."""
    is_reported = any(report.problems for report in reports)
    advice = "--repair (data.repair=true) does what is said of repairing" if is_reported else None
    return UnusableDataError(problems, advice=advice)


class SumOfLosses:
    """The objective of models that return their losses by name."""

    def __init__(self, select: Callable[[Target], Any]):
        """Choose.

        Args:
            select: What the model wants of each target.
        """
        self._select = select

    def __call__(self, runnable: nn.Module, batch: UnequalBatch) -> Tensor:
        """Sum of the losses of a batch."""
        losses: dict[str, Tensor] = runnable(batch.images, [self._select(target) for target in batch.targets])
        return torch.stack(list(losses.values())).sum()
