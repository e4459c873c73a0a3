"""Data for training and prediction; knows no model."""

from inline_attention.data.images import ImageError, find_images, load_image

__all__ = ["ImageError", "find_images", "load_image"]
