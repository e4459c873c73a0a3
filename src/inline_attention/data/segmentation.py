"""Datasets for semantic segmentation: find, read and check images with label maps.

No repair is silent and no file is changed: a repair applies to what this run uses, and the report says what was done.
Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin, PpmImagePlugin, TiffImagePlugin
from PIL.ImageFile import ImageFile

from inline_attention.data.findings import KEPT_AS_LABELS, NOT_POSSIBLE, DataReport, OpenedSplits, each_once
from inline_attention.data.images import ImageError, find_images, image_size, load_image, open_image, read_in_threads
from inline_attention.data.listed_files import ALLOW_OUTSIDE, why_outside
from inline_attention.data.sources import DataError, check_folder, split_names
from inline_attention.support.files import AnyPath, read_bounded
from inline_attention.support.text import natural_key
from inline_attention.support.untrusted import parse_json

IGNORED = 255  # label of pixels that count neither in losses nor in figures
# Without loss alone: a JPEG would blur labels into each other.
MAP_FORMATS = {"PNG": (".png",), "TIFF": (".tif", ".tiff"), "BMP": (".bmp",), "GIF": (".gif",), "PPM": (".pgm",)}
MAP_SUFFIXES = frozenset(suffix for suffixes in MAP_FORMATS.values() for suffix in suffixes)
# What Pillow multiplies gray values of less than 8 bits with, by how they lie in the file.
GRAY_SCALES = {"L;2": 85, "L;2R": 85, "L;4": 17, "L;4R": 17}
NUMBER_MODES = ("1", "L", "P", "I;16", "I;16B", "I;16L", "I")
IMAGE_FOLDERS = ("images", "imgs", "img_dir", "leftImg8bit")
MAP_FOLDERS = ("annotations", "masks", "labels", "ann_dir", "gtFine")
ADE20K_SPLITS = ("training", "validation")
CLASS_FILES = ("classes.txt", "classes.json", "objectInfo150.txt")
MAX_CLASS_FILE_BYTES = 2**20
SHAPE_TOLERANCE = 0.01  # relative difference of aspect ratios up to which a map shows the same as its image
IMAGES_AND_MAPS = "images and label maps"


class ColoredMapError(ImageError):
    """A file that should hold labels holds colors."""


def read_label_map(path: AnyPath) -> np.ndarray:
    """Read a map, `[H, W]` int32; of an image with a palette the numbers, not the colors they stand for.

    Raises:
        ColoredMapError: If its pixels are colors.
        ImageError: If the file cannot be read, or not without changing labels.
    """
    with open_image(path, formats=MAP_FORMATS, what="label map") as image:
        if image.mode not in NUMBER_MODES:
            fault = f"holds colors ({image.mode}), and a label map needs one number for each pixel"
            gray = "a gray image or one with a palette, in which the number of a class is the pixel's value"
            raise ColoredMapError(path, f"{fault}; convert it to {gray}")
        scale = 1
        # Arguments of the decoder, which are gone after decoding.
        arguments = image.tile[0][3] if isinstance(image, ImageFile) and image.tile else None
        if isinstance(image, PpmImagePlugin.PpmImageFile):
            # Pillow scales all values with the largest that a PGM announces, the last argument where it can be any.
            maximum = int(arguments[-1]) if isinstance(arguments, tuple) else 255
            if maximum not in (255, 65535):
                scaled = f"announces values up to {maximum} (its maxval), from which labels would be scaled"
                raise ImageError(path, f"is a PGM that {scaled}; write it with 255 or 65535 in that place, or as a PNG")
        elif isinstance(image, (PngImagePlugin.PngImageFile, TiffImagePlugin.TiffImageFile)):
            mode_in_file = arguments[0] if isinstance(arguments, tuple) else arguments
            scale = GRAY_SCALES.get(str(mode_in_file), 1)
        return np.asarray(image).astype(np.int32) // scale


class Pair(NamedTuple):
    """An image and its label map."""

    image: Path
    label_map: Path


def find_pair_folders(
    root: AnyPath,
    split: str,
    image_folder: str | None = None,
    map_folder: str | None = None,
    *,
    allow_outside: bool = False,
) -> tuple[Path, Path]:
    """Return the folders of images and maps of a split: `images/training` and `annotations/training` in ADE20K.

    Args:
        root: Folder of the dataset.
        split: Name such as "train", which "training" will do for as well.
        image_folder: Folder of images below `root`, "{split}" in it standing for the split; if None, one of the usual
            names, as `images/training` or `training/images`.
        map_folder: Folder of label maps, with the same rules.
        allow_outside: Accept folders that are not below `root`; otherwise, or if there are none, `DataError` is raised.
    """
    root = check_folder(root, IMAGES_AND_MAPS)
    settings = (("image_folder", image_folder), ("map_folder", map_folder))
    for setting, given in settings if not allow_outside else ():
        if given is not None and (reason := why_outside(root, given.replace("{split}", split))) is not None:
            raise DataError(f"{setting} {given!r} {reason}; allow it with {ALLOW_OUTSIDE}")
    images, maps = (_find_folder(root, split, setting, given) for setting, given in settings)
    return images, maps


def _find_folder(root: Path, split: str, setting: str, given: str | None) -> Path:
    kinds, what = (IMAGE_FOLDERS, "images") if setting == "image_folder" else (MAP_FOLDERS, "label maps")
    splits = dict.fromkeys((split, *split_names(split)))
    usual = [folder for kind in kinds for name in splits for folder in (f"{kind}/{name}", f"{name}/{kind}")]
    names = usual if given is None else [given.replace("{split}", name) for name in splits]
    if found := next((root / name for name in names if (root / name).is_dir()), None):
        return found
    if given is not None:
        raise DataError(
            f"{root} has no folder {given}, where {what} of the split {split!r} are said to be, "
            f"{{split}} being one of {', '.join(splits)}; correct {setting}"
        )
    expected = next((name for name in ADE20K_SPLITS if name in splits), split)
    raise DataError(
        f"{root} has no folder with {what} of the split {split!r}; expected {kinds[0]}/{expected}, or one of "
        f"{', '.join(kinds)} with one of {', '.join(splits)}; another is named by {setting}, such as "
        f"{kinds[0]}_{{split}}"
    )


def find_pairs(image_folder: AnyPath, map_folder: AnyPath) -> tuple[list[Pair], dict[str, list[Path]]]:
    """Match files by their path below the folders, without the suffix; `DataError` if there is no pair at all.

    Returns sorted pairs, and the other files by what is wrong with them.
    """
    images, same_images = _by_stem(Path(image_folder), find_images([image_folder]))
    maps, same_maps = _by_stem(Path(map_folder), find_images([map_folder], MAP_SUFFIXES))
    both = sorted(images.keys() & maps.keys(), key=natural_key)
    if not both:
        raise DataError(
            f"no image in {Path(image_folder)} ({len(images)} found) has the name of a label map in {Path(map_folder)} "
            f"({len(maps)} found); expected pairs such as a/1.jpg and b/1.png"
        )
    faults = {
        "images without a label map": [images[stem] for stem in sorted(images.keys() - maps.keys())],
        "label maps without an image": [maps[stem] for stem in sorted(maps.keys() - images.keys())],
        "files that differ from another in their suffix alone": same_images + same_maps,
    }
    return [Pair(images[stem], maps[stem]) for stem in both], faults


def _by_stem(folder: Path, files: Sequence[Path]) -> tuple[dict[str, Path], list[Path]]:
    found: dict[str, Path] = {}
    files = [path for path in files if path.is_file()]
    stems = [str(path.relative_to(folder).with_suffix("")) for path in files]
    return found, [path for path, stem in zip(files, stems, strict=True) if found.setdefault(stem, path) is not path]


def find_class_file(root: AnyPath) -> Path:
    """Return the first of `CLASS_FILES` in a folder; raise `DataError` if there is none."""
    if found := next((file for name in CLASS_FILES if (file := Path(root) / name).is_file()), None):
        return found
    raise DataError(f"{root} has no list of classes; expected classes.txt with a name on each line, or classes.json")


def read_class_names(path: AnyPath, *, reduce_zero_label: bool = False) -> tuple[str, ...]:
    """Read the names of classes in the order of their labels.

    Args:
        path: A text with a name on each line; a table with tabs and a column "Name", as ADE20K's objectInfo150.txt; or
            JSON: a list of names, or an object that gives each number in maps its name, from 0 or 1 without holes.
        reduce_zero_label: Treat 0 as "other" (see `LabelRules`); its name is then no class.

    Raises:
        DataError: If it cannot be read, is empty, or names a class twice.
    """
    path, this = Path(path), f"the list of classes {path}"
    try:
        text = read_bounded(path, MAX_CLASS_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"{this} cannot be read: {error}") from error
    try:
        names = _from_json(text, reduce_zero_label) if path.suffix.lower() == ".json" else _from_text(text)
    except ValueError as error:
        raise DataError(f"{this} is of no use: {error}") from error
    if not names:
        raise DataError(f"{this} is empty; write a name on each line")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{this} has {name!r} more than once; give each class a name of its own")
    return tuple(names)


def _from_text(text: str) -> list[str]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    columns = [cell.strip() for cell in lines[0][1].split("\t")] if lines else []
    if "Name" not in columns:
        return [line.strip() for _, line in lines]
    names: list[str] = []
    for number, line in lines[1:]:
        cells = dict(zip(columns, line.split("\t"), strict=False))
        if not (name := cells.get("Name", "").strip()):
            raise ValueError(f"it has no name in line {number}; complete or remove it")
        names.append(name)
    return names


def _from_json(text: str, reduce_zero_label: bool) -> list[str]:
    content: Any = parse_json(text)
    if isinstance(content, list) and all(isinstance(name, str) for name in content):
        return content
    if not isinstance(content, dict):
        raise ValueError("expected a list of names")
    named = sorted((int(number), str(name)) for number, name in content.items())
    numbers, names = [number for number, _ in named], [name for _, name in named]
    start = 0 if 0 in numbers else 1
    if numbers != list(range(start, start + len(numbers))):
        found = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        raise ValueError(f"its numbers are {found}; number the classes from 0 or from 1 without holes")
    return names[1:] if reduce_zero_label and start == 0 else names


@dataclass(frozen=True)
class LabelRules:
    """Rules that turn numbers in files into labels of a model.

    Labels are 0 to `num_classes - 1`, and `IGNORED`, which files may have as well. With `reduce_zero_label` 0 in files
    means "other" and is ignored, 1 is the first class, as in ADE20K.
    """

    num_classes: int
    reduce_zero_label: bool = False
    repair: bool = False  # ignore numbers out of range, resize a map to the size of its image; both errors otherwise

    def __post_init__(self):
        if not 1 <= self.num_classes <= IGNORED:
            raise DataError(f"there may be 1 to {IGNORED} classes, got {self.num_classes}")

    def labels(self, values: np.ndarray) -> np.ndarray:
        """Turn numbers in files into labels of the same shape; -1 where they are out of range."""
        labels = values.astype(np.int32) - int(self.reduce_zero_label)
        labels[(labels < 0) | (labels >= self.num_classes)] = -1
        labels[values == IGNORED] = IGNORED
        if self.reduce_zero_label:
            labels[values == 0] = IGNORED
        return labels


class SegmentationSource:
    """Pairs of images and label maps. Cheap to copy into worker processes.

    `location` names their place in messages. The place of a class in `class_names` is its label.
    """

    def __init__(self, location: str, class_names: Sequence[str], pairs: Sequence[Pair], rules: LabelRules):
        if not pairs:
            raise DataError(f"{location} has no pair of an image and a label map to use")
        self.location, self.class_names, self.rules = location, tuple(class_names), rules
        # Arrays instead of many strings: processes that are forked share them, and keep sharing them.
        self._images = np.array([os.fsencode(pair.image) for pair in pairs])
        self._maps = np.array([os.fsencode(pair.label_map) for pair in pairs])

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        """Return the image's path."""
        return os.fsdecode(self._images[index])

    def load(self, index: int) -> Image.Image:
        """Return the image, upright and in RGB; raise `ImageError` if it cannot be read."""
        return load_image(self.name(index))

    def target(self, index: int, size: tuple[int, int]) -> np.ndarray:
        """Return `[H, W]` uint8: the label of each pixel, `IGNORED` where there is none. The size is the image's.

        Raises:
            ImageError: If the map cannot be read, or does not follow the rules.
        """
        path = os.fsdecode(self._maps[index])
        values = read_label_map(path)
        if values.shape != size:
            if not self.rules.repair:
                raise ImageError(path, f"is {values.shape[1]}×{values.shape[0]} pixels, its image {size[1]}×{size[0]}")
            values = np.asarray(Image.fromarray(values).resize((size[1], size[0]), Image.Resampling.NEAREST))
        labels = self.rules.labels(values)
        outside = labels < 0
        if outside.any() and not self.rules.repair:
            raise ImageError(path, f"has the label {values[outside][0]}, which is not in the list of classes")
        labels[outside] = IGNORED
        return labels.astype(np.uint8)


