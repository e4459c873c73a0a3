"""Open a dataset by the name that users of timm write, and check it before the first step.

Each check returns a list of problems, one sentence each with what to do; an empty list means no problems.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from inline_attention.data.cifar10 import DOWNLOAD, cifar10
from inline_attention.data.findings import OpenedSplits, each_once
from inline_attention.data.images import ImageError, load_image, load_image_bytes
from inline_attention.data.listed_files import is_inside
from inline_attention.data.randomness import derived_seed
from inline_attention.data.shards import ShardSource, find_shards
from inline_attention.data.sources import (
    ArraySource,
    DataError,
    FolderSource,
    ImageSource,
    find_split_folder,
    is_training_split,
    unlabelled_pictures,
)
from inline_attention.support.files import AnyPath
from inline_attention.support.text import install_command, some_of

TRAINING_SAMPLES = 1437  # the first four fifths; the rest is for validation
LARGEST_VALUE = 16
CHECKED_IMAGES = 16
NAMED = 5  # classes listed in a message


def digits(split: str) -> ArraySource:
    """Return the digits as RGB images of 8×8 pixels, white on black: 1,437 to train on, 360 to validate on."""
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
        """Fetch the dataset, or open what was fetched before, in `root` or the Hub's own cache."""
        try:
            import datasets.config  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            missing = f"{name} is read by the Hugging Face package, which is missing"
            raise DataError(f"{missing}; {install_command('hub')}") from error
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
        """Decode the image's bytes or the file of the cache; timm's reader opens whatever path a row names."""
        name = self.name(index)
        try:
            image = self._reader.dataset[index][self._reader.image_key] or {}
            content, path = image.get("bytes"), image.get("path")
        except Exception as error:  # a lost or damaged file of the cache can fail anywhere
            raise ImageError(name, f"cannot be opened: {str(error) or type(error).__name__}") from error
        if content:
            return load_image_bytes(content, name)
        if path and is_inside(path, self._cache):
            return load_image(path)
        reason = f"the row names {path}, which is not in the cache" if path else "the row is empty"
        raise ImageError(name, f"cannot be opened: {reason}")


def open_dataset(dataset: str = "folder", data_dir: AnyPath | None = None, split: str = "train") -> ImageSource:
    """Open one split of a dataset.

    Args:
        dataset: One of
            - "folder" (or ""): images in `data_dir`/SPLIT/CLASS, or in `data_dir`/CLASS if there is but one split;
            - "pictures": images anywhere in `data_dir`/SPLIT, without classes; without splits, one of ten is held out;
            - "digits": handwritten digits inside this package;
            - "cifar10": the binary version, packed or not, or a folder of images, in `data_dir`;
            - "hfds/NAME": a dataset of the Hugging Face Hub, kept in `data_dir`;
            - "wds/PATTERN": tar archives below `data_dir`, such as `wds/{split}-{0000..0099}.tar`.
        data_dir: A folder; None for "digits".
        split: "train", "validation", or whatever the dataset calls it. With `wds/…` it may be the pattern itself.

    Raises `DataError` if there is no such dataset, or it cannot be opened.
    """
    kind, _, rest = dataset.partition("/")
    if dataset == "digits":
        if data_dir is not None:
            given = f"the dataset 'digits' is inside this package and needs no folder, got {os.fspath(data_dir)}"
            raise DataError(f"{given}; leave --data-dir out, or add --dataset folder to use those images")
        return digits(split)
    if kind == "hfds" and rest:
        return HubSource(dataset, None if data_dir is None else os.fspath(data_dir), split)
    if kind == "wds":
        pattern = split if ".tar" in split else rest.replace("{split}", split)
        return ShardSource(find_shards(data_dir or "", pattern), os.path.join(data_dir or "", pattern))
    if dataset not in ("", "folder", "pictures", "cifar10"):
        known = "folder, pictures, digits, cifar10, hfds/NAME or wds/PATTERN"
        raise DataError(f"unknown dataset {dataset!r}; expected {known}")
    if data_dir is None:
        raise DataError(f"the dataset {dataset or 'folder'!r} needs a folder; give one with --data-dir")
    if dataset == "pictures":
        return unlabelled_pictures(data_dir, split)
    if dataset == "cifar10" and (arrays := cifar10(data_dir, split)) is not None:
        return arrays
    try:
        return FolderSource(find_split_folder(Path(data_dir), split))
    except DataError as error:
        if dataset != "cifar10":
            raise
        raise DataError(f"{error}; or put {DOWNLOAD} there") from error


