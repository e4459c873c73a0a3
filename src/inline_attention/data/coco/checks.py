"""Open COCO datasets and check them before the first step, and repair them on request.

No repair is silent and no file is changed: a repair applies to what this run uses, and the report says what was done.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from inline_attention.data.coco.annotations import (
    ANNOTATIONS_AND_IMAGES,
    CocoAnnotations,
    CocoCategory,
    CocoImage,
    CocoObject,
    find_annotation_file,
    find_image_folder,
    read_annotations,
)
from inline_attention.data.coco.masks import Extent, MaskError, MaskSizeError, decode_mask, mask_extent, valid_polygons
from inline_attention.data.coco.source import CocoSource
from inline_attention.data.findings import KEPT_AS_LABELS, LEFT_OUT, NOT_POSSIBLE, DataReport, OpenedSplits, each_once
from inline_attention.data.images import ImageError, image_size, read_in_threads
from inline_attention.data.listed_files import ALLOW_OUTSIDE, ListedFiles, OutsideError
from inline_attention.data.sources import DataError, check_folder
from inline_attention.support.files import AnyPath
from inline_attention.support.text import counted

OUTSIDE_TOLERANCE = 1.0  # pixels by which boxes may leave the image: annotation tools round differently
MASK_TOLERANCE_PIXELS = 2.0
MASK_TOLERANCE_SHARE = 0.05  # of the box's longer side
# Of the image's side: what is smaller gets lost in the rounding of float32 as boxes are flipped and resized, and a box
# without area makes losses infinite.
VANISHING_SHARE = 2.0**-20
# Repairs.
WITH_OBJECTS = "left out with their objects"
FROM_MASK = "box taken from the mask"
BOXES_ONLY = "boxes only: fit for faster_rcnn and retinanet"
NO_MASKS = "annotation files without a single mask"


@dataclass(frozen=True)
class OpenedCoco(OpenedSplits[CocoSource]):
    """Both splits: images to train on have an object and no crowds; all images are validated on."""

    validation_annotations: CocoAnnotations | None = None  # ground truth of validation images, crowds included


def open_and_check_coco(
    data_dir: AnyPath,
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    masks: bool | None = True,
    num_classes: int | None = None,
    allow_outside: bool = False,
    **options: Any,
) -> OpenedCoco:
    """Open `data_dir/annotations/instances_*.json` and the images they are about, and check both.

    Args:
        data_dir: Folder of the dataset.
        train_split, validation_split: Names such as "train" or "train2017", and "validation", "val" or "val2017".
        masks: Use masks, which all objects must have; None: if any object of the split has one.
        num_classes: Categories that the model knows; None if it follows the data.
        allow_outside: Read images that the annotations name outside of `data_dir`.
        **options: `repair`, `decode` and `on_progress` of `check_annotations`.

    Raises:
        DataError: If there is no such folder. All other problems are in the result.
    """
    check_folder(data_dir, ANNOTATIONS_AND_IMAGES)
    problems: list[str] = []
    reports: list[DataReport] = []

    def open_split(split: str, *, training: bool) -> tuple[CocoAnnotations | None, CocoSource | None]:
        checked = None
        try:
            wanted = None if reports and reports[0].count(NO_MASKS) else masks  # report it once
            kind = {"masks": wanted, "every_category": training, "allow_outside": allow_outside}
            (checked, report), files = check_split(data_dir, split, **kind, **options)
            reports.append(report)
            problems.extend(report.problems)
            if not report.problems:
                with_masks = masks if masks is not None else has_masks(checked)
                return checked, CocoSource(checked, files, masks=with_masks, skip_empty=training)
        except DataError as error:
            problems.append(str(error))
        return checked, None

    ours, train = open_split(train_split, training=True)
    theirs, validation = open_split(validation_split, training=False)
    if ours is not None and theirs is not None:
        problems += check_same_categories(ours, theirs)
    if ours is not None and num_classes not in (None, count := len(ours.class_names)):
        problems.append(f"{ours.location} has {count} categories, the model {num_classes}; leave --num-classes out")
    return OpenedCoco(train, validation, each_once(problems), reports, theirs)


class CheckedAnnotations(NamedTuple):
    """Annotations, repaired if asked, and the faults that were found. Without faults, all objects have an area."""

    annotations: CocoAnnotations
    report: DataReport


def check_split(
    data_dir: AnyPath, split: str, *, allow_outside: bool = False, **options: Any
) -> tuple[CheckedAnnotations, ListedFiles]:
    """Read and check the annotations of a split, with options of `check_annotations`; also returns its images."""
    read = read_annotations(find_annotation_file(data_dir, split))
    folder = find_image_folder(data_dir, read, split, allow_outside=allow_outside)
    files = ListedFiles(folder, data_dir, allow_outside=allow_outside)
    return check_annotations(read, files, **options), files


def check_annotations(
    annotations: CocoAnnotations,
    image_folder: ListedFiles | AnyPath,
    *,
    masks: bool | None = True,
    every_category: bool = True,
    repair: bool = False,
    decode: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> CheckedAnnotations:
    """Check all images and all objects.

    Args:
        annotations: Annotations as read from the file.
        image_folder: Folder that their file names are relative to.
        masks: Check masks. Without them objects need none, and what is wrong with those they have is no fault. None:
            check them if any object has one.
        every_category: Require an object of each category, as it takes one to be learned; not in validation data.
        repair: Return repaired annotations; otherwise they come back as they are, if there is a fault. The files stay
            as they are.
        decode: Decode all images, which finds truncated files; otherwise only the first bytes are read.
        on_progress: Called after each image.
    """
    checked = f"{counted(len(annotations.images), 'images')}, {counted(len(annotations.objects), 'objects')}"
    boxes_only = bool(annotations.objects) and not has_masks(annotations)
    if boxes_only and masks is None:
        checked += f"; {BOXES_ONLY}"
    report = DataReport(annotations.location, checked, repaired=repair)
    if boxes_only and masks:  # one fault, not one per object
        report.repaired = False
        report.add(NO_MASKS, BOXES_ONLY, f"{NOT_POSSIBLE}train with --set detection.head=faster_rcnn, or add masks")
    masks = masks is not False and not boxes_only
    files = ListedFiles.of(image_folder)
    for entry in annotations.malformed:
        report.add("malformed entries", entry, "left out, images with their objects")
    sizes = read_in_threads(
        lambda image: image_size(files.path(image.file_name), decode=decode), annotations.images, on_progress
    )
    images = _check_images(annotations.images, sizes, report)
    categories = _check_categories(annotations.categories, report)
    # Objects are left out with their image, which is one fault, not many.
    known_images = {image.id for image in annotations.images} | annotations.malformed_images
    objects = _ObjectChecks(images, known_images, categories, report, masks).checked(annotations.objects)
    if every_category:
        used = {item.category_id for item in objects if not item.is_crowd}
        for category in categories.values():
            if category.id not in used:
                report.add("categories without an object", f"{category.name} ({category.id})", KEPT_AS_LABELS)
    if repair or not report:
        usable = tuple(images.values()), tuple(categories.values()), tuple(objects)
        annotations = CocoAnnotations(annotations.location, *usable)
    return CheckedAnnotations(annotations, report)


def has_masks(annotations: CocoAnnotations) -> bool:
    """True if any object has a mask."""
    return any(item.segmentation for item in annotations.objects)


def check_same_categories(train: CocoAnnotations, validation: CocoAnnotations) -> list[str]:
    """Report categories whose id or name differs between two files: their labels would not mean the same."""
    ours, theirs = train.category_names, validation.category_names
    different = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    return [
        f"{len(different)} categories differ between {train.location} and {validation.location}, such as id {first}: "
        f"{ours.get(first, 'none')!r} and {theirs.get(first, 'none')!r}; give both files the same categories"
        for first in different[:1]
    ]


def _check_images(
    images: Sequence[CocoImage], sizes: Iterable[tuple[int, int] | ImageError], report: DataReport
) -> dict[int, CocoImage]:
    """Return the images that can be used, by id, given height and width of their files."""
    first: dict[int, CocoImage] = {}
    # As after joining two files: objects may be of either image.
    shared = {image.id for image in images if first.setdefault(image.id, image) != image}
    kept: dict[int, CocoImage] = {}
    for image, size in zip(images, sizes, strict=True):
        name = f"{image.file_name} (image {image.id})"
        if image.id in shared:
            repair = f"{WITH_OBJECTS}, because their objects cannot be told apart"
            report.add("different images with the same id", name, repair)
        elif isinstance(size, OutsideError):
            repair = f"{WITH_OBJECTS}; {ALLOW_OUTSIDE} reads them"
            report.add("images whose file is outside of the data folder", name, repair)
        elif isinstance(size, ImageError):
            if os.path.exists(size.path):  # not `Path.exists`, which raises for names that no file can have
                report.add("images whose file cannot be read", f"{name}: {size.reason}", WITH_OBJECTS)
            else:
                report.add("images whose file is missing", name, WITH_OBJECTS)
        elif image.id in kept:
            report.add("images that are listed more than once", name, "kept once")
        elif not (image.height and image.width):
            report.add("images without a size", name, "size taken from the file")
            kept[image.id] = replace(image, height=size[0], width=size[1])
        elif size != (image.height, image.width):
            fault = "images of another size than the annotations say"
            detail = f"{size[1]}×{size[0]} instead of {image.width}×{image.height}"
            report.add(fault, f"{name}: {detail}", f"{WITH_OBJECTS}, because either size may be wrong")
        else:
            kept[image.id] = image
    return kept


def _check_categories(categories: Sequence[CocoCategory], report: DataReport) -> dict[int, CocoCategory]:
    """Return the categories that can be used, by id."""
    kept: dict[int, CocoCategory] = {}
    for category in categories:
        if kept.setdefault(category.id, category) is not category:
            fault, repair = "categories with an id that another has", "left out, the first of each id being kept"
            report.add(fault, f"{category.name} ({category.id})", repair)
    ids: dict[str, int] = {}
    for category in kept.values():
        if (first := ids.setdefault(category.name, category.id)) != category.id:
            both = f"{category.name} ({first} and {category.id})"
            repair = "kept apart, by their ids; figures by category show the last of them alone"
            report.add("categories with a name that another has", both, repair)
    return kept


@dataclass(frozen=True)
class _ObjectChecks:
    """Checks objects one by one, each against its image."""

    images: dict[int, CocoImage]
    known_images: set[int]
    categories: dict[int, CocoCategory]
    report: DataReport
    masks: bool

    def checked(self, objects: Sequence[CocoObject]) -> list[CocoObject]:
        """Return the objects that can be used, repaired."""
        next_id = max((item.id for item in objects), default=0) + 1
        ids: set[int] = set()
        kept: list[CocoObject] = []
        for item in objects:
            usable = self._checked(item)
            if item.id in ids:
                self._add("objects with an id that another has", item, repair="given new ids")
                if usable is not None:
                    usable = replace(usable, id=next_id)
                    next_id += 1
            ids.add(item.id)
            if usable is not None:
                kept.append(usable)
        return kept

    def _checked(self, item: CocoObject) -> CocoObject | None:
        image = self.images.get(item.image_id)
        if item.image_id not in self.known_images:
            return self._add("objects of an unknown image", item, f"image {item.image_id}")
        if item.category_id not in self.categories:
            return self._add("objects of an unknown category", item, f"category {item.category_id}")
        if image is None:
            return None
        usable, extent = self._with_usable_mask(item, image) if self.masks else (item, None)
        usable = usable and self._with_usable_box(usable, image, extent)
        usable = usable and self._with_usable_area(usable, image)
        if usable is None or self.masks or usable.segmentation is None:
            return usable
        return replace(usable, segmentation=None)  # nobody has checked it

    def _with_usable_mask(self, item: CocoObject, image: CocoImage) -> tuple[CocoObject | None, Extent | None]:
        try:
            extent = mask_extent(item.segmentation, image.height, image.width)
        except MaskSizeError as error:
            return self._add("masks of another size than their image", item, str(error)), None
        except MaskError as error:
            fault, detail = ("malformed masks", str(error)) if item.segmentation else ("objects without a mask", "")
            return self._add(fault, item, detail), None
        if extent is None or _vanishes(extent, image):
            return self._add("masks that cover nothing of their image", item), None
        if isinstance(item.segmentation, list):
            valid = valid_polygons(item.segmentation, image.height, image.width)
            if len(valid) < len(item.segmentation):
                self._add("masks with malformed polygons", item, repair="those polygons left out")
                item = replace(item, segmentation=valid)
        return item, extent

    def _with_usable_box(self, item: CocoObject, image: CocoImage, extent: Extent | None) -> CocoObject | None:
        clipped, fault, detail = _clipped_box(item.box, image)
        if clipped is None:
            self._add(fault, item, detail, repair=LEFT_OUT if extent is None else FROM_MASK)
            return None if extent is None else _with_box(item, extent)
        left, top, width, height = item.box
        if _difference((left, top, left + width, top + height), clipped) > OUTSIDE_TOLERANCE:
            self._add("boxes that leave their image", item, repair="clipped")
            item = _with_box(item, clipped)
        tolerance = max(MASK_TOLERANCE_PIXELS, MASK_TOLERANCE_SHARE * max(width, height))
        if extent is not None and _difference(clipped, extent) > tolerance:
            self._add("boxes that disagree with their mask", item, repair=FROM_MASK)
            item = _with_box(item, extent)
        return item

    def _with_usable_area(self, item: CocoObject, image: CocoImage) -> CocoObject:
        if item.area is not None:
            if 0 < item.area < math.inf:
                return item
            detail = "no number" if math.isnan(item.area) else f"{item.area:g}"
            repair = "area taken from the mask, or else from the box"
            self._add("objects without a positive finite area", item, detail, repair=repair)
        try:
            covered = float(np.count_nonzero(decode_mask(item.segmentation, image.height, image.width)))
        except MaskError:
            covered = 0.0
        return replace(item, area=covered or item.box_area)

    def _add(self, fault: str, item: CocoObject, detail: str = "", *, repair: str = LEFT_OUT) -> None:
        """Report a fault; returns None in place of the object."""
        image = self.images.get(item.image_id)
        where = f" in {image.file_name}" if image is not None else ""
        self.report.add(fault, f"object {item.id}{where}{': ' if detail else ''}{detail}", repair)


def _clipped_box(box: tuple[float, ...], image: CocoImage) -> tuple[Extent | None, str, str]:
    """Clip a box to the image. Return it or None, the fault and a detail."""
    if not box or not all(map(math.isfinite, box)):
        return None, "objects without a box of four finite numbers", ""
    left, top, width, height = box
    right, bottom = min(float(image.width), left + width), min(float(image.height), top + height)
    clipped = max(0.0, left), max(0.0, top), right, bottom
    is_empty = width <= 0 or height <= 0
    if not is_empty and (clipped[0] >= right or clipped[1] >= bottom):
        return None, "boxes wholly outside of their image", ""
    if is_empty or _vanishes(clipped, image):
        return None, "boxes without area", f"{width:g}×{height:g}"
    return clipped, "", ""


def _difference(one: Extent, other: Extent) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _vanishes(corners: Extent, image: CocoImage) -> bool:
    left, top, right, bottom = corners
    return right - left <= VANISHING_SHARE * image.width or bottom - top <= VANISHING_SHARE * image.height


def _with_box(item: CocoObject, corners: Extent) -> CocoObject:
    left, top, right, bottom = corners
    return replace(item, box=(left, top, right - left, bottom - top))
