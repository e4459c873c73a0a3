"""Pictures in folders, one folder per class."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from inline_attention.data.images import FORMATS, SUFFIXES, load_image
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.support.text import natural_key

SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "eval", "evaluation", "test"),
}


class FolderSource(ImageSource):
    """The pictures below a folder; the innermost folder of each names its class.

    Classes and pictures are numbered as timm numbers them (digits in names by value), but all of our formats count, and
    hidden files do not.
    """

    def __init__(self, root: str | os.PathLike[str]):
        """List the pictures.

        Raises:
            DataError: If there is no such folder, or no picture in it.
        """
        self.root = Path(root)
        if not self.root.is_dir():
            what = "is not a folder" if self.root.exists() else "does not exist"
            raise DataError(f"the data folder {self.root} {what}; give one that holds a folder of pictures per class")
        by_path, empty = _walk(self.root)
        if not by_path:
            raise DataError(
                f"{self.root} holds no picture; expected ROOT/CLASS/NAME with a suffix of {', '.join(FORMATS)} files"
            )
        stray = [path for path, name in by_path.items() if not name]
        if stray:
            raise DataError(
                f"{self.root} holds {len(stray)} pictures outside of class folders, such as {stray[0]}; "
                "move them into the folder of their class"
            )
        paths = sorted(by_path, key=natural_key)
        class_names = sorted(set(by_path.values()), key=natural_key)
        numbers = {name: number for number, name in enumerate(class_names)}
        targets = np.array([numbers[by_path[path]] for path in paths])
        super().__init__(str(self.root), class_names, targets, sorted(empty - set(class_names), key=natural_key))
        # One array instead of a million strings: processes that are forked share it, and keep sharing it.
        self._paths = np.array([os.fsencode(path) for path in paths])

    def load(self, index: int) -> Image.Image:
        """Read the file."""
        return load_image(self.name(index))

    def name(self, index: int) -> str:
        """The file's path."""
        return os.path.join(self.root, os.fsdecode(self._paths[index]))


def find_split_folder(root: str | os.PathLike[str], split: str) -> Path:
    """The folder of a split: one of its usual names below `root`, or `root` itself if it is not split at all.

    Raises:
        DataError: If there are folders for other splits, but not for this one.
    """
    root = Path(root)
    names = next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))
    for name in dict.fromkeys((split, *names)):
        if (root / name).is_dir():
            return root / name
    others = [name for names in SPLIT_FOLDERS.values() for name in names if (root / name).is_dir()]
    if others:
        raise DataError(
            f"{root} has a folder {others[0]!r}, but none for the split {split!r}; expected one of {', '.join(names)}"
        )
    return root


def _walk(root: Path) -> tuple[dict[str, str], set[str]]:
    """The class of each picture, by path below the root, and the names of folders in which there is nothing."""
    by_path: dict[str, str] = {}
    empty: set[str] = set()
    # Of each folder yet to be visited those on the way to it: a link to one of them would lead around in a circle.
    ways: dict[str, frozenset[tuple[int, int]]] = {os.fspath(root): frozenset([_identity(root)])}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        way, visible = ways.pop(folder), [name for name in subfolders if not name.startswith(".")]
        subfolders.clear()
        for name in visible:
            path = os.path.join(folder, name)
            with suppress(OSError):  # a folder that cannot be looked into is passed over, as it is below
                identity = _identity(path)
                if identity not in way:
                    subfolders.append(name)
                    ways[path] = way | {identity}
        relative = os.path.relpath(folder, root)
        class_name = "" if relative == "." else os.path.basename(relative)
        pictures = [f for f in files if os.path.splitext(f)[1].lower() in SUFFIXES and not f.startswith(".")]
        by_path.update((os.path.normpath(os.path.join(relative, name)), class_name) for name in pictures)
        if not pictures and not subfolders and class_name:
            empty.add(class_name)
    return by_path, empty


def _identity(folder: str | Path) -> tuple[int, int]:
    """What is the same of a folder and of all links to it."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino
