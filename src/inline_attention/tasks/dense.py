"""What detectors and segmenters share: their metadata in files of weights, and their initial weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from inline_attention.data.batch import Normalize, Target, UnequalBatch
from inline_attention.data.findings import DataReport
from inline_attention.models.checkpoints import CheckpointError, CheckpointMismatchError, load_checkpoint
from inline_attention.models.described import (
    ModelDescriptionError,
    check_description,
    check_model_size,
    parse_class_names,
    parse_note,
)
from inline_attention.models.reading import Checkpoint
from inline_attention.support.settings import read_settings, settings_of
from inline_attention.support.text import printable, some_of
from inline_attention.tasks.pyramid import PyramidBackbone
from inline_attention.tasks.task import ModelChoice, UnusableDataError

Options = TypeVar("Options")
TASK = "task"  # entry of a file's metadata; files without it are of classifiers
BACKBONE_PREFIX = "backbone."
MODEL_PREFIX = "body.model."  # of the model inside a backbone


def initialize_from(model: nn.Module, backbone: PyramidBackbone, file: Checkpoint, task: str) -> str:
    """Load the weights of a file that fit the model.

    A file of the same task with the same heads is loaded completely, except for layers that depend on the number of
    classes if that differs. From all other files, such as those of classifiers, the backbone is loaded.

    Args:
        model: Model to initialize.
        backbone: Backbone of the model.
        file: Opened checkpoint.
        task: Task of the model.

    Returns:
        Description of the loaded weights.

    Raises:
        CheckpointMismatchError: If the weights do not fit.
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
    """Return the normalization with the backbone's mean and standard deviation."""
    described = resolve_data_config({}, model=backbone.model)
    return Normalize(described["mean"], described["std"])


@dataclass(frozen=True)
class TaskMetadata(Generic[Options]):
    """What the metadata of a detector's or segmenter's weights say, checked.

    Attributes:
        backbone: Name and arguments of the backbone.
        options: Options of the detector or segmenter.
        flip: Probability of a flip in training.
        flags: Further switches by name.
        class_names: Class names.
    """

    backbone: ModelChoice
    options: Options
    flip: float
    flags: dict[str, bool]
    class_names: list[str]


def task_metadata(
    task: str, backbone: ModelChoice, options: Any, class_names: Sequence[str], **others: Any
) -> dict[str, str]:
    """Return the metadata that `read_task_metadata` reads."""
    described = {"backbone": backbone.name, "backbone_arguments": dict(backbone.arguments)}
    return {
        TASK: task,
        "model": backbone.name,
        OPTIONS: json.dumps({**asdict(options), **described, **others}),
        CLASS_NAMES: json.dumps(list(class_names)),
    }


def read_task_metadata(
    file: Checkpoint, task: str, kind: type[Options], flags: Sequence[str] = ()
) -> TaskMetadata[Options]:
    """Read and check the metadata of a detector's or segmenter's weights.

    Args:
        file: File of weights.
        task: Task that it must be of.
        kind: Dataclass of the options.
        flags: Names of further switches.

    Raises:
        CheckpointError: If the file is of another task or version, or damaged, or a value is refused.
    """
    recorded = file.metadata.get(TASK, "classification")
    if recorded != task:
        message = f"{file.path} is of a model for {printable(recorded)[:60]}, not for {task}"
        raise CheckpointError(f"{message}; choose another file")
    content: dict[str, Any] | None = parse_note(file, OPTIONS, dict)
    class_names = parse_class_names(file)
    if content is None or class_names is None:
        raise CheckpointError(f"{file.path} does not say how its model was built; train it again")
    known = settings_of(kind)
    if differing := sorted(content.keys() ^ {*known, "flip", "backbone", "backbone_arguments", *flags}):
        raise CheckpointError(
            f"{file.path} is of another version of inline-attention: {printable(', '.join(differing[:3]))[:200]} is "
            "known to one of the two alone; use the version that wrote it"
        )
    try:
        name, arguments = check_description(content["backbone"], content["backbone_arguments"], file.weights)
        options = read_settings(kind, {key: content[key] for key in known})
        flip, switches = content["flip"], {key: content[key] for key in flags}
        if type(flip) not in (int, float) or not 0 <= flip <= 1:
            raise ValueError("flip must be a number from 0 to 1")
        if not all(type(value) is bool for value in switches.values()):
            raise ValueError(f"{' and '.join(flags)} must be true or false")
    except (ModelDescriptionError, ValueError) as error:
        raise CheckpointError(f"{file.path} describes a model that is refused: {error}") from error
    return TaskMetadata(ModelChoice(name, arguments), options, float(flip), switches, class_names)


def check_size(file: Checkpoint, build: Callable[[], nn.Module]) -> None:
    """Refuse a model that is far larger than the weights in its file, without allocating it.

    Raises:
        CheckpointError: If it is refused, or cannot be built.
    """
    try:
        with torch.device("meta"):
            model = build()
        check_model_size("model", model, file.weights)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{file.path} describes a model that cannot be built: {printable(error)[:300]}"
        ) from error


def notes_of(reports: Sequence[DataReport]) -> tuple[str, ...]:
    """Return the reports of repairs as notes."""
    return tuple(str(report) for report in reports if report)


def unusable(problems: Sequence[str], reports: Sequence[DataReport]) -> UnusableDataError:
    """Return the error of unusable data, with advice to repair if the reports have problems."""
    is_reported = any(report.problems for report in reports)
    advice = "--repair (data.repair=true) repairs what is marked so" if is_reported else None
    return UnusableDataError(problems, advice=advice)


class SumOfLosses:
    """Sum of the losses that a model returns by name."""

    def __init__(self, select: Callable[[Target], Any]):
        """Set up.

        Args:
            select: Returns the part of a target that the model needs.
        """
        self._select = select

    def __call__(self, runnable: nn.Module, batch: UnequalBatch) -> Tensor:
        """Return the loss of a batch."""
        losses: dict[str, Tensor] = runnable(batch.images, [self._select(target) for target in batch.targets])
        return torch.stack(list(losses.values())).sum()
