"""The contents of a COCO annotation file as they are; `checks` finds what is wrong with them."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from inline_attention.data.coco.masks import with_whole_size
from inline_attention.data.listed_files import ListedFiles, is_plain
from inline_attention.data.sources import DataError, check_folder, split_names
from inline_attention.support.files import AnyPath, read_bounded

Entry = TypeVar("Entry")
MAX_FILE_BYTES = 2**33  # eight gigabytes; COCO's own files have less than half of one
LONGEST_NAME = 4096  # characters, as paths have at most
ANNOTATIONS_AND_IMAGES = "annotations and images of COCO's format"
ID_LIMIT = 2**63  # ids are kept as int64
NAMES_TRIED = 100  # images, at least, that are looked for in a folder to see whether it is theirs


@dataclass(frozen=True, slots=True)
class CocoImage:
    """An image: its number, its file below the image folder, and its size in pixels (0 if the file does not say)."""

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
    """An annotated object, or a crowd of them. NaN stands for what is no number."""

    id: int
    image_id: int
    category_id: int
    box: tuple[float, ...]  # left, top, width, height in pixels; empty if the file has no list of four
    area: float | None  # pixels that it covers; None if the file does not say, for `checks` to derive
    segmentation: Any  # polygons or run lengths, as `masks` takes them
    is_crowd: bool  # True if it stands for many objects that are not annotated one by one

    @property
    def box_area(self) -> float:
        """Area of the box in pixels."""
        return self.box[2] * self.box[3]


@dataclass(frozen=True)
class CocoAnnotations:
    """Content of an annotation file.

    Labels are the numbers that a model uses: 1 to the number of categories, in order of the categories' ids, which may
    have holes. 0 is the background.
    """

    location: str
    images: tuple[CocoImage, ...]
    categories: tuple[CocoCategory, ...]
    objects: tuple[CocoObject, ...]
    malformed: tuple[str, ...] = ()  # places and faults of entries that became no image, category or object
    malformed_images: frozenset[int] = frozenset()  # ids of those of images, as far as they are known

    @property
    def category_names(self) -> dict[int, str]:
        """Name of each category by its id, in order of ids; that of the first, if some share an id."""
        names = {category.id: category.name for category in reversed(self.categories)}
        return dict(sorted(names.items()))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the categories; that of label 1 first."""
        return tuple(self.category_names.values())

    @property
    def label_to_category(self) -> dict[int, int]:
        """Id of the category of each label."""
        return dict(enumerate(self.category_names, start=1))

    def to_json(self) -> dict[str, Any]:
        """Return the contents in COCO's format, without malformed entries."""
        return {
            "images": [asdict(image) for image in self.images],
            "categories": [asdict(category) for category in self.categories],
            "annotations": [
                {
                    "id": item.id,
                    "image_id": item.image_id,
                    "category_id": item.category_id,
                    "bbox": list(item.box),
                    **({} if item.area is None else {"area": item.area}),
                    "segmentation": item.segmentation,
                    "iscrowd": int(item.is_crowd),
                }
                for item in self.objects
            ],
        }


