"""Which tasks look at which settings: one that would be without effect is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator

from inline_attention.engine.config.parsing import Problem, to_mapping
from inline_attention.engine.config.schema import TrainConfig
from inline_attention.engine.config.settings import shown

ALL = ("classification", "detection", "segmentation")
# The first entry that a setting's name begins with counts; what has none is for all.
USED_BY: dict[str, tuple[str, ...]] = {
    "augmentation.hflip": ALL,
    "augmentation.": ("classification",),
    "data.allow_outside_files": ("detection", "segmentation"),
    "data.class_map": ("classification", "segmentation"),
    "data.crop_pct": ("classification",),
    "data.image_folder": ("segmentation",),
    "data.in_memory": ("classification",),
    "data.map_folder": ("segmentation",),
    "data.reduce_zero_label": ("segmentation",),
    "data.repair": ("detection", "segmentation"),
    "detection.": ("detection",),
    "loss.": ("classification",),
    "model.in_chans": ("classification",),
    "optimizer.layer_decay": ("classification",),
    "segmentation.": ("segmentation",),
    "training.compile": ("classification",),
}


def check_relevance(config: TrainConfig) -> Iterator[Problem]:
    """Settings that have been changed, and that the task does not look at."""
    given, defaults, task = to_mapping(config), to_mapping(TrainConfig()), config.task.name
    for section, values in given.items():
        for name, value in values.items():
            path = f"{section}.{name}"
            tasks = next((tasks for prefix, tasks in USED_BY.items() if path.startswith(prefix)), ALL)
            if task not in tasks and value != defaults[section][name]:
                message = f"has no effect on {task}, only on {' and '.join(tasks)}, got {shown(value)}"
                yield Problem(path, f"{message}; leave it out")
