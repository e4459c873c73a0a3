"""Check image and label map pairs before the first step, and repair them on request.

No repair is silent and no file is changed: a repair applies to what this run uses, and the report says what was done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from inline_attention.data.findings import DataReport, Findings
from inline_attention.data.images import READERS, ImageError, image_size
from inline_attention.data.segmentation.files import (
    ColoredMapError,
    FoundPairs,
    Pair,
    find_class_file,
    find_pair_folders,
    find_pairs,
    read_class_names,
    read_label_map,
)
from inline_attention.data.segmentation.source import IGNORED, LabelRules, SegmentationSource
from inline_attention.data.sources import DataError
from inline_attention.support.text import printable

SHAPE_TOLERANCE = 0.01  # relative difference of aspect ratios up to which a map shows the same as its image


@dataclass(frozen=True)
class CheckedPairs:
    """Images with maps, repaired if that was asked for, and what was found wrong with them.

    Attributes:
        source: None if there are faults and they were not to be repaired, or cannot be.
    """

    source: SegmentationSource | None
    report: DataReport


def check_pairs(
    found: FoundPairs,
    location: str,
    class_names: Sequence[str],
    rules: LabelRules,
    *,
    every_class: bool = True,
    repair: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> CheckedPairs:
    """Check all pairs: every map in full, every image by the first bytes of its file.

    Args:
        found: The files.
        location: Where they are, for messages.
        class_names: Name of each class.
        rules: How numbers in files become labels; what they forbid is a fault.
        every_class: Whether each class needs a pixel, as it does to be learned; in validation data it does not.
        repair: Return what can be used after repairing; nothing, if no pixel is labeled.
        on_progress: Called after each pair.
    """
    findings = Findings()
    for path in found.images_alone:
        findings.add("images without a label map", str(path), repair="left out")
    for path in found.maps_alone:
        findings.add("label maps without an image", str(path), repair="left out")
    for path in found.ambiguous:
        findings.add("files that differ from another in their suffix alone", str(path), repair="left out")
    kept: list[Pair] = []
    seen = np.zeros(len(class_names), dtype=bool)
    with ThreadPoolExecutor(READERS) as executor:
        for pair, read in zip(found.pairs, executor.map(lambda pair: _read(pair, rules), found.pairs), strict=True):
            if _usable(pair, read, rules, findings):
                kept.append(pair)
                seen[[label for label in read.labels if label < len(seen)]] = True
            if on_progress is not None:
                on_progress()
    if every_class:
        for label in np.flatnonzero(~seen).tolist():
            findings.add(
                "classes without a pixel",
                f"{class_names[label]} ({label})",
                repair="kept, so that labels stay the same; nothing will be learned of them",
            )
    unlabeled = bool(kept) and not seen.any()
    if unlabeled:
        for pair in kept:
            findings.add(
                "maps without a labeled pixel, and there are no others",
                str(pair.label_map),
                repair="not possible; label them, or correct the list of classes or reduce_zero_label",
            )
    report = findings.report(location, f"{len(found.pairs):,} pairs", repaired=repair and not unlabeled)
    if report.problems:
        return CheckedPairs(None, report)
    if repair:
        rules = replace(rules, outside_ignored=True, resize=True)
    return CheckedPairs(SegmentationSource(location, class_names, kept, rules), report)


@dataclass(frozen=True)
class _Read:
    """Facts about one pair.

    Attributes:
        error: Why a file cannot be used; None if both can.
        image_size: (height, width) in pixels.
        map_size: (height, width) in pixels.
        labels: Labels of the map, without those ignored.
        outside: Numbers in the file that are no label.
    """

    error: ImageError | None = None
    image_size: tuple[int, int] = (0, 0)
    map_size: tuple[int, int] = (0, 0)
    labels: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()


def _read(pair: Pair, rules: LabelRules) -> _Read:
    try:
        size = image_size(pair.image)
        values = read_label_map(pair.label_map)
    except ImageError as error:
        return _Read(error)
    numbers = np.unique(values)
    labels = rules.labels(numbers)
    return _Read(
        image_size=size,
        map_size=(values.shape[0], values.shape[1]),
        labels=tuple(int(label) for label in labels if 0 <= label != IGNORED),
        outside=tuple(int(number) for number in numbers[labels < 0]),
    )


def _usable(pair: Pair, read: _Read, rules: LabelRules, findings: Findings) -> bool:
    if read.error is not None:
        colors = isinstance(read.error, ColoredMapError)
        fault = "maps of colors instead of labels" if colors else "files that cannot be read"
        findings.add(fault, str(read.error), repair="left out")
        return False
    if read.map_size != read.image_size:
        (height, width), (map_height, map_width) = read.image_size, read.map_size
        detail = f"{pair.label_map}: {map_width}×{map_height} for an image of {width}×{height}"
        if abs(height * map_width / (width * map_height) - 1) > SHAPE_TOLERANCE:
            findings.add("maps of another shape than their image", detail, repair="left out")
            return False
        findings.add("maps of another size than their image", detail, repair="brought to the image's size")
    if read.outside:
        numbers = ", ".join(map(str, read.outside[:3])) + (", …" if len(read.outside) > 3 else "")
        counted_from_one = read.outside == (rules.num_classes,) and not rules.reduce_zero_label
        hint = (
            "; or set reduce_zero_label (--reduce-zero-label), if files count classes from 1, as scenes and ADE20K do"
            if counted_from_one
            else ""
        )
        findings.add(
            "maps with labels outside of the list of classes",
            f"{pair.label_map}: {numbers}",
            repair=f"those pixels ignored{hint}",
        )
    return True


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
        image_folder: Folder of images below `data_dir` (see `find_pair_folders`).
        map_folder: Folder of label maps below `data_dir`.
        reduce_zero_label: Whether 0 means "other" (see `LabelRules`), as in ADE20K and in scenes.
        num_classes: Classes that the model knows; None if it follows the data.
        repair: Repair what can be repaired in what is used; the files stay as they are.
        allow_outside: Accept folders that are not below `data_dir`.
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
                    f"{folders[0]} has the images of {train_split!r} and of {validation_split!r}: what is trained on "
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