def open_and_check(
    dataset: str,
    data_dir: AnyPath | None,
    *,
    train_split: str = "train",
    validation_split: str = "validation",
    num_classes: int | None = None,
) -> OpenedSplits[ImageSource]:
    """Open both splits of a dataset and check them.

    Dataset, folder and splits are those of `open_dataset`. Classes of the validation split are numbered as those of the
    training data. `num_classes` are the model's; None if it follows the data.
    """
    problems: list[str] = []

    def opened(split: str) -> ImageSource | None:
        try:
            return open_dataset(dataset, data_dir, split)
        except DataError as error:
            problems.append(str(error))

    train, validation = opened(train_split), opened(validation_split)
    if train is not None:
        problems += check_labels(train, num_classes) + check_readable(train)
    if train is not None and validation is not None:
        wrong = check_same_classes(train, validation) + check_labels(validation, None)
        problems += wrong
        if train.location == validation.location and dataset != "digits":
            same = f"training and validation data are the same, {train.location}"
            problems.append(f"{same}; put images that are not trained on into a folder val beside train")
        elif not wrong:
            validation = validation.with_classes(train.class_names)
    if validation is not None:
        problems += check_readable(validation)
    return OpenedSplits(train, validation, each_once(problems))


def check_labels(source: ImageSource, num_classes: int | None) -> list[str]:
    """Report empty classes, class numbers out of range, and a number of classes that is not the model's."""
    problems: list[str] = []
    if source.empty_classes:
        empty = _listed(source.empty_classes, "empty class")
        problems.append(f"{source.location}: {empty}; add images or remove the folder")
    count = len(source.class_names)
    wrong = np.flatnonzero((source.targets < 0) | (source.targets >= count)).tolist()
    if wrong:
        example = f"{source.name(wrong[0])} with {source.targets[wrong[0]]}; correct or remove them"
        samples = f"{len(wrong)} samples have a class out of 0 to {count - 1}"
        problems.append(f"{source.location}: {samples}, such as {example}")
    if num_classes not in (None, count):
        problems.append(f"{source.location} has {count} classes, the model {num_classes}; leave --num-classes out")
    return problems


def check_same_classes(train: ImageSource, validation: ImageSource) -> list[str]:
    """Report classes that only one of the two has."""
    problems: list[str] = []
    for one, other in ((train, validation), (validation, train)):
        known = set(other.class_names)
        if only := [name for name in one.class_names if name not in known]:
            classes = f"{_listed(only, 'class')} of {one.location} not in {other.location}"
            problems.append(f"{classes}; training and validation data need the same classes")
    return problems


def check_readable(source: ImageSource) -> list[str]:
    """Report if none of a few images, chosen by a fixed seed, can be read."""
    if not len(source):
        return [f"{source.location} is empty; add images"]
    drawn = random.Random(derived_seed("check", len(source)))
    chosen = drawn.sample(range(len(source)), min(CHECKED_IMAGES, len(source)))
    reasons: list[ImageError] = []
    for index in chosen:
        try:
            source.load(index)
            return []
        except ImageError as error:
            reasons.append(error)
    return [f"{source.location}: none of {len(chosen)} images tried can be read; {reasons[0]}"]


def _listed(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'es' if len(names) > 1 else ''} ({some_of(map(repr, names), NAMED)})"
