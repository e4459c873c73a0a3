"""The weights that a detector or a segmenter starts from: its backbone's from a classifier, or all of its own kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from inline_attention.models.checkpoints import CheckpointMismatchError, load_checkpoint
from inline_attention.models.reading import Checkpoint
from inline_attention.support.text import some_of
from inline_attention.tasks.pyramid import PyramidBackbone

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
