"""Data for training and prediction; knows no model. Names are imported on first use: a check needs no transforms."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inline_attention.data.batch import Batch, Normalize
    from inline_attention.data.broken import BrokenImage, BrokenImageLimit, BrokenImages, BrokenImagesError
    from inline_attention.data.checks import OpenedData, open_and_check
    from inline_attention.data.datasets import open_dataset
    from inline_attention.data.images import ImageError, find_images, load_image
    from inline_attention.data.loading import DataWorkerError, ImageLoader, Loader, named_worker_error
    from inline_attention.data.memory import MemoryImages, MemoryLoader, decode_to_memory
    from inline_attention.data.on_device import BatchAugmentation, training_augmentation
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

_MODULE_OF = {
    "Batch": "batch",
    "BatchAugmentation": "on_device",
    "BrokenImage": "broken",
    "BrokenImageLimit": "broken",
    "BrokenImages": "broken",
    "BrokenImagesError": "broken",
    "DataError": "sources",
    "DataWorkerError": "loading",
    "EvaluationBatches": "sampling",
    "ImageError": "images",
    "ImageLoader": "loading",
    "ImageSource": "sources",
    "Loader": "loading",
    "MemoryImages": "memory",
    "MemoryLoader": "memory",
    "Normalize": "batch",
    "OpenedData": "checks",
    "SeededMixup": "transforms",
    "TrainingBatches": "sampling",
    "decode_to_memory": "memory",
    "evaluation_transform": "transforms",
    "find_images": "images",
    "load_image": "images",
    "named_worker_error": "loading",
    "open_and_check": "checks",
    "open_dataset": "datasets",
    "training_augmentation": "on_device",
    "training_transform": "transforms",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value
