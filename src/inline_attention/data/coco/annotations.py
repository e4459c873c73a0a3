"""The contents of a COCO annotation file, as they are: what may be wrong with them is for `checks` to find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from inline_attention.data.coco.masks import with_whole_size
from inline_attention.data.folders import SPLIT_FOLDERS
from inline_attention.data.sources import DataError

Entry = TypeVar("Entry")
ID_LIMIT = 2**63  # ids are kept as int64


@dataclass(frozen=True, slots=True)
class CocoImage:
    """A picture: its number, its file below the image folder, and its size in pixels (0 if the file does not say)."""

    id: int
    file_name: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class CocoCategory:
    """A kind of object."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class CocoObject:
    """An annotated object, or a crowd of them.

    Attributes:
        id: Its number.
        image_id: Of the picture it is in.
        category_id: Its kind.
        box: Left, top, width, height in pixels; empty if the file has no four numbers there.
        area: Pixels of the mask, or of the box where the file does not say.
        segmentation: Polygons or run lengths, as `masks` takes them.
        is_crowd: Whether it stands for many objects that nobody has told apart.
    """

    id: int
    image_id: int
    category_id: int
    box: tuple[float, ...]
    area: float
    segmentation: Any
    is_crowd: bool


@dataclass(frozen=True)
class CocoAnnotations:
    """All of a file.

    Labels are the numbers that a model uses: 1 to the number of categories, in order of the categories' ids, which may
    have holes. 0 is the background.

    Attributes:
        location: The file, for messages.
    """

    location: str
    images: tuple[CocoImage, ...]
    categories: tuple[CocoCategory, ...]
    objects: tuple[CocoObject, ...]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the categories; that of label 1 first."""
        return tuple(category.name for category in self._in_order())

    @property
    def label_to_category(self) -> dict[int, int]:
        """Id of the category of each label."""
        return {label: category.id for label, category in enumerate(self._in_order(), start=1)}

    @property
    def category_to_label(self) -> dict[int, int]:
        """Label of each category's id."""
        return {category_id: label for label, category_id in self.label_to_category.items()}

    def to_json(self) -> dict[str, Any]:
        """The contents in COCO's format."""
        return {
            "images": [
                {"id": image.id, "file_name": image.file_name, "height": image.height, "width": image.width}
                for image in self.images
            ],
            "categories": [{"id": category.id, "name": category.name} for category in self.categories],
            "annotations": [
                {
                    "id": item.id,
                    "image_id": item.image_id,
                    "category_id": item.category_id,
                    "bbox": list(item.box),
                    "area": item.area,
                    "segmentation": item.segmentation,
                    "iscrowd": int(item.is_crowd),
                }
                for item in self.objects
            ],
        }

    def _in_order(self) -> list[CocoCategory]:
        unique = {category.id: category for category in self.categories}
        return [unique[category_id] for category_id in sorted(unique)]


def read_annotations(path: str | os.PathLike[str]) -> CocoAnnotations:
    """Read a file such as `instances_train2017.json`.

    Raises:
        DataError: If it cannot be read, is no JSON, or entries lack what makes them entries.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON, or only the beginning of it: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object with images, annotations and categories, not a list")
    return CocoAnnotations(
        str(path),
        _entries(path, content, "images", _image),
        _entries(path, content, "categories", _category),
        _entries(path, content, "annotations", _object),
    )


def find_annotation_file(root: str | os.PathLike[str], split: str) -> Path:
    """The file of a split, such as `annotations/instances_val2017.json` for "validation".

    Raises:
        DataError: If there is none, or more than one.
    """
    root = Path(root)
    names = next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))
    for folder in (root / "annotations", root):
        for name in dict.fromkeys((split, *names)):
            found = sorted(folder.glob(f"instances_{name}.json")) or sorted(folder.glob(f"instances_{name}*.json"))
            if len(found) > 1:
                listed = ", ".join(file.name for file in found)
                raise DataError(f"{folder} has {len(found)} files for the split {split!r}: {listed}; keep one")
            if found:
                return found[0]
    raise DataError(
        f"{root} has no annotations of the split {split!r}; "
        f"expected annotations/instances_{names[0]}.json, in which a year may follow"
    )


def find_image_folder(root: str | os.PathLike[str], annotations: CocoAnnotations, split: str) -> Path:
    """The folder that the file names of the annotations are relative to: the first in which one of them exists.

    Raises:
        DataError: If there is none.
    """
    root = Path(root)
    names = next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))
    own = Path(annotations.location).stem.removeprefix("instances_")  # such as train2017
    folders = [parent / name for name in dict.fromkeys((own, split, *names)) for parent in (root, root / "images")]
    folders += [root / "images", root]
    for folder in folders:
        # Not only the first: some of a dataset's files may be missing.
        if any((folder / image.file_name).is_file() for image in annotations.images[:100]):
            return folder
    raise DataError(
        f"none of the pictures in {annotations.location}, such as {_first_name(annotations)!r}, is in any of "
        f"{', '.join(str(folder) for folder in folders[:4])} or {root}; put them there"
    )


def _first_name(annotations: CocoAnnotations) -> str:
    return annotations.images[0].file_name if annotations.images else ""


def _entries(
    path: Path, content: Mapping[str, Any], key: str, build: Callable[[Mapping[str, Any]], Entry]
) -> tuple[Entry, ...]:
    items = content.get(key)
    if not isinstance(items, list):
        raise DataError(f"{path} has no list {key!r}; is it an annotation file of COCO's format?")
    entries: list[Entry] = []
    for number, item in enumerate(items):
        try:
            entries.append(build(item))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
            raise DataError(f"{path}: entry {number} of {key!r} {what}; correct or remove it") from error
    return tuple(entries)


def _image(item: Mapping[str, Any]) -> CocoImage:
    height, width = int(item.get("height") or 0), int(item.get("width") or 0)
    return CocoImage(_id(item, "id"), str(item["file_name"]), height, width)


def _category(item: Mapping[str, Any]) -> CocoCategory:
    return CocoCategory(_id(item, "id"), str(item.get("name", item["id"])))


def _object(item: Mapping[str, Any]) -> CocoObject:
    box = _four_numbers(item.get("bbox"))
    area = item.get("area")
    if not isinstance(area, (int, float)):
        area = box[2] * box[3] if box else 0.0
    return CocoObject(
        _id(item, "id"),
        _id(item, "image_id"),
        _id(item, "category_id"),
        box,
        float(area),
        with_whole_size(item.get("segmentation")),
        bool(int(item.get("iscrowd") or 0)),  # some files have it as text, and "0" is true
    )


def _id(item: Mapping[str, Any], key: str) -> int:
    value = item[key]
    number = int(value)
    if isinstance(value, float) and number != value:
        raise ValueError(f"{key} is {value}, no whole number")
    if not -ID_LIMIT <= number < ID_LIMIT:
        raise ValueError(f"{key} {value} does not fit into 64 bits")
    return number


def _four_numbers(box: Any) -> tuple[float, ...]:
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(value, (int, float)) for value in box):
        return ()
    return tuple(map(float, box))
