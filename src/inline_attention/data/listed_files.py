"""Files that another file names, such as the images of a COCO annotation file.

The list may come from a stranger. A name in it must not lead out of the folder of the data: not by an absolute path, by
`..`, by a form that Windows understands, or by a symbolic link. Where a folder itself is the list (`folders`,
`segmentation`, `shards`), links in it are followed: clusters share data by them.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Self

from inline_attention.data.images import ImageError
from inline_attention.support.files import AnyPath

ALLOW_OUTSIDE = "--allow-outside-files (data.allow_outside_files=true)"


class OutsideError(ImageError):
    """A listed file is outside of the data folder."""


class ListedFiles:
    """Files below a folder, by the names that a list gives them."""

    def __init__(self, folder: AnyPath, data_dir: AnyPath | None = None, *, allow_outside: bool = False):
        """Set the folder that names are relative to. Files may be in `data_dir` too, or anywhere if `allow_outside`."""
        self.folder = Path(folder)
        self._allow_outside = allow_outside
        self._roots = [os.path.realpath(root) for root in (self.folder, data_dir) if root is not None]

    @classmethod
    def of(cls, folder: Self | AnyPath) -> Self:
        """Return the files of a folder; `ListedFiles` pass through."""
        return folder if isinstance(folder, cls) else cls(folder)  # pyright: ignore[reportArgumentType]

    def path(self, name: str) -> Path:
        """Return the path of a listed file, which need not exist; raise `OutsideError` if it is outside."""
        path = self.folder / name
        reason = None if self._allow_outside else _foreign_form(name) or self._outside(path)
        if reason is not None:
            raise OutsideError(path, f"{reason}; if you trust the list, allow it with {ALLOW_OUTSIDE}")
        return path

    def is_outside(self, name: str) -> bool:
        """True if `path` refuses a listed file."""
        try:
            self.path(name)
        except OutsideError:
            return True
        return False

    def has(self, name: str) -> bool:
        """True if a listed file exists and is not outside of the folders."""
        return not self.is_outside(name) and os.path.isfile(self.folder / name)

    def _outside(self, path: Path) -> str | None:
        try:
            plain = ".." not in path.parts and not path.is_symlink()
            real = os.path.join(_real_folder(path.parent), path.name) if plain else os.path.realpath(path)
        except (OSError, ValueError):  # no file can have such a name
            return None
        return None if any(_is_below(real, root) for root in self._roots) else f"leads to {real}, outside of the data"


def is_inside(path: AnyPath, folder: AnyPath) -> bool:
    """True if a path, with all links followed, leads into a folder."""
    return "\0" not in os.fspath(path) and _is_below(os.path.realpath(path), os.path.realpath(folder))


def is_plain(name: str) -> bool:
    """True if a name is relative and has no `..` in it."""
    return _foreign_form(name) is None and not os.path.isabs(name) and ".." not in Path(name).parts


def why_outside(root: AnyPath, name: str) -> str | None:
    """Return why a path relative to `root` leads out of it, None if it does not. Links are not looked at."""
    whole = os.path.abspath(root)
    inside = _is_below(os.path.normpath(os.path.join(whole, name)), whole)
    return _foreign_form(name) or (None if inside else f"leads out of {whole}")


def _foreign_form(name: str) -> str | None:
    """Return why a name is no path of this system, None if it may be one."""
    if "\0" in name:
        return "has a NUL byte in its name"
    windows = PureWindowsPath(name)
    if os.name != "nt" and (windows.drive or ("\\" in name and (name.startswith("\\") or ".." in windows.parts))):
        return "is named by a Windows path that leads out of its folder"
    return None


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(os.path.join(root, ""))


@lru_cache(maxsize=4096)
def _real_folder(folder: Path) -> str:
    return os.path.realpath(folder)
