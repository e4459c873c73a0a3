"""The two splits of datasets that come as arrays, by the names that folders have for them."""

from __future__ import annotations

from inline_attention.data.folders import SPLIT_FOLDERS
from inline_attention.data.sources import DataError


def is_training_split(split: str, location: str) -> bool:
    """Whether a split is the one to train on; otherwise it is the one held out.

    Args:
        split: "train", "validation", or another of the names that folders have for these.
        location: Where the pictures are, for the message.

    Raises:
        DataError: If it is none of these. A guess might train on what is held out.
    """
    for kind, names in SPLIT_FOLDERS.items():
        if split in names:
            return kind == "train"
    known = " and ".join(f"one called {', '.join(names[:-1])} or {names[-1]}" for names in SPLIT_FOLDERS.values())
    raise DataError(f"{location} has no split {split!r}; it has two, {known}")
