"""Both splits of a COCO dataset, opened and checked: all that is wrong with them is said at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from inline_attention.data.coco.annotations import (
    CocoAnnotations,
    find_annotation_file,
    find_image_folder,
    read_annotations,
)
from inline_attention.data.coco.checks import check_annotations, check_same_categories
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.findings import DataReport
from inline_attention.data.sources import DataError


@dataclass(frozen=True)
class OpenedCoco:
    """Training and validation data, as far as they could be opened, and all that is wrong with them.

    Attributes:
        train: Images to train on, without crowds and without images that show no object.
        validation: All images to validate on.
        validation_annotations: What predictions on them are measured against, crowds included.
        reports: One for each split that could be checked.
        problems: One sentence each; faults that were repaired are in the reports alone.
    """

    train: CocoSource | None
    validation: CocoSource | None
    validation_annotations: CocoAnnotations | None
    reports: list[DataReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def open_and_check_coco(
    data_dir: str | os.PathLike[str],
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    masks: bool = True,
    num_classes: int | None = None,
    repair: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> OpenedCoco:
    """Open `data_dir/annotations/instances_*.json` and the pictures they are about, and check both.

    Args:
        data_dir: Folder of the dataset.
        train_split: Such as "train" or "train2017".
        validation_split: Such as "validation", "val" or "val2017".
        masks: Whether masks are used.
        num_classes: Categories that the model knows; None if it follows the data.
        repair: Repair what can be repaired in what is used; the files stay as they are.
        on_progress: Called after each image.
    """
    problems: list[str] = []
    reports: list[DataReport] = []
    annotations: dict[str, CocoAnnotations] = {}
    sources: dict[str, CocoSource] = {}
    for split in (train_split, validation_split):
        training = split == train_split
        try:
            read = read_annotations(find_annotation_file(data_dir, split))
            folder = find_image_folder(data_dir, read, split)
            checked = check_annotations(
                read, folder, masks=masks, every_category=training, repair=repair, on_progress=on_progress
            )
            reports.append(checked.report)
            problems += checked.report.problems
            annotations[split] = checked.annotations
            if not checked.report.problems:
                sources[split] = CocoSource(checked.annotations, folder, masks=masks, skip_empty=training)
        except DataError as error:
            problems.append(str(error))
    train, validation = annotations.get(train_split), annotations.get(validation_split)
    if train is not None and validation is not None:
        problems += check_same_categories(train, validation)
    if train is not None and num_classes is not None and num_classes != len(train.class_names):
        count = len(train.class_names)
        problems.append(f"{train.location} has {count} categories, the model {num_classes}; use num_classes={count}")
    return OpenedCoco(sources.get(train_split), sources.get(validation_split), validation, reports, problems)
