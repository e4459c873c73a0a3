"""Both splits of a COCO dataset, opened and checked: all that is wrong with them is said at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inline_attention.data.coco.annotations import (
    CocoAnnotations,
    find_annotation_file,
    find_image_folder,
    read_annotations,
)
from inline_attention.data.coco.checks import check_annotations, check_same_categories
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.findings import DataReport
from inline_attention.data.listed_files import ListedFiles
from inline_attention.data.sources import DataError
from inline_attention.support.text import printable


@dataclass(frozen=True)
class OpenedCoco:
    """Training and validation data, as far as they could be opened, and all that is wrong with them.

    Attributes:
        train: Images to train on, without crowds and without images that show no object.
        validation: All images to validate on.
        validation_annotations: What predictions on them are measured against, crowds included.
        reports: One for each that could be checked.
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
    allow_outside: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> OpenedCoco:
    """Open `data_dir/annotations/instances_*.json` and the images they are about, and check both.

    Args:
        data_dir: Folder of the dataset.
        train_split: Such as "train" or "train2017".
        validation_split: Such as "validation", "val" or "val2017".
        masks: Whether masks are used.
        num_classes: Categories that the model knows; None if it follows the data.
        repair: Repair what can be repaired in what is used; the files stay as they are.
        allow_outside: Read images that the annotations name outside of `data_dir`.
        on_progress: Called after each image.
    """
    train, validation = (
        _open_split(
            data_dir,
            split,
            training=training,
            masks=masks,
            repair=repair,
            allow_outside=allow_outside,
            on_progress=on_progress,
        )
        for split, training in ((train_split, True), (validation_split, False))
    )
    problems = [*train.problems, *validation.problems]
    if train.annotations is not None and validation.annotations is not None:
        problems += check_same_categories(train.annotations, validation.annotations)
    if train.annotations is not None and num_classes not in (None, len(train.annotations.class_names)):
        count = len(train.annotations.class_names)
        problems.append(
            f"{train.annotations.location} has {count} categories, the model {num_classes}; use num_classes={count}"
        )
    reports = [split.report for split in (train, validation) if split.report is not None]
    problems = [printable(problem) for problem in dict.fromkeys(problems)]  # once each: both may be the same split
    return OpenedCoco(train.source, validation.source, validation.annotations, reports, problems)


@dataclass(frozen=True)
class _OpenedSplit:
    """One split in one role, as far as it could be opened."""

    annotations: CocoAnnotations | None = None
    source: CocoSource | None = None
    report: DataReport | None = None
    problems: Sequence[str] = ()


def _open_split(
    data_dir: str | os.PathLike[str],
    split: str,
    *,
    training: bool,
    masks: bool,
    repair: bool,
    allow_outside: bool,
    on_progress: Callable[[], None] | None,
) -> _OpenedSplit:
    """Open and check a split, to train on it (images with an object, which every category needs) or to validate."""
    try:
        read = read_annotations(find_annotation_file(data_dir, split))
        folder = find_image_folder(data_dir, read, split, allow_outside=allow_outside)
        files = ListedFiles(folder, data_dir, allow_outside=allow_outside)
        checked = check_annotations(
            read, files, masks=masks, every_category=training, repair=repair, on_progress=on_progress
        )
    except DataError as error:
        return _OpenedSplit(problems=[str(error)])
    opened = _OpenedSplit(checked.annotations, report=checked.report, problems=checked.report.problems)
    if opened.problems:
        return opened
    try:
        return replace(opened, source=CocoSource(checked.annotations, files, masks=masks, skip_empty=training))
    except DataError as error:
        return replace(opened, problems=[str(error)])
