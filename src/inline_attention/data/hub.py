"""Datasets of the Hugging Face Hub, through timm's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from inline_attention.data.images import ImageError, load_image_bytes
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
            import datasets  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport] (only whether it is there)
        except ImportError as error:
            raise DataError(
                f"{name} is read by the Hugging Face package, which is missing; pip install datasets"
            ) from error
        from timm.data.dataset_factory import create_dataset

        try:
            dataset: Any = create_dataset(name, root=root, split=split)
            self._reader = dataset.reader
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
        """Decode the picture's bytes."""
        try:
            stream, _ = self._reader[index]
            with stream:
                content = stream.read()
        except Exception as error:  # an empty row fails an assertion of timm's, a lost file in other ways
            raise ImageError(self.name(index), f"cannot be opened: {str(error) or 'the row is empty'}") from error
        return load_image_bytes(content, self.name(index))

    def name(self, index: int) -> str:
        """The number in the dataset, which is what one looks it up by."""
        return f"{self.location}[{index}]"