OpenedPairs = OpenedSplits[SegmentationSource]
_Read = tuple[tuple[int, int], tuple[int, ...], np.ndarray]  # size of an image, of its map, and numbers in the map


def open_and_check_pairs(
    data_dir: AnyPath,
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    class_file: AnyPath | None = None,
    image_folder: str | None = None,
    map_folder: str | None = None,
    reduce_zero_label: bool = False,
    num_classes: int | None = None,
    allow_outside: bool = False,
    **options: Any,
) -> OpenedPairs:
    """Open `data_dir/images/{training,validation}` and `data_dir/annotations/{training,validation}`, and check them.

    Args:
        data_dir: Folder of the dataset.
        train_split, validation_split: Names such as "train" or "training", and "validation" or "val".
        class_file: Names of classes; one of the usual files in `data_dir`, if None.
        image_folder, map_folder: Folders of images and label maps below `data_dir` (see `find_pair_folders`).
        reduce_zero_label: Treat 0 as "other" (see `LabelRules`), as in ADE20K and in scenes.
        num_classes: Classes that the model knows; None if it follows the data.
        allow_outside: Accept folders that are not below `data_dir`.
        **options: `repair`, `decode` and `on_progress` of `check_pairs`.

    Raises:
        DataError: If there is no such folder. All other problems are in the result.
    """
    check_folder(data_dir, IMAGES_AND_MAPS)
    try:
        file = class_file if class_file is not None else find_class_file(data_dir)
        names = read_class_names(file, reduce_zero_label=reduce_zero_label)
        rules = LabelRules(len(names), reduce_zero_label=reduce_zero_label)
    except DataError as error:
        return OpenedPairs(None, None, [str(error)])
    problems: list[str] = []
    if num_classes not in (None, len(names)):
        problems.append(f"{data_dir} has {len(names)} classes, the model {num_classes}; leave --num-classes out")
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
            sources[training], report = check_pairs(folders, location, names, rules, every_class=training, **options)
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
    decode: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> tuple[SegmentationSource | None, DataReport]:
    """Check all pairs, every map in full.

    Args:
        folders: Folder of images, folder of label maps.
        location: Their place, for messages.
        class_names: Name of each class.
        rules: Rules that turn numbers in files into labels; what they forbid is a fault.
        every_class: Require a pixel of each class, as it takes one to be learned; not in validation data.
        repair: Return what can be used after repairing; nothing, if no pixel is labeled. The files stay as they are.
        decode: Decode all images, which finds truncated files; otherwise only the first bytes are read.
        on_progress: Called after each pair.

    Returns:
        The pairs, None if there are faults that were not repaired; and the faults.
    """
    pairs, faults = find_pairs(*folders)
    report = DataReport(location, f"{len(pairs):,} pairs", repaired=repair)
    for fault, paths in faults.items():
        for path in paths:
            report.add(fault, str(path))
    kept: list[Pair] = []
    seen = np.zeros(len(class_names), dtype=bool)
    reads = read_in_threads(lambda pair: _read(pair, decode=decode), pairs, on_progress)
    for pair, read in zip(pairs, reads, strict=True):
        if (labels := _check_pair(pair, read, rules, report)) is not None:
            kept.append(pair)
            seen[labels] = True
    if every_class:
        for label in np.flatnonzero(~seen).tolist():
            report.add("classes without a pixel", f"{class_names[label]} ({label})", KEPT_AS_LABELS)
    if kept and not seen.any():
        report.repaired = False
        for pair in kept:
            repairing = f"{NOT_POSSIBLE}label them, or correct the list of classes or reduce_zero_label"
            report.add("maps without a labeled pixel, and there are no others", str(pair.label_map), repairing)
    if report.problems:
        return None, report
    return SegmentationSource(location, class_names, kept, replace(rules, repair=repair)), report


