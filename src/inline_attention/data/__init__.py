"""Data for training and prediction; knows no model."""

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImage, BrokenImageLimit, BrokenImages, BrokenImagesError
from inline_attention.data.datasets import OpenedData, open_and_check, open_dataset
from inline_attention.data.images import ImageError, find_images, load_image
from inline_attention.data.loading import DataWorkerError, ImageLoader, Loader, named_worker_error
from inline_attention.data.on_device import (
    BatchAugmentation,
    MemoryImages,
    MemoryLoader,
    decode_to_memory,
    training_augmentation,
)
from inline_attention.data.sampling import EvaluationBatches, TrainingBatches
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.data.transforms import SeededMixup, evaluation_transform, training_transform

__all__ = [
    "Batch",
    "BatchAugmentation",
    "BrokenImage",
    "BrokenImageLimit",
    "BrokenImages",
    "BrokenImagesError",
    "DataError",
    "DataWorkerError",
    "EvaluationBatches",
    "ImageError",
    "ImageLoader",
    "ImageSource",
    "Loader",
    "MemoryImages",
    "MemoryLoader",
    "Normalize",
    "OpenedData",
    "SeededMixup",
    "TrainingBatches",
    "decode_to_memory",
    "evaluation_transform",
    "find_images",
    "load_image",
    "named_worker_error",
    "open_and_check",
    "open_dataset",
    "training_augmentation",
    "training_transform",
]
