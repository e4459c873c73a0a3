"""What detectors and segmenters share: their metadata in files of weights, and their initial weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from inline_attention.data.batch import Normalize, Target, UnequalBatch
from inline_attention.data.findings import DataReport
from inline_attention.models.checkpoints import CheckpointError, CheckpointMismatchError, load_checkpoint
from inline_attention.models.described import (
    ModelDescriptionError,
    check_description,
    parse_class_names,
    parse_note,
)
from inline_attention.models.reading import Checkpoint
from inline_attention.support.text import some_of
from inline_attention.tasks.pyramid import PyramidBackbone
from inline_attention.tasks.task import UnusableDataError

TASK = "task"  # entry of a file's metadata; files without it are of classifiers
BACKBONE_PREFIX = "backbone."
MODEL_PREFIX = "body.model."  # of the model inside a backbone


def initialize_from(model: nn.Module, backbone: PyramidBackbone, file: Checkpoint, task: str) -> str:
    """Load what a file has for the model.

    Of a file of the same task and with the same heads everything is taken, and what depends on the number of classes
    left as it is where that differs. Of all others the backbone is: of classifiers that `inline train` or
    `inline convert` wrote, of the other task's, of another head or width.

    Args:
        model: Is changed.
        backbone: The one inside it.
        file: What `open_checkpoint` returned.
        task: What the model is for.

    Returns:
        What was taken, in words.

    Raises:
        CheckpointMismatchError: If the file is of something else.
    """
    recorded = file.metadata.get(TASK)
    if recorded == task and _has_heads_of(model, file):
        left_out = _load_all_but_other_classes(model, file)
        return f"all of {file.path}" + (f" but {left_out} tensors that go with its classes" if left_out else "")
    if recorded is None:
        _load_backbone(backbone, file)
    else:
        prefix = BACKBONE_PREFIX + MODEL_PREFIX
        inside = {name.removeprefix(prefix): value for name, value in file.weights.items() if name.startswith(prefix)}
        _load_backbone(backbone, replace(file, weights=inside))
    return f"the backbone of {file.path}; all else is random"


def _has_heads_of(model: nn.Module, file: Checkpoint) -> bool:
    """Whether all but the backbone is of one shape in both, the number of classes aside."""

    def heads(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        return {
            name: value.shape[1:]  # the first dimension of a head's last layer is what goes with the number of classes
            for name, value in weights.items()
            if not name.startswith(BACKBONE_PREFIX)
        }

    return heads(model.state_dict()) == heads(file.weights)


def _load_backbone(backbone: PyramidBackbone, file: Checkpoint) -> None:
    # Not strict: a classifier's head, and the norm before it, have no place in a backbone.
    _refuse_missing(file, load_checkpoint(backbone.model, file, strict=False).missing)


def _load_all_but_other_classes(model: nn.Module, file: Checkpoint) -> int:
    """Load what fits; how many tensors were left out."""
    own = model.state_dict()
    other_classes = {
        name
        for name, value in file.weights.items()
        if name in own and value.shape != own[name].shape and value.shape[1:] == own[name].shape[1:]
    }
    kept = {name: value for name, value in file.weights.items() if name not in other_classes}
    report = load_checkpoint(model, replace(file, weights=kept), strict=False)
    _refuse_missing(file, tuple(name for name in report.missing if name not in other_classes))
    return len(other_classes)


def _refuse_missing(file: Checkpoint, missing: tuple[str, ...]) -> None:
    if missing:
        raise CheckpointMismatchError(
            f"{file.path} lacks {len(missing)} weights of the model: {some_of(missing)}; it must be of the same model "
            "with the same arguments",
            missing,
        )


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
