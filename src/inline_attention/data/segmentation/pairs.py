"""Pictures and maps of labels in two folders, which belong together by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from timm.utils.misc import natural_key

from inline_attention.data.folders import SPLIT_FOLDERS
from inline_attention.data.images import SUFFIXES
from inline_attention.data.segmentation.label_maps import MAP_SUFFIXES
from inline_attention.data.sources import DataError

IMAGE_FOLDERS = ("images", "imgs", "img_dir", "leftImg8bit")
ADE20K_SPLITS = ("training", "validation")
MAP_FOLDERS = ("annotations", "masks", "labels", "ann_dir", "gtFine")


@dataclass(frozen=True)
class Pair:
    """A picture and its map of labels."""

    image: Path
    label_map: Path


@dataclass(frozen=True)
class FoundPairs:
    """What two folders hold.

    Attributes:
        pairs: Those that belong together, sorted.
        images_alone: Pictures without a map.
        maps_alone: Maps without a picture.
        ambiguous: Files that share their name, without the suffix, with another of their folder.
    """

    pairs: tuple[Pair, ...]
    images_alone: tuple[Path, ...]
    maps_alone: tuple[Path, ...]
    ambiguous: tuple[Path, ...]


def find_pair_folders(root: str | os.PathLike[str], split: str) -> tuple[Path, Path]:
    """The folders of pictures and of maps of a split: `images/training` and `annotations/training` in ADE20K.

    Other usual names are known too, and `training/images` as well as `images/training`.

    Raises:
        DataError: If there are none.
    """
    root = Path(root)
    known = next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))
    splits = tuple(dict.fromkeys((split, *known)))
    images = _first_folder(root, IMAGE_FOLDERS, splits)
    maps = _first_folder(root, MAP_FOLDERS, splits)
    if images is None or maps is None:
        missing = "pictures" if images is None else "maps of labels"
        first = "images" if images is None else "annotations"
        usual = next((name for name in ADE20K_SPLITS if name in splits), split)
        raise DataError(
            f"{root} has no folder with {missing} of the split {split!r}; expected {first}/{usual}, "
            f"or one of {', '.join(IMAGE_FOLDERS if images is None else MAP_FOLDERS)} with one of {', '.join(splits)}"
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
            f"no picture in {image_folder} ({len(images)} found) has the name of a map of labels in {map_folder} "
            f"({len(maps)} found); expected pairs such as a/1.jpg and b/1.png"
        )
    return FoundPairs(
        tuple(Pair(images[stem], maps[stem]) for stem in both),
        tuple(images[stem] for stem in sorted(images.keys() - maps.keys())),
        tuple(maps[stem] for stem in sorted(maps.keys() - images.keys())),
        (*same_images, *same_maps),
    )


def _first_folder(root: Path, kinds: Iterable[str], splits: Iterable[str]) -> Path | None:
    for kind in kinds:
        for split in splits:
            for folder in (root / kind / split, root / split / kind):
                if folder.is_dir():
                    return folder
    return None


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