def read_annotations(path: AnyPath) -> CocoAnnotations:
    """Read a file such as `instances_train2017.json`; raise `DataError` if it is no JSON or lacks one of its lists.

    Entries that lack what makes them entries are collected in `malformed`.
    """
    path = Path(path)
    try:
        text = read_bounded(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # the latter from one that is too large
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter from lists within lists within lists
        raise DataError(f"{path} is no JSON, or only the beginning of it: {error}") from error
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory") from error
    del text
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object with images, annotations and categories, not a list")
    for name in ("images", "categories", "annotations"):
        if not isinstance(content.get(name), list):
            raise DataError(f"{path} has no list {name!r}; is it an annotation file of COCO's format?")
    malformed: list[str] = []
    images, lost_images = _entries(content, "images", _image, malformed)
    categories, _ = _entries(content, "categories", _category, malformed)
    objects, _ = _entries(content, "annotations", _object, malformed)
    return CocoAnnotations(str(path), images, categories, objects, tuple(malformed), lost_images)


def find_annotation_file(root: AnyPath, split: str) -> Path:
    """Return the annotation file of a split, such as `annotations/instances_val2017.json` for "validation".

    Raises `DataError` if there is none, or more than one.
    """
    root, names = check_folder(root, ANNOTATIONS_AND_IMAGES), split_names(split)
    for folder in (root / "annotations", root):
        for name in (split, *names):
            found = sorted(folder.glob(f"instances_{name}.json")) or sorted(folder.glob(f"instances_{name}*.json"))
            if len(found) > 1:
                listed = ", ".join(file.name for file in found)
                raise DataError(f"{folder} has {len(found)} files for the split {split!r}: {listed}; keep one")
            if found:
                return found[0]
    expected = f"annotations/instances_{names[0]}.json, or with a year, such as instances_{names[0]}2017.json"
    raise DataError(f"{root} has no annotations of the split {split!r}; expected {expected}")


def find_image_folder(root: AnyPath, annotations: CocoAnnotations, split: str, *, allow_outside: bool = False) -> Path:
    """Return the folder below `root` that the file names of the annotations are relative to: it holds most of them.

    Raises `DataError` if there is none that holds any.
    """
    root = Path(root)
    if not annotations.images:
        return root  # there is nothing to look for, and something wrong that a check says better
    own = Path(annotations.location).stem.removeprefix("instances_")  # such as train2017
    folder_names = dict.fromkeys((own, split, *split_names(split)))
    named = [parent / name for name in folder_names for parent in (root, root / "images")]
    existing = [folder for folder in (*named, root / "images", root) if folder.is_dir()]
    names = [image.file_name for image in annotations.images]
    plain = [name for name in names if is_plain(name)]
    folders = [ListedFiles(folder, root, allow_outside=allow_outside) for folder in existing]
    # A few will do as a rule. All are looked for only where none of those is there, and names that lead out of a folder
    # last: an absolute name is found in every folder.
    for looked_for in (plain[:: max(1, len(plain) // NAMES_TRIED)], plain, names):
        held = [sum(map(files.has, looked_for)) for files in folders]
        if any(held):
            return existing[held.index(max(held))]
    if existing and not plain and all(map(folders[0].is_outside, names)):
        return existing[0]  # there is something wrong that a check says better
    places = ", ".join(map(str, named[:4]))
    images = f"none of the images in {annotations.location}, such as {names[0]!r}"
    raise DataError(f"{images}, is in any of {places} or {root}; put them there")


def _entries(
    content: Any, list_name: str, build: Callable[[Mapping[str, Any]], Entry], malformed: list[str]
) -> tuple[tuple[Entry, ...], frozenset[int]]:
    """Return the entries of a list, and ids of malformed ones, whose places and faults are added to `malformed`."""
    entries: list[Entry] = []
    lost: set[int] = set()
    for number, item in enumerate(content[list_name]):
        try:
            if not isinstance(item, dict):
                raise ValueError(f"{reprlib.repr(item)} instead of names with values")
            entries.append(build(item))
        except (ValueError, KeyError) as error:
            fault = f"has no {error}" if isinstance(error, KeyError) else str(error)
            malformed.append(f"entry {number} of {list_name!r}: {fault}")
            with suppress(ValueError, KeyError, TypeError):  # the last from what is no dictionary
                lost.add(_whole_number(item, "id"))
    return tuple(entries), frozenset(lost)


def _image(item: Mapping[str, Any]) -> CocoImage:
    file_name = _text("file_name", item["file_name"])
    height, width = (_whole_number(item, side, default=0) for side in ("height", "width"))
    return CocoImage(_whole_number(item, "id"), file_name, height, width)


def _category(item: Mapping[str, Any]) -> CocoCategory:
    number = _whole_number(item, "id")
    name = item.get("name", number)
    return CocoCategory(number, str(name) if isinstance(name, (int, float)) else _text("name", name))


def _object(item: Mapping[str, Any]) -> CocoObject:
    box, area = item.get("bbox"), item.get("area")
    return CocoObject(
        _whole_number(item, "id"),
        _whole_number(item, "image_id"),
        _whole_number(item, "category_id"),
        tuple(map(_float, box)) if isinstance(box, list) and len(box) == 4 else (),
        None if area is None else _float(area),
        with_whole_size(item.get("segmentation")),
        bool(_whole_number(item, "iscrowd", default=0)),  # some files have it as text, and "0" is true
    )


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        what = "no text" if not isinstance(value, str) else f"longer than {LONGEST_NAME:,} characters"
        raise ValueError(f"{key} is {reprlib.repr(value)}, {what}")
    return value


def _whole_number(item: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the number under a key, which may be written as 1.0 or "1"; the default if it is missing or null."""
    value = item[key] if default is None else item.get(key) or default
    number = None
    with suppress(TypeError, ValueError, OverflowError):
        number = int(value)
    if number is None or (isinstance(value, float) and number != value):
        raise ValueError(f"{key} is {reprlib.repr(value)}, no whole number")
    if not -ID_LIMIT <= number < ID_LIMIT:
        raise ValueError(f"{key} {reprlib.repr(value)} does not fit into 64 bits")
    return number


def _float(value: Any) -> float:
    """Return a number; NaN for anything else, and infinity for what is too large."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
