"""Datasets for semantic segmentation: images and label maps in folders, their checks, ADE20K's layout."""

from inline_attention.data.segmentation.checks import open_and_check_pairs

__all__ = ["open_and_check_pairs"]
