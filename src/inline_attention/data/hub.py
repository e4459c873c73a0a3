"""Datasets of the Hugging Face Hub, through timm's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from inline_attention.data.images import ImageError, load_image, load_image_bytes
from inline_attention.data.listed_files import is_inside
from inline_attention.data.sources import DataError, ImageSource


class HubSource(ImageSource):
    """A dataset with an image and a label column."""

    def __init__(self, name: str, root: str | None, split: str):
        """Fetch the dataset, or open what was fetched before.

        Args:
            name: As timm takes it: `hfds/OWNER/NAME`.
            root: Where to keep it; by default the Hub's own cache.
            split: The dataset's own name of the split.

        Raises:
            DataError: If the `datasets` package is missing, or the dataset cannot be opened.
        """
        try:
            import datasets.config  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise DataError(
                f"{name} is read by the Hugging Face package, which is missing; pip install 'inline-attention[hub]'"
            ) from error
        from timm.data.dataset_factory import create_dataset

        try:
            dataset: Any = create_dataset(name, root=root, split=split, trust_remote_code=False)
            self._reader = dataset.reader
            self._caches = [root] if root else [str(datasets.config.HF_DATASETS_CACHE)]
            labels = self._reader.dataset[self._reader.label_key]
            targets = np.array([int(label) for label in labels], dtype=np.int64)
        except Exception as error:  # network, names, columns: all of it is for the user to see
            raise DataError(
                f"{name}, split {split!r}, cannot be opened: {str(error) or type(error).__name__}; "
                "check its name, its splits, and that it has the columns image and label"
            ) from error
        numbers: dict[str, int] = self._reader.class_to_idx
        by_number = {number: class_name for class_name, number in numbers.items()}
        count = max(by_number, default=int(targets.max(initial=-1))) + 1
        super().__init__(f"{name} ({split})", [by_number.get(n, str(n)) for n in range(count)], targets)

    def load(self, index: int) -> Image.Image:
        """Decode the picture's bytes, or the file in the cache that the row names.

        Not through timm's reader, which opens whatever path a row names.
        """
        try:
            image = self._reader.dataset[index][self._reader.image_key] or {}
            content, path = image.get("bytes"), image.get("path")
        except Exception as error:  # a lost or damaged file of the cache can fail anywhere
            raise ImageError(self.name(index), f"cannot be opened: {str(error) or type(error).__name__}") from error
        if content:
            return load_image_bytes(content, self.name(index))
        if not path:
            raise ImageError(self.name(index), "cannot be opened: the row is empty")
        if not any(is_inside(path, folder) for folder in self._caches):
            raise ImageError(self.name(index), f"cannot be opened: the row names {path}, which is not in the cache")
        return load_image(path)

    def name(self, index: int) -> str:
        """The number in the dataset, which is what one looks it up by."""
        return f"{self.location}[{index}]"
