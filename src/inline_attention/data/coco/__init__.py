"""Datasets of COCO's format: annotation files, their checks, and images with boxes and masks."""

from inline_attention.data.coco.annotations import (
    CocoAnnotations,
    CocoCategory,
    CocoImage,
    CocoObject,
    MalformedEntry,
    find_annotation_file,
    find_image_folder,
    read_annotations,
)
from inline_attention.data.coco.checks import (
    CheckedAnnotations,
    OpenedCoco,
    check_annotations,
    check_same_categories,
    open_and_check_coco,
)
from inline_attention.data.coco.masks import MaskError, decode_mask, encode_mask
from inline_attention.data.coco.source import CocoSource

__all__ = [
    "CheckedAnnotations",
    "CocoAnnotations",
    "CocoCategory",
    "CocoImage",
    "CocoObject",
    "CocoSource",
    "MalformedEntry",
    "MaskError",
    "OpenedCoco",
    "check_annotations",
    "check_same_categories",
    "decode_mask",
    "encode_mask",
    "find_annotation_file",
    "find_image_folder",
    "open_and_check_coco",
    "read_annotations",
]
