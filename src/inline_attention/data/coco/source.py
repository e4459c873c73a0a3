"""Images with objects, as COCO annotates them, in the form that torchvision's detectors take.

Shapes: `N` images, `n` objects of an image, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import copy
import json
import os
from collections import defaultdict
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from inline_attention.data.batch import Target
from inline_attention.data.coco.annotations import CocoAnnotations, CocoObject
from inline_attention.data.coco.masks import MaskError, decode_mask
from inline_attention.data.images import ImageError, load_image
from inline_attention.data.listed_files import ListedFiles
from inline_attention.data.sources import DataError
from inline_attention.support.files import AnyPath

MOST_MASK_PIXELS = 2**33  # of all masks of an image


class CocoSource:
    """Annotated images by number. Cheap to copy into worker processes.

    `location` is the annotation file. The first of `class_names` is that of label 1. `image_ids` `[N]` are COCO's, and
    `sizes` `[N, 2]` are heights and widths, int64 both.
    """

    def __init__(
        self,
        annotations: CocoAnnotations,
        image_folder: ListedFiles | AnyPath,
        *,
        masks: bool = True,
        skip_empty: bool = False,
    ):
        """Take annotations as they are: `check_annotations` first.

        Args:
            annotations: The annotations.
            image_folder: Folder that their file names are relative to.
            masks: Add masks to targets.
            skip_empty: Leave out images without an object, as is usual in training; `DataError` if none is left.
        """
        self.location, self.class_names = annotations.location, annotations.class_names
        self._files, self._masks = ListedFiles.of(image_folder), masks
        labels = {number: label for label, number in annotations.label_to_category.items()}
        by_image: defaultdict[int, list[CocoObject]] = defaultdict(list)
        for item in annotations.objects:
            if not item.is_crowd:  # losses do not know what to do with crowds
                by_image[item.image_id].append(item)
        images = [image for image in annotations.images if by_image[image.id] or not skip_empty]
        if not images:
            raise DataError(f"{self.location} has no image{' with an object' if skip_empty else ''} to use")
        self.image_ids = np.array([image.id for image in images], dtype=np.int64)
        self.sizes = np.array([(image.height, image.width) for image in images], dtype=np.int64)
        # Packed, as a million small Python objects would be copied into every worker, page by page, as they are used.
        self._names = np.array([os.fsencode(image.file_name) for image in images])
        packed = [json.dumps([_packed(item, labels) for item in by_image[image.id]]).encode() for image in images]
        self._ends = np.cumsum([0, *map(len, packed)])
        self._objects = np.frombuffer(b"".join(packed), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.image_ids)

    def name(self, index: int) -> str:
        """Return the image's path."""
        return os.path.join(self._files.folder, os.fsdecode(self._names[index]))

    def load(self, index: int) -> Image.Image:
        """Return the image, upright and in RGB.

        Raises `ImageError` if it cannot be read, is outside of the data folder, or is not of the annotated size.
        """
        image = load_image(self._files.path(os.fsdecode(self._names[index])))
        height, width = self.sizes[index]
        if image.size != (width, height):
            reason = f"is {image.width}×{image.height} pixels, {width}×{height} in {self.location}"
            raise ImageError(self.name(index), reason)
        return image

    def target(self, index: int) -> Target:
        """Return the objects in an image, in the form of torchvision's detectors.

        Returns:
            boxes `[n, 4]` float32 (left, top, right, bottom in pixels), labels `[n]` int64 from 1, masks `[n, H, W]`
            uint8 (if wanted; `ImageError` if one is malformed), image_id int64, area `[n]` float32 and iscrowd `[n]`
            int64.
        """
        packed = self._objects[self._ends[index] : self._ends[index + 1]]
        objects: list[dict[str, Any]] = json.loads(packed.tobytes())
        boxes = torch.tensor([item["box"] for item in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = {
            "boxes": boxes,
            "labels": torch.tensor([item["label"] for item in objects], dtype=torch.int64),
            "image_id": torch.tensor(int(self.image_ids[index])),
            "area": torch.tensor([item["area"] for item in objects], dtype=torch.float32),
            "iscrowd": torch.zeros(len(objects), dtype=torch.int64),
        }
        return {**target, "masks": self._decoded(objects, index)} if self._masks else target

    def without_masks(self) -> Self:
        """Return the same images with targets without masks."""
        plain = copy.copy(self)
        plain._masks = False
        return plain

    def _decoded(self, objects: list[dict[str, Any]], index: int) -> Tensor:
        height, width = map(int, self.sizes[index])
        if len(objects) * height * width > MOST_MASK_PIXELS:
            reason = f"has {len(objects):,} masks of {width}×{height} pixels, too many to decode"
            raise ImageError(self.name(index), reason)
        masks = np.empty((len(objects), height, width), dtype=np.uint8)
        for mask, item in zip(masks, objects, strict=True):
            try:
                mask[...] = decode_mask(item["segmentation"], height, width)
            except MaskError as error:
                raise ImageError(self.name(index), f"has a malformed mask (object {item['id']}): {error}") from error
        return torch.from_numpy(masks)


def _packed(item: CocoObject, labels: dict[int, int]) -> dict[str, Any]:
    return {
        "id": item.id,
        "box": item.box,
        "label": labels[item.category_id],
        "area": item.box_area if item.area is None else item.area,
        "segmentation": item.segmentation,
    }
