"""Both splits of a dataset for segmentation, opened and checked: all that is wrong with them is said at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from inline_attention.data.findings import DataReport
from inline_attention.data.segmentation.checks import check_pairs
from inline_attention.data.segmentation.classes import find_class_file, read_class_names
from inline_attention.data.segmentation.pairs import find_pair_folders, find_pairs
from inline_attention.data.segmentation.source import LabelRules, SegmentationSource
from inline_attention.data.sources import DataError
from inline_attention.support.text import printable


@dataclass(frozen=True)
class OpenedPairs:
    """Training and validation data, as far as they could be opened, and all that is wrong with them.

    Attributes:
        train: Pairs to train on.
        validation: Pairs to validate on.
        reports: One for each split that could be checked.
        problems: One sentence each; faults that were repaired are in the reports alone.
    """

    train: SegmentationSource | None
    validation: SegmentationSource | None
    reports: list[DataReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def open_and_check_pairs(
    data_dir: str | os.PathLike[str],
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    class_file: str | os.PathLike[str] | None = None,
    image_folder: str | None = None,
    map_folder: str | None = None,
    reduce_zero_label: bool = False,
    num_classes: int | None = None,
    repair: bool = False,
    allow_outside: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> OpenedPairs:
    """Open `data_dir/images/{training,validation}` and `data_dir/annotations/{training,validation}`, and check them.

    Args:
        data_dir: Folder of the dataset.
        train_split: Such as "train" or "training".
        validation_split: Such as "validation" or "val".
        class_file: Names of classes; one of the usual files in `data_dir`, if None.
        image_folder: As for `find_pair_folders`.
        map_folder: As for `find_pair_folders`.
        reduce_zero_label: As for `LabelRules`: True for ADE20K and for scenes.
        num_classes: Classes that the model knows; None if it follows the data.
        repair: Repair what can be repaired in what is used; the files stay as they are.
        allow_outside: As for `find_pair_folders`.
        on_progress: Called after each pair.
    """
    try:
        file = class_file if class_file is not None else find_class_file(data_dir)
        names = read_class_names(file, reduce_zero_label=reduce_zero_label)
        rules = LabelRules(len(names), reduce_zero_label=reduce_zero_label)
    except DataError as error:
        return OpenedPairs(None, None, problems=[str(error)])
    problems: list[str] = []
    if num_classes is not None and num_classes != len(names):
        problems.append(f"{data_dir} has {len(names)} classes, the model {num_classes}; use num_classes={len(names)}")
    reports: list[DataReport] = []
    sources: dict[bool, SegmentationSource | None] = {}
    seen: dict[tuple[Path, Path], str] = {}
    for split, is_for_training in ((train_split, True), (validation_split, False)):
        try:
            folders = find_pair_folders(data_dir, split, image_folder, map_folder, allow_outside=allow_outside)
            if seen.setdefault(folders, split) != split:
                raise DataError(
                    f"{folders[0]} has the pictures of {train_split!r} and of {validation_split!r}: what is trained on "
                    "measures nothing; name the split in image_folder and map_folder, such as images/{split}"
                )
            checked = check_pairs(
                find_pairs(*folders),
                f"{Path(data_dir)} ({split})",
                names,
                rules,
                every_class=is_for_training,
                repair=repair,
                on_progress=on_progress,
            )
        except DataError as error:
            problems.append(str(error))
            continue
        reports.append(checked.report)
        problems += checked.report.problems
        sources[is_for_training] = checked.source
    problems = [printable(problem) for problem in dict.fromkeys(problems)]  # once each: both may be the same split
    return OpenedPairs(sources.get(True), sources.get(False), reports, problems)
