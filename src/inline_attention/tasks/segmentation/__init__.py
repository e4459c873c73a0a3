"""Semantic segmentation: a class for every pixel, and how good they are."""
