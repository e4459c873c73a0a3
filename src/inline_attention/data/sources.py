"""Labeled images: one interface for arrays, folders and archives."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image

from inline_attention.data.images import FORMATS, SUFFIXES, find_images, load_image
from inline_attention.support.files import AnyPath
from inline_attention.support.text import natural_key, printable


class DataError(ValueError):
    """A dataset cannot be opened or used as asked. Names from files in the message are shown as text."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class ImageSource(ABC):
    """Labeled images by number. Cheap to copy into worker processes.

    `location` names their place in messages. The place of a class in `class_names` is its number, of which `targets`
    `[N]` int64 are those of the images. `empty_classes` were announced, and have no image.
    """

    def __init__(
        self, location: str, class_names: Sequence[str], targets: np.ndarray, empty_classes: Sequence[str] = ()
    ):
        self.location = location
        self.class_names = tuple(class_names)
        self.targets = np.asarray(targets, dtype=np.int64)
        self.empty_classes = tuple(empty_classes)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def load(self, index: int) -> Image.Image:
        """Return the image, upright and in RGB; raise `ImageError` if it cannot be read."""

    def name(self, index: int) -> str:
        """Return the image's path, or else the location and the image's number."""
        return f"{self.location}[{index}]"

    def with_classes(self, class_names: Sequence[str]) -> Self:
        """Return the same images with classes numbered as in `class_names`, those of a model or of training data.

        Raises `DataError` if a class is not among them.
        """
        numbers = {name: number for number, name in enumerate(class_names)}
        if unknown := [name for name in self.class_names if name not in numbers]:
            them = f"{len(unknown)} classes that are not among the {len(numbers)} known ones, such as {unknown[0]!r}"
            raise DataError(f"{self.location} has {them}; rename or remove them")
        renumbered = copy.copy(self)
        renumbered.class_names = tuple(class_names)
        renumbered.targets = np.array([numbers[name] for name in self.class_names], dtype=np.int64)[self.targets]
        return renumbered


class ArraySource(ImageSource):
    """Images in memory."""

    def __init__(self, location: str, class_names: Sequence[str], images: np.ndarray, targets: np.ndarray):
        """Take images `[N, H, W, 3]` uint8 and class numbers `[N]` as they are."""
        super().__init__(location, class_names, targets)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Return the image."""
        return Image.fromarray(self.images[index])


HELD_OUT = 10  # of so many pictures without splits, one is for validation
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "eval", "evaluation", "test"),
}


class PictureSource(ImageSource):
    """Image files; without classes, unless they are given."""

    def __init__(
        self,
        location: str,
        files: Sequence[AnyPath],
        class_names: Sequence[str] = ("",),
        targets: np.ndarray | None = None,
        empty_classes: Sequence[str] = (),
    ):
        """Take files in the order given."""
        super().__init__(location, class_names, np.zeros(len(files)) if targets is None else targets, empty_classes)
        # One array instead of a million strings: processes that are forked share it, and keep sharing it.
        self._paths = np.array([os.fsencode(path) for path in files])
        self._folder = ""

    def load(self, index: int) -> Image.Image:
        """Read the file."""
        return load_image(self.name(index))

    def name(self, index: int) -> str:
        """Return the file's path."""
        return os.path.join(self._folder, os.fsdecode(self._paths[index]))


class FolderSource(PictureSource):
    """The images below a folder; the innermost folder of each names its class.

    Classes and images are numbered as timm numbers them (digits in names by value), but all of our formats count, and
    hidden files do not.
    """

    def __init__(self, root: AnyPath):
        """List the images; raise `DataError` if there is no such folder, or no image in it."""
        self.root = check_folder(root, "a folder of images per class")
        by_path, empty = _walk(self.root)
        if not by_path:
            suffixes = ", ".join(FORMATS)
            raise DataError(f"{self.root} holds no image; expected ROOT/CLASS/NAME with a suffix of {suffixes} files")
        if stray := [path for path, name in by_path.items() if not name]:
            found = f"{self.root} holds {len(stray)} images outside of class folders, such as {stray[0]}"
            raise DataError(f"{found}; move them into the folder of their class")
        paths = sorted(by_path, key=natural_key)
        class_names = sorted(set(by_path.values()), key=natural_key)
        numbers = {name: number for number, name in enumerate(class_names)}
        targets = np.array([numbers[by_path[path]] for path in paths])
        unused = sorted(empty - set(class_names), key=natural_key)
        super().__init__(str(self.root), paths, class_names, targets, unused)
        self._folder = self.root


def unlabelled_pictures(root: AnyPath, split: str) -> PictureSource:
    """Return the pictures anywhere below the folder of a split; without one, every tenth picture is for validation.

    Raises `DataError` if there is no such folder, or no picture in it.
    """
    root = check_folder(root, "pictures")
    folder = find_split_folder(root, split)
    files = find_images([folder])
    if not files:
        raise DataError(f"{folder} holds no picture; expected files with a suffix of {', '.join(FORMATS)}")
    if folder != root:
        return PictureSource(str(folder), files)
    held_out = not is_training_split(split, str(root))
    chosen = [file for number, file in enumerate(files) if (number % HELD_OUT == HELD_OUT - 1) == held_out]
    if not chosen:
        raise DataError(f"{root} holds {len(files)} pictures, expected at least {HELD_OUT}; add some")
    return PictureSource(f"{root} ({split}: {'one' if held_out else HELD_OUT - 1} of {HELD_OUT} pictures)", chosen)


def check_folder(root: AnyPath, content: str) -> Path:
    """Return the folder of a dataset, which should hold `content`; raise `DataError` if there is no such folder."""
    root = Path(root)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"the data folder {root} {what}; give one that holds {content}")
    return root


def split_names(split: str) -> tuple[str, ...]:
    """Return all usual names of a split, given one of them. Another name is returned alone."""
    return next((names for names in SPLIT_FOLDERS.values() if split in names), (split,))


def is_training_split(split: str, location: str) -> bool:
    """True for the split to train on, False for the one held out. No other: a guess might train on what is held out."""
    for kind, names in SPLIT_FOLDERS.items():
        if split in names:
            return kind == "train"
    known = " and ".join(f"one called {', '.join(names[:-1])} or {names[-1]}" for names in SPLIT_FOLDERS.values())
    raise DataError(f"{location} has no split {split!r}; it has two, {known}")


def find_split_folder(root: AnyPath, split: str) -> Path:
    """Return the folder of a split: one of its usual names below `root`, or `root` itself if it has no splits."""
    root, names = Path(root), split_names(split)
    for name in (split, *names):
        if (root / name).is_dir():
            return root / name
    if others := [name for known in SPLIT_FOLDERS.values() for name in known if (root / name).is_dir()]:
        expected = f"none for the split {split!r}; expected one of {', '.join(names)}"
        raise DataError(f"{root} has a folder {others[0]!r}, but {expected}")
    return root


def _walk(root: Path) -> tuple[dict[str, str], set[str]]:
    """Return the class of each image, by path below the root, and the names of empty folders."""
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
        images = [f for f in files if os.path.splitext(f)[1].lower() in SUFFIXES and not f.startswith(".")]
        by_path.update((os.path.normpath(os.path.join(relative, name)), class_name) for name in images)
        if not images and not subfolders and class_name:
            empty.add(class_name)
    return by_path, empty


def _identity(folder: str | Path) -> tuple[int, int]:
    """Numbers that a folder and all links to it share."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino
