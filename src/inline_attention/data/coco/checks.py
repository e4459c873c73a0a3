"""Check COCO annotations before the first step, and repair them on request.

No repair is silent and no file is changed: a repair applies to what this run uses, and the report says what was done.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from inline_attention.data.coco.annotations import (
    CocoAnnotations,
    CocoCategory,
    CocoImage,
    CocoObject,
    MalformedEntry,
)
from inline_attention.data.coco.masks import MaskError, MaskSizeError, mask_area, mask_extent, valid_polygons
from inline_attention.data.findings import DataReport, Findings
from inline_attention.data.images import ImageError, image_sizes
from inline_attention.data.listed_files import ALLOW_OUTSIDE, ListedFiles, OutsideError

Extent = tuple[float, float, float, float]  # left, top, right, bottom in pixels
OUTSIDE_TOLERANCE = 1.0  # pixels by which boxes may leave the image: annotation tools round differently
MASK_TOLERANCE_PIXELS = 2.0
MASK_TOLERANCE_SHARE = 0.05  # of the box's longer side
# Of the image's side: what is smaller gets lost in the rounding of float32 as boxes are flipped and resized, and a box
# without area makes losses infinite.
VANISHING_SHARE = 2.0**-20


@dataclass(frozen=True)
class CheckedAnnotations:
    """Annotations, repaired if that was asked for, and what was found wrong with them.

    If nothing is wrong any more, all objects have an area.
    """

    annotations: CocoAnnotations
    report: DataReport


def check_annotations(
    annotations: CocoAnnotations,
    image_folder: ListedFiles | str | os.PathLike[str],
    *,
    masks: bool = True,
    every_category: bool = True,
    repair: bool = False,
    on_progress: Callable[[], None] | None = None,
) -> CheckedAnnotations:
    """Check all images (by the first bytes of their files) and all objects.

    Args:
        annotations: Annotations as read from the file.
        image_folder: What their file names are relative to.
        masks: Whether masks will be used; without, objects need none, and what is wrong with those they have is no
            fault.
        every_category: Whether each category needs an object, as it does to be learned; in validation data it does not.
        repair: Return repaired annotations; otherwise they come back as they are, if there is a fault.
        on_progress: Called after each image.
    """
    findings = Findings()
    _check_entries(annotations.malformed, findings)
    images = _check_images(annotations.images, ListedFiles.of(image_folder), findings, on_progress)
    categories = _check_categories(annotations.categories, findings)
    # Objects are left out with their image, which is one fault, not many.
    objects = _Objects(
        {image.id: image for image in images},
        {image.id for image in annotations.images} | _ids_of_malformed_images(annotations.malformed),
        {category.id for category in categories},
        findings,
        masks=masks,
    ).checked(annotations.objects)
    if every_category:
        _check_every_category(categories, objects, findings)
    checked = f"{len(annotations.images):,} images, {len(annotations.objects):,} objects"
    report = findings.report(annotations.location, checked, repaired=repair)
    if repair or not report:
        annotations = CocoAnnotations(annotations.location, tuple(images), tuple(categories), tuple(objects))
    return CheckedAnnotations(annotations, report)


def check_same_categories(train: CocoAnnotations, validation: CocoAnnotations) -> list[str]:
    """Categories whose id or name differs between two files: their labels would not mean the same."""
    ours, theirs = train.category_names, validation.category_names
    different = sorted(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    if not different:
        return []
    first = different[0]
    return [
        f"{len(different)} categories differ between {train.location} and {validation.location}, such as id {first}: "
        f"{ours.get(first, 'none')!r} and {theirs.get(first, 'none')!r}; give both files the same categories"
    ]


def _check_entries(malformed: Iterable[MalformedEntry], findings: Findings) -> None:
    for entry in malformed:
        findings.add("malformed entries", str(entry), repair="left out, images with their objects")


def _ids_of_malformed_images(malformed: Iterable[MalformedEntry]) -> set[int]:
    return {entry.id for entry in malformed if entry.list_name == "images" and entry.id is not None}


def _check_images(
    images: Iterable[CocoImage], files: ListedFiles, findings: Findings, on_progress: Callable[[], None] | None
) -> list[CocoImage]:
    images = list(images)
    shared = _shared_ids(images)
    kept: dict[int, CocoImage] = {}
    found = image_sizes((files.path_or_error(image.file_name) for image in images), on_progress)
    for image, size in zip(images, found, strict=True):
        name = f"{image.file_name} (image {image.id})"
        if image.id in shared:
            findings.add(
                "different images with the same id",
                name,
                repair="left out with their objects, as nobody knows whose those are",
            )
        elif isinstance(size, OutsideError):
            findings.add(
                "images whose file is outside of the data folder",
                name,
                repair=f"left out with their objects; {ALLOW_OUTSIDE} reads them",
            )
        elif isinstance(size, ImageError):
            # Not `Path.exists`, which raises for names that no file can have.
            missing = not os.path.exists(size.path)
            fault = "images whose file is missing" if missing else "images whose file cannot be read"
            findings.add(fault, name if missing else f"{name}: {size.reason}", repair="left out with their objects")
        elif image.id in kept:
            findings.add("images that are listed more than once", name, repair="kept once")
        elif not (image.height and image.width):
            findings.add("images without a size", name, repair="size taken from the file")
            kept[image.id] = replace(image, height=size[0], width=size[1])
        elif size != (image.height, image.width):
            findings.add(
                "images of another size than the annotations say",
                f"{name}: {size[1]}×{size[0]} instead of {image.width}×{image.height}",
                repair="left out with their objects, as nobody knows which is right",
            )
        else:
            kept[image.id] = image
    return list(kept.values())


def _shared_ids(images: Iterable[CocoImage]) -> set[int]:
    """Ids of more than one image, as after joining two files: their objects may be of either."""
    first: dict[int, CocoImage] = {}
    return {image.id for image in images if first.setdefault(image.id, image) != image}


def _check_categories(categories: Iterable[CocoCategory], findings: Findings) -> list[CocoCategory]:
    kept: dict[int, CocoCategory] = {}
    for category in categories:
        if category.id in kept:
            findings.add(
                "categories with an id that another has",
                f"{category.name} ({category.id})",
                repair="left out, the first of each id being kept",
            )
        else:
            kept[category.id] = category
    ids: dict[str, int] = {}
    for category in kept.values():
        if (first := ids.setdefault(category.name, category.id)) != category.id:
            findings.add(
                "categories with a name that another has",
                f"{category.name} ({first} and {category.id})",
                repair="kept apart, by their ids; figures by category show the last of them alone",
            )
    return list(kept.values())


def _check_every_category(categories: list[CocoCategory], objects: list[CocoObject], findings: Findings) -> None:
    used = {item.category_id for item in objects if not item.is_crowd}
    for category in categories:
        if category.id not in used:
            findings.add(
                "categories without an object",
                f"{category.name} ({category.id})",
                repair="kept, so that labels stay the same; nothing will be learned of them",
            )


class _Objects:
    """Checks objects one by one, each against its image."""

    def __init__(
        self,
        images: dict[int, CocoImage],
        known_images: set[int],
        categories: set[int],
        findings: Findings,
        *,
        masks: bool,
    ):
        self._images, self._known_images, self._categories = images, known_images, categories
        self._findings, self._masks = findings, masks
        self._ids: set[int] = set()

    def checked(self, objects: Iterable[CocoObject]) -> list[CocoObject]:
        """The objects that can be used, repaired."""
        objects = list(objects)
        next_id = max((item.id for item in objects), default=0) + 1
        kept: list[CocoObject] = []
        for item in objects:
            usable = self._checked(item)
            if item.id in self._ids:
                self._add("objects with an id that another has", item, repair="given new ids")
                if usable is not None:
                    usable = replace(usable, id=next_id)
                    next_id += 1
            self._ids.add(item.id)
            if usable is not None:
                kept.append(usable)
        return kept

    def _checked(self, item: CocoObject) -> CocoObject | None:
        if item.image_id not in self._known_images:
            self._add("objects of an unknown image", item, f"image {item.image_id}")
            return None
        if item.category_id not in self._categories:
            self._add("objects of an unknown category", item, f"category {item.category_id}")
            return None
        image = self._images.get(item.image_id)
        if image is None:
            return None
        extent = None
        if self._masks:
            with_mask = self._with_usable_mask(item, image)
            if with_mask is None:
                return None
            item, extent = with_mask
        with_box = self._with_usable_box(item, image, extent)
        usable = None if with_box is None else self._with_usable_area(with_box, image)
        if usable is None or self._masks or usable.segmentation is None:
            return usable
        return replace(usable, segmentation=None)  # nobody has checked it

    def _with_usable_mask(self, item: CocoObject, image: CocoImage) -> tuple[CocoObject, Extent] | None:
        try:
            extent = mask_extent(item.segmentation, image.height, image.width)
        except MaskSizeError as error:
            self._add("masks of another size than their image", item, str(error))
            return None
        except MaskError as error:
            fault = "malformed masks" if item.segmentation else "objects without a mask"
            self._add(fault, item, "" if fault == "objects without a mask" else str(error))
            return None
        if extent is None or _vanishes(extent, image):
            self._add("masks that cover nothing of their image", item)
            return None
        if isinstance(item.segmentation, list):
            valid = valid_polygons(item.segmentation, image.height, image.width)
            if len(valid) < len(item.segmentation):
                self._add("masks with malformed polygons", item, repair="those polygons left out")
                item = replace(item, segmentation=valid)
        return item, extent

    def _with_usable_box(self, item: CocoObject, image: CocoImage, extent: Extent | None) -> CocoObject | None:
        repair = "left out" if extent is None else "box taken from the mask"
        if not item.box or not all(map(math.isfinite, item.box)):
            self._add("objects without a box of four finite numbers", item, repair=repair)
            return None if extent is None else _with_box(item, extent)
        left, top, width, height = item.box
        if width <= 0 or height <= 0:
            self._add("boxes without area", item, f"{width:g}×{height:g}", repair=repair)
            return None if extent is None else _with_box(item, extent)
        box = left, top, left + width, top + height
        clipped = (
            max(0.0, left),
            max(0.0, top),
            min(float(image.width), left + width),
            min(float(image.height), top + height),
        )
        if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
            self._add("boxes wholly outside of their image", item, repair=repair)
            return None if extent is None else _with_box(item, extent)
        if _vanishes(clipped, image):
            self._add("boxes without area", item, f"{width:g}×{height:g}", repair=repair)
            return None if extent is None else _with_box(item, extent)
        if max(abs(a - b) for a, b in zip(box, clipped, strict=True)) > OUTSIDE_TOLERANCE:
            self._add("boxes that leave their image", item, repair="clipped")
            item = _with_box(item, clipped)
        if extent is not None:
            tolerance = max(MASK_TOLERANCE_PIXELS, MASK_TOLERANCE_SHARE * max(width, height))
            if max(abs(a - b) for a, b in zip(clipped, extent, strict=True)) > tolerance:
                self._add("boxes that disagree with their mask", item, repair="box taken from the mask")
                item = _with_box(item, extent)
        return item

    def _with_usable_area(self, item: CocoObject, image: CocoImage) -> CocoObject:
        if item.area is not None and 0 < item.area < math.inf:
            return item
        if item.area is not None:
            self._add(
                "objects without a positive finite area",
                item,
                "no number" if math.isnan(item.area) else f"{item.area:g}",
                repair="area taken from the mask, or else from the box",
            )
        return replace(item, area=_covered_area(item, image))

    def _add(self, fault: str, item: CocoObject, detail: str = "", *, repair: str = "left out") -> None:
        image = self._images.get(item.image_id)
        where = f" in {image.file_name}" if image is not None else ""
        self._findings.add(fault, f"object {item.id}{where}{': ' if detail else ''}{detail}", repair=repair)


def _covered_area(item: CocoObject, image: CocoImage) -> float:
    """Return the area of the mask as evaluation counts it, or of the box if no mask covers a pixel."""
    try:
        return float(mask_area(item.segmentation, image.height, image.width)) or item.box_area
    except MaskError:
        return item.box_area


def _vanishes(corners: Extent, image: CocoImage) -> bool:
    left, top, right, bottom = corners
    return right - left <= VANISHING_SHARE * image.width or bottom - top <= VANISHING_SHARE * image.height


def _with_box(item: CocoObject, corners: Extent) -> CocoObject:
    left, top, right, bottom = corners
    return replace(item, box=(left, top, right - left, bottom - top))
