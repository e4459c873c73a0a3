"""Datasets for semantic segmentation: pictures and maps of labels in folders, their checks, ADE20K's layout."""

from inline_attention.data.segmentation.checks import CheckedPairs, check_pairs
from inline_attention.data.segmentation.classes import find_class_file, read_class_names
from inline_attention.data.segmentation.label_maps import read_label_map
from inline_attention.data.segmentation.opening import OpenedPairs, open_and_check_pairs
from inline_attention.data.segmentation.pairs import FoundPairs, Pair, find_pair_folders, find_pairs
from inline_attention.data.segmentation.source import IGNORED, LabelRules, SegmentationSource

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
