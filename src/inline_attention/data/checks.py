"""Check data before the first step, and report all problems at once.

Each check returns a list of problems, one sentence each with what to do; an empty list is good news.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import numpy as np

from inline_attention.data.datasets import open_dataset
from inline_attention.data.findings import OpenedSplits, each_once
from inline_attention.data.images import ImageError
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.support.text import some_of

NAMED = 5  # classes listed in a message


OpenedData = OpenedSplits[ImageSource]


def open_and_check(
    dataset: str,
    data_dir: str | os.PathLike[str] | None,
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    num_classes: int | None = None,
) -> OpenedData:
    """Open both splits of a dataset and check them.

    Args:
        dataset: Dataset name (see `open_dataset`).
        data_dir: Folder of the dataset.
        train_split: Split to train on.
        validation_split: Split to validate on; its classes are numbered as those of the training data.
        num_classes: Classes of the model; None if it follows the data.
    """
    problems: list[str] = []
    sources: list[ImageSource | None] = []
    for split in (train_split, validation_split):
        try:
            sources.append(open_dataset(dataset, data_dir, split))
        except DataError as error:
            sources.append(None)
            problems.append(str(error))
    train, validation = sources
    if train is not None:
        problems += check_labels(train, num_classes) + check_readable(train)
    if train is not None and validation is not None:
        differences = check_same_classes(train, validation)
        wrong_labels = check_labels(validation, None)
        problems += differences + wrong_labels
        if train.location == validation.location and dataset != "digits":
            problems.append(
                f"training and validation data are the same, {train.location}; put images that are not trained on "
                "into a folder val beside train"
            )
        elif not (differences or wrong_labels):
            validation = validation.with_classes(train.class_names)
    if validation is not None:
        problems += check_readable(validation)
    return OpenedData(train, validation, each_once(problems))


def check_labels(source: ImageSource, num_classes: int | None) -> list[str]:
    """Empty classes, class numbers out of range, and the number of classes against the model's."""
    problems: list[str] = []
    if source.empty_classes:
        empty = _listed(source.empty_classes, "empty class")
        problems.append(f"{source.location}: {empty}; add images or remove the folder")
    counted = len(source.class_names)
    wrong = np.flatnonzero((source.targets < 0) | (source.targets >= counted))
    if len(wrong):
        first = int(wrong[0])
        problems.append(
            f"{source.location}: {len(wrong)} samples have a class out of 0 to {counted - 1}, such as "
            f"{source.name(first)} with {source.targets[first]}; correct or remove them"
        )
    if num_classes is not None and num_classes != counted:
        problems.append(f"{source.location} has {counted} classes, the model {num_classes}; use num_classes={counted}")
    return problems


def check_same_classes(train: ImageSource, validation: ImageSource) -> list[str]:
    """Classes that only one of them has."""
    problems: list[str] = []
    for one, other in ((train, validation), (validation, train)):
        known = set(other.class_names)
        if only := [name for name in one.class_names if name not in known]:
            classes = f"{_listed(only, 'class')} of {one.location} not in {other.location}"
            problems.append(f"{classes}; training and validation data need the same classes")
    return problems


def check_readable(source: ImageSource, sample: int = 16) -> list[str]:
    """Report if none of a few images, chosen by a fixed seed, can be read."""
    chosen = random.Random(derived_seed("check", len(source))).sample(range(len(source)), min(sample, len(source)))
    reasons: list[str] = []
    for index in chosen:
        try:
            source.load(index)
        except ImageError as error:
            reasons.append(str(error))
        else:
            return []
    if not reasons:
        return [f"{source.location} is empty; add images"]
    return [f"{source.location}: none of {len(reasons)} images tried can be read; {reasons[0]}"]


def _listed(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'es' if len(names) > 1 else ''} ({some_of(map(repr, names), NAMED)})"
