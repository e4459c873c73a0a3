"""Pictures and maps of labels in two folders, which belong together by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inline_attention.data.folders import SPLIT_FOLDERS
from inline_attention.data.images import SUFFIXES
from inline_attention.data.listed_files import ALLOW_OUTSIDE, why_outside
from inline_attention.data.segmentation.label_maps import MAP_SUFFIXES
from inline_attention.data.sources import DataError
from inline_attention.support.text import natural_key

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


def find_pair_folders(
    root: str | os.PathLike[str],
    split: str,
    image_folder: str | None = None,
    map_folder: str | None = None,
    *,
    allow_outside: bool = False,
) -> tuple[Path, Path]:
    """The folders of pictures and of maps of a split: `images/training` and `annotations/training` in ADE20K.

    Args:
        root: Of the dataset.
        split: Such as "train", which "training" will do for as well.
        image_folder: Folder of pictures below `root`, "{split}" in it standing for the split; if None, one of the usual
            names, as `images/training` or `training/images`.
        map_folder: Folder of maps, likewise.
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
            ("pictures", image_folder, IMAGE_FOLDERS, "image_folder")
            if images is None
            else ("maps of labels", map_folder, MAP_FOLDERS, "map_folder")
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
            f"no picture in {image_folder} ({len(images)} found) has the name of a map of labels in {map_folder} "
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
