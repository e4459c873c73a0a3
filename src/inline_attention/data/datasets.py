"""Open a dataset by the name that users of timm write."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from inline_attention.data.cifar10 import cifar10
from inline_attention.data.images import ImageError, load_image, load_image_bytes
from inline_attention.data.listed_files import is_inside
from inline_attention.data.shards import ShardSource, find_shards
from inline_attention.data.sources import (
    ArraySource,
    DataError,
    FolderSource,
    ImageSource,
    find_split_folder,
    is_training_split,
)

TRAINING_SAMPLES = 1437  # the first four fifths; the rest is for validation
LARGEST_VALUE = 16


def digits(split: str) -> ArraySource:
    """The digits as RGB images of 8×8 pixels, white on black: 1,437 to train on, 360 to validate on.

    Raises:
        DataError: If there is no such split.
    """
    part = slice(None, TRAINING_SAMPLES) if is_training_split(split, "digits") else slice(TRAINING_SAMPLES, None)
    path = files("inline_attention.data") / "digits.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        gray, targets = content["images"], content["targets"]
    scaled = np.round(gray[part] * (255 / LARGEST_VALUE)).astype(np.uint8)
    images = np.repeat(scaled[..., None], 3, axis=-1)
    return ArraySource("digits", [str(digit) for digit in range(10)], images, targets[part])


class HubSource(ImageSource):
    """A dataset of the Hugging Face Hub, `hfds/OWNER/NAME`, with an image and a label column."""

    def __init__(self, name: str, root: str | None, split: str):
        """Fetch the dataset, or open what was fetched before, in `root` or the Hub's own cache.

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
            self._cache = root or str(datasets.config.HF_DATASETS_CACHE)
            labels = self._reader.dataset[self._reader.label_key]
            targets = np.array([int(label) for label in labels], dtype=np.int64)
        except Exception as error:  # network, names, columns: all of it is for the user to see
            raise DataError(
                f"{name}, split {split!r}, cannot be opened: {str(error) or type(error).__name__}; "
                "check its name, its splits, and that it has the columns image and label"
            ) from error
        names = {number: class_name for class_name, number in self._reader.class_to_idx.items()}
        count = max(names, default=int(targets.max(initial=-1))) + 1
        super().__init__(f"{name} ({split})", [names.get(number, str(number)) for number in range(count)], targets)

    def load(self, index: int) -> Image.Image:
        """Decode the image's bytes, or the file in the cache that the row names.

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
        if not is_inside(path, self._cache):
            raise ImageError(self.name(index), f"cannot be opened: the row names {path}, which is not in the cache")
        return load_image(path)

    def name(self, index: int) -> str:
        """The number in the dataset, which is what one looks it up by."""
        return f"{self.location}[{index}]"


def open_dataset(
    dataset: str = "folder", data_dir: str | os.PathLike[str] | None = None, split: str = "train"
) -> ImageSource:
    """Open one split of a dataset.

    Args:
        dataset: One of
            - "folder" (or ""): images in `data_dir`/SPLIT/CLASS, or in `data_dir`/CLASS if there is but one split;
            - "digits": handwritten digits inside this package;
            - "cifar10": the Python or binary version, packed or not, or a folder of images, in `data_dir`;
            - "hfds/NAME": a dataset of the Hugging Face Hub, kept in `data_dir`;
            - "wds/PATTERN": tar archives below `data_dir`, such as `wds/{split}-{0000..0099}.tar`.
        data_dir: A folder; None for "digits".
        split: "train", "validation", or whatever the dataset calls it. With `wds/…` it may be the pattern itself.

    Raises:
        DataError: If there is no such dataset, or it cannot be opened.
    """
    kind, _, rest = dataset.partition("/")
    if dataset == "digits":
        if data_dir is not None:
            raise DataError(
                f"the dataset 'digits' is inside this package and needs no folder, got {os.fspath(data_dir)}; leave "
                "--data-dir out, or add --dataset folder to use those images"
            )
        return digits(split)
    if kind == "hfds" and rest:
        return HubSource(dataset, os.fspath(data_dir) if data_dir is not None else None, split)
    if kind == "wds":
        pattern = split if ".tar" in split else rest.replace("{split}", split)
        return ShardSource(find_shards(data_dir or "", pattern), os.path.join(data_dir or "", pattern))
    if dataset not in ("", "folder", "cifar10"):
        raise DataError(f"unknown dataset {dataset!r}; expected folder, digits, cifar10, hfds/NAME or wds/PATTERN")
    if data_dir is None:
        raise DataError(f"the dataset {dataset or 'folder'!r} needs a folder; give one with --data-dir")
    if dataset == "cifar10" and (arrays := cifar10(data_dir, split)) is not None:
        return arrays
    try:
        return FolderSource(find_split_folder(Path(data_dir), split))
    except DataError as error:
        if dataset == "cifar10":
            raise DataError(
                f"{error}; or put cifar-10-python.tar.gz (from https://www.cs.toronto.edu/~kriz/cifar.html) there"
            ) from error
        raise