def _read(pair: Pair, *, decode: bool) -> _Read:
    size, values = image_size(pair.image, decode=decode), read_label_map(pair.label_map)
    return size, values.shape, np.unique(values)


def _check_pair(pair: Pair, read: _Read | ImageError, rules: LabelRules, report: DataReport) -> np.ndarray | None:
    """Return the labels of a map, without those ignored; None if the pair cannot be used."""
    if isinstance(read, ImageError):
        has_colors = isinstance(read, ColoredMapError)
        fault = "maps of colors instead of labels" if has_colors else "files that cannot be read"
        return report.add(fault, str(read))
    (height, width), (map_height, map_width), numbers = read
    if (map_height, map_width) != (height, width):
        detail = f"{pair.label_map}: {map_width}×{map_height} for an image of {width}×{height}"
        if abs(height * map_width / (width * map_height) - 1) > SHAPE_TOLERANCE:
            return report.add("maps of another shape than their image", detail)
        report.add("maps of another size than their image", detail, "brought to the image's size")
    labels = rules.labels(numbers)
    outside = numbers[labels < 0].tolist()
    if outside:
        repair = "those pixels ignored"
        if outside == [rules.num_classes] and not rules.reduce_zero_label:
            files = "if files count classes from 1, as scenes and ADE20K do"
            repair += f"; or set reduce_zero_label (--reduce-zero-label), {files}"
        first = ", ".join(map(str, outside[:3])) + (", …" if len(outside) > 3 else "")
        report.add("maps with labels outside of the list of classes", f"{pair.label_map}: {first}", repair)
    return labels[(labels >= 0) & (labels < rules.num_classes)]
