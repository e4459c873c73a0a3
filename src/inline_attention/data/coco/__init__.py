"""Datasets of COCO's format: annotation files, their checks, and images with boxes and masks."""

from inline_attention.data.coco.checks import open_and_check_coco

__all__ = ["open_and_check_coco"]
