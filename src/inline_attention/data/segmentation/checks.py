"""Check image and label map pairs before the first step, and repair them on request.

No repair is silent and no file is changed: a repair applies to what this run uses, and the report says what was done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inline_attention.data.findings import DataReport, OpenedSplits, each_once
from inline_attention.data.images import ImageError, image_size, read_in_threads
from inline_attention.data.segmentation.pairs import (
    ColoredMapError,
    LabelRules,
    Pair,
    SegmentationSource,
    find_class_file,
    find_pair_folders,
    find_pairs,
    read_class_names,
    read_label_map,
)
from inline_attention.data.sources import DataError

SHAPE_TOLERANCE = 0.01  # relative difference of aspect ratios up to which a map shows the same as its image
LEFT_OUT = "left out"


OpenedPairs = OpenedSplits[SegmentationSource]


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
        train_split: Name such as "train" or "training".
        validation_split: Name such as "validation" or "val".
        class_file: Names of classes; one of the usual files in `data_dir`, if None.
        image_folder: Folder of images below `data_dir` (see `find_pair_folders`).
        map_folder: Folder of label maps below `data_dir`.
        reduce_zero_label: Treat 0 as "other" (see `LabelRules`), as in ADE20K and in scenes.
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
        return OpenedPairs(None, None, [str(error)])
    problems: list[str] = []
    if num_classes not in (None, len(names)):
        problems.append(f"{data_dir} has {len(names)} classes, the model {num_classes}; use num_classes={len(names)}")
    reports: list[DataReport] = []
    sources: dict[bool, SegmentationSource | None] = {}
    seen: dict[tuple[Path, Path], str] = {}
    for split, training in ((train_split, True), (validation_split, False)):
        try:
            folders = find_pair_folders(data_dir, split, image_folder, map_folder, allow_outside=allow_outside)
            if seen.setdefault(folders, split) != split:
                raise DataError(
                    f"{folders[0]} has the images of {train_split!r} and of {validation_split!r}: what is trained on "
                    "measures nothing; name the split in image_folder and map_folder, such as images/{split}"
                )
            location = f"{Path(data_dir)} ({split})"
            sources[training], report = check_pairs(
                folders, location, names, rules, every_class=training, repair=repair, on_progress=on_progress
            )
            reports.append(report)
            problems += report.problems
        except DataError as error:
            problems.append(str(error))
    return OpenedPairs(sources.get(True), sources.get(False), each_once(problems), reports)


def check_pairs(
    folders: tuple[Path, Path],
    location: str,
    class_names: Sequence[str],
    rules: LabelRules,
    *,
    every_class: bool = True,
    repair: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> tuple[SegmentationSource | None, DataReport]:
    """Check all pairs: every map in full, every image by the first bytes of its file.

    Args:
        folders: Folder of images, folder of label maps.
        location: Their place, for messages.
        class_names: Name of each class.
        rules: Rules that turn numbers in files into labels; what they forbid is a fault.
        every_class: Require a pixel of each class, as it takes one to be learned; not in validation data.
        repair: Return what can be used after repairing; nothing, if no pixel is labeled.
        on_progress: Called after each pair.

    Returns:
        The pairs, None if there are faults that were not repaired; and the faults.
    """
    found = find_pairs(*folders)
    report = DataReport(location, f"{len(found.pairs):,} pairs", repaired=repair)
    for fault, paths in found.faults.items():
        for path in paths:
            report.add(fault, str(path), LEFT_OUT)
    kept: list[Pair] = []
    seen = np.zeros(len(class_names), dtype=bool)
    for pair, read in zip(found.pairs, read_in_threads(_read, found.pairs, on_progress), strict=True):
        labels = _check_pair(pair, read, rules, report)
        if labels is not None:
            kept.append(pair)
            seen[labels] = True
    if every_class:
        for label in np.flatnonzero(~seen).tolist():
            kept_classes = "kept, so that labels stay the same; nothing will be learned of them"
            report.add("classes without a pixel", f"{class_names[label]} ({label})", kept_classes)
    if kept and not seen.any():
        report.repaired = False
        for pair in kept:
            repairing = "not possible; label them, or correct the list of classes or reduce_zero_label"
            report.add("maps without a labeled pixel, and there are no others", str(pair.label_map), repairing)
    if report.problems:
        return None, report
    if repair:
        rules = replace(rules, outside_ignored=True, resize=True)
    return SegmentationSource(location, class_names, kept, rules), report


class _Read(NamedTuple):
    """Sizes (height, width) of an image and its map, and the numbers that occur in the map."""

    image_size: tuple[int, int]
    map_size: tuple[int, ...]
    numbers: np.ndarray


def _read(pair: Pair) -> _Read:
    size, values = image_size(pair.image), read_label_map(pair.label_map)
    return _Read(size, values.shape, np.unique(values))


def _check_pair(pair: Pair, read: _Read | ImageError, rules: LabelRules, report: DataReport) -> np.ndarray | None:
    """Return the labels of a map, without those ignored; None if the pair cannot be used."""
    if isinstance(read, ImageError):
        colors = isinstance(read, ColoredMapError)
        fault = "maps of colors instead of labels" if colors else "files that cannot be read"
        report.add(fault, str(read), LEFT_OUT)
        return None
    (height, width), (map_height, map_width) = read.image_size, read.map_size
    if (map_height, map_width) != (height, width):
        detail = f"{pair.label_map}: {map_width}×{map_height} for an image of {width}×{height}"
        if abs(height * map_width / (width * map_height) - 1) > SHAPE_TOLERANCE:
            report.add("maps of another shape than their image", detail, LEFT_OUT)
            return None
        report.add("maps of another size than their image", detail, "brought to the image's size")
    labels = rules.labels(read.numbers)
    outside = read.numbers[labels < 0].tolist()
    if outside:
        repair = "those pixels ignored"
        if outside == [rules.num_classes] and not rules.reduce_zero_label:
            repair += "; or set reduce_zero_label (--reduce-zero-label), if files count classes from 1, as scenes and "
            repair += "ADE20K do"
        numbers = ", ".join(map(str, outside[:3])) + (", …" if len(outside) > 3 else "")
        report.add("maps with labels outside of the list of classes", f"{pair.label_map}: {numbers}", repair)
    return labels[(labels >= 0) & (labels < rules.num_classes)]
