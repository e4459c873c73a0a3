"""Datasets for semantic segmentation: images and label maps in folders, their checks, ADE20K's layout."""

from inline_attention.data.segmentation.checks import CheckedPairs, OpenedPairs, check_pairs, open_and_check_pairs
from inline_attention.data.segmentation.pairs import (
    IGNORED,
    FoundPairs,
    LabelRules,
    Pair,
    SegmentationSource,
    find_class_file,
    find_pair_folders,
    find_pairs,
    read_class_names,
    read_label_map,
)

__all__ = [
    "IGNORED",
    "CheckedPairs",
    "FoundPairs",
    "LabelRules",
    "OpenedPairs",
    "Pair",
    "SegmentationSource",
    "check_pairs",
    "find_class_file",
    "find_pair_folders",
    "find_pairs",
    "open_and_check_pairs",
    "read_class_names",
    "read_label_map",
]
