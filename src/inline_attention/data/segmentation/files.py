"""Find and read the files of a segmentation dataset: class names, image and label map pairs, label maps.

Shapes: `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import PngImagePlugin, PpmImagePlugin, TiffImagePlugin
from PIL.Image import Image

from inline_attention.data.images import SUFFIXES, ImageError, open_image
from inline_attention.data.listed_files import ALLOW_OUTSIDE, why_outside
from inline_attention.data.sources import SPLIT_FOLDERS, DataError
from inline_attention.support.files import read_bounded
from inline_attention.support.text import natural_key
from inline_attention.support.untrusted import parse_json

# Without loss alone: a JPEG would blur labels into each other.
MAP_FORMATS = {"PNG": (".png",), "TIFF": (".tif", ".tiff"), "BMP": (".bmp",), "GIF": (".gif",), "PPM": (".pgm",)}
MAP_SUFFIXES = frozenset(suffix for suffixes in MAP_FORMATS.values() for suffix in suffixes)
# What Pillow multiplies gray values of less than 8 bits with, by how they lie in the file.
GRAY_SCALES = {"L;2": 85, "L;2R": 85, "L;4": 17, "L;4R": 17}
NUMBER_MODES = ("1", "L", "P", "I;16", "I;16B", "I;16L", "I")


class ColoredMapError(ImageError):
    """A file that should hold labels holds colors."""


def read_label_map(path: str | os.PathLike[str]) -> np.ndarray:
    """Read a map; of an image with a palette the numbers, not the colors they stand for.

    Returns:
        `[H, W]` int32.

    Raises:
        ColoredMapError: If its pixels are colors.
        ImageError: If the file cannot be read, or not without changing labels.
    """
    with open_image(path, formats=MAP_FORMATS, what="label map") as image:
        if image.mode not in NUMBER_MODES:
            raise ColoredMapError(path, _colors_refused(image.mode))
        if isinstance(image, PpmImagePlugin.PpmImageFile) and (maximum := _maximum(image)) not in (255, 65535):
            raise ImageError(path, _maximum_refused(maximum))
        scale = _gray_scale(image)
        return np.asarray(image).astype(np.int32) // scale


def _gray_scale(image: Image) -> int:
    if not isinstance(image, (PngImagePlugin.PngImageFile, TiffImagePlugin.TiffImageFile)) or not image.tile:
        return 1
    arguments = image.tile[0][3]  # of the decoder, which begin with the mode in the file; gone after decoding
    raw_mode = arguments[0] if isinstance(arguments, tuple) else arguments
    return GRAY_SCALES.get(str(raw_mode), 1)


def _maximum(image: PpmImagePlugin.PpmImageFile) -> int:
    """The largest value that a PGM announces, which Pillow scales to 255 or 65535, and all others with it."""
    arguments = image.tile[0][3]  # of the decoder; the largest value is the last of them where it can be any
    return int(arguments[-1]) if isinstance(arguments, tuple) else 255


def _maximum_refused(maximum: int) -> str:
    return (
        f"is a PGM that announces values up to {maximum} (its maxval), from which labels would be scaled; write it "
        "with 255 or 65535 in that place, or as a PNG"
    )


def _colors_refused(mode: str) -> str:
    return (
        f"holds colors ({mode}), and a label map needs one number for each pixel; convert it to a gray image or "
        "one with a palette, in which the number of a class is the pixel's value"
    )


IMAGE_FOLDERS = ("images", "imgs", "img_dir", "leftImg8bit")
ADE20K_SPLITS = ("training", "validation")
MAP_FOLDERS = ("annotations", "masks", "labels", "ann_dir", "gtFine")


@dataclass(frozen=True)
class Pair:
    """An image and its label map."""

    image: Path
    label_map: Path


@dataclass(frozen=True)
class FoundPairs:
    """Files of two folders, matched by name.

    Attributes:
        pairs: Those that belong together, sorted.
        images_alone: Images without a map.
        maps_alone: Maps without an image.
        ambiguous: Files that share their name, without the suffix, with another of their folder.
    """

    pairs: tuple[Pair, ...]
    images_alone: tuple[Path, ...]
    maps_alone: tuple[Path, ...]
    ambiguous: tuple[Path, ...]


def find_pair_folders(
    root: str | os.PathLike[str],
    split: str,
    image_folder: str | None = None,
    map_folder: str | None = None,
    *,
    allow_outside: bool = False,
) -> tuple[Path, Path]:
    """The folders of images and of maps of a split: `images/training` and `annotations/training` in ADE20K.

    Args:
        root: Folder of the dataset.
        split: Such as "train", which "training" will do for as well.
        image_folder: Folder of images below `root`, "{split}" in it standing for the split; if None, one of the usual
            names, as `images/training` or `training/images`.
        map_folder: Folder of label maps, with the same rules.
        allow_outside: Accept folders that are not below `root`.

    Raises:
        DataError: If there are none, or one is outside of `root`.
    """
    root = Path(root)
    for setting, given in (("image_folder", image_folder), ("map_folder", map_folder)):
        reason = None if given is None or allow_outside else why_outside(root, given.replace("{split}", split))
        if reason is not None:
            raise DataError(f"{setting} {given!r} {reason}; allow it with {ALLOW_OUTSIDE}")
    known = next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))
    splits = tuple(dict.fromkeys((split, *known)))
    images = _first_folder(root, image_folder, IMAGE_FOLDERS, splits)
    maps = _first_folder(root, map_folder, MAP_FOLDERS, splits)
    if images is None or maps is None:
        missing, given, kinds, setting = (
            ("images", image_folder, IMAGE_FOLDERS, "image_folder")
            if images is None
            else ("label maps", map_folder, MAP_FOLDERS, "map_folder")
        )
        if given is not None:
            raise DataError(
                f"{root} has no folder {given}, where {missing} of the split {split!r} are said to be, "
                f"{{split}} being one of {', '.join(splits)}; correct {setting}"
            )
        usual = next((name for name in ADE20K_SPLITS if name in splits), split)
        raise DataError(
            f"{root} has no folder with {missing} of the split {split!r}; expected {kinds[0]}/{usual}, or one of "
            f"{', '.join(kinds)} with one of {', '.join(splits)}; another is named by {setting}, such as "
            f"{kinds[0]}_{{split}}"
        )
    return images, maps


def find_pairs(image_folder: str | os.PathLike[str], map_folder: str | os.PathLike[str]) -> FoundPairs:
    """Match files by their path below the folders, without the suffix.

    Raises:
        DataError: If there is no pair at all.
    """
    image_folder, map_folder = Path(image_folder), Path(map_folder)
    images, same_images = _by_stem(image_folder, SUFFIXES)
    maps, same_maps = _by_stem(map_folder, MAP_SUFFIXES)
    both = sorted(images.keys() & maps.keys(), key=natural_key)
    if not both:
        raise DataError(
            f"no image in {image_folder} ({len(images)} found) has the name of a label map in {map_folder} "
            f"({len(maps)} found); expected pairs such as a/1.jpg and b/1.png"
        )
    return FoundPairs(
        tuple(Pair(images[stem], maps[stem]) for stem in both),
        tuple(images[stem] for stem in sorted(images.keys() - maps.keys())),
        tuple(maps[stem] for stem in sorted(maps.keys() - images.keys())),
        (*same_images, *same_maps),
    )


def _first_folder(root: Path, given: str | None, kinds: Iterable[str], splits: Sequence[str]) -> Path | None:
    if given is not None:
        candidates = [root / given.replace("{split}", split) for split in splits]
    else:
        candidates = [
            folder for kind in kinds for split in splits for folder in (root / kind / split, root / split / kind)
        ]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _by_stem(folder: Path, suffixes: frozenset[str]) -> tuple[dict[str, Path], list[Path]]:
    found: dict[str, Path] = {}
    ambiguous: list[Path] = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or path.suffix.lower() not in suffixes or not path.is_file():
            continue
        stem = str(relative.with_suffix(""))
        if stem in found:
            ambiguous.append(path)
        else:
            found[stem] = path
    return found, ambiguous


MAX_BYTES = 2**20
CLASS_FILES = ("classes.txt", "classes.json", "objectInfo150.txt")


def find_class_file(root: str | os.PathLike[str]) -> Path:
    """The first of `CLASS_FILES` in a folder.

    Raises:
        DataError: If there is none.
    """
    for name in CLASS_FILES:
        if (file := Path(root) / name).is_file():
            return file
    raise DataError(f"{root} has no list of classes; expected classes.txt with a name on each line, or classes.json")


def read_class_names(path: str | os.PathLike[str], *, reduce_zero_label: bool = False) -> tuple[str, ...]:
    """Names in the order of the labels in masks.

    Args:
        path: A text with a name on each line; a table with tabs and a column "Name", as ADE20K's objectInfo150.txt; or
            JSON: a list of names, or an object that gives each number in maps its name, from 0 or 1 without holes.
        reduce_zero_label: Whether 0 means "other" (see `LabelRules`); its name is then no class.

    Raises:
        DataError: If it cannot be read, is empty, or names a class twice.
    """
    path = Path(path)
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"the list of classes {path} cannot be read: {error}") from error
    is_json = path.suffix.lower() == ".json"
    names = _from_json(path, text, reduce_zero_label) if is_json else _from_text(path, text)
    if not names:
        raise DataError(f"the list of classes {path} is empty; write a name on each line")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"the list of classes {path} has {twice[0]!r} more than once; give each class a name of its own"
        )
    return tuple(names)


def _from_text(path: Path, text: str) -> list[str]:
    rows = {
        number: [cell.strip() for cell in line.split("\t")]
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    }
    columns = next(iter(rows.values()), [])
    if "Name" not in columns:
        return [line.strip() for line in text.splitlines() if line.strip()]
    place = columns.index("Name")
    names: list[str] = []
    for number, row in list(rows.items())[1:]:
        if len(row) <= place or not row[place]:
            raise DataError(f"the list of classes {path} has no name in line {number}; complete or remove it")
        names.append(row[place])
    return names


def _from_json(path: Path, text: str, reduce_zero_label: bool) -> list[str]:
    try:
        content: Any = parse_json(text)
        if isinstance(content, dict):
            return _by_number([(int(label), str(name)) for label, name in content.items()], reduce_zero_label)
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise ValueError("expected a list of names")
    except ValueError as error:
        raise DataError(f"the list of classes {path} is of no use: {error}") from error
    return content


def _by_number(named: list[tuple[int, str]], reduce_zero_label: bool) -> list[str]:
    numbers, names = [number for number, _ in sorted(named)], [name for _, name in sorted(named)]
    start = 0 if 0 in numbers else 1
    if numbers != list(range(start, start + len(numbers))):
        found = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        raise ValueError(f"its numbers are {found}; number the classes from 0 or from 1 without holes")
    return names[1:] if reduce_zero_label and start == 0 else names
