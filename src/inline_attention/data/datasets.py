"""Opening a dataset by the name that users of timm write."""

from __future__ import annotations

import os
from pathlib import Path

from inline_attention.data.cifar10 import cifar10
from inline_attention.data.digits import digits
from inline_attention.data.folders import FolderSource, find_split_folder
from inline_attention.data.hub import HubSource
from inline_attention.data.shards import ShardSource, find_shards
from inline_attention.data.sources import DataError, ImageSource

NAMES = "folder, digits, cifar10, hfds/NAME or wds/PATTERN"


def open_dataset(
    dataset: str = "folder", data_dir: str | os.PathLike[str] | None = None, split: str = "train"
) -> ImageSource:
    """Open one split of a dataset.

    Args:
        dataset: One of
            - "folder" (or ""): pictures in `data_dir`/SPLIT/CLASS, or in `data_dir`/CLASS if there is but one split;
            - "digits": handwritten digits inside this package;
            - "cifar10": the Python or binary version, packed or not, or a folder of pictures, in `data_dir`;
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
                "--data-dir out, or add --dataset folder to use those pictures"
            )
        return digits(split)
    if kind == "hfds" and rest:
        return HubSource(dataset, os.fspath(data_dir) if data_dir is not None else None, split)
    if kind == "wds":
        pattern = split if ".tar" in split else rest.replace("{split}", split)
        return ShardSource(find_shards(data_dir or "", pattern), os.path.join(data_dir or "", pattern))
    if dataset not in ("", "folder", "cifar10"):
        raise DataError(f"unknown dataset {dataset!r}; expected {NAMES}")
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
